"""A learned temperature of similarities."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


def inverse_temperature(log_scale: jax.Array, lowest: float) -> jax.Array:
    """Factor of similarities with a learned temperature.

    Args:
      log_scale: The parameter, a scalar: the logarithm of 1 / temperature. Values above that of `lowest` are reflected at it,
        so that the gradient is not 0 there: a constant would keep a parameter that has passed it for ever.
      lowest: Lowest temperature.

    Returns:
      1 / temperature, a scalar, at most 1 / `lowest`.
    """
    most = np.float32(-math.log(lowest))
    return jnp.exp(jnp.where(log_scale > most, 2 * most - log_scale, log_scale))
