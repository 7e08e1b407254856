"""Weights of the pairs of tokens of a chunk, with decays from the key to the query.

Decays are computed from sums of logarithms, only for pairs of which the key comes first: as exponentials of differences
that are at most 0. `exp(-sum)` would overflow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hpnlp.ops.attention.linear.chunks import Borders, select

DIRECT = 4  # tokens of a block whose decays by feature are computed for each pair
LEAST_LOG = -128.0  # exp(-128) is 0 in float32


class LogSums(NamedTuple):
    """Sums of logarithms of decays, in two terms of which the first is exact.

    The difference of two float32 sums of -1000 has an error of 1e-4, also if all decays between them are close to 1. The exact
    terms cancel without an error, and the other terms are small.

    Attributes:
      coarse: `[Y, C]` or `[Y, C, M]`, multiples of a power of 2; their sums and differences are exact in float32.
      fine: The remainders.
    """

    coarse: jax.Array
    fine: jax.Array

    @property
    def value(self) -> jax.Array:
        """The sums."""
        return self.coarse + self.fine

    def at(self, *index: Any) -> LogSums:
        """Indexes both terms like an array."""
        return LogSums(self.coarse[index], self.fine[index])

    def since(self, earlier: LogSums) -> jax.Array:
        """The sums minus those of earlier tokens."""
        return (self.coarse - earlier.coarse) + (self.fine - earlier.fine)


def repeat_for_group(x: jax.Array, q: jax.Array) -> jax.Array:
    """Repeats values of tokens for the queries of a group.

    Args:
      x: `[Y, C, ...]`.
      q: `[Y, G C, M]`, queries.

    Returns:
      `[Y, G C, ...]`.
    """
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else jnp.tile(x, (1, groups, *[1] * (x.ndim - 2)))


def cumulative(log_decay: jax.Array, borders: Borders) -> LogSums:
    """Sums of logarithms of decays over the tokens of a chunk, in each segment by itself.

    Args:
      log_decay: `[Y, C]` or `[Y, C, M]`; logarithms below LEAST_LOG count as LEAST_LOG.
      borders: Borders of segments, for causal attention.

    Returns:
      The sums `[Y, C]` or `[Y, C, M]` over the token and the preceding ones of its segment in the chunk.
    """
    same = borders.same.astype(jnp.float32)
    pattern = "ts,ys...->yt..." if same.shape[0] == 1 else "yts,ys...->yt..."
    same = same[0] if same.shape[0] == 1 else same
    # All sums of the multiples are at most 2^24 times this power of 2.
    unit = 2.0 ** (math.ceil(math.log2(-LEAST_LOG * log_decay.shape[1])) - 24)
    log_decay = jnp.maximum(log_decay, LEAST_LOG)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay / unit) * unit)
    # Rounding to fewer bits, as matrix units may do, would change decays of long sequences.
    return LogSums(*(jnp.einsum(pattern, same, x, precision="highest") for x in (coarse, log_decay - coarse)))


def weights(q: jax.Array, k: jax.Array, total: LogSums | None, borders: Borders) -> jax.Array:
    """Inner products of queries and keys with decays.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      total: `[Y, C]` or `[Y, C, M]`, the result of `cumulative`; None for no decay.
      borders: Borders of segments.

    Returns:
      `[Y, G C, C]`, with 0 for pairs that do not influence each other.
    """
    size, by_feature = k.shape[1], total is not None and total.coarse.ndim == 3
    rows = _by_feature(q, k, total, borders) if by_feature else jnp.einsum("ytm,ysm->yts", q, k)
    rows = rows.reshape(rows.shape[0], -1, size, size)  # [Y, G, C, C]
    if total is not None and not by_feature:
        difference = total.at(slice(None), slice(None), None).since(total.at(slice(None), None))
        rows = rows * jnp.exp(jnp.where(borders.same, difference, jnp.float32(0)))[:, None]
    return jnp.where(borders.same[:, None], rows, jnp.float32(0)).reshape(*q.shape[:2], size)


def _by_feature(q: jax.Array, k: jax.Array, total: Any, borders: Borders) -> jax.Array:
    """[Y, G C, C], products with a decay of each feature; values of pairs that do not influence each other are arbitrary.

    A block is divided into halves. Between queries of the second and keys of the first half, the decay is a product of the one
    from the key to the last token of the first half, and the one from there to the query; each half is divided in the same way.
    """
    y, size, features = k.shape
    runs = jnp.cumsum(~borders.same[:, 1:, :-1].diagonal(axis1=1, axis2=2), axis=1, dtype=jnp.int32)
    runs = jnp.broadcast_to(jnp.pad(runs, ((0, 0), (1, 0))), (y, size))
    return _halves(q.reshape(y, -1, size, features), k, total, runs).reshape(y, -1, size)


def _halves(q: jax.Array, k: jax.Array, total: LogSums, runs: jax.Array) -> jax.Array:
    """[Y, G, C, C] from q [Y, G, C, M], k and total [Y, C, M], and the segments [Y, C]."""
    (y, groups, size, features), half = q.shape, q.shape[2] // 2
    if size <= DIRECT or size % 2:
        visible = (runs[:, :, None] == runs[:, None]) & jnp.tri(size, dtype=bool)[None]
        difference = total.at(slice(None), slice(None), None).since(total.at(slice(None), None))
        difference = jnp.where(visible[..., None], difference, jnp.float32(0))
        return jnp.einsum("ygtm,ytsm->ygts", q, jnp.exp(difference) * k[:, None])

    first, middle, second = (
        total.at(slice(None), part) for part in (slice(half), slice(half - 1, half), slice(half, None))
    )
    from_key = _exp(runs[:, :half] == runs[:, half - 1 : half], middle.since(first)) * k[:, :half]
    to_query = _exp(runs[:, half:] == runs[:, half - 1 : half], second.since(middle))
    rows = (q[:, :, half:] * to_query[:, None]).reshape(y, -1, features)
    across = jnp.einsum("ytm,ysm->yts", rows, from_key).reshape(y, groups, half, half)

    def halved(x: jax.Array) -> jax.Array:
        """[Y, C, ...] -> [2 Y, C / 2, ...]."""
        return x.reshape(-1, half, *x.shape[2:])

    queries = q.reshape(y, groups, 2, half, features).transpose(0, 2, 1, 3, 4).reshape(-1, groups, half, features)
    within = _halves(queries, halved(k), LogSums(*map(halved, total)), halved(runs)).reshape(y, 2, groups, half, half)
    top = jnp.concatenate([within[:, 0], jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([across, within[:, 1]], axis=-1)], axis=2)


def _exp(flags: jax.Array, x: jax.Array) -> jax.Array:
    """exp(x [Y, C, M]) where flags [Y, C] are True, else 0. x may be large elsewhere."""
    return select(flags, jnp.exp(select(flags, x)))
