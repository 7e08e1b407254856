"""Fourier mixing against the transforms' matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.fourier import fourier_mix, fourier_mix_reference
from tests.contracts import assert_close, once


def test_transform_matches_its_matrices():
    """Odd and even sizes, with first and second derivatives."""
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.standard_normal((2, *shape)).astype(jnp.float32)) for shape in ((7, 5), (4, 6), (1, 3), (1, 1))
    ]

    def result(function, x):
        scale = float(x[0].size) ** -0.5
        score = lambda x: jnp.sum(function(x, scale) ** 3)  # noqa: E731
        slope = lambda x: jnp.sum(jax.grad(score)(x) ** 2)  # noqa: E731
        return function(x, scale), jax.grad(score)(x), 0.01 * jax.grad(slope)(x)

    assert_close(*once(lambda xs: [[result(f, x) for x in xs] for f in (fourier_mix, fourier_mix_reference)], arrays))
    half = fourier_mix(arrays[0].astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16


@pytest.mark.oracle
def test_transform_matches_transformers():
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.fnet.modeling_fnet")
    config = modeling.FNetConfig(hidden_size=6, use_tpu_fourier_optimizations=False)
    x = np.random.default_rng(0).standard_normal((2, 7, 6)).astype(np.float32)
    expected = modeling.FNetBasicFourierTransform(config)(torch.from_numpy(x))[0]
    np.testing.assert_allclose(fourier_mix(jnp.asarray(x)), expected.numpy(), atol=1e-5)
