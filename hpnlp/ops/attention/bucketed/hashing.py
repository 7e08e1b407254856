"""Buckets of vectors: by random rotations (LSH), and by the nearest centroid (spherical k-means)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("", key="...")
def random_rotations(key: Array, rounds: int, dim: int, buckets: int) -> Float[Array, "R H b"]:
    """Random projections of `lsh_buckets`.

    Args:
      key: PRNG key.
      rounds: Number of hash rounds R.
      dim: Features of the vectors H.
      buckets: Number of buckets, even; or 1.

    Returns:
      float32 [R, H, buckets / 2], normally distributed.

    Raises:
      InputError: An odd number of buckets over 1, or less than one round.
    """
    if rounds < 1 or buckets < 1 or (buckets > 1 and buckets % 2):
        raise InputError(
            f"rounds={rounds}, buckets={buckets}: expected at least one round, and 1 or an even number of buckets"
        )
    return jax.random.normal(key, (rounds, dim, buckets // 2), jnp.float32)


@array_op("...", x="...")
def lsh_buckets(x: Float[Array, "*a H"], rotations: Float[Array, "R H b"]) -> Int[Array, "*a R"]:
    """Buckets of vectors: `argmax([x R; -x R])`, which depends on the angles of the vectors only.

    Vectors at a small angle are likely to have the same bucket. The bucket of a vector is a function of it alone.

    Args:
      x: Vectors [..., H].
      rotations: float32 [R, H, buckets / 2], as `random_rotations` returns them; of width 0 for one bucket.

    Returns:
      int32 [..., R], from 0 to buckets - 1. It has no gradient.

    Cost: O(R H buckets / 2) for each vector.

    References: Kitaev et al. 2020, "Reformer", arXiv 2001.04451, sec. 2, "Locality sensitive hashing". Andoni et al. 2015,
      "Practical and optimal LSH for angular distance", arXiv 1509.02897.
    """
    rounds, dim, half = rotations.shape
    if half == 0:
        return jnp.zeros((*x.shape[:-1], rounds), jnp.int32)
    flat = lax.stop_gradient(x).reshape(-1, dim).astype(jnp.float32)
    projected = lax.dot(flat, lax.stop_gradient(rotations).transpose(1, 0, 2).reshape(dim, rounds * half))
    projected = projected.reshape(-1, rounds, half)
    # As argmax of both signs, whose pairs of a value and an index XLA:CPU would compare one by one.
    largest = jnp.max(jnp.abs(projected), axis=2, keepdims=True)
    index = jnp.arange(half, dtype=jnp.int32)[None, None]
    positive, negative = (jnp.min(jnp.where(x == largest, index, half), axis=2) for x in (projected, -projected))
    return jnp.where(positive < half, positive, half + negative).reshape(*x.shape[:-1], rounds)


@array_op("...", x="...")
def unit_vectors(x: Float[Array, "*a H"], eps: float = 1e-6) -> Float[Array, "*a H"]:
    """Vectors of length 1: `x / sqrt(mean(x^2) + eps) / sqrt(H)`.

    Args:
      x: Vectors [..., H].
      eps: Added to the mean square.

    Returns:
      [..., H] in the dtype of x, computed in float32.

    References: Kitaev et al. 2020, "Reformer", sec. 2, "Shared-QK attention"; eps as in the authors' code (trax).
    """
    y = x.astype(jnp.float32)
    square = jnp.mean(y**2, axis=-1, keepdims=True)
    return (y * lax.rsqrt(square + eps) * x.shape[-1] ** -0.5).astype(x.dtype)


@array_op("...", x="...")
def nearest_centroids(x: Float[Array, "*a N H"], centroids: Float[Array, "N C H"]) -> Int[Array, "*a N"]:
    """The centroid of each vector with the largest inner product, by head.

    Args:
      x: Vectors [..., N, H].
      centroids: float32 [N, C, H], of length 1.

    Returns:
      int32 [..., N], from 0 to C - 1. It has no gradient.

    Cost: O(C H) for each vector.

    References: Roy et al. 2020, "Efficient content-based sparse attention with routing transformers", arXiv 2003.05997,
      sec. 4.1.
    """
    heads, _, dim = centroids.shape
    flat = lax.stop_gradient(x).reshape(-1, heads, dim).astype(jnp.float32)
    similarity = jnp.einsum("tnh,nch->tnc", flat, lax.stop_gradient(centroids))
    return lax.argmax(similarity, 2, jnp.int32).reshape(x.shape[:-1])
