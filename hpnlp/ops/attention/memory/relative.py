"""Attention with Transformer-XL's relative positions to tokens in a memory and in the sequence, block by block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.masks.patterns import Window
from hpnlp.ops.attention.positions.bias import relative_shift
from hpnlp.types import InputError

# Segment ids of padding: queries and keys that see nothing and that nothing sees.
NO_QUERY, NO_KEY = -2, -1


@array_op("B T N R", q="B T N", r="R")
def distance_scores(
    q: Float[Array, "B T N H"], r: Float[Array, "R N H"], bias: Float[Array, "N H"], *, scale: float | None = None
) -> Float[Array, "B T N R"]:
    """Position scores of each query by distance: (q + bias) . r[distance] * scale.

    Args:
      q: Queries [B, T, N, H].
      r: Projected embeddings of the distances 0 to R - 1, [R, N, H].
      bias: Learned bias of the position scores, v in the paper, [N, H].
      scale: H ** -0.5 if None.

    Returns:
      float32 [B, T, N, R].

    Cost:
      O(B T N R H).

    References:
      Dai et al. 2019, "Transformer-XL", section 3.3, terms b and d of A^rel.
    """
    return _by_head(q, r, bias, scale).transpose(0, 2, 1, 3)


@array_op("B T N", q="B T N")
def relative_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
    block_size: int = 128,
) -> Float[Array, "B T N Hv"]:
    """Softmax attention with the scores ((q + u) . k + (q + v) . r[distance]) * scale, to the last R keys of each query.

    Keys are consecutive: the last T of them are those of the queries, and S - T come before. The distance of query i and key j
    is therefore i + S - T - j. A query sees the keys at distances 0 to R - 1; all keys at or before it for R >= S.

    Sequences of more than `block_size` queries are computed in blocks, of which the backward pass computes the scores again, so
    that the scores of one block are in memory at a time.

    Args:
      q: Queries [B, T, N, H].
      k: Keys [B, S, K, H]. K divides N.
      v: Values [B, S, K, Hv].
      r: Projected embeddings of the distances 0 to R - 1, [R, N, H]; those of S and more are not read.
      content_bias: Learned bias u of the content scores [N, H].
      position_bias: Learned bias v of the position scores [N, H].
      segment_ids: int [B, T]; a query sees the keys of its own segment. Ids of at least 0.
      kv_segment_ids: int [B, S]; needed with segment_ids unless S = T.
      scale: H ** -0.5 if None.
      dropout_rate: As in `attend`.
      rng: As in `attend`; each block folds its number into the key.
      streams: As in `attend`.
      block_size: Largest number of queries of a block.

    Returns:
      o [B, T, N, Hv] in q's dtype, accumulated in float32; 0 in rows that see nothing.

    Raises:
      InputError: There are fewer keys than queries.

    Cost:
      O(B N T (block + R) H) time for R < S, else O(B N T (block + S) H); B N block (block + R) floats of temporary memory.

    References:
      Dai et al. 2019, "Transformer-XL", sections 3.2 and 3.3 and appendix B.
    """
    length, keys = q.shape[1], k.shape[1]
    if keys < length:
        raise InputError(f"relative_attention of {length} queries and {keys} keys: expected at least one key per query")
    r = r[:keys]
    biases = content_bias.astype(q.dtype), position_bias
    options = {"scale": scale, "dropout_rate": dropout_rate, "streams": streams}
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    if length <= block_size:
        return _block(q, k, v, r, biases, segment_ids, kv_segment_ids, {**options, "rng": rng})
    if segment_ids is None or kv_segment_ids is None:
        segment_ids, kv_segment_ids = (jnp.ones((x.shape[0], x.shape[1]), jnp.int32) for x in (q, k))
    return _in_blocks(q, k, v, r, biases, segment_ids, kv_segment_ids, options, rng, block_size)


@array_op("B S", q="B T N", k="B S K")
def received_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    block_size: int = 128,
) -> Float[Array, "B S"]:
    """The weight that `relative_attention` gives each key, summed over the queries and averaged over the heads.

    Args:
      q: As for `relative_attention`.
      k: As for `relative_attention`.
      r: As for `relative_attention`.
      content_bias: As for `relative_attention`.
      position_bias: As for `relative_attention`.
      segment_ids: As for `relative_attention`.
      kv_segment_ids: As for `relative_attention`.
      block_size: As for `relative_attention`.

    Returns:
      float32 [B, S].

    Cost:
      A forward and a backward pass of `relative_attention` with values of one feature.
    """
    q, k = (x.astype(jnp.float32) for x in (q, k))

    def attend_to(values: Array) -> Array:
        return relative_attention(
            q,
            k,
            values,
            r,
            content_bias,
            position_bias,
            segment_ids=segment_ids,
            kv_segment_ids=kv_segment_ids,
            block_size=block_size,
        )

    # The sum of a key's weights is the gradient of the sum of the outputs with respect to a value of one feature. Made of q and
    # k, so that zeros and ones differ over devices inside a shard_map as these do.
    o, pull = jax.vjp(attend_to, jnp.where(False, k[..., :1], 0.0))
    (received,) = pull(jnp.where(True, jnp.ones_like(o), o))
    return jnp.sum(received, axis=(2, 3)) / q.shape[2]


@array_op("B T N", q="B T N")
def reference_relative_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    r: Float[Array, "R N H"],
    content_bias: Float[Array, "N H"],
    position_bias: Float[Array, "N H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """`relative_attention` by its definition, with an embedding for each pair: slow and in O(T S N H) memory.

    Args:
      q: As for `relative_attention`.
      k: As for `relative_attention`.
      v: As for `relative_attention`.
      r: As for `relative_attention`.
      content_bias: As for `relative_attention`.
      position_bias: As for `relative_attention`.
      segment_ids: As for `relative_attention`.
      kv_segment_ids: As for `relative_attention`.
      scale: As for `relative_attention`.

    Returns:
      As `relative_attention`.
    """
    (_, length, heads, size), keys = q.shape, k.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2).astype(jnp.float32) for x in (k, v))
    distance = jnp.arange(length)[:, None] + keys - length - jnp.arange(keys)[None]
    visible = ((distance >= 0) & (distance < r.shape[0]))[None]
    if segment_ids is not None:
        kv_segment_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        visible &= segment_ids[:, :, None] == kv_segment_ids[:, None]
    pairs = r[jnp.clip(distance, 0, r.shape[0] - 1)].astype(jnp.float32)
    queries = q.astype(jnp.float32)
    by_content = jnp.einsum("btnh,bsnh->bnts", queries + content_bias[None, None], k)
    by_position = jnp.einsum("btnh,tsnh->bnts", queries + position_bias[None, None], pairs)
    scores = (by_content + by_position) * (size**-0.5 if scale is None else scale)
    weights = jax.nn.softmax(scores, axis=-1, where=visible[:, None])
    weights = jnp.where(visible.any(axis=-1)[:, None, :, None], weights, 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(q.dtype)


def _by_head(q: Array, r: Array, bias: Array, scale: float | None) -> Array:
    """`distance_scores` as float32 [B, N, T, R]."""
    queries = q + bias.astype(q.dtype)[None, None]
    product = jnp.einsum("btnh,rnh->bntr", queries, r.astype(q.dtype), preferred_element_type=jnp.float32)
    return product * (q.shape[-1] ** -0.5 if scale is None else scale)


def _block(
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    biases: tuple[Array, Array],
    segment_ids: Array | None,
    kv_segment_ids: Array | None,
    options: dict[str, Any],
) -> Array:
    """Attention of all queries at once, whose position scores are an array [B, N, T, S]."""
    keys, (content_bias, position_bias) = k.shape[1], biases
    # Column c of the argument of `relative_shift` is for distance S - 1 - c.
    scores = _by_head(q, jnp.flip(r, 0), position_bias, options["scale"])
    bias = relative_shift(jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (keys - r.shape[0], 0))), keys)
    o: Any = attend(
        q + content_bias[None, None],
        k,
        v,
        Window(r.shape[0] - 1, 0).shift(keys - q.shape[1]),
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        bias=bias,
        **options,
    )
    return o


def _in_blocks(
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    biases: tuple[Array, Array],
    segment_ids: Array,
    kv_segment_ids: Array,
    options: dict[str, Any],
    rng: Array | None,
    block: int,
) -> Array:
    """Attention in blocks of queries, each with the keys from R - 1 before its first query to its last query."""
    (length, keys), back = (q.shape[1], k.shape[1]), r.shape[0] - 1
    count = -(-length // block)
    before = max(0, back - (keys - length))  # keys of padding in front
    after = count * block - length
    first = keys - length - back + before  # of the first query's keys, in the padded arrays

    def padded(x: Array, front: int, value: int) -> Array:
        return jnp.pad(x, ((0, 0), (front, after), *[(0, 0)] * (x.ndim - 2)), constant_values=value)

    queries = padded(q, 0, 0), padded(segment_ids, 0, NO_QUERY)
    sources = padded(k, before, 0), padded(v, before, 0), padded(kv_segment_ids, before, NO_KEY)

    @jax.checkpoint
    def one(number: Array, queries: Any, sources: Any, r: Array, biases: Any, rng: Array | None) -> Array:
        start = number * block
        q, ids = (jax.lax.dynamic_slice_in_dim(x, start, block, 1) for x in queries)
        k, v, kv_ids = (jax.lax.dynamic_slice_in_dim(x, first + start, back + block, 1) for x in sources)
        key = None if rng is None else jax.random.fold_in(rng, number)
        return _block(q, k, v, r, biases, ids, kv_ids, {**options, "rng": key})

    def step(_: None, number: Array) -> tuple[None, Array]:
        return None, one(number, queries, sources, r, biases, rng)

    _, o = jax.lax.scan(step, None, jnp.arange(count, dtype=jnp.int32))
    return jnp.moveaxis(o, 0, 1).reshape(o.shape[1], count * block, *o.shape[3:])[:, :length]
