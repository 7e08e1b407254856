"""Order of tokens by bucket: which place each token has, and how many tokens of its bucket precede it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("...", buckets="...")
def sort_by_bucket(
    buckets: Int[Array, "*a T"], segment_ids: Int[Array, "*b T"] | None, window: int
) -> tuple[Int[Array, "*a T"], Int[Array, "*a T"]]:
    """Sorts tokens by (segment, bucket, index), and gives each a coordinate.

    The coordinates of two tokens of one bucket and segment differ by the number of tokens of the bucket from one to the other.
    Those of other tokens differ by more than `window`. A token therefore sees another one within the window if the coordinates
    differ by at most `window`, and the difference does not depend on later tokens.

    Args:
      buckets: Integers [..., T], bucket of each token.
      segment_ids: int32 [..., T], or None for one segment.
      window: Largest distance within a bucket.

    Returns:
      int32 (order [..., T], the indices of the tokens in sorted order; coordinates [..., T], of the sorted tokens).

    Raises:
      InputError: The coordinates do not fit into 32 bits.

    Cost: O(T log T).
    """
    length = buckets.shape[-1]
    if length * (window + 2) >= 2**31 - 1:
        raise InputError(f"window {window} with {length} tokens: expected (window + 2) * tokens below 2**31; lower it")
    order, is_first = _sort(buckets, segment_ids)
    number = jnp.cumsum(is_first, axis=-1, dtype=jnp.int32) - 1
    place = _index(order)
    return order, place + number * (window + 1)


@array_op("...", buckets="...")
def bucket_ranks(buckets: Int[Array, "*a T"], segment_ids: Int[Array, "*b T"] | None = None) -> Int[Array, "*a T"]:
    """Number of earlier tokens of the same bucket and segment.

    Args:
      buckets: Integers [..., T], bucket of each token.
      segment_ids: int32 [..., T], or None for one segment.

    Returns:
      int32 [..., T].

    Cost: O(T log T).
    """
    order, is_first = _sort(buckets, segment_ids)
    place = _index(order)
    start = lax.cummax(jnp.where(is_first, place, 0), axis=order.ndim - 1)
    return jnp.take_along_axis(place - start, inverse(order), axis=-1)


@array_op("...", order="...")
def inverse(order: Int[Array, "*a T"]) -> Int[Array, "*a T"]:
    """Inverse of permutations.

    Args:
      order: int32 [..., T], permutations of 0 to T - 1.

    Returns:
      int32 [..., T], the place of each index.

    Cost: O(T).
    """
    place = _index(order)
    return jnp.put_along_axis(jnp.zeros_like(order), order, place, axis=-1, inplace=False)


def _sort(buckets: Array, segment_ids: Array | None) -> tuple[Int[Array, "*a T"], Bool[Array, "*a T"]]:
    """(order, whether each sorted token is the first of its bucket and segment)."""
    if buckets.dtype.itemsize < 4:  # the number that packs a bucket and an index would overflow
        buckets = buckets.astype(jnp.int32)
    keys = (buckets,) if segment_ids is None else (jnp.broadcast_to(segment_ids, buckets.shape), buckets)
    # XLA:CPU sorts one array in a third of the time of two.
    fits = jnp.max(buckets, initial=0) < (2**31 - 1) // max(1, buckets.shape[-1])
    *keys, order = lax.cond(fits, _sort_packed, _sort_apart, *keys)
    is_first = jnp.zeros(buckets.shape, bool).at[..., :1].set(True)
    for key in keys:
        is_first = is_first.at[..., 1:].max(key[..., 1:] != key[..., :-1])
    return order, is_first


def _sort_packed(*keys: Int[Array, "*a T"]) -> tuple[Int[Array, "*a T"], ...]:
    """The sorted keys and the order, of buckets that fit into one number together with the index."""
    *segment_ids, buckets = keys
    length = max(1, buckets.shape[-1])
    packed = buckets * length + _index(buckets)
    *segment_ids, packed = lax.sort((*segment_ids, packed), num_keys=len(keys), is_stable=False)
    return *segment_ids, packed // length, packed % length


def _sort_apart(*keys: Int[Array, "*a T"]) -> tuple[Int[Array, "*a T"], ...]:
    """The sorted keys and the order, of any buckets."""
    return tuple(lax.sort((*keys, _index(keys[0])), num_keys=len(keys), is_stable=True))


def _index(x: Array) -> Int[Array, "*a T"]:
    return jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
