"""Adaptive softmax: frequent words in a head beside an entry for each cluster of rarer ones, which have narrower vectors.

Ids fall in frequency. With cutoffs (c0, ..., c_last), words under c0 are in the head; tail i has those from cutoffs[i] up to
the next cutoff, the last tail up to the vocabulary's end. The head's row c0 + i stands for tail i. A tail is a pair: its
projection [d_i, D] and its words' vectors [words, d_i]. These are the parameters of torch.nn.AdaptiveLogSoftmaxWithLoss:
head.weight, and tail[i][0].weight with tail[i][1].weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.linear import linear
from hpnlp.ops.sampling import pick, sample
from hpnlp.ops.softmax.cross_entropy import linear_cross_entropy, logits
from hpnlp.ops.softmax.grouped_softmax import best_of, check_k, grouped_nll, known_labels
from hpnlp.types import InputError

Tails = Sequence[tuple[Array, Array]]
Shape = tuple[int, int]
# Tokens and words of one product with a tail.
BLOCK, WIDTH = 256, 4096


def adaptive_shapes(
    dim: int, vocab: int, cutoffs: Sequence[int], div_value: int | float = 4
) -> tuple[Shape, tuple[tuple[Shape, Shape], ...]]:
    """Shapes of the head and of each tail's (projection, vectors): tail i is of width D // div_value ** (i + 1).

    Raises InputError where cutoffs do not rise or reach the vocabulary, and where a tail would have no width.
    """
    _check_cutoffs(cutoffs)
    if cutoffs[-1] >= vocab:
        raise InputError(
            f"cutoffs {tuple(cutoffs)}: expected the last under the vocabulary of {vocab}, which ends the last tail"
        )
    widths = [int(dim // div_value ** (i + 1)) for i in range(len(cutoffs))]
    if min(widths) < 1:
        raise InputError(
            f"div_value {div_value}: tails of width {dim} are {widths} wide; lower it, or take fewer cutoffs"
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
    """-log p(label | h) of each token, float32, in nats: torch's `output`, negated; its `loss` is the mean.

    head, head_bias, tails, cutoffs: see above. labels: ids of words. block: tokens of one product with a tail.

    Tokens that do not count: give them h of 0 and any label, and mask the loss. Gradients by reverse mode, once, and forward
    over reverse; flatten tokens rather than `vmap` (see `grouped_nll`).
    Raises InputError on cutoffs that do not rise, on shapes that do not fit them, and on labels out of range where they are
    known while tracing; elsewhere such a token's loss is NaN, and it has no gradient.
    Cost: with the gradients 8 N D H operations for the head; for a tail the tokens whose label it has, rounded up to `block`,
    times 8 d (words + D). Memory: tiles of 256 tokens x 4096 words.
    Source: Grave et al. 2017, "Efficient softmax approximation for GPUs", sec. 4.
    """
    vocab = _check(h, head, tails, cutoffs, head_bias)
    labels, known = known_labels(labels, h.shape[0], vocab)
    if block < 1:
        raise InputError(f"block {block}: expected at least 1 token")
    cluster = jnp.searchsorted(jnp.asarray(cutoffs, jnp.int32), labels, side="right").astype(jnp.int32)
    entries = jnp.where(cluster == 0, labels, cutoffs[0] + cluster - 1)
    each = linear_cross_entropy(h, head, entries, bias=head_bias, reduction="none")
    for i, (projection, words) in enumerate(tails):
        groups = jnp.where(cluster == i + 1, 0, -1)
        starts = np.array([0, words.shape[0]], np.int32)
        each = each + grouped_nll(
            h, words, groups, labels - cutoffs[i], starts, projection=projection, block=block, width=WIDTH
        )
    return jnp.where(known, each, jnp.nan)


@array_op("N", h="N")
def adaptive_log_probs(
    h: Float[Array, "N D"],
    head: Float[Array, "H D"],
    tails: Tails,
    cutoffs: Sequence[int],
    *,
    head_bias: Float[Array, " H"] | None = None,
) -> Float[Array, "N V"]:
    """log p(word | h) of every word; float32. Arguments and errors as `adaptive_nll`. Memory O(N V)."""
    _check(h, head, tails, cutoffs, head_bias)
    entries = _entries(h, head, head_bias)
    parts = [entries[:, : cutoffs[0]]]
    for i, tail in enumerate(tails):
        parts.append(entries[:, cutoffs[0] + i, None] + jax.nn.log_softmax(_tail_logits(h, tail), axis=1))
    return jnp.concatenate(parts, axis=1)


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
    """The k most probable words of each token, best first: (log p, ids). Exact; among equals any. torch's `predict` is k = 1.

    A token visits a tail only where the tail's probability, which no word of it exceeds, is over that of its k-th word so far.
    Arguments and errors as `adaptive_nll`; biases are finite; k is 1 to V.
    Cost: D H, and of each tail visited d (words + D), a token after another; memory O(N H).
    """
    vocab = _check(h, head, tails, cutoffs, head_bias)
    check_k(k, vocab)

    def token(given: tuple[Array, Array]) -> tuple[Array, Array]:
        x, entries = given
        none = jnp.full(k, -jnp.inf, jnp.float32), jnp.zeros(k, jnp.int32)
        found = best_of(*none, entries[: cutoffs[0]], jnp.arange(cutoffs[0], dtype=jnp.int32))
        for i, tail in enumerate(tails):
            bound = entries[cutoffs[0] + i]

            def visit(
                best: Array, ids: Array, bound: Array = bound, tail: Any = tail, i: int = i
            ) -> tuple[Array, Array]:
                words = cutoffs[i] + jnp.arange(tail[1].shape[0], dtype=jnp.int32)
                return best_of(best, ids, bound + jax.nn.log_softmax(_tail_logits(x[None], tail)[0]), words)

            # Not `>`: NaN visits all, and is the result.
            found = lax.cond(~(bound <= found[0][-1]), visit, lambda *found: found, *found)
        return found

    return lax.map(token, (h, _entries(h, head, head_bias)))


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
    """A word a token, drawn from p(word | h). Arguments and errors as `adaptive_nll`.

    Cost: D H, and d (words + D) for the tail that is drawn, a token after another.
    """
    _check(h, head, tails, cutoffs, head_bias)
    first, second = jax.random.split(key)
    drawn = sample(logits(h, head, bias=head_bias), first).astype(jnp.int32)

    def within(i: int, x: Array, point: Array) -> Array:
        return cutoffs[i] + pick(_tail_logits(x[None], tails[i]), point[None])[0].astype(jnp.int32)

    def token(given: tuple[Array, Array, Array]) -> Array:
        x, entry, point = given
        choices = [lambda x, point: entry, *(lambda x, point, i=i: within(i, x, point) for i in range(len(tails)))]
        return lax.switch(jnp.maximum(entry - cutoffs[0] + 1, 0), choices, x, point)

    return lax.map(token, (h, drawn, jax.random.uniform(second, drawn.shape, jnp.float32)))


def _entries(h: Array, head: Array, head_bias: Array | None) -> Float[Array, "N H"]:
    return jax.nn.log_softmax(logits(h, head, bias=head_bias), axis=1)


def _tail_logits(h: Array, tail: tuple[Array, Array]) -> Float[Array, "N words"]:
    projection, words = tail
    return logits(linear(h, projection.T), words)


def _check_cutoffs(cutoffs: Sequence[int]) -> None:
    if not cutoffs or cutoffs[0] < 1 or any(a >= b for a, b in zip(cutoffs, cutoffs[1:], strict=False)):
        raise InputError(f"cutoffs {tuple(cutoffs)}: expected rising numbers of words, from 1 on")


def _check(h: Any, head: Any, tails: Tails, cutoffs: Sequence[int], head_bias: Any) -> int:
    """How many words there are."""
    _check_cutoffs(cutoffs)
    if h.ndim != 2:
        raise InputError(f"h {h.shape}: expected [N, D]; flatten tokens to one axis")
    if len(tails) != len(cutoffs):
        raise InputError(f"{len(tails)} tails, cutoffs {tuple(cutoffs)}: expected a tail from each cutoff on")
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
                f"words {cutoffs[i]} on, for h {h.shape}"
            )
    return cutoffs[-1] + tails[-1][1].shape[0]
