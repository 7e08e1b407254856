"""Attention within buckets: the spec of each mixer in tests, and its reference."""

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.ops.attention import Causal
from hpnlp.spec import parse_one


def within_buckets(q, v, buckets, window, mask, segment_ids):
    """Dense attention over the pairs of each bucket with fewer than `window` tokens between them, in any round.

    Keys are queries of length 1, and a token sees itself only if it sees nothing else. buckets: [B, T, N, R].
    """
    length, group = q.shape[1], q.shape[2] // v.shape[2]
    q, v = q.astype(jnp.float32), jnp.repeat(v.astype(jnp.float32), group, axis=2)
    k = q / jnp.sqrt(jnp.sum(q**2, axis=-1, keepdims=True) + 1e-6 * q.shape[-1])
    alike = buckets[:, :, None] == buckets[:, None]
    alike = alike & (segment_ids[:, :, None] == segment_ids[:, None])[..., None, None]  # [B, T, T, N, R]
    index = np.arange(length)
    between = (index[None, None] > np.minimum.outer(index, index)[..., None]) & (
        index[None, None] < np.maximum.outer(index, index)[..., None]
    )
    count = jnp.einsum("tsu,btunr->btsnr", jnp.asarray(between, jnp.float32), alike.astype(jnp.float32))
    visible = jnp.any(alike & (count < window), axis=-1).transpose(0, 3, 1, 2)
    if mask == Causal():
        visible = visible & np.tri(length, dtype=bool)[None, None]
    visible_others = visible & ~np.eye(length, dtype=bool)[None, None]
    alone = ~visible_others.any(axis=-1, keepdims=True)
    visible = jnp.where(alone, np.eye(length, dtype=bool)[None, None], visible_others)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k)
    # Alone, the score is a constant, because the softmax over one token is one.
    weights = jax.nn.softmax(jnp.where(visible & ~alone, scores, jnp.where(visible, jnp.float32(0), -jnp.inf)), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def reformer(mixing, arrays, params, mask, segment_ids):
    """The hash by the largest of 2 b inner products."""
    arguments, q = dict(parse_one(mixing.spec, "mixer").kwargs), arrays["q"].astype(jnp.float32)
    half = arguments["buckets"] // 2
    rotations = jax.random.normal(jax.random.key(4), (arguments["rounds"], q.shape[-1], half))
    products = jnp.einsum("btnh,rhc->btnrc", q, rotations)
    buckets = jnp.argmax(jnp.concatenate([products, -products], axis=-1), axis=-1)
    o = within_buckets(arrays["q"], arrays["v"], buckets, arguments["window"], mask, segment_ids)
    return o.astype(arrays["q"].dtype)


def routing(mixing, arrays, params, mask, segment_ids):
    """Clusters by the largest inner product with the centroids, which are buffers."""
    arguments, q = dict(parse_one(mixing.spec, "mixer").kwargs), arrays["q"].astype(jnp.float32)
    q = q - q.mean(axis=-1, keepdims=True)
    q = q / jnp.sqrt(jnp.mean(q**2, axis=-1, keepdims=True) + 1e-6)
    similarity = jnp.einsum("btnh,nch->btnc", q, params["buffers"]["centroids"])
    buckets = jnp.argmax(similarity, axis=-1)[..., None]
    o = within_buckets(q, arrays["v"], buckets, arguments["window"], mask, segment_ids)
    return o.astype(arrays["q"].dtype)


EXAMPLES = {
    "reformer": ("reformer(buckets=4,rounds=2,window=2)",),
    "routing": ("routing(clusters=2,window=2,decay=0.5)",),
}
REFERENCES = {"reformer": reformer, "routing": routing}
HIDES_SELF = {"reformer", "routing"}
