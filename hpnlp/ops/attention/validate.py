"""What `attend` is given, checked once, at its edge."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from hpnlp.ops.attention.masks.base import check
from hpnlp.types import InputError


def validate(
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    positions: Array | None,
    kv_positions: Array | None,
    operands: dict[str, Any],
    dropout_rate: float,
    rng: Array | None,
) -> None:
    """Raises InputError on the first thing that does not fit."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected [B, T, N, H], [B, S, K, H], [B, S, K, Hv]")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and q.shape[3] == k.shape[3] and k.shape[1:3] == v.shape[1:3]):
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected one B, one H in q and k, one S and K in k and v"
        )
    if 0 in (q.shape[3], v.shape[3]):
        raise InputError(f"q {q.shape}, v {v.shape}: expected at least one feature, H and Hv")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise InputError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads: choose K that divides N")
    if not (q.dtype == k.dtype == v.dtype):
        raise InputError(f"dtypes of q {q.dtype}, k {k.dtype}, v {v.dtype} differ: cast them to one")
    (b, t, n), s = q.shape[:3], k.shape[1]
    check(mask)
    mask.by_head(n)  # raises for another number of masks
    if positions is None:
        mask.check_length(max(t, s))
    for name, value, kv_value in (("segment_ids", segment_ids, kv_segment_ids), ("positions", positions, kv_positions)):
        if value is None and kv_value is not None:
            raise InputError(f"kv_{name} without {name}: pass both")
        if value is not None and kv_value is None and t != s:
            raise InputError(f"{name} without kv_{name} where T {t} and S {s} differ: pass both")
        for label, array, shape in ((name, value, (b, t)), (f"kv_{name}", kv_value, (b, s))):
            if array is not None and array.shape != shape:
                raise InputError(f"{label} has shape {array.shape}: expected {shape}")
    lengths, sinks, soft_cap = (operands[name] for name in ("kv_lengths", "sinks", "soft_cap"))
    if lengths is not None and lengths.shape != (b,):
        raise InputError(f"kv_lengths has shape {lengths.shape}: expected {(b,)}")
    if sinks is not None and sinks.shape != (n,):
        raise InputError(f"sinks has shape {sinks.shape}: expected {(n,)}, a logit for each query head")
    if isinstance(soft_cap, Tracer):
        raise InputError("soft_cap is traced: expected a number that is fixed while tracing")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise InputError(f"soft_cap {soft_cap}: expected a finite number over 0, or None for no cap")
    _square("dense_mask", operands["dense_mask"], (b, n, t, s))
    if not callable(operands["bias"]):
        _square("bias", operands["bias"], (b, n, t, s))
    elif getattr(operands["bias"], "heads", n) != n:
        raise InputError(f"a bias of {operands['bias'].heads} heads for {n} query heads: make it for {n}")
    _global(operands["global_tokens"], b, t, s)
    if not 0.0 <= dropout_rate < 1.0:
        raise InputError(f"dropout_rate {dropout_rate}: expected 0 <= rate < 1")
    if dropout_rate and rng is None:
        raise InputError("dropout_rate without rng: pass a jax.random key, or dropout_rate=0")


def _square(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array is None:
        return
    kind = jnp.bool_ if name == "dense_mask" else jnp.inexact
    if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, kind):
        mend = "an additive mask goes to bias" if name == "dense_mask" else "one of bool goes to dense_mask"
        found = getattr(array, "dtype", type(array).__name__)
        raise InputError(
            f"{name} is of {found}: expected an array of {'bool' if name == 'dense_mask' else 'floats'}; {mend}"
        )
    try:
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise InputError(f"{name} has shape {array.shape}: expected one that broadcasts to [B, N, T, S] = {shape}")


def _global(tokens: Array | None, b: int, t: int, s: int) -> None:
    if tokens is None:
        return
    if t != s:
        raise InputError(f"global_tokens where T {t} and S {s} differ: it is for self-attention; pass a dense_mask")
    flags = tokens.dtype == jnp.bool_
    if not (flags or jnp.issubdtype(tokens.dtype, jnp.integer)) or tokens.ndim != 2 or tokens.shape[0] != b:
        raise InputError(f"global_tokens is {tokens.dtype} {tokens.shape}: expected bool {(b, t)} or integers ({b}, G)")
    if flags and tokens.shape != (b, t):
        raise InputError(f"global_tokens has shape {tokens.shape}: expected {(b, t)}")
