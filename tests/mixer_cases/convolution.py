"""Convolutions: the reference of each mixer."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Causal


def convolution(mixing, arrays, params, mask, segment_ids):
    """A dense matrix for each feature, whose entry [t, s] is the weight of distance t - s."""
    x, kernel = arrays["x"].astype(jnp.float32), params["params"]["taps"]
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & ((distance >= 0) & (distance < len(kernel)))[None]
    weights = jnp.where(visible[..., None], kernel[np.clip(distance, 0, len(kernel) - 1)][None], jnp.float32(0))
    return jnp.einsum("btsd,bsd->btd", weights, x).astype(arrays["x"].dtype)


def softmax_convolution(mixing, arrays, params, mask, segment_ids):
    """A dense matrix for each head; row t holds the softmax of the scores of token t, at the tokens that its taps read."""
    gate, v = (arrays[name].astype(jnp.float32) for name in ("gate", "v"))
    by_token = "scores" in mixing.module.needs
    scores = arrays["scores"].astype(jnp.float32) if by_token else params["params"]["taps"][None, None]
    width, ahead = mixing.module.width, 0 if mask == Causal() else mixing.module.width // 2
    tap = np.arange(v.shape[1])[:, None] + ahead - np.arange(v.shape[1])[None]
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & ((tap >= 0) & (tap < width))[None]
    weights = jnp.broadcast_to(jax.nn.softmax(scores, axis=-1), (*v.shape[:3], width))
    chosen = jnp.asarray(tap[..., None] == np.arange(width), jnp.float32)
    weights = jnp.einsum("btnw,tsw->btsn", weights, chosen) * visible[..., None].astype(jnp.float32)
    return jnp.einsum("btsn,bsnh->btnh", weights, v * jax.nn.sigmoid(gate)).astype(arrays["v"].dtype)


def dilated_convolution(mixing, arrays, params, mask, segment_ids):
    """A dense matrix for each pair of tokens, zeros where the tokens are not a tap of each other, between two ReLUs."""
    module, v, kernel = mixing.module, arrays["v"].astype(jnp.float32), params["params"]["taps"]
    ahead = 0 if mask == Causal() else module.width // 2
    distance = np.arange(v.shape[1])[:, None] - np.arange(v.shape[1])[None] + ahead * module.dilation
    tap = distance // module.dilation
    is_tap = (distance % module.dilation == 0) & (tap >= 0) & (tap < module.width)
    visible = ((segment_ids[:, :, None] == segment_ids[:, None]) & is_tap[None]).astype(jnp.float32)
    pairs = kernel.astype(jnp.float32)[:, np.clip(tap, 0, module.width - 1)]
    o = jnp.einsum("bts,ntshf,bsnh->btnf", visible, pairs, jax.nn.relu(v))
    return jax.nn.relu(o).astype(arrays["v"].dtype)


EXAMPLES = {
    "lightconv": ("lightconv(5)", "lightconv(4)"),
    "dynamicconv": ("dynamicconv(4)", "dynamicconv(5)"),
    "convolution": ("convolution(3,4)", "convolution(4)"),
}
REFERENCES = {
    "conv": convolution,
    "lightconv": softmax_convolution,
    "dynamicconv": softmax_convolution,
    "convolution": dilated_convolution,
}
