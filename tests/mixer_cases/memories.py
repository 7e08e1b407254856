"""Mixers with relative positions and a memory: the spec of each in tests, and its reference without a carry."""

import jax.numpy as jnp

from hpnlp.ops.attention.positions.rope import sinusoids

# Spec -> the number of earlier tokens that a token sees without a carry.
BACK = {"transformer_xl(3)": 3, "compressive(4,3,2)": 99, "compressive(4,3,2,most_used)": 99}
EXAMPLES = {name: tuple(spec for spec in BACK if spec.startswith(name)) for name in ("transformer_xl", "compressive")}
# Mixers that, with a carry, see less of earlier batches than in one pass; see tests/nn/test_compressive.py.
WITHOUT_FULL_PASS = ("compressive",)


def relative(mixing, arrays, params, mask, segment_ids):
    """All pairs with the four terms of the paper: content and distance, of the query and of the biases."""
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    (_, length, heads, size), learned = q.shape, params["params"]["relative"]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    places = jnp.arange(length, dtype=jnp.int32)
    distance = places[:, None] - places[None]
    dim = arrays["x"].shape[-1]
    r = jnp.einsum("tsd,dnh->tsnh", sinusoids(distance, dim), learned["kernel"].reshape(dim, heads, size))
    u, w = learned["content_bias"], learned["position_bias"]
    terms = (
        jnp.einsum("btnh,bsnh->bnts", q, k),
        jnp.einsum("btnh,tsnh->bnts", q, r),
        jnp.einsum("nh,bsnh->bns", u, k)[:, :, None],
        jnp.einsum("nh,tsnh->nts", w, r)[None],
    )
    scores = sum(terms[1:], terms[0]) * size**-0.5
    seen = ((distance >= 0) & (distance <= BACK[mixing.spec]))[None]
    seen &= segment_ids[:, :, None] == segment_ids[:, None]
    weights = jnp.where(seen[:, None], jnp.exp(scores - scores.max(axis=-1, keepdims=True)), jnp.float32(0))
    weights /= weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(arrays["q"].dtype)


REFERENCES = dict.fromkeys(EXAMPLES, relative)
