"""Class-based softmax: p(word | h) = p(class of word | h) p(word | class, h), exact and normalised.

Tables of words are in the order of `Classes.order`: ROW i BELONGS TO WORD order[i], NOT TO WORD i, so that the words of a
class are side by side. Where classes are ranges of ids (`equal_size_classes`), the two are the same. `table[classes.order]`
converts a table in the order of ids, and `table[classes.position]` converts it back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.sampling import pick, sample
from hpnlp.ops.softmax.cross_entropy import linear_cross_entropy, logits
from hpnlp.ops.softmax.structured.grouped_softmax import TileShape, check_k, grouped_nll, known_labels, merge_top_k
from hpnlp.ops.softmax.structured.word_order import checked_order
from hpnlp.types import AnyArray, InputError

# Words of a class in one product: other class sizes are rounded up to a multiple.
WIDTH = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """V words in C classes, none of them empty. All arrays are int32.

    Attributes:
      order: [V] the words, class by class.
      position: [V] position of each word in `order`.
      class_of: [V] class of each word.
      starts: [C + 1] class c has the positions starts[c] to starts[c + 1] - 1.
      count: C, the number of classes.
      widest: Number of words of the largest class.
    """

    order: Any
    position: Any
    class_of: Any
    starts: Any
    count: int = dataclasses.field(metadata={"static": True})
    widest: int = dataclasses.field(metadata={"static": True})


def classes_from(assignment: ArrayLike | Sequence[Any], count: int) -> Classes:
    """Classes from the class of each word.

    Args:
      assignment: [V] integers, 0 to count - 1.
      count: C, the number of classes.

    Returns:
      The classes; words of a class are in the order of their ids.

    Raises:
      InputError: assignment has another shape or range, or a class has no word.

    Cost:
      A sort of V numbers, on the host.
    """
    assignment = np.asarray(assignment)
    if assignment.ndim != 1 or not np.issubdtype(assignment.dtype, np.integer):
        raise InputError(
            f"assignment is {assignment.dtype} {assignment.shape}: expected integers [V], each word's class"
        )
    _check_count(assignment.size, count)
    if assignment.min() < 0 or assignment.max() >= count:
        raise InputError(
            f"assignment has classes {assignment.min()} to {assignment.max()}: expected 0 to {count - 1}, or another count"
        )
    sizes = np.bincount(assignment, minlength=count)
    if not sizes.all():
        raise InputError(f"class {sizes.argmin()} has no word: number the classes without gaps, or lower count={count}")
    order = np.argsort(assignment, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(order.size)
    arrays = (order, position, assignment, np.concatenate([[0], np.cumsum(sizes)]))
    return Classes(*(x.astype(np.int32) for x in arrays), count=count, widest=int(sizes.max()))


def equal_size_classes(vocab: int, count: int) -> Classes:
    """Classes of V / C consecutive ids each, to within one word.

    Training is cheapest at C = sqrt(V). Ids should be sorted by falling frequency, so that few classes occur in a batch.

    Args:
      vocab: V, the number of words.
      count: C, the number of classes.

    Returns:
      The classes.

    Raises:
      InputError: count is not 1 to V.
    """
    _check_count(vocab, count)
    return classes_from(np.arange(vocab) * count // max(vocab, 1), count)


def equal_mass_classes(
    counts: ArrayLike | Sequence[Any],
    count: int,
    *,
    power: float = 0.5,
    widest: int | None = None,
    order: ArrayLike | Sequence[Any] | None = None,
) -> Classes:
    """Classes that are ranges of an order of the words, with about the same sum of counts ** power each.

    Args:
      counts: [V] frequencies of the words, at least 0.
      count: C, the number of classes.
      power: 1 is frequency binning, which leaves most words of a Zipf-like vocabulary to a few classes; 0.5 bounds the largest
        class near 2 sqrt(V) words at C = sqrt(V).
      widest: Bound on the number of words of a class; None for no bound. With falling counts, a frequent word may be a class of
        its own.
      order: [V] ids, of which classes are ranges; None sorts by falling counts. With the `similarity_order` of embeddings,
        classes are clusters of similar words, which are easier to distinguish from other words; more of them occur in a batch.

    Returns:
      The classes.

    Raises:
      InputError: counts are no such numbers, order does not hold each id once, or `count` classes of `widest` words do not hold
        V words.

    References:
      Mikolov et al. 2011, "Extensions of recurrent neural network language model" (power 1), and their RNNLM toolkit (0.5).
    """
    mass = np.asarray(counts, np.float64)
    if mass.ndim != 1 or not np.isfinite(mass).all() or (mass < 0).any():
        raise InputError(f"counts {mass.shape}: expected a finite number of at least 0 for every word, [V]")
    vocab = mass.size
    _check_count(vocab, count)
    limit = vocab if widest is None else widest
    if limit * count < vocab:
        raise InputError(
            f"widest {widest}: {count} classes of {widest} words do not hold {vocab}; raise widest or count"
        )
    words = np.argsort(-mass, kind="stable") if order is None else checked_order(order, vocab)
    sums = np.cumsum(mass[words] ** power)
    ideal_starts = np.searchsorted(sums, sums[-1] * np.arange(1, count) / count) + 1
    starts = [0]
    for number, start in enumerate(ideal_starts, 1):
        classes_left = count - number
        low, high = max(starts[-1] + 1, vocab - classes_left * limit), min(starts[-1] + limit, vocab - classes_left)
        starts.append(min(max(int(start), low), high))
    assignment = np.empty(vocab, np.int64)
    assignment[words] = np.repeat(np.arange(count), np.diff([*starts, vocab]))
    return classes_from(assignment, count)


@array_op("N", h="N")
def class_nll(
    h: Float[Array, "N D"],
    class_table: Float[Array, "C D"],
    word_table: Float[Array, "V D"],
    classes: Classes,
    labels: Int[Array, " N"],
    *,
    class_bias: Float[Array, " C"] | None = None,
    word_bias: Float[Array, " V"] | None = None,
    block: int = 16,
) -> Float[Array, " N"]:
    """-log p(class of label | h) - log p(label | class, h) of each token, in nats.

    Gradients by reverse mode, once, and forward over reverse; flatten tokens instead of using `jax.vmap` (see `grouped_nll`).
    For tokens that do not count, pass h of 0 and any label, and mask the loss.

    Args:
      h: [N, D] hidden states.
      class_table: [C, D] vectors of the classes.
      word_table: [V, D] vectors of the words, in the order of `classes`: row i belongs to word classes.order[i].
      classes: Partition of the words.
      labels: [N] ids of words.
      class_bias: [C] added to the scores of the classes; None for no bias.
      word_bias: [V] added to the scores of the words, in the order of word_table; None for no bias.
      block: Tokens of one product with words of a class.

    Returns:
      [N] float32 losses.

    Raises:
      InputError: Shapes do not fit the classes, or a label that is known while tracing is no word. The loss of a token whose
        label is unknown while tracing and no word is NaN, and it has no gradient.

    Cost:
      With the gradients 8 N D (C + words of the label's class) operations, with the words of a class rounded up to 128 and its
      tokens to `block`; the gradient of word_table is dense. Memory: see `grouped_nll` and `linear_cross_entropy`.

    References:
      Goodman 2001, "Classes for fast maximum entropy training".
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    labels, is_word = known_labels(labels, h.shape[0], word_table.shape[0])
    if block < 1:
        raise InputError(f"block {block}: expected at least 1 token")
    groups = jnp.asarray(classes.class_of)[labels]
    of_class = linear_cross_entropy(h, class_table, groups, bias=class_bias, reduction="none")
    targets = jnp.asarray(classes.position)[labels]
    width = -(-classes.widest // -(-classes.widest // WIDTH))
    of_word = grouped_nll(h, word_table, groups, targets, classes.starts, bias=word_bias, tile=TileShape(block, width))
    return jnp.where(is_word, of_class + of_word, jnp.nan)


@array_op("N", h="N")
def class_log_probs(
    h: Float[Array, "N D"],
    class_table: Float[Array, "C D"],
    word_table: Float[Array, "V D"],
    classes: Classes,
    *,
    class_bias: Float[Array, " C"] | None = None,
    word_bias: Float[Array, " V"] | None = None,
) -> Float[Array, "N V"]:
    """Log-probabilities of all words, in the order of ids.

    Arguments: see `class_nll`.

    Returns:
      [N, V] float32.

    Cost:
      O(N V D) time, O(N V) memory.
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    class_of_row = jnp.asarray(classes.class_of)[jnp.asarray(classes.order)]
    # Scores are [V, N] from the beginning: XLA:CPU has no bfloat16 product whose result is transposed.
    s = logits(word_table.astype(h.dtype), h)
    s = s if word_bias is None else s + word_bias.astype(jnp.float32)[:, None]
    top = jax.ops.segment_max(lax.stop_gradient(s), class_of_row, classes.count, indices_are_sorted=True)
    sums = jax.ops.segment_sum(jnp.exp(s - top[class_of_row]), class_of_row, classes.count, indices_are_sorted=True)
    of_class = jax.nn.log_softmax(logits(h, class_table, bias=class_bias), axis=1).T
    return (s + (of_class - top - jnp.log(sums))[class_of_row]).T[:, jnp.asarray(classes.position)]


@array_op("N", h="N")
def class_top_k(
    h: Float[Array, "N D"],
    class_table: Float[Array, "C D"],
    word_table: Float[Array, "V D"],
    classes: Classes,
    k: int,
    *,
    class_bias: Float[Array, " C"] | None = None,
    word_bias: Float[Array, " V"] | None = None,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The k most probable words of each token, exact; ties may be broken in any way.

    A token visits classes in order of falling probability, until its k-th best word so far is at least as probable as the next
    class, which bounds all words of the class.

    Args:
      h: As in `class_nll`.
      class_table: As in `class_nll`.
      word_table: As in `class_nll`.
      classes: As in `class_nll`.
      k: Number of words, 1 to V.
      class_bias: As in `class_nll`; finite.
      word_bias: As in `class_nll`; finite.

    Returns:
      (log_probs [N, k] float32, ids [N, k] int32), best first.

    Raises:
      InputError: Shapes do not fit the classes, or k is not 1 to V.

    Cost:
      C D operations a token, and `widest` D for each class visited, one token after another; memory O(N C).
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    check_k(k, word_table.shape[0])
    of_class = jax.nn.log_softmax(logits(h, class_table, bias=class_bias), axis=1)

    def token(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, scores = inputs
        scores, ranked_classes = lax.top_k(scores, classes.count)

        def may_win(state: tuple[Array, Array, Array]) -> Array:
            rank, best, _ = state
            # Not `>`: a token with NaN visits all classes, and NaN is its result.
            return (rank < classes.count) & ~(scores[jnp.minimum(rank, classes.count - 1)] <= best[-1])

        def visit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            rank, best, ids = state
            s, words = _class_logits(x, word_table, classes, ranked_classes[rank], word_bias)
            best, ids = merge_top_k(best, ids, scores[rank] + jax.nn.log_softmax(s), words)
            return rank + 1, best, ids

        start = jnp.full(k, -jnp.inf, jnp.float32), jnp.zeros(k, jnp.int32)
        return lax.while_loop(may_win, visit, (jnp.int32(0), *start))[1:]

    return lax.map(token, (h, of_class))


@array_op("N", h="N")
def class_sample(
    h: Float[Array, "N D"],
    class_table: Float[Array, "C D"],
    word_table: Float[Array, "V D"],
    classes: Classes,
    key: Array,
    *,
    class_bias: Float[Array, " C"] | None = None,
    word_bias: Float[Array, " V"] | None = None,
) -> Int[Array, " N"]:
    """Draws a word for each token: a class from p(class | h), then a word from p(word | class, h).

    Args:
      h: As in `class_nll`.
      class_table: As in `class_nll`.
      word_table: As in `class_nll`.
      classes: As in `class_nll`.
      key: PRNG key of the random numbers.
      class_bias: As in `class_nll`.
      word_bias: As in `class_nll`.

    Returns:
      [N] int32 ids.

    Cost:
      C D operations a token, and `widest` D for the class drawn, one token after another.
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    class_key, word_key = jax.random.split(key)
    drawn = sample(logits(h, class_table, bias=class_bias), class_key)

    def token(inputs: tuple[Array, Array, Array]) -> Array:
        x, class_id, point = inputs
        s, words = _class_logits(x, word_table, classes, class_id, word_bias)
        return words[pick(s[None], point[None])[0]]

    return lax.map(token, (h, drawn, jax.random.uniform(word_key, drawn.shape, jnp.float32)))


def _class_logits(
    x: Float[Array, " D"], word_table: Array, classes: Classes, class_id: Array, bias: Array | None
) -> tuple[Array, Array]:
    """(logits, ids) [widest] of a range of words that contains the class; the logits of words of other classes are -inf."""
    starts, size = jnp.asarray(classes.starts), classes.widest
    first = jnp.minimum(starts[class_id], word_table.shape[0] - size)
    bias = None if bias is None else lax.dynamic_slice_in_dim(bias, first, size)
    s = logits(x[None], lax.dynamic_slice_in_dim(word_table, first, size), bias=bias)[0]
    rows = first + jnp.arange(size, dtype=jnp.int32)
    s = jnp.where((rows >= starts[class_id]) & (rows < starts[class_id + 1]), s, -jnp.inf)
    return s, lax.dynamic_slice_in_dim(jnp.asarray(classes.order), first, size)


def _check_count(vocab: int, count: int) -> None:
    if not 1 <= count <= vocab:
        raise InputError(f"count {count}: expected 1 to {vocab}, the number of words, so that no class is empty")


def _check(
    h: AnyArray,
    class_table: AnyArray,
    word_table: AnyArray,
    classes: Classes,
    class_bias: AnyArray | None,
    word_bias: AnyArray | None,
) -> None:
    if h.ndim != 2:
        raise InputError(f"h {h.shape}: expected [N, D]; flatten tokens to one axis")
    dim, vocab = h.shape[1], classes.order.shape[0]
    expected = {
        "class_table": (class_table, (classes.count, dim)), "word_table": (word_table, (vocab, dim)),
        "class_bias": (class_bias, (classes.count,)), "word_bias": (word_bias, (vocab,)),
    }  # fmt: skip
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise InputError(
                f"{name} has shape {array.shape}: expected {shape} for h {h.shape} and {classes.count} classes of {vocab} words"
            )
