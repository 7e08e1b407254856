"""Softmax cross-entropy from blocks of logits, so that no array of tokens x vocabulary exists.

The loss of a token needs three numbers of its logits: the log-sum-exp over all words but the label, the label's logit and,
for label smoothing, the sum of all logits (`LogitStatistics`). The label is kept apart from the other words because
softmax(logits)[label] - 1 rounds to 0 in float32 for a confident token, while -sigmoid(other_lse - target) keeps its digits.

There are two orders of computation:

- `statistics` scans over blocks of the vocabulary; a block holds the logits of all tokens for some words. Its JVP is a second
  such scan, linear in the tangents, that recomputes the logits of each block. JAX transposes it for reverse mode and
  differentiates it again for higher orders; no block is stored. Loss and gradients take four products of size N x V x D.
- `weighted_sum` scans over chunks of tokens; a chunk holds the logits of some tokens for all words. Loss and gradients take
  three products, because the cotangent of a sum is a scalar, by which gradients can be multiplied after they are computed:
  each chunk computes its logits and from them its contribution to every gradient before the next chunk begins.

Gradients are products in the dtype of h, which must not be float16: callers pass h and w through `hpnlp.ops.linear.widened`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.softmax.logits_spec import LogitsSpec, LogitStatistics
from hpnlp.ops.softmax.online_logsumexp import OnlineLogSumExp


def reference(
    spec: LogitsSpec,
    h: Float[Array, "N D"],
    w: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " N"],
) -> LogitStatistics:
    """Computes `statistics` from an array of all logits, as the definition has it.

    Args:
      spec: Form of the logits; block sizes and flags are not used.
      h: [N, D] hidden states.
      w: [V, D] word vectors.
      bias: [V] or None.
      labels: [N] int32.

    Returns:
      The statistics, all of them computed.
    """
    s = h.astype(jnp.float32) @ w.astype(h.dtype).astype(jnp.float32).T
    s = s if bias is None else s + bias.astype(jnp.float32)[None]
    s = s if spec.soft_cap is None else spec.soft_cap * jnp.tanh(s / spec.soft_cap)
    s = s / spec.temperature
    is_label = jax.nn.one_hot(labels, w.shape[0], dtype=jnp.bool_)
    other_lse = jax.nn.logsumexp(s, axis=1, where=~is_label)
    target = jnp.where(is_label, s, 0.0).sum(axis=1)
    return LogitStatistics(other_lse, target, s.sum(axis=1), jnp.argmax(s, axis=1).astype(jnp.int32))


# Blocks of the vocabulary, for all tokens


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def statistics(
    spec: LogitsSpec,
    h: Float[Array, "N D"],
    w: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " N"],
) -> LogitStatistics:
    """Computes the statistics of the logits in one pass over blocks of the vocabulary.

    Args:
      spec: Form of the logits, and the words of a block.
      h: [N, D] hidden states, not float16.
      w: [V, D] word vectors.
      bias: [V] or None.
      labels: [N] int32; may lie outside 0 to V - 1.

    Returns:
      The statistics. They have derivatives of any order, in both modes.
    """

    def add(running: _RunningStatistics, start: Array, w: Array, bias: Array | None) -> _RunningStatistics:
        return running.add(spec, spec.logits(h, w, bias), labels, start)

    return _over_vocab_blocks(
        spec, add, _RunningStatistics.empty(_zeros(h.shape[:1], h, w, bias, labels)), w, bias
    ).result()


@statistics.defjvp
@accepts_numpy
def _(spec: LogitsSpec, primals: PyTree, tangents: PyTree) -> tuple[LogitStatistics, LogitStatistics]:
    """The statistics, and their tangents from a second scan over the blocks of the vocabulary."""
    h, w, bias, labels = primals
    dh, dw, dbias, _ = tangents
    out = statistics(spec, h, w, bias, labels)
    base = _finite_or_zero(out.other_lse)[:, None]
    dh = dh.astype(jnp.float32)  # the blocks' contributions to its transpose are then summed in float32

    def add(sums: PyTree, start: Array, w: Array, bias: Array | None, dw: Array, dbias: Array | None) -> Any:
        d_other_lse, d_target, d_logit_sum = sums
        block = (h, w) if bias is None else (h, w, bias)
        block_tangents = (dh.astype(h.dtype), dw) if bias is None else (dh.astype(h.dtype), dw, dbias)
        s, ds = jax.jvp(lambda h, w, bias=None: spec.logits(h, w, bias), block, block_tangents)
        is_label, other_s = _split_label(s, labels, start)
        d_other_lse = d_other_lse + (jnp.exp(other_s - base) * ds).sum(axis=1)
        d_target = d_target + jnp.where(is_label, ds, 0.0).sum(axis=1)
        if spec.with_logit_sum:
            d_logit_sum = d_logit_sum + ds.sum(axis=1)
        return d_other_lse, d_target, d_logit_sum

    zero = _zeros(h.shape[:1], h, w, bias, labels, dh, dw, dbias)
    tables = w, bias, dw, dbias
    d_other_lse, d_target, d_logit_sum = _over_vocab_blocks(spec, add, (zero, zero, zero), *tables)
    return out, LogitStatistics(d_other_lse, d_target, d_logit_sum, zero_from_primal(out.argmax))


class _RunningStatistics(NamedTuple):
    """Statistics of the words that were added so far."""

    other_lse: OnlineLogSumExp  # over all words but the label
    target: Array  # [N] logit of the label, 0 until its block is added
    logit_sum: Array  # [N] sum of the logits
    maximum: Array  # [N] largest logit
    argmax: Array  # [N] word with the largest logit

    @classmethod
    def empty(cls, zeros: Float[Array, " N"]) -> _RunningStatistics:
        return cls(OnlineLogSumExp.empty(zeros), zeros, zeros, zeros - jnp.inf, zeros.astype(jnp.int32))

    def add(self, spec: LogitsSpec, s: Array, labels: Array, start: Array) -> _RunningStatistics:
        """The statistics with the logits `s` [N, c] of the words from `start` on."""
        _, target, logit_sum, maximum, argmax = self
        is_label, other_s = _split_label(s, labels, start)
        other_lse = self.other_lse.add(other_s)
        target = target + jnp.where(is_label, s, 0.0).sum(axis=1)
        if spec.with_logit_sum:
            logit_sum = logit_sum + s.sum(axis=1)
        if spec.with_argmax:
            block_maximum = s.max(axis=1)
            argmax = jnp.where(block_maximum > maximum, start + jnp.argmax(s, axis=1).astype(jnp.int32), argmax)
            maximum = jnp.maximum(maximum, block_maximum)
        return _RunningStatistics(other_lse, target, logit_sum, maximum, argmax)

    def result(self) -> LogitStatistics:
        return LogitStatistics(self.other_lse.value(), self.target, self.logit_sum, self.argmax)


def _over_vocab_blocks(spec: LogitsSpec, body: Callable[..., Any], carry: PyTree, *tables: PyTree) -> Any:
    """Repeats `carry = body(carry, first word, *blocks of the tables)` over blocks of the vocabulary."""
    vocab = tables[0].shape[0]
    count = vocab // spec.vocab_block
    end = count * spec.vocab_block
    if spec.vocab_block == vocab:
        return body(carry, jnp.int32(0), *tables)
    # Derivatives recompute the logits of a block instead of storing them.
    body = jax.checkpoint(body, prevent_cse=False)
    blocks = jax.tree.map(lambda x: x[:end].reshape(count, spec.vocab_block, *x.shape[1:]), tables)
    starts = jnp.arange(count, dtype=jnp.int32) * spec.vocab_block
    carry = lax.scan(lambda carry, x: (body(carry, *x), None), carry, (starts, *blocks))[0]
    if end == vocab:
        return carry
    return body(carry, jnp.int32(end), *jax.tree.map(lambda x: x[end:], tables))


def _split_label(s: Array, labels: Array, start: Array) -> tuple[Array, Array]:
    """Mask of the labels in a block of logits `s` [N, c] of the words from `start` on, and `s` with -inf there."""
    is_label = labels[:, None] == start + jnp.arange(s.shape[1], dtype=jnp.int32)[None]
    return is_label, jnp.where(is_label, -jnp.inf, s)


# Chunks of tokens, for all words


class _Wanted(NamedTuple):
    """Flags: which gradients are computed."""

    h: bool
    w: bool
    bias: bool


class _Chunk(NamedTuple):
    """States [c, D], labels [c] and factors [c] of some tokens."""

    h: Array
    labels: Array
    factors: Array


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_sum(
    spec: LogitsSpec,
    h: Float[Array, "N D"],
    w: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " N"],
    factors: Float[Array, " N"],
) -> Float[Array, ""]:
    """Computes sum(factors * losses); where it is differentiated, the gradients are computed along with it.

    Args:
      spec: Form of the logits and the loss, tokens of a chunk, and words of a block within it.
      h: [N, D] hidden states, not float16.
      w: [V, D] word vectors.
      bias: [V] or None.
      labels: [N] int32, in 0 to V - 1.
      factors: [N] float32; tokens with a factor of 0 contribute nothing to the sum and the gradients.

    Returns:
      The sum, a float32 scalar. Second derivatives are those of `statistics`.
    """
    return _sum_from_statistics(spec, h, w, bias, labels, factors)[0]


@functools.partial(weighted_sum.defjvp, symbolic_zeros=True)
@accepts_numpy
def _(spec: LogitsSpec, primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
    # Gradients by arguments whose tangent is a symbolic zero are not computed; only a JVP rule can tell.
    has_tangent = [x is not None and not isinstance(x, SymbolicZero) for x in tangents]
    wanted = _Wanted(*has_tangent[:3])
    losses, gradients = _losses_and_gradients(spec, wanted, *primals)
    factors = primals[4]
    terms = [_inner(g, d) for g, d, is_wanted in zip(gradients, tangents, wanted, strict=False) if is_wanted]
    if has_tangent[4]:
        terms.append(_inner(losses, tangents[4]))
    return (factors * losses).sum(), sum(terms, jnp.zeros((), jnp.float32))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _losses_and_gradients(
    spec: LogitsSpec, wanted: _Wanted, h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
) -> tuple[Array, tuple[Any, ...]]:
    """Losses [N], 0 where the factor is, and the wanted float32 gradients of their weighted sum by h, w and bias."""
    tokens, vocab = h.shape[0], w.shape[0]
    chunks = max(-(-tokens // spec.chunk_tokens), 1)
    chunk_tokens = -(-tokens // chunks)
    vectors = w.astype(h.dtype)

    operands = h, w, bias, labels, factors
    carry = (
        _zeros((chunk_tokens, vocab), operands),
        _zeros(w.shape, operands) if wanted.w else None,
        _zeros(bias.shape, operands) if wanted.bias and bias is not None else None,
    )
    split = _Chunk(*(_split_into_chunks(x, chunks) for x in (h, labels, factors)))
    step = functools.partial(_chunk_step, spec, wanted, vectors, bias)
    (_, dw, dbias), (losses, dh) = lax.scan(step, carry, split)
    losses = jnp.where(factors == 0, 0.0, _join_chunks(losses, tokens))
    return losses, (None if dh is None else _join_chunks(dh, tokens), dw, dbias)


@_losses_and_gradients.defjvp
@accepts_numpy
def _(spec: LogitsSpec, wanted: _Wanted, primals: PyTree, tangents: PyTree) -> tuple[Any, Any]:
    """Derivatives of gradients, computed through `statistics`, which JAX can differentiate any number of times."""
    argnums = tuple(i for i in range(3) if wanted[i])

    def from_statistics(*arguments: Array | None) -> Any:
        total = functools.partial(_sum_from_statistics, spec)
        gradients, losses = jax.grad(total, argnums, has_aux=True)(*arguments)
        by_argument = dict(zip(argnums, gradients, strict=True))
        return losses, tuple(by_argument[i].astype(jnp.float32) if i in by_argument else None for i in range(3))

    return _losses_and_gradients(spec, wanted, *primals), jax.jvp(from_statistics, primals, tangents)[1]


def _sum_from_statistics(
    spec: LogitsSpec, h: Array, w: Array, bias: Array | None, labels: Array, factors: Array
) -> tuple[Array, Float[Array, " N"]]:
    """The weighted sum and the losses [N], by way of `statistics`."""
    other_lse, target, logit_sum, _ = statistics(spec, h, w, bias, labels)
    losses = spec.losses(other_lse, target, logit_sum, w.shape[0])
    losses = jnp.where(factors == 0, 0.0, losses)
    return (factors * losses).sum(), losses


def _split_into_chunks(x: Array, chunks: int) -> Array:
    """[N, ...] padded to [chunks, tokens of a chunk, ...].

    Token i goes to chunk i modulo their number, so that every chunk is divided over devices where the tokens are.
    """
    size = -(-x.shape[0] // chunks)
    padded = jnp.pad(x, [(0, chunks * size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
    return jnp.moveaxis(padded.reshape(size, chunks, *x.shape[1:]), 1, 0)


def _join_chunks(x: Array, tokens: int) -> Array:
    """Inverse of `_split_into_chunks`, without the padding."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[0] * x.shape[1], *x.shape[2:])[:tokens]


def _chunk_step(
    spec: LogitsSpec, wanted: _Wanted, vectors: Array, bias: Array | None, carry: PyTree, chunk: _Chunk
) -> tuple[Any, tuple[Array, Array | None]]:
    """Losses [c] of a chunk and its gradient by h; adds its contributions to the gradients by w and bias.

    carry: (buffer [c, V] that every chunk overwrites, gradient by w or None, gradient by bias or None).
    """
    buffer, dw, dbias = carry
    # The label's logit is computed apart, and -inf is written in its place among the others.
    target = _label_logits(spec, vectors, bias, chunk)
    buffer, other_lse, logit_sum = _write_logits(spec, vectors, bias, chunk, buffer)
    losses_of = functools.partial(spec.losses, words=vectors.shape[0])
    losses, pull = jax.vjp(losses_of, other_lse, target, logit_sum)
    cotangents = pull(chunk.factors)
    buffer, dw, dbias = _write_gradients(spec, chunk, other_lse, target, cotangents, (buffer, dw, dbias))
    # One product over the whole vocabulary is faster than a sum of products over its blocks.
    dh = _dot(buffer.astype(chunk.h.dtype), vectors, 1, 0) if wanted.h else None
    return (buffer, dw, dbias), (losses, dh)


def _label_logits(spec: LogitsSpec, vectors: Array, bias: Array | None, chunk: _Chunk) -> Float[Array, " c"]:
    """Logit of each token's label."""
    target = (chunk.h.astype(jnp.float32) * vectors[chunk.labels].astype(jnp.float32)).sum(axis=1)
    return spec.scale(target if bias is None else target + bias[chunk.labels].astype(jnp.float32))


def _write_logits(
    spec: LogitsSpec, vectors: Array, bias: Array | None, chunk: _Chunk, buffer: Array
) -> tuple[Array, Array, Array]:
    """First pass over a chunk: (buffer [c, V] of the logits with -inf at the labels, other_lse [c], logit_sum [c])."""

    def block(start: Array, size: int, state: PyTree) -> Any:
        buffer, logit_sum, other_lse = state
        s = _dot(chunk.h, lax.dynamic_slice_in_dim(vectors, start, size), 1, 1)
        if bias is not None:
            s = s + lax.dynamic_slice_in_dim(bias, start, size).astype(jnp.float32)[None]
        s = spec.scale(s)
        if spec.with_logit_sum:
            logit_sum = logit_sum + s.sum(axis=1)
        s = s.at[_label_indices(chunk, start, size)].set(-jnp.inf, mode="drop", unique_indices=True)
        return lax.dynamic_update_slice_in_dim(buffer, s, start, axis=1), logit_sum, other_lse.add(s)

    zeros = _zeros((chunk.labels.shape[0],), chunk, vectors, bias)
    state = buffer, zeros, OnlineLogSumExp.empty(zeros)
    buffer, logit_sum, other_lse = _over_chunk_blocks(spec, vectors.shape[0], block, state)
    return buffer, other_lse.value(), logit_sum


def _write_gradients(
    spec: LogitsSpec,
    chunk: _Chunk,
    other_lse: Array,
    target: Array,
    cotangents: tuple[Array, Array, Array],
    state: PyTree,
) -> Any:
    """Second pass over a chunk: replaces the logits in the buffer by the gradients of the products h w^T + bias.

    cotangents: those of other_lse, target and logit_sum, [c] each. state: (buffer, gradient by w or None, gradient by bias or
    None); the chunk's contributions are added to the latter two. Returns the new state.
    """
    d_other_lse, d_target, d_logit_sum = cotangents
    base = _finite_or_zero(other_lse)[:, None]

    def block(start: Array, size: int, state: PyTree) -> Any:
        buffer, dw, dbias = state
        s = lax.dynamic_slice_in_dim(buffer, start, size, axis=1)
        ds = spec.scale_gradient(s, d_other_lse[:, None] * jnp.exp(s - base) + d_logit_sum[:, None])
        indices = _label_indices(chunk, start, size)
        d_label = spec.scale_gradient(target, d_target + d_logit_sum)
        ds = ds.at[indices].set(d_label, mode="drop", unique_indices=True)
        if dw is not None:
            dw = _add_block(dw, start, _dot(ds.astype(chunk.h.dtype), chunk.h, 0, 0))
        if dbias is not None:
            dbias = _add_block(dbias, start, ds.sum(axis=0))
        return lax.dynamic_update_slice_in_dim(buffer, ds, start, axis=1), dw, dbias

    return _over_chunk_blocks(spec, state[0].shape[1], block, state)


def _over_chunk_blocks(spec: LogitsSpec, vocab: int, body: Callable[[Array, int, Any], Any], state: PyTree) -> Any:
    """Repeats `state = body(first word, number of words, state)` over blocks of words and a shorter last block."""
    count, remainder = divmod(vocab, spec.chunk_vocab_block)
    size = spec.chunk_vocab_block
    if count:
        state = lax.fori_loop(0, count, lambda i, state: body(i * size, size, state), state)
    return body(jnp.int32(vocab - remainder), remainder, state) if remainder else state


def _label_indices(chunk: _Chunk, start: Array, size: int) -> tuple[Array, Array]:
    """(row, column) of each token's label in a block of logits [c, size]; the column is out of bounds in other blocks."""
    column = chunk.labels - start
    # Negative columns would count from the end.
    return jnp.arange(column.shape[0], dtype=jnp.int32), jnp.where(column < 0, size, column)


def _add_block(table: Array, start: Array, block: Array) -> Array:
    """The table with the block added to its rows from `start` on."""
    before = lax.dynamic_slice_in_dim(table, start, block.shape[0])
    return lax.dynamic_update_slice_in_dim(table, before + block, start, axis=0)


def _inner(a: Array, b: Array) -> Float[Array, ""]:
    return (a * b.astype(jnp.float32)).sum()


# Helpers of both


def _zeros(shape: tuple[int, ...], *operands: PyTree) -> Array:
    """float32 zeros that in `jax.shard_map` vary over all mesh axes that one of the operands varies over."""
    return vary_alike(jnp.zeros(shape, jnp.float32), *jax.tree.leaves(operands))[0]


def _finite_or_zero(x: Array) -> Array:
    """Replaces -inf by 0, because differences of two -inf would be NaN."""
    return jnp.where(jnp.isneginf(x), 0.0, x)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)
