"""Clustered attention: references with dense weights, from the bits of each query on."""

import jax
import jax.numpy as jnp
import numpy as np

CLUSTERS, TOP, BITS, ITERATIONS = 5, 3, 7, 2


def first_centroids(ids):
    """Tokens of the first centroids: the first one of each segment, and others at equal distances."""
    order = np.argsort(ids, kind="stable")
    first = [t for i, t in enumerate(order) if i == 0 or ids[order[i - 1]] != ids[t]]
    others = [t for t in order if t not in first]
    share = CLUSTERS - len(first)
    steps = [
        int((i + 1) * share / len(others) + 1e-9) - int(i * share / len(others) + 1e-9) for i in range(len(others))
    ]
    seeds = {*first, *(t for t, step in zip(others, steps, strict=True) if step)}
    return np.array([t for t in order if t in seeds])


def clusters_of(q, ids):
    """int `[T, N]`, clusters of the queries `[T, N, H]`, and the segment of each cluster."""
    directions = jax.random.normal(jax.random.key(4), (q.shape[2], BITS), jnp.float32)
    bits = jnp.einsum("tnh,hb->tnb", q.astype(jnp.float32), directions) > 0
    seeds = first_centroids(ids)
    centroids, same = bits[seeds], ids[:, None] == ids[seeds][None]

    def nearest(centroids):
        distance = jnp.sum(bits[:, None] != centroids[None], axis=3)
        return jnp.argmin(jnp.where(same[:, :, None], distance, BITS + 1), axis=1)

    for _ in range(ITERATIONS):
        member = jax.nn.one_hot(nearest(centroids), CLUSTERS, dtype=bool)
        ones = jnp.sum(member[..., None] & bits[:, :, None], axis=0).swapaxes(0, 1)
        zeros = jnp.sum(member[..., None] & ~bits[:, :, None], axis=0).swapaxes(0, 1)
        centroids = jnp.where(ones == zeros, centroids, ones > zeros)
    return nearest(centroids), ids[seeds]


def weights_of(q, k, ids, top):
    """float32 `[T, N, T]`, the attention weights of one sequence."""
    q, k = q.astype(jnp.float32), jnp.repeat(k.astype(jnp.float32), q.shape[1] // k.shape[1], axis=1)
    clusters, segments = clusters_of(jax.lax.stop_gradient(q), ids)
    member = jax.nn.one_hot(clusters, CLUSTERS)
    centroids = jnp.einsum("tnc,tnh->cnh", member, q) / jnp.maximum(member.sum(axis=0), 1.0).T[..., None]
    visible = (segments[:, None] == ids[None])[:, None]
    scores = jnp.where(visible, jnp.einsum("cnh,snh->cns", centroids, k) * q.shape[2] ** -0.5, -1e9)
    of_clusters = jax.nn.softmax(scores, axis=2)
    weights = jnp.einsum("tnc,cns->tns", member, of_clusters)
    if not top:
        return weights
    order = jnp.argsort(-jax.lax.stop_gradient(scores), axis=2)[:, :, :top]
    is_best = jax.nn.one_hot(order, len(ids), dtype=bool).any(axis=2) & visible
    is_best = jnp.einsum("tnc,cns->tns", member, is_best.astype(jnp.float32)) > 0.5
    exact = jax.nn.softmax(jnp.where(is_best, jnp.einsum("tnh,snh->tns", q, k) * q.shape[2] ** -0.5, -1e9), axis=2)
    total = jnp.sum(jnp.where(is_best, weights, 0.0), axis=2, keepdims=True)
    return jnp.where(is_best, total * exact, weights)


def reference_of(top):
    def clustered(mixing, arrays, params, mask, segment_ids):
        q, k, v = (arrays[name] for name in "qkv")
        values = jnp.repeat(v.astype(jnp.float32), 2, axis=2)
        ids = np.asarray(mixing.segment_ids)
        weights = jnp.stack([weights_of(q[b], k[b], ids[b], top) for b in range(q.shape[0])])
        return jnp.einsum("btns,bsnh->btnh", weights, values).astype(q.dtype)

    return clustered


EXAMPLES = {
    "clustered": (f"clustered({CLUSTERS},{BITS},{ITERATIONS})",),
    "clustered_improved": (f"clustered_improved({CLUSTERS},{TOP},{BITS},{ITERATIONS})",),
}
REFERENCES = {"clustered": reference_of(0), "clustered_improved": reference_of(TOP)}
