"""Activations of MLPs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hpnlp.nn.feed_forward.mlp import gelu_exact
from tests.contracts import once


def test_exact_gelu_and_its_derivative_match_the_error_function():
    """On one device, and in shard_map, where JAX 0.12 cannot differentiate the error function."""
    x = np.linspace(-6, 6, 48, dtype=np.float32)
    below = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])
    density = np.exp(-(x.astype(np.float64) ** 2) / 2) / math.sqrt(2 * math.pi)
    derivative = jax.grad(lambda x: jnp.sum(gelu_exact(x)))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    divided = jax.shard_map(derivative, mesh=mesh, in_specs=spec, out_specs=spec)
    value, slope, slopes = once(lambda x: (gelu_exact(x), derivative(x), divided(x)), jnp.asarray(x))
    np.testing.assert_allclose(value, x * below, atol=1e-6)
    for actual in (slope, slopes):
        np.testing.assert_allclose(actual, below + x * density, atol=1e-6)
