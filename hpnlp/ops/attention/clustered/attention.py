"""Attention of the centroids of clusters of queries to all keys, and its improvement by exact weights of some keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.clustered.hamming_kmeans import Clusters
from hpnlp.ops.attention.masks.base import Full
from hpnlp.ops.attention.selected_blocks.attend_blocks import ChosenBlocks, attend_blocks
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("B T N", q="B T N")
def clustered_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    clusters: Clusters,
    kv_segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention of the mean query of each cluster, which all its queries get.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      clusters: Clusters of the queries. The result of a sequence that does not fit has no meaning.
      kv_segment_ids: Segment of each key; needed if the clusters have segments.

    Returns:
      o in q's dtype. Clusters have no gradient.

    Raises:
      InputError: Shapes do not fit, or only clusters or only keys have segments.

    Cost: O(B N C (T + S) H) time and B N T C numbers.

    References: Vyas et al. 2020, "Fast transformers with clustered attention", arXiv 2007.04825, eq. 3 to 6.
    """
    kv_segment_ids = _checked_segments(q, k, v, clusters, kv_segment_ids)
    members = clusters.one_hot()
    centroids = _centroids(q, members).swapaxes(1, 2).astype(q.dtype)
    o: Any = attend(centroids, k, v, Full(), segment_ids=clusters.segment_ids, kv_segment_ids=kv_segment_ids)
    return jnp.einsum("bntc,bcnh->btnh", members, o.astype(jnp.float32)).astype(q.dtype)


@array_op("B T N", q="B T N")
def improved_clustered_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    clusters: Clusters,
    top: int,
    kv_segment_ids: Int[Array, "B S"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Clustered attention in which each query divides the weight of its cluster's best keys by its own scores.

    The keys with the highest weights of a centroid keep their total weight, and the queries of the cluster divide it among them
    by a softmax of their exact scores. All other keys keep the weights of the centroid.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      clusters: Clusters of the queries. The result of a sequence that does not fit has no meaning.
      top: Number of keys of a cluster with exact scores.
      kv_segment_ids: Segment of each key; needed if the clusters have segments.

    Returns:
      o in q's dtype. Clusters and the choice of keys have no gradient.

    Raises:
      InputError: `top` is less than 1, shapes do not fit, or only clusters or only keys have segments.

    Cost: O(B N (C (T + S) + T top) H) time and B N C (S + top H) + B N T C numbers.

    References: Vyas et al. 2020, arXiv 2007.04825, eq. 9 to 11.
    """
    if top < 1:
        raise InputError(f"top {top}: expected at least 1 key")
    kv_segment_ids = _checked_segments(q, k, v, clusters, kv_segment_ids)
    (batch, _, heads, size), (kv_heads, count), top = q.shape, (k.shape[2], clusters.count), min(top, k.shape[1])
    members = clusters.one_hot()
    centroids = _centroids(q, members).reshape(batch, kv_heads, -1, size)  # clusters of all heads of a key head
    keys, values = (x.astype(jnp.float32).swapaxes(1, 2) for x in (k, v))
    scores = jnp.einsum("bkch,bksh->bkcs", centroids, keys) * jnp.float32(size**-0.5)
    if clusters.segment_ids is not None and kv_segment_ids is not None:
        same = clusters.segment_ids[:, :, None] == kv_segment_ids[:, None]
        visible = jnp.tile(same, (1, heads // kv_heads, 1))[:, None]
        # Finite, since each cluster of a sequence that fits sees its tokens.
        scores = jnp.where(visible, scores, jnp.float32(-1e30))
    weights = jax.nn.softmax(scores, axis=3)
    best = lax.top_k(lax.stop_gradient(scores), top)[1].astype(jnp.int32)
    best_weights = jnp.take_along_axis(weights, best, axis=3)
    best_keys, best_values = (
        jnp.take_along_axis(x.swapaxes(1, 2), best.reshape(batch, kv_heads, -1, 1), axis=2) for x in (k, v)
    )
    mixed = jnp.einsum("bkcs,bksh->bkch", weights, values)
    shape = *best.shape, values.shape[3]
    mixed = mixed - jnp.einsum("bkct,bkcth->bkch", best_weights, best_values.astype(jnp.float32).reshape(shape))
    of_clusters = jnp.concatenate([mixed, jnp.sum(best_weights, axis=3, keepdims=True)], axis=3)
    of_clusters = of_clusters.reshape(batch, heads, count, -1)
    of_queries = jnp.einsum("bntc,bnch->btnh", members, of_clusters)

    def by_query_head(x: Array) -> Array:
        return x.reshape(batch, heads, count * top, x.shape[-1]).swapaxes(1, 2)

    is_visible = None
    if clusters.segment_ids is not None:
        seen = (jnp.take_along_axis(scores, best, axis=3) > -1e30).reshape(batch, heads, -1, 1)
        is_visible = by_query_head(seen)[..., 0]
    starts = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None] * top, (batch, count))
    chosen = ChosenBlocks(starts, clusters.of_tokens[..., None], top, is_visible)
    exact, _ = attend_blocks(q, by_query_head(best_keys), by_query_head(best_values), chosen)
    return (of_queries[..., :-1] + of_queries[..., -1:] * exact.astype(jnp.float32)).astype(q.dtype)


def _centroids(q: Array, members: Array) -> Array:
    """float32 `[B, N, C, H]`, the mean query of each cluster; 0 for an empty one."""
    sums = jnp.einsum("bntc,btnh->bnch", members, q.astype(jnp.float32))
    counts = jnp.sum(members, axis=2)
    return sums / jnp.maximum(counts, 1.0)[..., None]


def _checked_segments(q: Array, k: Array, v: Array, clusters: Clusters, kv_segment_ids: Array | None) -> Array | None:
    """`kv_segment_ids`, if the arguments fit."""
    if k.shape[:3] != v.shape[:3] or k.shape[::3] != q.shape[::3] or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: expected equal B, equal H in q and k, equal S and K in k and v, and K "
            "that divides N"
        )
    if clusters.of_tokens.shape != q.shape[:3]:
        raise InputError(f"clusters of tokens {clusters.of_tokens.shape}: expected {q.shape[:3]}, those of the queries")
    if (clusters.segment_ids is None) != (kv_segment_ids is None):
        raise InputError(
            "clusters and keys must both have segments: pass kv_segment_ids, and segment_ids to hamming_kmeans"
        )
    return kv_segment_ids
