"""Second moments of inputs as gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.linear import linear
from hpnlp.ops.weights import ObservedWeight

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(3, 4, 4)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(2, 5, 4)), jnp.float32)


def test_moments_of_every_layer_are_gradients_and_other_gradients_stay():
    def loss(weights, x):
        out, inputs = jax.lax.scan(lambda x, w: (jnp.tanh(linear(x, w)), x), x, weights)
        return (out**2).sum(), inputs

    observed = ObservedWeight(W, jnp.zeros((3, 4, 4)))
    gradients, inputs = jax.grad(loss, has_aux=True)(observed, X)
    plain, _ = jax.grad(loss, has_aux=True)(W, X)
    np.testing.assert_allclose(gradients.matrix, plain, rtol=1e-6)
    flat = np.asarray(inputs, np.float64).reshape(3, 10, 4)
    np.testing.assert_allclose(gradients.moments, np.einsum("lni,lnj->lij", flat, flat), rtol=1e-5)
    np.testing.assert_array_equal(loss(observed, X)[0], loss(W, X)[0])
