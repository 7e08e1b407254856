"""Adaptive softmax: a head of the frequent words and one entry for each cluster of rarer words, which have narrower vectors.

Ids are sorted by falling frequency. With cutoffs (c_0, ..., c_last), the words 0 to c_0 - 1 are in the head. Tail i has the
words from cutoffs[i] up to the next cutoff, the last tail those up to the end of the vocabulary. Row c_0 + i of the head
stands for tail i. A tail is a pair: its projection [d_i, D] and the vectors of its words [words, d_i]. These are the
parameters of torch.nn.AdaptiveLogSoftmaxWithLoss: `head.weight`, `tail[i][0].weight` and `tail[i][1].weight`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import linear
from hpnlp.ops.sampling import pick, sample
from hpnlp.ops.softmax.cross_entropy import linear_cross_entropy, logits
from hpnlp.ops.softmax.structured.grouped_softmax import TileShape, check_k, grouped_nll, known_labels, merge_top_k
from hpnlp.types import AnyArray, InputError

Tails = Sequence[tuple[Array, Array]]
Shape = tuple[int, int]
# Tokens and words of one product with a tail: a tile of 4 MiB.
BLOCK, WIDTH = 256, 4096


def adaptive_shapes(
    dim: int, vocab: int, cutoffs: Sequence[int], div_value: int | float = 4
) -> tuple[Shape, tuple[tuple[Shape, Shape], ...]]:
    """Shapes of the parameters.

    Args:
      dim: D, the features of a hidden state.
      vocab: V, the number of words.
      cutoffs: First ids of the tails, rising, from 1 to V - 1.
      div_value: Tail i has the width d_i = D // div_value ** (i + 1).

    Returns:
      (shape of the head, (shape of the projection, shape of the vectors) of each tail).

    Raises:
      InputError: cutoffs do not rise or reach V, or a tail would have width 0.
    """
    _check_cutoffs(cutoffs)
    if cutoffs[-1] >= vocab:
        raise InputError(
            f"cutoffs {tuple(cutoffs)}: expected the last under the vocabulary of {vocab}, where the last tail ends"
        )
    widths = [int(dim // div_value ** (i + 1)) for i in range(len(cutoffs))]
    if min(widths) < 1:
        raise InputError(
            f"div_value {div_value}: for {dim} features, tails are {widths} wide; lower it, or pass fewer cutoffs"
        )
    sizes = np.diff([*cutoffs, vocab]).tolist()
    tails = tuple(((width, dim), (size, width)) for width, size in zip(widths, sizes, strict=True))
    return (cutoffs[0] + len(cutoffs), dim), tails


@array_op("N", h="N")
def adaptive_nll(
    h: Float[Array, "N D"],
    head: Float[Array, "H D"],
    tails: Tails,
    labels: Int[Array, " N"],
    cutoffs: Sequence[int],
    *,
    head_bias: Float[Array, " H"] | None = None,
    block: int = BLOCK,
) -> Float[Array, " N"]:
    """-log p(label | h) of each token, in nats: `output` of torch's module, negated; its `loss` is the mean.

    Gradients by reverse mode, once, and forward over reverse; flatten tokens instead of using `jax.vmap` (see `grouped_nll`).
    For tokens that do not count, pass h of 0 and any label, and mask the loss.

    Args:
      h: [N, D] hidden states.
      head: [H, D] vectors of the head, H = c_0 + number of tails.
      tails: (projection [d_i, D], vectors [words, d_i]) of each tail.
      labels: [N] ids of words.
      cutoffs: First id of each tail.
      head_bias: [H] added to the scores of the head; None for no bias.
      block: Tokens of one product with a tail.

    Returns:
      [N] float32 losses.

    Raises:
      InputError: cutoffs do not rise, shapes do not fit them, or a label that is known while tracing is no word. The loss of a
        token whose label is unknown while tracing and no word is NaN, and it has no gradient.

    Cost:
      With the gradients 8 N D H operations for the head; for each tail 8 d (words + D) operations for each token whose label it
      has, the number of tokens rounded up to `block`. Memory: tiles of 256 tokens x 4096 words.

    References:
      Grave et al. 2017, "Efficient softmax approximation for GPUs", sec. 4.
    """
    vocab = _check(h, head, tails, cutoffs, head_bias)
    labels, is_word = known_labels(labels, h.shape[0], vocab)
    if block < 1:
        raise InputError(f"block {block}: expected at least 1 token")
    cluster = jnp.searchsorted(jnp.asarray(cutoffs, jnp.int32), labels, side="right").astype(jnp.int32)
    entries = jnp.where(cluster == 0, labels, cutoffs[0] + cluster - 1)
    losses = linear_cross_entropy(h, head, entries, bias=head_bias, reduction="none")
    for i, (projection, words) in enumerate(tails):
        groups = jnp.where(cluster == i + 1, 0, -1)
        starts = np.array([0, words.shape[0]], np.int32)
        losses = losses + grouped_nll(
            h, words, groups, labels - cutoffs[i], starts, projection=projection, tile=TileShape(block, WIDTH)
        )
    return jnp.where(is_word, losses, jnp.nan)


@array_op("N", h="N")
def adaptive_log_probs(
    h: Float[Array, "N D"],
    head: Float[Array, "H D"],
    tails: Tails,
    cutoffs: Sequence[int],
    *,
    head_bias: Float[Array, " H"] | None = None,
) -> Float[Array, "N V"]:
    """Log-probabilities of all words.

    Arguments: see `adaptive_nll`.

    Returns:
      [N, V] float32.

    Cost:
      O(N V) memory.
    """
    _check(h, head, tails, cutoffs, head_bias)
    entries = _head_log_probs(h, head, head_bias)
    log_probs = [entries[:, : cutoffs[0]]]
    for i, tail in enumerate(tails):
        log_probs.append(entries[:, cutoffs[0] + i, None] + jax.nn.log_softmax(_tail_logits(h, tail), axis=1))
    return jnp.concatenate(log_probs, axis=1)


@array_op("N", h="N")
def adaptive_top_k(
    h: Float[Array, "N D"],
    head: Float[Array, "H D"],
    tails: Tails,
    cutoffs: Sequence[int],
    k: int,
    *,
    head_bias: Float[Array, " H"] | None = None,
) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
    """The k most probable words of each token, exact; ties may be broken in any way. torch's `predict` is k = 1.

    A token visits a tail only if the tail's probability, which bounds those of its words, is over that of the k-th best word so
    far.

    Args:
      h: As in `adaptive_nll`.
      head: As in `adaptive_nll`.
      tails: As in `adaptive_nll`.
      cutoffs: As in `adaptive_nll`.
      k: Number of words, 1 to V.
      head_bias: As in `adaptive_nll`; finite.

    Returns:
      (log_probs [N, k] float32, ids [N, k] int32), best first.

    Raises:
      InputError: cutoffs do not rise, shapes do not fit them, or k is not 1 to V.

    Cost:
      D H operations a token, and d (words + D) for each tail visited, one token after another; memory O(N H).
    """
    vocab = _check(h, head, tails, cutoffs, head_bias)
    check_k(k, vocab)

    def visit(x: Array, entry: Array, i: int, best: Array, ids: Array) -> tuple[Array, Array]:
        words = cutoffs[i] + jnp.arange(tails[i][1].shape[0], dtype=jnp.int32)
        return merge_top_k(best, ids, entry + jax.nn.log_softmax(_tail_logits(x[None], tails[i])[0]), words)

    def token(inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, entries = inputs
        empty = jnp.full(k, -jnp.inf, jnp.float32), jnp.zeros(k, jnp.int32)
        best, ids = merge_top_k(*empty, entries[: cutoffs[0]], jnp.arange(cutoffs[0], dtype=jnp.int32))
        for i in range(len(tails)):
            entry = entries[cutoffs[0] + i]
            # Not `>`: a token with NaN visits all tails, and NaN is its result.
            may_win = ~(entry <= best[-1])
            visit_tail = functools.partial(visit, x, entry, i)
            best, ids = lax.cond(may_win, visit_tail, lambda best, ids: (best, ids), best, ids)
        return best, ids

    return lax.map(token, (h, _head_log_probs(h, head, head_bias)))


@array_op("N", h="N")
def adaptive_sample(
    h: Float[Array, "N D"],
    head: Float[Array, "H D"],
    tails: Tails,
    cutoffs: Sequence[int],
    key: Array,
    *,
    head_bias: Float[Array, " H"] | None = None,
) -> Int[Array, " N"]:
    """Draws a word for each token from p(word | h).

    Args:
      h: As in `adaptive_nll`.
      head: As in `adaptive_nll`.
      tails: As in `adaptive_nll`.
      cutoffs: As in `adaptive_nll`.
      key: PRNG key of the random numbers.
      head_bias: As in `adaptive_nll`.

    Returns:
      [N] int32 ids.

    Cost:
      D H operations a token, and d (words + D) for the tail that is drawn, one token after another.
    """
    _check(h, head, tails, cutoffs, head_bias)
    head_key, tail_key = jax.random.split(key)
    drawn = sample(logits(h, head, bias=head_bias), head_key).astype(jnp.int32)

    def word_of_tail(i: int, x: Array, point: Array) -> Array:
        return cutoffs[i] + pick(_tail_logits(x[None], tails[i]), point[None])[0].astype(jnp.int32)

    tail_branches = [functools.partial(word_of_tail, i) for i in range(len(tails))]

    def token(inputs: tuple[Array, Array, Array]) -> Array:
        x, entry, point = inputs
        branches = [lambda x, point: entry, *tail_branches]
        return lax.switch(jnp.maximum(entry - cutoffs[0] + 1, 0), branches, x, point)

    return lax.map(token, (h, drawn, jax.random.uniform(tail_key, drawn.shape, jnp.float32)))


def _head_log_probs(h: Array, head: Array, head_bias: Array | None) -> Float[Array, "N H"]:
    return jax.nn.log_softmax(logits(h, head, bias=head_bias), axis=1)


def _tail_logits(h: Array, tail: tuple[Array, Array]) -> Float[Array, "N words"]:
    projection, words = tail
    return logits(linear(h, projection.T), words)


def _check_cutoffs(cutoffs: Sequence[int]) -> None:
    if not cutoffs or cutoffs[0] < 1 or any(a >= b for a, b in zip(cutoffs, cutoffs[1:], strict=False)):
        raise InputError(f"cutoffs {tuple(cutoffs)}: expected rising numbers, from 1 on")


def _check(h: AnyArray, head: AnyArray, tails: Tails, cutoffs: Sequence[int], head_bias: AnyArray | None) -> int:
    """Raises InputError if shapes do not fit; returns the number of words."""
    _check_cutoffs(cutoffs)
    if h.ndim != 2:
        raise InputError(f"h {h.shape}: expected [N, D]; flatten tokens to one axis")
    if len(tails) != len(cutoffs):
        raise InputError(f"{len(tails)} tails, cutoffs {tuple(cutoffs)}: expected one tail for each cutoff")
    dim, entries = h.shape[1], cutoffs[0] + len(cutoffs)
    if head.shape != (entries, dim):
        raise InputError(
            f"head has shape {head.shape}: expected {(entries, dim)} for h {h.shape}, {cutoffs[0]} words, {len(cutoffs)} tails"
        )
    if head_bias is not None and head_bias.shape != (entries,):
        raise InputError(f"head_bias has shape {head_bias.shape}: expected {(entries,)}")
    for i, (projection, words) in enumerate(tails):
        size = cutoffs[i + 1] - cutoffs[i] if i + 1 < len(cutoffs) else max(words.shape[0], 1)
        expected = (words.shape[-1], dim), (size, words.shape[-1])
        if (projection.shape, words.shape) != expected:
            raise InputError(
                f"tail {i} has shapes {projection.shape}, {words.shape}: expected {expected[0]}, {expected[1]}; "
                f"it begins at word {cutoffs[i]}, and h is {h.shape}"
            )
    return cutoffs[-1] + tails[-1][1].shape[0]
