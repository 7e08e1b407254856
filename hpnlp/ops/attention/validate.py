"""Validation of the arguments of `attend`, once, at the public edge."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from hpnlp.ops.attention.masks.per_head import AnyMask, check_mask
from hpnlp.ops.attention.operands import Operands
from hpnlp.ops.attention.pair_bias import BiasOfHeads, is_pair_bias
from hpnlp.types import AnyArray, InputError

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def validate(q: AnyArray, k: AnyArray, v: AnyArray, mask: AnyMask, operands: Operands) -> None:
    """Checks shapes, dtypes and values of the arguments of `attend`.

    Args:
      q: [B, T, N, H].
      k: [B, S, K, H].
      v: [B, S, K, Hv].
      mask: Mask or PerHead.
      operands: All other arguments of `attend`.

    Raises:
      InputError: The first argument that does not fit.
    """
    _check_qkv(q, k, v)
    (b, t, n), s = q.shape[:3], k.shape[1]
    check_mask(mask)
    mask.by_head(n)  # raises if a PerHead has another number of masks
    if operands.positions is None:
        mask.check_length(max(t, s))
    _check_twins("segment_ids", operands.segment_ids, operands.kv_segment_ids, (b, t), (b, s))
    _check_twins("positions", operands.positions, operands.kv_positions, (b, t), (b, s))
    if operands.kv_lengths is not None and operands.kv_lengths.shape != (b,):
        raise InputError(f"kv_lengths has shape {operands.kv_lengths.shape}: expected {(b,)}")
    if operands.sinks is not None and operands.sinks.shape != (n,):
        raise InputError(f"sinks has shape {operands.sinks.shape}: expected {(n,)}, one logit for each query head")
    _check_soft_cap(operands.soft_cap)
    _check_dense_mask(operands.dense_mask, (b, n, t, s))
    _check_bias(operands.bias, (b, n, t, s))
    _check_global_tokens(operands.global_tokens, b, t, s)
    if not 0.0 <= operands.dropout_rate < 1.0:
        raise InputError(f"dropout_rate {operands.dropout_rate}: expected 0 <= rate < 1")
    if operands.dropout_rate and operands.rng is None:
        raise InputError(
            f"dropout_rate {operands.dropout_rate} without rng: pass a jax.random key as rng, or dropout_rate=0"
        )


def _check_qkv(q: AnyArray, k: AnyArray, v: AnyArray) -> None:
    """Checks the shapes and dtypes of queries, keys and values."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected [B, T, N, H], [B, S, K, H], [B, S, K, Hv]")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[1:3] == v.shape[1:3]):
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected equal B, equal H in q and k, equal S and K in k and v"
        )
    if 0 in (q.shape[3], v.shape[3]):
        raise InputError(f"q {q.shape}, v {v.shape}: expected at least one feature in H and Hv")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise InputError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads: choose K that divides N")
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"dtypes of q {q.dtype}, k {k.dtype}, v {v.dtype} differ: cast all to the same dtype")


def _check_twins(
    name: str, value: Array | None, kv_value: Array | None, shape: tuple[int, int], kv_shape: tuple[int, int]
) -> None:
    """Checks an operand of the queries and its kv_ twin, which is the same array where the caller left it out."""
    if value is None and kv_value is not None:
        raise InputError(f"kv_{name} without {name}: pass both")
    if value is None:
        return
    if kv_value is value and shape != kv_shape:
        raise InputError(f"{name} without kv_{name} where T {shape[1]} and S {kv_shape[1]} differ: pass both")
    for label, array, expected in ((name, value, shape), (f"kv_{name}", kv_value, kv_shape)):
        if array is not None and array.shape != expected:
            raise InputError(f"{label} has shape {array.shape}: expected {expected}")


def _check_soft_cap(soft_cap: int | float | Tracer | None) -> None:
    """Checks that the cap is None or a positive number known while tracing."""
    if isinstance(soft_cap, Tracer):
        raise InputError("soft_cap is traced: expected a number that is fixed while tracing")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise InputError(f"soft_cap {soft_cap}: expected a finite number over 0, or None for no cap")


def _check_dense_mask(array: Any, shape: tuple[int, ...]) -> None:
    """Checks that a dense mask is bool and broadcasts to [B, N, T, S]."""
    if array is None:
        return
    if not _has_dtype(array, jnp.bool_):
        raise InputError(
            f"dense_mask has type {_type_name(array)}: expected an array of bool; pass an additive mask as bias"
        )
    _check_broadcasts("dense_mask", array, shape)


def _check_bias(bias: Any, shape: tuple[int, ...]) -> None:
    """Checks that a bias is a function of as many heads as the queries have, or floats that broadcast to [B, N, T, S]."""
    if bias is None:
        return
    if is_pair_bias(bias):
        bias.check()
        for array in bias.dense_terms:
            _check_bias(array, shape)
            if array.ndim != 4:
                raise InputError(f"a term of BiasArrays has shape {array.shape}: expected 4 axes, any of them 1")
        return
    if callable(bias):
        if isinstance(bias, BiasOfHeads) and bias.heads != shape[1]:
            raise InputError(f"bias is for {bias.heads} heads, expected {shape[1]} heads, as the queries have")
        return
    if not _has_dtype(bias, jnp.inexact):
        raise InputError(
            f"bias has type {_type_name(bias)}: expected an array of floats; pass an array of bool as dense_mask"
        )
    _check_broadcasts("bias", bias, shape)


def _has_dtype(array: object, kind: type) -> bool:
    return isinstance(array, _ARRAYS) and jnp.issubdtype(array.dtype, kind)


def _type_name(array: object) -> str:
    """The dtype of an array, and the type of another object."""
    return str(array.dtype) if isinstance(array, _ARRAYS) else type(array).__name__


def _check_broadcasts(name: str, array: Any, shape: tuple[int, ...]) -> None:
    """Checks that an array broadcasts to [B, N, T, S]."""
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise InputError(f"{name} has shape {array.shape}: expected a shape that broadcasts to [B, N, T, S] = {shape}")


def _check_global_tokens(tokens: Array | None, b: int, t: int, s: int) -> None:
    """Checks that global tokens are flags or indices of a self-attention call."""
    if tokens is None:
        return
    if t != s:
        raise InputError(
            f"global_tokens where T {t} and S {s} differ: expected self-attention; pass a dense_mask in cross-attention"
        )
    is_flags = tokens.dtype == jnp.bool_
    if not (is_flags or jnp.issubdtype(tokens.dtype, jnp.integer)) or tokens.ndim != 2 or tokens.shape[0] != b:
        raise InputError(f"global_tokens is {tokens.dtype} {tokens.shape}: expected bool {(b, t)} or integers ({b}, G)")
    if is_flags and tokens.shape != (b, t):
        raise InputError(f"global_tokens has shape {tokens.shape}: expected {(b, t)}")
