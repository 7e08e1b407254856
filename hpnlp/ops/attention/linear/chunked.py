"""Linear attention in chunks: products of pairs within a chunk, and one state for each chunk."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from hpnlp.ops.attention.linear.chunks import Borders, select
from hpnlp.ops.attention.linear.decay import cumulative, repeat_for_group, weights
from hpnlp.ops.attention.linear.delta import corrections
from hpnlp.ops.attention.linear.state import LinearState, normalized
from hpnlp.ops.helpers.custom_vjp import vary_alike

# Chunks in one iteration of the loop over states on a GPU, whose kernels take less time than their launches.
GPU_UNROLL = 16


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


def causal_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    beta: jax.Array | None,
    borders: Borders,
    normalize: bool,
) -> Chunks:
    """Chunks of causal attention.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      v: `[Y, C, H]`, values.
      log_decay: `[Y, C]` or `[Y, C, M]`, logarithms of decays; None for no decay.
      beta: `[Y, C]`, step sizes of the delta rule; None for sums. C is then a power of 2.
      borders: Borders of segments.
      normalize: Whether outputs are normalised.

    Returns:
      The results of the chunks.
    """
    forward = borders.forward
    total = None if log_decay is None else cumulative(log_decay, borders)
    scores = weights(q, k, total, borders)
    readers, keys, k_start, decay = q, k, k, None
    if total is not None:
        from_start = jnp.exp(_with_feature_axis(total.value))
        to_end = total.at(slice(None), slice(-1, None)).since(total)
        to_end = to_end if forward is None else select(forward.writes, to_end)
        readers, k_start = q * repeat_for_group(from_start, q), k * from_start
        keys, decay = k * jnp.exp(_with_feature_axis(to_end)), jnp.exp(total.value[:, -1])
    if forward is not None:
        readers, keys = select(repeat_for_group(forward.reads, q), readers), select(forward.writes, keys)
        continues = forward.continues.astype(jnp.float32)
        decay = continues if decay is None else select(forward.continues, decay)
    if beta is not None:
        k_start = k_start if forward is None else select(forward.reads, k_start)
        v, reads = corrections(k, k_start, v, total, beta, borders)
        readers = readers - jnp.einsum("yts,ysm->ytm", scores, reads)
        decay = _diagonal(decay, keys) - jnp.einsum("ysm,ysp->ymp", keys, reads)
    return Chunks(
        o=jnp.einsum("yts,ysh->yth", scores, v),
        readers=readers,
        sums=jnp.einsum("ysm,ysh->ymh", keys, v),
        decay=decay,
        weight=scores.sum(axis=-1) if normalize else None,
        keys=keys.sum(axis=1) if normalize else None,
    )


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
    scores = weights(q, k, None, borders)
    o, weight = jnp.einsum("yts,ysh->yth", scores, v), scores.sum(axis=-1) if normalize else None
    for crossing, reverse in ((borders.forward, False), (borders.backward, True)):
        assert crossing is not None
        keys, readers = select(crossing.writes, k), select(repeat_for_group(crossing.reads, q), q)
        decay = crossing.continues.astype(jnp.float32)
        sums = jnp.einsum("ysm,ysh->ymh", keys, v)
        states, _ = scan_states(sums, decay, jnp.zeros_like(sums[:heads]), reverse=reverse)
        o = o + jnp.einsum("ytm,ymh->yth", readers, states)
        if weight is not None:
            sums = keys.sum(axis=1)
            states, _ = scan_states(sums, decay, jnp.zeros_like(sums[:heads]), reverse=reverse)
            weight = weight + jnp.einsum("ytm,ym->yt", readers, states)
    return o if weight is None else normalized(o, weight, eps)


def _with_feature_axis(x: jax.Array) -> jax.Array:
    """[Y, C] -> [Y, C, 1]; [Y, C, M] as it is."""
    return x[..., None] if x.ndim == 2 else x


def _diagonal(decay: jax.Array | None, keys: jax.Array) -> jax.Array:
    """[Y or 1, M, M], the decay of a state `[Y, M, H]` as a matrix."""
    identity = jnp.eye(keys.shape[-1], dtype=jnp.float32)[None]
    return identity if decay is None else identity * decay.reshape(decay.shape[0], -1, 1)


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
    if decay is None:
        start, sums = vary_alike(start, sums)
    else:
        start, sums, decay = vary_alike(start, sums, decay)
    by_chunk = sums.reshape(-1, *start.shape)
    if by_chunk.shape[0] == 1:
        return start, _decayed(start, decay) + sums
    factors = None if decay is None else decay.reshape(-1, start.shape[0], *decay.shape[1:])
    if jax.default_backend() == "gpu":
        if factors is not None and factors.ndim == 4 and not reverse:
            states, last = _states_by_tree(by_chunk, factors, start)
        else:
            states, last = _states_by_loop(by_chunk, factors, start, reverse, GPU_UNROLL)
    else:
        states, last = _states_by_loop(by_chunk, factors, start, reverse)
    return states.reshape(sums.shape), last


def _states_by_loop(
    sums: jax.Array, factors: jax.Array | None, start: jax.Array, reverse: bool, unroll: int = 1
) -> tuple[jax.Array, jax.Array]:
    """States `[n, B K, ...]` of `scan_states`, one chunk after another, and the last state."""

    def step(state: jax.Array, chunk: PyTree) -> tuple[jax.Array, jax.Array]:
        more, factor = chunk
        return _decayed(state, factor) + more, state

    last, states = lax.scan(step, start, (sums, factors), reverse=reverse, unroll=unroll)
    return states, last


def _states_by_tree(sums: jax.Array, factors: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """States of `_states_by_loop` for matrices of decay, in log2(n) rounds of products of pairs of chunks."""

    def join(earlier: PyTree, later: PyTree) -> PyTree:
        (a, s), (b, t) = earlier, later
        return jnp.einsum("nxmp,nxpq->nxmq", b, a), jnp.einsum("nxmp,nxph->nxmh", b, s) + t

    factors, sums = lax.associative_scan(join, (factors, sums))
    after = jnp.einsum("nxmp,xph->nxmh", factors, start) + sums
    return jnp.concatenate([start[None], after[:-1]]), after[-1]


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
