"""Mixers that summarise the sequence: the reference of each mixer, with dense matrices."""

import jax
import jax.numpy as jnp

from hpnlp.ops.attention.low_rank.nystrom import nystrom_reference
from hpnlp.ops.attention.low_rank.value_conv import value_conv_reference
from hpnlp.ops.fourier import fourier_mix_reference


def linformer(mixing, arrays, params, mask, segment_ids):
    """Compression by an explicit matrix [R, T] of each head and feature."""
    module, params, length = mixing.module, params.get("params", {}), segment_ids.shape[1]
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    real = (segment_ids > 0).astype(jnp.float32)
    rows, heads = jnp.arange(length), k.shape[2]
    if module.compression == "projection":
        filled = jnp.ones((2, module.rank))
    else:
        size = -(-length // module.rank) if module.compression == "pool" else module.width
        window = (jnp.arange(-(-length // size))[:, None] == rows[None] // size).astype(jnp.float32)
        filled = real @ window.T

    def compressed(name, x):
        if module.compression == "projection":
            matrix = params.get("projection", params.get(f"{name}_projection"))
            matrix = jnp.broadcast_to(matrix, (heads, *matrix.shape[-2:]))
            return jnp.einsum("krs,bs,bskh->brkh", matrix, real, x)
        taps = jnp.ones((size, *x.shape[2:])) if module.compression == "pool" else params[f"{name}_taps"]
        sums = jnp.einsum("rs,skh,bs,bskh->brkh", window, taps[rows % size], real, x)
        return sums if module.compression == "conv" else sums / jnp.maximum(filled, 1)[:, :, None, None]

    k, v = (jnp.repeat(compressed(name, x), 2, axis=2) for name, x in (("key", k), ("value", v)))
    visible = (real[:, :, None] * filled[:, None] > 0)[:, None]
    scores = jnp.einsum("btnh,brnh->bntr", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bntr,brnh->btnh", jnp.where(visible, weights, 0.0), v).astype(arrays["q"].dtype)


def nystrom(mixing, arrays, params, mask, segment_ids):
    q, k, v = (arrays[name] for name in "qkv")
    real = segment_ids > 0
    o = nystrom_reference(q, k, v, mixing.module.landmarks, real)
    if not mixing.module.width:
        return o
    keep = real[..., None, None]
    near = value_conv_reference(jnp.where(keep, v, jnp.zeros((), v.dtype)), params["params"]["taps"])
    return o + jnp.where(keep, near, jnp.zeros((), v.dtype))


def fourier(mixing, arrays, params, mask, segment_ids):
    x, real = arrays["x"], (segment_ids > 0)[..., None]
    scale = 1.0 if mixing.module.scale == "none" else (x.shape[1] * x.shape[2]) ** -0.5
    zero = jnp.zeros((), x.dtype)
    return jnp.where(real, fourier_mix_reference(jnp.where(real, x, zero), scale), zero)


EXAMPLES = {
    "linformer": (
        "linformer(5)",
        "linformer(4,pool)",
        "linformer(compression=conv,width=3)",
        "linformer(5,share=none)",
    ),
    "nystrom": ("nystrom(3,5)", "nystrom(40,0)"),
}
REFERENCES = {"linformer": linformer, "nystrom": nystrom, "fnet": fourier}
