"""Exact softmax cross-entropy over a vocabulary, without an array of tokens x vocabulary."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import prefers_transpose, product_by_transpose, product_transposed, widened
from hpnlp.ops.softmax import chunked_cross_entropy
from hpnlp.ops.softmax.logits_spec import LogitsSpec
from hpnlp.ops.weight import Weight, dense, is_weight
from hpnlp.types import AnyArray, InputError

IMPLS = ("auto", "tokens", "vocabulary", "reference")
REDUCTIONS = ("mean", "sum", "none")
# Logits of a block of words: 16 MiB, which is large enough for fast products.
BLOCK_LOGITS = 1 << 22
# Words of a block at least, however many tokens there are.
MIN_BLOCK_WORDS = 128
# Logits of a chunk of tokens at most: 64 MiB.
MAX_CHUNK_LOGITS = 1 << 24
# Tokens of a chunk at least for "auto" to choose chunks: with fewer, reading all word vectors takes longer than the product.
MIN_CHUNK_TOKENS = 256
# The same on accelerators, where reading and writing the gradient by w for every chunk takes as long as the products of 300
# tokens (by the data sheet of an H100), and where loops of many small products leave most of the device idle.
ACCELERATOR_BLOCK_LOGITS = 1 << 24
ACCELERATOR_CHUNK_LOGITS = 1 << 26
ACCELERATOR_CHUNK_TOKENS = 1024
# Tokens of a chunk are a multiple of this on accelerators, if that divides all tokens, so that products need no padding.
ACCELERATOR_ALIGNMENT = 128


@array_op("M V", h="M", table="V")
def logits(
    h: Float[Array, "M D"], table: Float[Array, "V D"] | Weight, *, bias: Float[Array, "V"] | None = None
) -> Float[Array, "M V"]:
    """Logits of every word, h table^T + bias.

    Args:
      h: [M, D] hidden states.
      table: [V, D] word vectors, an array or a Weight.
      bias: [V] added to the products; None for no bias.

    Returns:
      [M, V] logits, accumulated and returned in float32.

    Cost:
      O(M V D) time, O(M V) memory.
    """
    # By the transpose, XLA:CPU moves the logits once more, which costs as much as it saves at D = 10 M.
    is_wide = isinstance(h.shape[0], int) and h.shape[1] >= 16 * h.shape[0]  # not of a symbolic number of rows
    by_transpose = is_wide and prefers_transpose(len(h)) and not is_weight(table)
    matrix: Any = table
    out = product_by_transpose(h, matrix) if by_transpose else product_transposed(h, table)
    return out if bias is None else out + bias.astype(jnp.float32)[None, :]


@array_op("N", h="N")
def linear_cross_entropy(
    h: Float[Array, "N D"],
    w: Float[Array, "V D"] | Weight,
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

    Gradients reach h, w, bias and weights, by `jax.grad`, `jax.jvp` and second derivatives. Products accumulate in float32;
    those of a float16 h are float32 themselves (see `widened`), so that gradients of a mean do not underflow.

    Over devices that share the words, call `partial_cross_entropy` in `jax.shard_map`. Over devices that share the tokens,
    call this function in `jax.shard_map`: gradients are then summed over devices once, not once a chunk.

    Args:
      h: [N, D] hidden states.
      w: [V, D] word vectors, an array or a Weight.
      labels: [N] ids of words.
      bias: [V] added to the logits; None for no bias.
      weights: [N] factors of the tokens' losses; None for 1.
      ignore_index: Tokens with this label, and tokens of weight 0, have no loss and no gradient, even where h is NaN; None
        for no such label.
      label_smoothing: Share of the target distribution that is spread evenly over all words, 0 to 1 (Szegedy et al. 2016).
      z_loss: Adds z_loss * lse^2 to each token's loss (Chowdhery et al. 2022).
      soft_cap: Logits become soft_cap * tanh(logit / soft_cap), before the temperature (Gemma Team 2024); None for no cap.
      temperature: Divides the logits.
      reduction: "mean" over the weights, 0 where they sum to 0; "sum"; or "none", [N].
      impl: "tokens" scans over chunks of tokens and computes the gradients of a chunk along with its losses, for reductions
        "mean" and "sum"; "vocabulary" scans over blocks of words and computes their logits again for the gradient;
        "reference" computes all logits at once. "auto" is "tokens" where a chunk of at least 256 tokens, or of all tokens,
        has no more than 2^24 logits (64 MiB), else "vocabulary"; on accelerators 1024 tokens and 2^26 logits.
      block_size: Tokens of a chunk, or words of a block ("auto" is then "vocabulary"). None takes a chunk of at most 2^24
        logits, or a block of about 2^22 logits whose size divides V where possible; on accelerators 2^26 and 2^24.
      return_stats: Also return the log-sum-exp and the word with the largest logit; the former is differentiable.

    Returns:
      The loss, a scalar or [N], float32; with return_stats the tuple (loss, lse [N], argmax [N]).

    Raises:
      InputError: Shapes do not fit, the vocabulary is empty, an option is out of range, or a label that is known while tracing
        is no word. The loss of a token whose label is unknown while tracing and no word is NaN.

    Cost:
      With the gradients, "tokens" takes 6 N V D operations, and memory for the logits of a chunk and one block of words,
      beside inputs and float32 gradients; its second derivatives cost as those of "vocabulary". "vocabulary" takes 8 N V D
      operations, of which 2 N V D are for the second computation of the logits, and memory for two blocks of logits; also for
      a copy of w and of its gradient where no divisor of V is near the block's size.

    References:
      Wijmans et al. 2024, "Cut your losses in large-vocabulary language models", algorithms 1 to 3.
      Szegedy et al. 2016, "Rethinking the Inception architecture for computer vision", sec. 7: label smoothing.
      Chowdhery et al. 2022, "PaLM", sec. 5: z-loss. Gemma Team 2024, "Gemma 2", sec. 2: soft cap.
    """
    table: Any = dense(w)
    _check_arrays(h, table, labels, bias, weights)
    _check_label_range(labels, table.shape[0], weights, ignore_index)
    _check_logit_options(soft_cap, temperature)
    is_scalar = reduction != "none" and not return_stats
    _check_loss_options(label_smoothing, reduction, impl, block_size)
    if impl == "tokens" and not is_scalar:
        raise InputError(
            f"impl='tokens' computes the gradients of a sum, reduction={reduction!r}, return_stats={return_stats}: expected "
            "impl='vocabulary' for reduction='none' and for return_stats"
        )
    tokens, vocab = h.shape[0], table.shape[0]
    factors = _token_factors(labels, weights, ignore_index)
    ignored = factors == 0
    h, labels = zero_ignored_tokens(h, labels.astype(jnp.int32), factors)
    h, table = widened(h, table)
    factors = jnp.where((labels >= 0) & (labels < vocab), factors, jnp.nan)

    spec = LogitsSpec(
        _vocab_block(tokens, vocab),
        soft_cap=soft_cap,
        temperature=temperature,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        with_logit_sum=label_smoothing != 0,
        with_argmax=return_stats,
    )
    chunk_tokens, chunk_vocab_block, are_many = _chunk_sizes(tokens, vocab, block_size)
    if impl == "tokens" or (impl == "auto" and is_scalar and block_size is None and are_many):
        spec = dataclasses.replace(spec, chunk_tokens=chunk_tokens, chunk_vocab_block=chunk_vocab_block)
        loss = chunked_cross_entropy.weighted_sum(spec, h, table, bias, labels, factors)
        return loss / _nonzero_sum(factors) if reduction == "mean" else loss

    if block_size is not None:
        spec = dataclasses.replace(spec, vocab_block=min(block_size, vocab))
    compute = chunked_cross_entropy.reference if impl == "reference" else chunked_cross_entropy.statistics
    other_lse, target, logit_sum, argmax = compute(spec, h, table, bias, labels)
    losses = factors * jnp.where(ignored, 0.0, spec.losses(other_lse, target, logit_sum, vocab))
    loss = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        loss = loss / _nonzero_sum(factors)
    return (loss, jnp.logaddexp(other_lse, target), argmax) if return_stats else loss


@array_op("N", h="N")
def partial_cross_entropy(
    h: Float[Array, "N D"],
    w_slice: Float[Array, "v D"] | Weight,
    labels: Int[Array, " N"],
    start: int | Int[Array, ""],
    *,
    bias: Float[Array, " v"] | None = None,
    soft_cap: float | None = None,
    temperature: float = 1.0,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """Statistics of the logits over a slice of the vocabulary, which merge exactly over slices.

    Log-sum-exps of slices merge by `merged_lse`, the other two results by addition. The loss is lse - target_logit; with labels
    smoothed by e, it is (1 - e) (lse - target_logit) + e (lse - logit_sum / V). Derivatives are as in `linear_cross_entropy`.
    Unlike there, no token is ignored or weighted.

    Args:
      h: [N, D] hidden states.
      w_slice: [v, D] vectors of the words start to start + v - 1, an array or a Weight.
      labels: [N] ids of words, in this slice or another.
      start: Id of the slice's first word.
      bias: [v] added to the logits; None for no bias.
      soft_cap: As in `linear_cross_entropy`.
      temperature: As in `linear_cross_entropy`.

    Returns:
      (lse, target_logit, logit_sum), each [N] float32; target_logit is 0 where another slice has the label.

    Raises:
      InputError: Shapes do not fit, labels are not integers, or an option is out of range.

    Cost:
      As "vocabulary" in `linear_cross_entropy`, for v words.
    """
    tokens, words = h.shape[0], w_slice.shape[0]
    if labels.shape != (tokens,) or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(
            f"labels are {labels.dtype} {labels.shape}: expected integers {(tokens,)}, the id of each token's word"
        )
    table: Any = dense(w_slice)
    _check_arrays(h, table, None, bias, None)
    _check_logit_options(soft_cap, temperature)
    labels = labels.astype(jnp.int32) - start
    h, table = widened(h, table)
    spec = LogitsSpec(_vocab_block(tokens, words), soft_cap=soft_cap, temperature=temperature, with_logit_sum=True)
    other_lse, target, logit_sum, _ = chunked_cross_entropy.statistics(spec, h, table, bias, labels)
    in_slice = (labels >= 0) & (labels < words)
    return merged_lse(other_lse, jnp.where(in_slice, target, -jnp.inf)), target, logit_sum


@array_op("...", first="...")
def merged_lse(first: Float[Array, "*shape"], *others: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Log-sum-exp over several slices from the log-sum-exp of each slice.

    Args:
      first: Log-sum-exp of one slice, of any shape.
      *others: Log-sum-exps of the other slices, of the same shape.

    Returns:
      The log-sum-exp of all. Where all are -inf, its gradient is 0; that of `jnp.logaddexp` would be NaN.

    Cost:
      O(1) operations an element and slice.
    """
    return functools.reduce(_logaddexp, others, first)


@array_op("N", h="N")
def zero_ignored_tokens(
    h: Float[Array, "N D"], labels: Int[Array, " N"], weights: Float[Array, " N"]
) -> tuple[Float[Array, "N D"], Int[Array, " N"]]:
    """Replaces tokens of weight 0 by zeros and label 0, so that a NaN or an invalid label there does not reach a gradient.

    Args:
      h: [N, D] hidden states.
      labels: [N] ids of words.
      weights: [N] factors of the tokens' losses.

    Returns:
      (h, labels), of the same shapes and dtypes.
    """
    counts = weights != 0
    return jnp.where(counts[:, None], h, jnp.zeros((), h.dtype)), jnp.where(counts, labels, 0)


def _logaddexp(a: Array, b: Array) -> Array:
    both_empty = jnp.isneginf(a) & jnp.isneginf(b)
    a, b = (jnp.where(both_empty, 0.0, x) for x in (a, b))
    return jnp.where(both_empty, -jnp.inf, jnp.logaddexp(a, b))


def _nonzero_sum(factors: Array) -> Float[Array, ""]:
    """Sum of the factors, or 1 where it is 0: the divisor of a mean."""
    total = factors.sum()
    return jnp.where(total == 0, 1.0, total)


def _vocab_block(tokens: int, vocab: int) -> int:
    """Words of a block: about BLOCK_LOGITS / tokens, and a divisor of the vocabulary if one is near.

    Otherwise a slice of the table has to be copied.
    """
    logits_of_block = BLOCK_LOGITS if jax.default_backend() == "cpu" else ACCELERATOR_BLOCK_LOGITS
    size = min(max(logits_of_block // max(tokens, 1), MIN_BLOCK_WORDS), vocab)
    divisors = [n for n in range(max(size // 2, 1), min(2 * size, vocab) + 1) if vocab % n == 0]
    return min(divisors, key=lambda n: abs(n - size), default=size)


def _chunk_sizes(tokens: int, vocab: int, block_size: int | None) -> tuple[int, int, bool]:
    """Tokens of a chunk, words of a block within it, and whether the tokens are enough for chunks to be fast."""
    if jax.default_backend() == "cpu":
        size = max(min(tokens, block_size or MAX_CHUNK_LOGITS // vocab), 1)
        words = min(max(BLOCK_LOGITS // 2 // size, MIN_BLOCK_WORDS), vocab)
        return size, words, size >= min(tokens, MIN_CHUNK_TOKENS)
    limit = max(min(tokens, block_size or ACCELERATOR_CHUNK_LOGITS // vocab), 1)
    aligned = range(limit - limit % ACCELERATOR_ALIGNMENT, limit // 2, -ACCELERATOR_ALIGNMENT)
    size = next((size for size in aligned if tokens % size == 0), limit)
    return size, vocab, size >= min(tokens, ACCELERATOR_CHUNK_TOKENS)


def _check_arrays(
    h: AnyArray, w: AnyArray, labels: AnyArray | None, bias: AnyArray | None, weights: AnyArray | None
) -> None:
    """Raises InputError if shapes do not fit, the vocabulary is empty, or labels are not integers."""
    if h.ndim != 2 or w.ndim != 2 or h.shape[1] != w.shape[1]:
        raise InputError(f"h {h.shape}, w {w.shape}: expected [N, D] and [V, D]; flatten tokens to one axis")
    tokens, vocab = h.shape[0], w.shape[0]
    if not vocab:
        raise InputError(f"w {w.shape}: the vocabulary is empty; expected at least one word")
    for name, array, size in (("labels", labels, tokens), ("weights", weights, tokens), ("bias", bias, vocab)):
        if array is not None and array.shape != (size,):
            raise InputError(f"{name} has shape {array.shape}: expected {(size,)}")
    if labels is not None and not jnp.issubdtype(labels.dtype, jnp.integer):
        raise InputError(f"labels are {labels.dtype}: expected integers, the id of each token's word")


def _check_label_range(labels: AnyArray, vocab: int, weights: AnyArray | None, ignore_index: int | None) -> None:
    """Raises InputError if a label, where labels are known while tracing, is no word and may have a weight other than 0."""
    if isinstance(labels, Tracer):
        return
    ids = np.asarray(labels)
    invalid = (ids != ignore_index) & ((ids < 0) | (ids >= vocab))
    if isinstance(weights, Tracer):
        return
    if weights is not None:
        invalid &= np.asarray(weights) != 0
    if invalid.any():
        raise InputError(f"a label is {ids[invalid][0]}: expected 0 to {vocab - 1}, or ignore_index={ignore_index}")


def _check_logit_options(soft_cap: float | None, temperature: float) -> None:
    if soft_cap is not None and not soft_cap > 0:
        raise InputError(f"soft_cap {soft_cap}: expected a number over 0, or None for no cap")
    if not temperature > 0:
        raise InputError(f"temperature {temperature}: expected a number over 0")


def _token_factors(labels: Any, weights: Any, ignore_index: int | None) -> Array:
    """[N] float32 factors of the tokens' losses, 0 for ignored tokens."""
    factors = jnp.ones(labels.shape[0], jnp.float32) if weights is None else weights.astype(jnp.float32)
    return factors if ignore_index is None else jnp.where(labels == ignore_index, 0.0, factors)


def _check_loss_options(label_smoothing: float, reduction: str, impl: str, block_size: int | None) -> None:
    if reduction not in REDUCTIONS:
        raise InputError(f"reduction {reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if impl not in IMPLS:
        raise InputError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing {label_smoothing}: expected 0 to 1")
    if block_size is not None and block_size < 1:
        raise InputError(f"block_size {block_size}: expected at least 1, or None for a size that suits")
