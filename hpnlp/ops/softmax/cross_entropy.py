"""Exact softmax cross-entropy over a vocabulary, without an array of tokens x vocabulary."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.linear import product, widened
from hpnlp.ops.softmax import chunked_cross_entropy
from hpnlp.ops.softmax.chunked_cross_entropy import LogitsSpec
from hpnlp.types import InputError

IMPLS = ("auto", "tokens", "vocabulary", "reference")
REDUCTIONS = ("mean", "sum", "none")
# How many logits are made at a time, of how many words at least.
LOGITS, SMALLEST = 1 << 22, 128
# How many logits a chunk of tokens may keep, and how few tokens make products that are worth reading all words for.
CHUNK, FEWEST = 1 << 24, 256


@array_op("M V", h="M", table="V")
def logits(
    h: Float[Array, "M D"], table: Float[Array, "V D"], *, bias: Float[Array, "V"] | None = None
) -> Float[Array, "M V"]:
    """h table^T + bias, accumulated and returned in float32. Cost: O(M V D) time, O(M V) memory."""
    out = product(h, table.T)
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]


@array_op("N", h="N")
def linear_cross_entropy(
    h: Float[Array, "N D"],
    w: Float[Array, "V D"],
    labels: Int[Array, " N"],
    *,
    bias: Float[Array, " V"] | None = None,
    weights: Float[Array, " N"] | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    impl: str = "auto",
    block_size: int | None = None,
    return_stats: bool = False,
) -> Any:
    """Cross-entropy of softmax(soft_cap(h w^T + bias) / temperature) with the labels, in nats, float32.

    bias: added to the logits. weights: a factor of each token's loss.
    ignore_index: tokens with this label, and tokens of weight 0, count for nothing, NaN or not; None for no such label.
    label_smoothing: the share of the target that is spread evenly over all words (Szegedy et al. 2016, sec. 7).
    z_loss: adds z_loss * lse^2 to each token's loss (Chowdhery et al. 2022, "PaLM", sec. 5).
    soft_cap: logits become soft_cap * tanh(logit / soft_cap) (Gemma Team 2024, "Gemma 2", sec. 2); before the temperature.
    reduction: "mean" over the weights, 0 where there are none, "sum", or "none", [N].
    impl: "tokens" makes the gradients of one chunk of tokens after another along with their losses, for "mean" and "sum";
      "vocabulary" goes through blocks of words, and makes their logits again for the gradient; "reference" makes all logits.
      "auto" is "tokens" where a chunk of at least 256 tokens, or all, keeps no more than 2^24 logits (64 MiB), else
      "vocabulary".
    block_size: tokens of a chunk, or words of a block ("auto" is then "vocabulary"); None takes a chunk of at most 2^24
      logits, or a divisor of V, where there is one, that makes some four million logits.
    return_stats: returns (loss, lse [N], argmax [N]); the lse has a gradient.

    Gradients reach h, w, bias and weights, by `grad`, `jvp` and second derivatives; products accumulate in float32, and those
    of a float16 h are float32 themselves (see `widened`), so that gradients of a mean are not lost.
    Raises InputError on shapes that do not fit, on an empty vocabulary, and on labels out of range where they are known
    while tracing; elsewhere such a token's loss is NaN.
    Cost, with the gradients: "tokens" 6 N V D operations, and memory for the logits of a chunk and one block of words, beside
    inputs and float32 gradients; its second derivatives are those of "vocabulary". "vocabulary" 8 N V D operations, of which 2
    are for the logits again, and memory for two blocks of logits, and for a copy of w and of its gradient where no divisor of V
    is near the block's size. Over devices that share the words, call `partial_cross_entropy` in `shard_map`; over devices that
    share the tokens, call this in `shard_map`: the sums of the gradient are then made once, not once a chunk.
    Source: Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", algorithms 1 to 3.
    """
    _check(
        h, w, labels, bias, weights, ignore_index, label_smoothing, soft_cap, temperature, reduction, impl, block_size
    )
    n, vocab = h.shape[0], w.shape[0]
    factors = jnp.ones(n, jnp.float32) if weights is None else weights.astype(jnp.float32)
    if ignore_index is not None:
        factors = jnp.where(labels == ignore_index, 0.0, factors)
    silent = factors == 0
    h, labels = without_silent(h, labels.astype(jnp.int32), factors)
    h, w = widened(h, w)
    factors = jnp.where((labels >= 0) & (labels < vocab), factors, jnp.nan)

    form = LogitsSpec(
        _block(n, vocab),
        soft_cap=soft_cap,
        temperature=temperature,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        total=label_smoothing != 0,
        best=return_stats,
    )
    scalar = reduction != "none" and not return_stats
    rows = max(min(n, block_size or CHUNK // vocab), 1)
    if impl == "tokens" and not scalar:
        raise InputError(
            "impl='tokens' makes the gradients of a sum: reduction 'none' and return_stats take 'vocabulary'"
        )
    if impl == "tokens" or (impl == "auto" and scalar and block_size is None and rows >= min(n, FEWEST)):
        words = min(max(LOGITS // 2 // rows, SMALLEST), vocab)
        form = dataclasses.replace(form, rows=rows, words=words)
        loss = chunked_cross_entropy.weighted_sum(form, h, w, bias, labels, factors)
        return loss / _weight(factors) if reduction == "mean" else loss

    if impl == "reference":
        others, target, total, best = chunked_cross_entropy.reference(form, h, w, bias, labels)
    else:
        if block_size is not None:
            form = dataclasses.replace(form, block=min(block_size, vocab))
        others, target, total, best = chunked_cross_entropy.statistics(form, h, w, bias, labels)
    each = factors * jnp.where(silent, 0.0, form.losses(others, target, total, vocab))
    loss = each if reduction == "none" else each.sum()
    if reduction == "mean":
        loss = loss / _weight(factors)
    return (loss, jnp.logaddexp(others, target), best) if return_stats else loss


@array_op("N", h="N")
def partial_cross_entropy(
    h: Float[Array, "N D"],
    w_slice: Float[Array, "v D"],
    labels: Int[Array, " N"],
    start: int | Int[Array, ""],
    *,
    bias: Float[Array, " v"] | None = None,
    soft_cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """(lse, target_logit, logit_sum) of the words from `start` on whose vectors are `w_slice`; float32.

    Over slices, lse merges by `merged_lse`, the others by sums: target_logit is 0 where another slice has the label. The loss
    is lse - target_logit; with labels smoothed by e, (1 - e) times that and e * (lse - logit_sum / V). Arguments,
    derivatives and cost as `linear_cross_entropy`, which masks and weighs tokens, as this does not.
    """
    n, words = h.shape[0], w_slice.shape[0]
    if labels.shape != (n,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(
            f"labels are {labels.dtype} {labels.shape}: expected integers {(n,)}, the number of each token's word"
        )
    _check(h, w_slice, None, bias, None, None, 0.0, soft_cap, temperature, "none", "auto", None)
    labels = labels.astype(jnp.int32) - start
    h, w_slice = widened(h, w_slice)
    form = LogitsSpec(_block(n, words), soft_cap=soft_cap, temperature=temperature, total=True)
    others, target, total, _ = chunked_cross_entropy.statistics(form, h, w_slice, bias, labels)
    own = (labels >= 0) & (labels < words)
    return merged_lse(others, jnp.where(own, target, -jnp.inf)), target, total


@array_op("...", first="...")
def merged_lse(first: Float[Array, "*shape"], *others: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The log-sum-exp of all slices from those of each: logaddexp, whose gradient is 0, and not NaN, where all are -inf.

    Cost: O(1) a number.
    """
    return functools.reduce(_logaddexp, others, first)


@array_op("N", h="N")
def without_silent(
    h: Float[Array, "N D"], labels: Int[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """Zeros and word 0 for tokens of weight 0, so that what stands there, NaN or no word, has no gradient."""
    counts = weights != 0
    return jnp.where(counts[:, None], h, jnp.zeros((), h.dtype)), jnp.where(counts, labels, 0)


def _logaddexp(a: Array, b: Array) -> Array:
    none = jnp.isneginf(a) & jnp.isneginf(b)
    a, b = (jnp.where(none, 0.0, x) for x in (a, b))
    return jnp.where(none, -jnp.inf, jnp.logaddexp(a, b))


def _weight(factors: Array) -> Float[Array, ""]:
    weight = factors.sum()
    return jnp.where(weight == 0, 1.0, weight)


def _block(tokens: int, vocab: int) -> int:
    """Words of a block: near LOGITS / tokens, and a divisor of the vocabulary if there is one: slicing it costs a copy."""
    wanted = min(max(LOGITS // max(tokens, 1), SMALLEST), vocab)
    divisors = [size for size in range(max(wanted // 2, 1), min(2 * wanted, vocab) + 1) if vocab % size == 0]
    return min(divisors, key=lambda size: abs(size - wanted), default=wanted)


def _check(
    h: Any,
    w: Any,
    labels: Any,
    bias: Any,
    weights: Any,
    ignore_index: int | None,
    label_smoothing: float,
    soft_cap: float | None,
    temperature: float,
    reduction: str,
    impl: str,
    block_size: int | None,
) -> None:
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1]:
        raise InputError(f"h {h.shape}, w {w.shape}: expected [N, D] and [V, D]; flatten tokens to one axis")
    n, vocab = h.shape[0], w.shape[0]
    if not vocab:
        raise InputError(f"w {w.shape}: the vocabulary is empty; expected at least one word")
    shapes = {"labels": (labels, n), "weights": (weights, n), "bias": (bias, vocab)}
    for name, (array, size) in shapes.items():
        if array is not None and array.shape != (size,):
            raise InputError(f"{name} has shape {array.shape}: expected {(size,)}")
    if labels is not None and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype}: expected integers, the number of each token's word")
    if labels is not None and not isinstance(labels, Tracer):
        known = np.asarray(labels)
        wrong = known[(known != ignore_index) & ((known < 0) | (known >= vocab))]
        weigh = None if weights is None or isinstance(weights, Tracer) else np.asarray(weights)
        if wrong.size and (weights is None or weigh is not None and np.isin(wrong, known[weigh != 0]).any()):
            raise InputError(f"a label is {wrong[0]}: expected 0 to {vocab - 1}, or ignore_index={ignore_index}")
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if impl not in IMPLS:
        raise InputError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing {label_smoothing}: expected 0 to 1")
    if soft_cap is not None and not soft_cap > 0:
        raise InputError(f"soft_cap {soft_cap}: expected a number over 0, or None for no cap")
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: expected a number over 0")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected at least 1, or None for a size that suits")
