"""K-means clustering of vectors of signs by their Hamming distance, within segments."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clusters:
    """Clusters of the tokens of each sequence, for each head.

    Attributes:
      of_tokens: int32 [B, T, N], the cluster of each token, 0 to C - 1.
      segment_ids: int32 [B, C], the segment whose tokens a cluster holds; None without segments.
      fits: bool [B], False for a sequence with more segments than clusters, whose clusters have no meaning; None without
        segments.
      count: Number of clusters C.
    """

    of_tokens: Any
    segment_ids: Any
    fits: Any
    count: int = dataclasses.field(metadata={"static": True})

    def one_hot(self) -> Float[Array, "B N T C"]:
        """Membership of each token, for products, whose gradients take less time on a CPU than those of a gather.

        Returns:
          float32 [B, N, T, C], 1 for the cluster of a token.
        """
        clusters = jnp.arange(self.count, dtype=jnp.int32)[None, None, None]
        return (self.of_tokens.swapaxes(1, 2)[..., None] == clusters).astype(jnp.float32)


@array_op("B T N", x="B T N")
def sign_bits(x: Float[Array, "B T N H"], directions: Float[Array, "H bits"]) -> Float[Array, "B T N bits"]:
    """Signs of projections of vectors, whose Hamming distance estimates the angle between vectors.

    Args:
      x: Vectors.
      directions: Random directions, which all heads share.

    Returns:
      float32, 1 or -1, without a gradient.

    Cost: O(B T N H bits).

    References: Charikar 2002, "Similarity estimation techniques from rounding algorithms", sec. 3.
    """
    projected = lax.stop_gradient(x).astype(jnp.float32) @ directions.astype(jnp.float32)
    return jnp.where(projected > 0, jnp.float32(1), jnp.float32(-1))


@array_op("B T N | B", bits="B T N")
def hamming_kmeans(
    bits: Float[Array, "B T N bits"], count: int, iterations: int, segment_ids: Int[Array, "B T"] | None = None
) -> Clusters:
    """Clusters tokens by Lloyd's algorithm.

    Each token goes to the nearest centroid, and each centroid takes the majority of each bit of its tokens. The first centroids
    are the bits of tokens at equal distances. With segments, each segment has at least one cluster, and the others are in
    proportion to the number of its tokens; a token goes to the clusters of its segment only. A centroid without tokens, and a
    bit without majority, stay as they are.

    Args:
      bits: 1 or -1, as `sign_bits` returns them.
      count: Number of clusters C of a sequence, at most T.
      iterations: Number of times that centroids change.
      segment_ids: Segment of each token, in any order; None for one segment per sequence.

    Returns:
      The clusters.

    Raises:
      InputError: `count` is not 1 to T, or `iterations` is negative.

    Cost: O(B T N C bits iterations) time, B T N C float32 numbers.

    References: Vyas et al. 2020, "Fast transformers with clustered attention", arXiv 2007.04825, sec. 3.2.1.
    """
    batch, length, heads, size = bits.shape
    if not 1 <= count <= length or length * count >= 2**31:
        raise InputError(
            f"count {count}: expected 1 to {length} clusters, the number of tokens, and less than 2^31 pairs"
        )
    if iterations < 0:
        raise InputError(f"iterations {iterations}: expected at least 0")
    fits, of_clusters = None, None
    if segment_ids is None:
        seeds = jnp.broadcast_to((jnp.arange(count, dtype=jnp.int32) * length // count)[None], (batch, count))
    else:
        seeds, fits = _seeds(segment_ids, count)
        of_clusters = jnp.take_along_axis(segment_ids, seeds, axis=1)
    x = bits.swapaxes(1, 2).reshape(batch * heads, length, size)
    start = jnp.take_along_axis(bits, seeds[:, :, None, None], axis=1)
    start = start.swapaxes(1, 2).reshape(batch * heads, count, size)

    def nearest(centroids: Array) -> Array:
        # The product of signs is the number of bits minus twice the distance.
        scores = jnp.einsum("ntb,ncb->ntc", x, centroids)
        if segment_ids is not None and of_clusters is not None:
            same = segment_ids[:, :, None] == of_clusters[:, None]
            scores = scores.reshape(batch, heads, length, count)
            scores = jnp.where(same[:, None], scores, -jnp.inf).reshape(batch * heads, length, count)
        return jnp.argmax(scores, axis=2).astype(jnp.int32)

    def step(_: int | Array, centroids: Array) -> Array:
        members = nearest(centroids)[..., None] == jnp.arange(count, dtype=jnp.int32)[None, None]
        sums = jnp.einsum("ntc,ntb->ncb", members.astype(jnp.float32), x)
        return jnp.where(sums == 0, centroids, jnp.sign(sums))

    start, x = vary_alike(start, x)
    centroids = lax.fori_loop(0, iterations, step, start)
    of_tokens = nearest(centroids).reshape(batch, heads, length).swapaxes(1, 2)
    return Clusters(of_tokens, of_clusters, fits, count)


def _seeds(segment_ids: Int[Array, "B T"], count: int) -> tuple[Array, Array]:
    """`(int32 [B, C], tokens of the first centroids, by segment; bool [B], whether each segment has one)`."""
    length = segment_ids.shape[1]
    order = jnp.argsort(segment_ids, axis=1, stable=True).astype(jnp.int32)
    ids = jnp.take_along_axis(segment_ids, order, axis=1)
    begins = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    segments = jnp.sum(begins, axis=1, dtype=jnp.int32)[:, None]
    # The first token of each segment is a seed, and C - segments of the others, at equal distances.
    share, others = jnp.maximum(count - segments, 0), jnp.maximum(length - segments, 1)
    rank = jnp.cumsum(~begins, axis=1, dtype=jnp.int32) - 1
    is_seed = begins | ((rank + 1) * share // others > rank * share // others)
    taken = jnp.argsort(~is_seed, axis=1, stable=True)[:, :count]
    return jnp.take_along_axis(order, taken, axis=1), segments[:, 0] <= count
