"""Convolutions: the reference of each mixer."""

import jax.numpy as jnp
import numpy as np


def convolution(mixing, arrays, params, mask, segment_ids):
    """A dense matrix for each feature, whose entry [t, s] is the weight of distance t - s."""
    x, kernel = arrays["x"].astype(jnp.float32), params["params"]["taps"]
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & ((distance >= 0) & (distance < len(kernel)))[None]
    weights = jnp.where(visible[..., None], kernel[np.clip(distance, 0, len(kernel) - 1)][None], jnp.float32(0))
    return jnp.einsum("btsd,bsd->btd", weights, x).astype(arrays["x"].dtype)


EXAMPLES = {}
REFERENCES = {"conv": convolution}
