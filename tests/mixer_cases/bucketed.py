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


def sinkhorn(mixing, arrays, params, mask, segment_ids):
    """Blocks one after the other, and sums over tokens instead of blocks of arrays."""
    arguments, causal = dict(parse_one(mixing.spec, "mixer").kwargs), mask == Causal()
    size, dtype = arguments["block"], arrays["q"].dtype
    q, k, v = (arrays[name].astype(jnp.float32) for name in "qkv")
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    starts = np.arange(0, q.shape[1], size)
    first = segment_ids[:, starts]
    # [B, blocks, T]: the tokens of each block in the segment of its first one.
    inside = np.arange(q.shape[1])[None] // size == np.arange(len(starts))[:, None]
    taken = (segment_ids[:, None] == first[..., None]) & inside[None]
    # Tokens in the mean query of each block. With a causal mask, those of earlier blocks, and the first one.
    alike = first[:, :, None] == first[:, None]
    allowed = alike & np.tri(len(starts), k=-1, dtype=bool)[None] if causal else alike
    of_query = taken
    if causal:
        earlier = jnp.einsum("bij,bjt->bit", allowed.astype(jnp.int32), taken.astype(jnp.int32)) > 0
        of_query = earlier | (np.arange(q.shape[1])[None] == starts[:, None])[None]

    def mean(x, tokens):
        weights = tokens.astype(jnp.float32)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return jnp.einsum("bit,btnh->bnih", weights, x)

    scores = jnp.einsum("bnih,bnjh->bnij", mean(q, of_query), mean(k, taken)) / q.shape[-1] ** 0.5
    weights = jnp.where(allowed[:, None], jnp.exp(scores / arguments["temperature"]), 0.0)
    for _ in range(arguments["iterations"]):
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        total = jnp.cumsum(weights, axis=-2) if causal else weights.sum(axis=-2, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)

    outputs = []
    for i, start in enumerate(starts):
        tokens = slice(start, start + size)
        queries, own = q[:, tokens], segment_ids[:, tokens]
        slots, seen = [], []
        for j, source in enumerate(starts):
            ids = segment_ids[:, source : source + size]
            pad = ((0, 0), (0, size - ids.shape[1]))
            is_taken = jnp.pad(ids == first[:, j][:, None], pad) & allowed[:, i, j][:, None]
            blocks = [jnp.pad(x[:, source : source + size], (*pad, (0, 0), (0, 0))) for x in (k, v)]
            factor = weights[:, :, i, j][:, None, :, None] * is_taken[..., None, None].astype(jnp.float32)
            slots.append([factor * x for x in blocks])
            seen.append(is_taken)
        mixed = [sum(parts) for parts in zip(*slots, strict=True)]
        visible = own[:, :, None] == own[:, None]
        if causal:
            visible = visible & np.tri(own.shape[1], dtype=bool)[None]
        beside = jnp.stack(seen).any(axis=0)[:, None] & (own == first[:, i][:, None])[..., None]
        keys, values = (jnp.concatenate([x[:, tokens], y], axis=1) for x, y in zip((k, v), mixed, strict=True))
        scores = jnp.einsum("btnh,bsnh->bnts", queries, keys) / q.shape[-1] ** 0.5
        visible = jnp.concatenate([visible, beside], axis=2)[:, None]
        outputs.append(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)), values))
    return jnp.concatenate(outputs, axis=1).astype(dtype)


EXAMPLES = {
    "reformer": ("reformer(buckets=4,rounds=2,window=2)",),
    # Sums of two terms at most, which are equal in any order: later tokens shift the places of earlier ones in a block.
    "routing": ("routing(clusters=2,window=2,decay=0.5)",),
    "sinkhorn": ("sinkhorn(block=4,iterations=2,temperature=0.5)",),
}
REFERENCES = {"reformer": reformer, "routing": routing, "sinkhorn": sinkhorn}
HIDES_SELF = {"reformer", "routing"}
