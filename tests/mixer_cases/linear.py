"""Linear attention: the reference of each mixer, with a matrix of all pairs of tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.linear import reference_linear_attention


def linear(mixing, arrays, params, mask, segment_ids):
    """Weights (elu(q) + 1)^T (elu(k) + 1) over their sum."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    options = {"causal": mask == Causal(), "normalize": True, "segment_ids": segment_ids}
    return reference_linear_attention(q, k, v, **options).astype(arrays["v"].dtype)


def retention(mixing, arrays, params, mask, segment_ids):
    """Scores times gamma^(t - s) as a matrix for each head, with t - s in tokens of the sequence."""
    q, k, v, gate = (arrays[name].astype(jnp.float32) for name in ("q", "k", "v", "gate"))
    (_, t, n, h), heads = q.shape, k.shape[2]
    k, v = (jnp.repeat(x, n // heads, axis=2) for x in (k, v))
    gamma = np.repeat(1 - 2.0 ** (-5 - np.arange(heads)), n // heads)
    distance = np.arange(t)[:, None] - np.arange(t)[None]
    decay = jnp.asarray(gamma[:, None, None] ** np.maximum(distance, 0), jnp.float32)
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & (distance >= 0)[None]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / h**0.5 * decay[None]
    o = jnp.einsum("bnts,bsnh->btnh", jnp.where(visible[:, None], scores, jnp.float32(0)), v)
    centred = o - o.mean(axis=-1, keepdims=True)
    o = centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + mixing.module.eps)
    return (o * jax.nn.silu(gate)).astype(arrays["v"].dtype)


def normalized_and_gated(mixing, o, params, gate):
    o = (
        o
        / jnp.sqrt((o**2).mean(axis=-1, keepdims=True) + mixing.module.eps)
        * params["params"]["scale"].reshape(1, 1, 1, -1)
    )
    return o * jax.nn.silu(gate)


def gla(mixing, arrays, params, mask, segment_ids):
    x, q, k, v, gate = (arrays[name].astype(jnp.float32) for name in ("x", "q", "k", "v", "gate"))
    weights = params["params"]
    logits = (
        x @ weights["decay_down"]["kernel"] @ weights["decay_up"]["kernel"] + weights["decay_up"]["bias"][None, None]
    )
    decay = jax.nn.sigmoid(logits.reshape(k.shape)) ** (1 / 16)
    o = reference_linear_attention(q / q.shape[-1] ** 0.5, k, v, log_decay=jnp.log(decay), segment_ids=segment_ids)
    return normalized_and_gated(mixing, o, params, gate).astype(arrays["v"].dtype)


def gated_delta(mixing, arrays, params, mask, segment_ids):
    """Token by token: the state forgets, is corrected, and is read."""
    weights, float32 = params["params"], {name: array.astype(jnp.float32) for name, array in arrays.items()}
    q, k, v = (jax.nn.silu(convolved(float32[name], weights, name, segment_ids)) for name in "qkv")
    q, k = (x / jnp.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    rate = jnp.exp(weights["log_rate"])[None, None]
    alpha = jnp.exp(-rate * jax.nn.softplus(float32["alpha"][..., 0] + weights["step_bias"][None, None]))
    alpha, beta = (jnp.repeat(x, 2, axis=2) for x in (alpha, jax.nn.sigmoid(float32["beta"][..., 0])))
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)

    def token(state, inputs):
        q, k, v, alpha, beta, begins = inputs
        state = jnp.where(begins[:, None, None, None], jnp.float32(0), state) * alpha[..., None, None]
        error = v - jnp.einsum("bnmh,bnm->bnh", state, k)
        state = state + beta[..., None, None] * k[..., None] * error[:, :, None]
        return state, jnp.einsum("bnmh,bnm->bnh", state, q)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, alpha, beta, begins))
    _, o = jax.lax.scan(token, jnp.zeros((*v[:, 0].shape, v.shape[-1]), jnp.float32), tokens)
    o = jnp.moveaxis(o, 0, 1) / q.shape[-1] ** 0.5
    return normalized_and_gated(mixing, o, params, float32["gate"]).astype(arrays["v"].dtype)


def convolved(x, weights, name, segment_ids):
    taps = weights.get(f"{name}_taps")
    if taps is None:
        return x
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
    visible = (segment_ids[:, :, None] == segment_ids[:, None]) & ((distance >= 0) & (distance < len(taps)))[None]
    matrix = jnp.where(visible[..., None, None], taps[jnp.clip(distance, 0, len(taps) - 1)][None], jnp.float32(0))
    return jnp.einsum("btsnh,bsnh->btnh", matrix, x)


# With a small eps, the norm divides rounding errors of gradients by outputs that may be close to 0, as that of the first token
# of a segment, which is q . k times its value.
EXAMPLES = {
    "linear": ("linear(8)",),
    "retention": ("retention(8,0.1)",),
    "gla": ("gla(16,3,0.1)",),
    "gated_delta": ("gated_delta(8,eps=0.1)", "gated_delta(8,0,0.1)"),
}
REFERENCES = {"linear": linear, "retention": retention, "gla": gla, "gated_delta": gated_delta}
