"""The learned temperature at its lowest value."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.pairs.temperature import inverse_temperature

MOST = np.float32(math.log(100))


@pytest.mark.parametrize(("excess", "scale"), [(-1.0, 100 / math.e), (0.0, 100.0), (0.5, 100 * math.exp(-0.5))])
def test_scale_is_at_most_that_of_the_lowest_temperature_and_its_gradient_not_0(excess, scale):
    value, gradient = jax.value_and_grad(inverse_temperature)(jnp.float32(MOST + excess), 0.01)
    np.testing.assert_allclose(value, scale, rtol=1e-5)
    np.testing.assert_allclose(gradient, -scale if excess > 0 else scale, rtol=1e-5)


def test_descent_stays_at_the_bound_and_leaves_it_again():
    """A loss first falls with the scale, and then rises with it."""
    log_scale, slope = jnp.float32(MOST - 0.02), jax.jit(jax.grad(lambda x: inverse_temperature(x, 0.01)))
    for direction, least, most in ((-1.0, 95.0, 100.001), (1.0, 0.0, 50.0)):
        for _ in range(100):
            log_scale = log_scale - np.float32(direction * 2e-4) * slope(log_scale)
        assert least <= inverse_temperature(log_scale, 0.01) <= most
