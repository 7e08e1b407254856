"""Class-based softmax: p(word | h) = p(class of word | h) p(word | class, h), exact and normalised.

Tables of words are in the order of `Classes.order`: ROW i BELONGS TO WORD order[i], NOT TO WORD i, so that the words of a
class lie side by side. Where classes are ranges of ids (`equal_size_classes`), the two are the same.
`table[classes.order]` brings a table in the order of ids into it, `table[classes.position]` brings it back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.sampling import pick, sample
from hpnlp.ops.softmax.cross_entropy import linear_cross_entropy, logits
from hpnlp.ops.softmax.grouped_softmax import best_of, check_k, grouped_nll, known_labels
from hpnlp.ops.softmax.word_order import checked_order
from hpnlp.types import InputError

# Words of a class that one product takes: classes of other sizes are rounded up to a multiple.
WIDTH = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """V words in C classes; every class has a word.

    order [V]: the words, class by class. position [V]: where a word stands in it. class_of [V]: the class of a word.
    starts [C + 1]: class c has positions starts[c] to starts[c + 1]. All int32. widest: words of the largest class.
    """

    order: Any
    position: Any
    class_of: Any
    starts: Any
    count: int = dataclasses.field(metadata={"static": True})
    widest: int = dataclasses.field(metadata={"static": True})


def classes_from(assignment: Any, count: int) -> Classes:
    """The classes of an `assignment` [V] of every word to 0 to count - 1; words of a class stay in the order of ids.

    Raises InputError where it is no such array, or where a class has no word. Cost: a sort of V numbers.
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
    """Ranges of ids of V / C words, to within one. Training is cheapest at C = sqrt(V).

    Ids should fall in frequency, so that a batch meets few classes. Raises InputError on a count outside 1 to V.
    """
    _check_count(vocab, count)
    return classes_from(np.arange(vocab) * count // max(vocab, 1), count)


def equal_mass_classes(
    counts: Any, count: int, *, power: float = 0.5, widest: int | None = None, order: Any = None
) -> Classes:
    """Classes of neighbours in an order, each with about the same sum of counts ** power.

    counts [V]: how often each word occurs.
    power: 1 is frequency binning, which leaves most words to a few classes of a Zipf-like vocabulary; 0.5 bounds its widest
      class near 2 sqrt(V) words at C = sqrt(V).
    order: the ids [V], of which classes are ranges; without it, by falling counts. With the `similarity_order` of embeddings
      classes are clusters of similar words, which are easier to tell apart from others; more of them are met by a batch.
    widest: no class has more words; one that a frequent word fills alone has one, where counts fall.
    Raises InputError on counts that are no such numbers, on an order that is not of every id once, and where count classes of
    `widest` words do not hold V.
    Source: Mikolov et al. 2011, "Extensions of recurrent neural network language model" (power 1), and their RNNLM
    toolkit (0.5).
    """
    mass = np.asarray(counts, np.float64)
    if mass.ndim != 1 or not np.isfinite(mass).all() or (mass < 0).any():
        raise InputError(f"counts {mass.shape}: expected a finite number of at least 0 for every word, [V]")
    vocab = mass.size
    _check_count(vocab, count)
    limit = vocab if widest is None else widest
    if limit * count < vocab:
        raise InputError(f"widest {widest}: {count} classes of so many words do not hold {vocab}; raise one of them")
    words = np.argsort(-mass, kind="stable") if order is None else checked_order(order, vocab)
    sums = np.cumsum(mass[words] ** power)
    wanted = np.searchsorted(sums, sums[-1] * np.arange(1, count) / count) + 1
    starts = [0]
    for number, start in enumerate(wanted, 1):
        left = count - number
        low, high = max(starts[-1] + 1, vocab - left * limit), min(starts[-1] + limit, vocab - left)
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
    """-log p(class of label | h) - log p(label | class, h) of each token, float32, in nats.

    class_table, class_bias: of the classes. word_table, word_bias: ROW i IS OF WORD classes.order[i]. labels: ids of words.
    block: tokens of one product with words of a class.

    Tokens that do not count: give them h of 0 and any label, and mask the loss. Gradients by reverse mode, once, and forward
    over reverse; flatten tokens rather than `vmap` (see `grouped_nll`).
    Raises InputError on shapes that do not fit the classes, and on labels out of range where they are known while tracing;
    elsewhere such a token's loss is NaN, and it has no gradient.
    Cost: with the gradients 8 N D (C + words of the label's class) operations, a class's words rounded up to 128 and its
    tokens to `block`; the gradient of word_table is dense. Memory: see `grouped_nll` and `linear_cross_entropy`.
    Source: Goodman 2001, "Classes for fast maximum entropy training".
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    labels, known = known_labels(labels, h.shape[0], word_table.shape[0])
    if block < 1:
        raise InputError(f"block {block}: expected at least 1 token")
    groups = jnp.asarray(classes.class_of)[labels]
    of_class = linear_cross_entropy(h, class_table, groups, bias=class_bias, reduction="none")
    targets = jnp.asarray(classes.position)[labels]
    width = -(-classes.widest // -(-classes.widest // WIDTH))
    of_word = grouped_nll(h, word_table, groups, targets, classes.starts, bias=word_bias, block=block, width=width)
    return jnp.where(known, of_class + of_word, jnp.nan)


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
    """log p(word | h) of every word, by id; float32. Arguments and errors as `class_nll`. Cost: O(N V D), memory O(N V)."""
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    own = jnp.asarray(classes.class_of)[jnp.asarray(classes.order)]
    # Words by tokens at once: of bfloat16 numbers, XLA:CPU has no product that is transposed afterwards.
    s = logits(word_table.astype(h.dtype), h)
    s = s if word_bias is None else s + word_bias.astype(jnp.float32)[:, None]
    top = jax.ops.segment_max(lax.stop_gradient(s), own, classes.count, indices_are_sorted=True)
    sums = jax.ops.segment_sum(jnp.exp(s - top[own]), own, classes.count, indices_are_sorted=True)
    of_class = jax.nn.log_softmax(logits(h, class_table, bias=class_bias), axis=1).T
    return (s + (of_class - top - jnp.log(sums))[own]).T[:, jnp.asarray(classes.position)]


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
    """The k most probable words of each token, best first: (log p, ids). Exact; among equals any.

    A token visits classes from the most probable on, until its k-th word so far has the probability of the next class, which
    no word of it exceeds. Arguments and errors as `class_nll`; biases are finite; k is 1 to V.
    Cost: a token after another, C D, and of each class visited `widest` D; memory O(N C).
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    check_k(k, word_table.shape[0])
    of_class = jax.nn.log_softmax(logits(h, class_table, bias=class_bias), axis=1)

    def token(given: tuple[Array, Array]) -> tuple[Array, Array]:
        x, scores = given
        scores, visits = lax.top_k(scores, classes.count)

        def more(state: tuple[Array, Array, Array]) -> Array:
            number, best, _ = state
            # Not `>`: NaN visits all, and is the result.
            return (number < classes.count) & ~(scores[jnp.minimum(number, classes.count - 1)] <= best[-1])

        def visit(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            number, best, ids = state
            s, words = _class_logits(x, word_table, classes, visits[number], word_bias)
            best, ids = best_of(best, ids, scores[number] + jax.nn.log_softmax(s), words)
            return number + 1, best, ids

        none = jnp.full(k, -jnp.inf, jnp.float32), jnp.zeros(k, jnp.int32)
        return lax.while_loop(more, visit, (jnp.int32(0), *none))[1:]

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
    """A word a token: a class from p(class | h), then a word from p(word | class, h). Arguments and errors as `class_nll`.

    Cost: C D, and `widest` D for the class drawn, a token after another.
    """
    _check(h, class_table, word_table, classes, class_bias, word_bias)
    first, second = jax.random.split(key)
    drawn = sample(logits(h, class_table, bias=class_bias), first)

    def token(given: tuple[Array, Array, Array]) -> Array:
        x, group, point = given
        s, words = _class_logits(x, word_table, classes, group, word_bias)
        return words[pick(s[None], point[None])[0]]

    return lax.map(token, (h, drawn, jax.random.uniform(second, drawn.shape, jnp.float32)))


def _class_logits(
    x: Array, word_table: Array, classes: Classes, group: Array, bias: Array | None
) -> tuple[Array, Array]:
    """`widest` logits and ids of words, with all of a class; -inf where a word is another class's."""
    starts, size = jnp.asarray(classes.starts), classes.widest
    at = jnp.minimum(starts[group], word_table.shape[0] - size)
    bias = None if bias is None else lax.dynamic_slice_in_dim(bias, at, size)
    s = logits(x[None], lax.dynamic_slice_in_dim(word_table, at, size), bias=bias)[0]
    place = at + jnp.arange(size, dtype=jnp.int32)
    s = jnp.where((place >= starts[group]) & (place < starts[group + 1]), s, -jnp.inf)
    return s, lax.dynamic_slice_in_dim(jnp.asarray(classes.order), at, size)


def _check_count(vocab: int, count: int) -> None:
    if not 1 <= count <= vocab:
        raise InputError(
            f"count {count}: expected 1 to {vocab}, the number of words: a class without words has no softmax"
        )


def _check(h: Any, class_table: Any, word_table: Any, classes: Classes, class_bias: Any, word_bias: Any) -> None:
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
