"""The public attention call: `attend`, `explain` (which implementation it takes) and `merge` (of partial results)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.block_sparse.decomposition.permuted import merge_partials
from hpnlp.ops.attention.block_sparse.flash import flash
from hpnlp.ops.attention.dispatch import explain_choice, kernel_module, resolve, unsupported
from hpnlp.ops.attention.masks.base import Full, Mask
from hpnlp.ops.attention.masks.per_head import PerHead
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.pair_bias import PairBias
from hpnlp.ops.attention.reference import dense_attention
from hpnlp.ops.attention.symbolic_lengths import has_symbols, symbolic_attention
from hpnlp.ops.attention.validate import validate
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("B T N", q="B T N")
def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: Mask | PerHead = Full(),  # noqa: B008  (frozen)
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    kv_positions: Int[Array, "B S"] | None = None,
    kv_lengths: Int[Array, "B"] | None = None,
    dense_mask: Array | None = None,
    global_tokens: Array | None = None,
    bias: Any = None,
    scale: float | Float[Array, ""] | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    block_size: int | None = None,
) -> Array | tuple[Array, Array]:
    """Softmax attention: softmax(q k^T * scale) v over the pairs that the mask and the operands allow.

    A row that may see nothing gives o = 0, lse = -inf (its sink, if there are sinks) and zero gradients. Keys and values that
    no query may see are never read into a result, NaN or not. Queries that may see nothing may be NaN as well, except with
    impl="splash" without return_lse, where their gradients are NaN.

    Derivatives are by reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`). Forward mode (`jax.jvp`, `jax.jacfwd`) raises
    JAX's TypeError, except with impl="reference".

    Correspondence with `jax.nn.dot_product_attention`:

        query, key, value             q, k, v
        is_causal=True                mask=Causal(); aligned top-left in both: with a cache pass positions
        local_window_size=(l, r)      mask=Window(l, r)
        mask                          dense_mask
        query_seq_lengths             leave out, and ignore those rows of the result
        key_value_seq_lengths         kv_lengths
        return_residual               return_lse: float32, and with a gradient
        implementation                impl

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H]. K divides N, and query head n reads key head n // (N / K).
      v: Values [B, S, K, Hv].
      mask: A static pattern, or one for each head, over positions if these are given, else over indices from 0.
      segment_ids: int [B, T]; a query sees the keys of its own segment.
      kv_segment_ids: int [B, S]; may be omitted if T == S (self-attention), and is then segment_ids.
      positions: int [B, T], in place of indices.
      kv_positions: int [B, S]; may be omitted as kv_segment_ids may.
      kv_lengths: int [B]; keys at indices from kv_lengths[b] on are hidden.
      dense_mask: bool, broadcasts to [B, N, T, S]; False hides. It costs the memory that it occupies and saves no
        computation.
      global_tokens: Self-attention only; bool [B, T], or int [B, G], indices in the row with -1 as padding. These tokens
        see all tokens and are seen by all tokens, whatever the mask (also a causal one), within segments, lengths and
        dense_mask.
      bias: Added to the scaled scores: an array that broadcasts to [B, N, T, S]; a weighted sum of such arrays, which "xla"
        does not store (`BiasArrays`); or a function of (head, query position, key position), int32 scalars, that returns a
        scalar and may close over arrays. Gradients reach the arrays.
      scale: H ** -0.5 if None; an array may be traced, and has a gradient.
      soft_cap: Scores become soft_cap * tanh(score / soft_cap), after the bias (Gemma Team 2024, "Gemma 2", section 2).
      sinks: [N]; for each head a logit that takes part in the softmax and has no value (OpenAI 2025, "gpt-oss"). The lse
        includes it.
      dropout_rate: Probability of dropping a weight. The pattern is a function of (rng, stream, positions), the same in
        every implementation.
      rng: PRNG key of dropout.
      streams: int [B, N], a distinct number for each row and head; b * N + n if None. Inside `shard_map`, where rows and
        heads count from 0 in each shard, global numbers make dropout the same as on one device.
      return_lse: Also return the log-sum-exp of each row's scores, for `merge`.
      impl: "xla" (blockwise, every device), "cudnn" (NVIDIA, 16 bits; dense, causal and windows), "pallas" (Hopper, 16
        bits, most masks; not yet measured), "splash" (TPU, every mask), "reference" (dense, slow), or "auto": the fastest
        that supports the call; `explain` returns the reasons.
      block_size: Queries and keys in a block of "xla"; None chooses the size with the lowest estimated cost.

    Returns:
      o [B, T, N, Hv] in q's dtype, accumulated in float32; with return_lse the pair (o, lse), lse float32 [B, T, N].

    Raises:
      InputError: Shapes do not fit, or the chosen implementation does not support an argument.

    Cost:
      O(B N H) time for each pair in the blocks that the mask does not rule out; O(B N (T + S) H) memory, also in the
      backward pass, except with "reference". See `flash` for short sequences and second derivatives.

    References:
      Vaswani et al. 2017, "Attention is all you need", eq. 1. Dao et al. 2022, "FlashAttention", algorithms 1 and 2.
    """
    operands = Operands(
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        positions=positions,
        kv_positions=kv_positions,
        kv_lengths=kv_lengths,
        dense_mask=dense_mask,
        global_tokens=global_tokens,
        bias=bias,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        rng=rng,
        streams=streams,
        return_lse=return_lse,
    )
    validate(q, k, v, mask, operands)
    if has_symbols(q, k):
        return symbolic_attention(q, k, v, mask, operands)
    impl = resolve(impl, block_size, q, k, v, mask, operands)
    if impl == "xla":
        return flash(q, k, v, mask, operands, block_size=block_size)
    if isinstance(bias, PairBias):
        operands = dataclasses.replace(operands, bias=bias.dense())
    if impl == "reference":
        return dense_attention(q, k, v, mask, operands)
    return getattr(kernel_module(impl), impl)(q, k, v, mask, operands)


def explain(q: Any, k: Any, v: Any, mask: Mask | PerHead = Full(), **operands: Any) -> str:  # noqa: B008  (frozen)
    """The implementation that `attend` takes with impl="auto", and the reasons against the others.

    Args:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: As for `attend`.
      **operands: All further arguments of `attend` except impl and block_size.

    Returns:
      One line for each implementation, from the fastest to the slowest.

    Raises:
      InputError: An argument that `attend` does not have.
    """
    names = [field.name for field in dataclasses.fields(Operands)]
    for name in operands:
        if name not in names:
            raise InputError(f"explain has no argument {name!r}: expected q, k, v, mask, {', '.join(names)}")
    call = Operands(**operands)
    return explain_choice(jax.default_backend(), lambda impl: unsupported(impl, q, k, v, mask, call))


@array_op("...", parts="...")
def merge(*parts: tuple[Float[Array, "*a Hv"], Float[Array, "*a"]]) -> tuple[Array, Array]:
    """Attention over the union of disjoint key sets from the partial result of each; exact and differentiable.

    Args:
      *parts: Pairs (o [..., Hv], lse float32 [...]), as `attend(..., return_lse=True)` returns them.

    Returns:
      (o, lse), o in the dtype of the first part. Where every part saw nothing (lse = -inf), o = 0 and lse = -inf, with zero
      gradients.

    Raises:
      InputError: No part was passed.

    References:
      Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", eq. 4.
    """
    if not parts:
        raise InputError("merge got no parts: pass at least one pair (o, lse)")
    return merge_partials(*((o, lse, jnp.zeros_like(lse)) for o, lse in parts))[:2]
