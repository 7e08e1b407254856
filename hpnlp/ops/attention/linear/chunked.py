"""Linear attention in chunks: products of pairs within a chunk, and one state for each chunk."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.ops.attention.linear.chunks import Borders, select
from hpnlp.ops.attention.linear.state import LinearState, normalized


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Results of all chunks by themselves, from which the states of the chunks and the outputs follow.

    Attributes:
      o: `[Y, G C, H]`, sums over the keys of the chunk.
      readers: `[Y, G C, M]`: queries as they read the state at the beginning of the chunk.
      sums: `[Y, M, H]`, the part of the state at the end of the chunk that its tokens add.
      decay: `[Y]`, `[Y, M]` or `[Y, M, M]`: factor of the state at the beginning; None for 1.
      weight: `[Y, G C]`, sums of the weights of the chunk's keys; None without normalisation.
      keys: `[Y, M]`, sums of the keys that reach the end of the chunk; None without normalisation.
    """

    o: jax.Array
    readers: jax.Array
    sums: jax.Array
    decay: jax.Array | None = None
    weight: jax.Array | None = None
    keys: jax.Array | None = None


def causal_chunks(q: jax.Array, k: jax.Array, v: jax.Array, borders: Borders, normalize: bool) -> Chunks:
    """Chunks of causal attention without decays.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      v: `[Y, C, H]`, values.
      borders: Borders of segments.
      normalize: Whether outputs are normalised.

    Returns:
      The results of the chunks.
    """
    o, weight = pairs_of_chunks(q, k, v, borders, normalize)
    forward = borders.forward
    keys = k if forward is None else select(forward.writes, k)
    return Chunks(
        o=o,
        readers=q if forward is None else select(of_groups(forward.reads, q), q),
        sums=jnp.einsum("ysm,ysh->ymh", keys, v),
        decay=None if forward is None else forward.continues.astype(jnp.float32),
        weight=weight,
        keys=keys.sum(axis=1) if normalize else None,
    )


def pairs_of_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, borders: Borders, normalize: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Sums over the keys of each chunk.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      v: `[Y, C, H]`, values.
      borders: Borders of segments.
      normalize: Whether outputs are normalised.

    Returns:
      (sums of values `[Y, G C, H]`, sums of weights `[Y, G C]` or None).
    """
    scores = _masked(borders.same, jnp.einsum("ytm,ysm->yts", q, k))
    return jnp.einsum("yts,ysh->yth", scores, v), scores.sum(axis=-1) if normalize else None


def bidirectional(
    q: jax.Array, k: jax.Array, v: jax.Array, borders: Borders, heads: int, normalize: bool, eps: float
) -> jax.Array:
    """Attention in both directions within segments.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      v: `[Y, C, H]`, values.
      borders: Borders of segments.
      heads: Number B K of the key heads of all sequences.
      normalize: Whether outputs are normalised.
      eps: As for `linear_attention`.

    Returns:
      o `[Y, G C, H]`.
    """
    o, weight = pairs_of_chunks(q, k, v, borders, normalize)
    for crossing, reverse in ((borders.forward, False), (borders.backward, True)):
        assert crossing is not None
        keys, readers = select(crossing.writes, k), select(of_groups(crossing.reads, q), q)
        decay = crossing.continues.astype(jnp.float32)
        sums = jnp.einsum("ysm,ysh->ymh", keys, v)
        states, _ = scan_states(sums, decay, jnp.zeros_like(sums[:heads]), reverse=reverse)
        o = o + jnp.einsum("ytm,ymh->yth", readers, states)
        if weight is not None:
            sums = keys.sum(axis=1)
            states, _ = scan_states(sums, decay, jnp.zeros_like(sums[:heads]), reverse=reverse)
            weight = weight + jnp.einsum("ytm,ym->yt", readers, states)
    return o if weight is None else normalized(o, weight, eps)


def _masked(same: jax.Array, scores: jax.Array) -> jax.Array:
    """Scores `[Y, G C, C]` with zeros for pairs of which `same` `[Y or 1, C, C]` is False."""
    size = same.shape[-1]
    by_group = scores.reshape(scores.shape[0], -1, size, size)
    return jnp.where(same[:, None], by_group, jnp.float32(0)).reshape(scores.shape)


def of_groups(x: jax.Array, q: jax.Array) -> jax.Array:
    """Repeats values of tokens for the queries of a group.

    Args:
      x: `[Y, C, ...]`.
      q: `[Y, G C, M]`, queries.

    Returns:
      `[Y, G C, ...]`.
    """
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else jnp.tile(x, (1, groups, *[1] * (x.ndim - 2)))


def scan_states(
    sums: jax.Array, decay: jax.Array | None, start: jax.Array, *, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """States at the beginning of each chunk.

    Args:
      sums: `[Y, ...]`, the terms of the chunks.
      decay: Factor of the state in each chunk, as in `Chunks`.
      start: `[B K, ...]`, the state before the first chunk.
      reverse: Sum over later chunks, beginning with the last.

    Returns:
      (`[Y, ...]`, the state after the last chunk).
    """
    by_chunk = sums.reshape(-1, *start.shape)
    if by_chunk.shape[0] == 1:
        return start, _decayed(start, decay) + sums

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        more, factor = chunk
        return _decayed(state, factor) + more, state

    factors = None if decay is None else decay.reshape(-1, start.shape[0], *decay.shape[1:])
    last, states = lax.scan(step, start, (by_chunk, factors), reverse=reverse)
    return states.reshape(sums.shape), last


def _decayed(state: jax.Array, decay: jax.Array | None) -> jax.Array:
    if decay is None:
        return state
    if decay.ndim == 3:
        return jnp.einsum("xmp,xph->xmh", decay, state)
    return state * decay.reshape(*decay.shape, *[1] * (state.ndim - decay.ndim))


def outputs(chunks: Chunks, state: LinearState, eps: float) -> tuple[jax.Array, LinearState]:
    """Adds to the outputs of the chunks what they read from the states before them.

    Args:
      chunks: Results of the chunks.
      state: State before the first chunk.
      eps: As for `linear_attention`.

    Returns:
      (o `[Y, G C, H]`, the state after the last chunk).
    """
    batch, heads = state.s.shape[:2]
    states, s = scan_states(chunks.sums, chunks.decay, _flat(state.s))
    o = chunks.o + jnp.einsum("ytm,ymh->yth", chunks.readers, states)
    s = s.reshape(batch, heads, *s.shape[1:])
    if chunks.weight is None or chunks.keys is None:
        return o, LinearState(s)
    assert state.z is not None
    states, z = scan_states(chunks.keys, chunks.decay, _flat(state.z))
    weight = chunks.weight + jnp.einsum("ytm,ym->yt", chunks.readers, states)
    return normalized(o, weight, eps), LinearState(s, z.reshape(batch, heads, -1))


def _flat(x: jax.Array) -> jax.Array:
    """[B, K, ...] -> [B K, ...]."""
    return x.reshape(-1, *x.shape[2:])
