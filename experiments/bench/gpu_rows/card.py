"""Rates of a device: bandwidth of a copy, and FLOP/s of large products by dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpu_rows.rows import Calls, Card, Context
from hpnlp import measure

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32, "int8": jnp.int8, "e4m3": jnp.float8_e4m3fn}


def product(dtype: Any, size: int) -> Callable[[], Any]:
    """A product of random square matrices with sums of 32 bits; zeros would be faster than data."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size)) for i in range(2))
    a, b = ((8 * x).astype(dtype) for x in (a, b))
    total = jnp.int32 if dtype == jnp.int8 else jnp.float32
    return lambda: _product(a, b, total)


@jax.jit(static_argnames="total")
def _product(a: jax.Array, b: jax.Array, total: Any) -> jax.Array:
    out = jnp.dot(a, b, preferred_element_type=total)
    return out if total == jnp.int32 else out.astype(jnp.bfloat16)


def rates(context: Context) -> Card:
    """Measures the device.

    Args:
      context: Settings.

    Returns:
      The rates, of the dtypes that the device and the compiler can multiply.
    """
    size, elements = (64, 1 << 12) if context.rehearse else (8192, 1 << 30)
    calls = Calls()
    x = jax.random.bits(jax.random.key(0), (elements,), jnp.uint16)
    copy = jax.jit(lambda x: x + jnp.uint16(1))
    calls.add("copy", lambda: lambda: copy(x))
    for name, dtype in DTYPES.items():
        calls.add(name, lambda dtype=dtype: product(dtype, size))
    times = measure.timeit(calls.running, rounds=3, min_seconds=0.0 if context.rehearse else 0.05, enqueue=True)
    seconds = {name: timing.median for name, timing in times.items()}
    return Card(2 * x.nbytes / seconds.pop("copy"), {name: 2 * size**3 / s for name, s in seconds.items()})
