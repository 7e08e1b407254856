"""Attention over symbolic lengths equals attention over these lengths as numbers."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, PerHead, Window, attend

CASES = {
    "segments": (Full(), {"segments"}, 4),
    "causal, grouped heads": (Causal() & Window(3), set(), 2),
    "a mask for each head": (PerHead((Full(), Causal(), Window(2, 2), Causal())), {"segments"}, 4),
    "soft cap": (Causal(), {"soft_cap"}, 4),
    "sinks": (Causal(), {"sinks"}, 4),
}


@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize("name", CASES)
def test_any_length_equals_the_schedule_of_one(name):
    mask, operands, kv_heads = CASES[name]
    extra = {"soft_cap": 5.0} if "soft_cap" in operands else {}
    extra |= {"sinks": jnp.arange(4.0)} if "sinks" in operands else {}

    def call(q, k, v, segments):
        return attend(q, k, v, mask, **extra, **({"segment_ids": segments} if "segments" in operands else {}))

    b, t = jax.export.symbolic_shape("b, t", constraints=["b >= 1", "t >= 1"])
    shapes = [jax.ShapeDtypeStruct((b, t, heads, 8), jnp.float32) for heads in (4, kv_heads, kv_heads)]
    exported = jax.export.export(jax.jit(call))(*shapes, jax.ShapeDtypeStruct((b, t), jnp.int32))
    draw = np.random.default_rng(0)
    for batch, length in ((1, 1), (2, 9)):
        q, k, v = (
            jnp.asarray(draw.normal(size=(batch, length, heads, 8)), jnp.float32) for heads in (4, kv_heads, kv_heads)
        )
        segments = jnp.asarray(draw.integers(0, 2, (batch, length)), jnp.int32)
        np.testing.assert_allclose(exported.call(q, k, v, segments), call(q, k, v, segments), atol=2e-6)
