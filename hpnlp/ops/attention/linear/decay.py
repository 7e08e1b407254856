"""Weights of the pairs of tokens of a chunk, with decays from the key to the query.

Decays are computed from sums of logarithms, only for pairs of which the key comes first: as exponentials of differences
that are at most 0. `exp(-sum)` would overflow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from hpnlp.ops.attention.linear.chunks import Borders, select

DIRECT = 4  # tokens of a block whose decays by feature are computed for each pair


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


def cumulative(log_decay: jax.Array, borders: Borders) -> jax.Array:
    """Sums of logarithms of decays over the tokens of a chunk, in each segment by itself.

    Args:
      log_decay: `[Y, C]` or `[Y, C, M]`.
      borders: Borders of segments, for causal attention.

    Returns:
      `[Y, C]` or `[Y, C, M]`, the sum over the token and the preceding ones of its segment in the chunk.
    """
    same = borders.same.astype(jnp.float32)
    pattern = "ts,ys...->yt..." if same.shape[0] == 1 else "yts,ys...->yt..."
    same = same[0] if same.shape[0] == 1 else same
    # Rounding to fewer bits, as matrix units may do, would change decays of long sequences.
    return jnp.einsum(pattern, same, log_decay, precision="highest")


def weights(q: jax.Array, k: jax.Array, total: jax.Array | None, borders: Borders) -> jax.Array:
    """Inner products of queries and keys with decays.

    Args:
      q: `[Y, G C, M]`, queries.
      k: `[Y, C, M]`, keys.
      total: `[Y, C]` or `[Y, C, M]`, the result of `cumulative`; None for no decay.
      borders: Borders of segments.

    Returns:
      `[Y, G C, C]`, with 0 for pairs that do not influence each other.
    """
    size, by_head = k.shape[1], total is None or total.ndim == 2
    rows = jnp.einsum("ytm,ysm->yts", q, k) if by_head else _by_feature(q, k, total, borders)
    rows = rows.reshape(rows.shape[0], -1, size, size)  # [Y, G, C, C]
    if total is not None and total.ndim == 2:
        difference = total[:, :, None] - total[:, None, :]
        rows = rows * jnp.exp(jnp.where(borders.same, difference, jnp.float32(0)))[:, None]
    return jnp.where(borders.same[:, None], rows, jnp.float32(0)).reshape(*q.shape[:2], size)


def _by_feature(q: jax.Array, k: jax.Array, total: Any, borders: Borders) -> jax.Array:
    """[Y, G C, C], products with a decay of each feature; values of pairs that do not influence each other are arbitrary.

    A block is divided into halves. Between queries of the second and keys of the first half, the decay is a product of the one
    from the key to the last token of the first half, and the one from there to the query; the halves are divided further.
    """
    y, size, features = k.shape
    runs = jnp.cumsum(~borders.same[:, 1:, :-1].diagonal(axis1=1, axis2=2), axis=1, dtype=jnp.int32)
    runs = jnp.broadcast_to(jnp.pad(runs, ((0, 0), (1, 0))), (y, size))
    return _halves(q.reshape(y, -1, size, features), k, total, runs).reshape(y, -1, size)


def _halves(q: jax.Array, k: jax.Array, total: jax.Array, runs: jax.Array) -> jax.Array:
    """[Y, G, C, C] from q [Y, G, C, M], k and total [Y, C, M], and the segments [Y, C]."""
    (y, groups, size, features), half = q.shape, q.shape[2] // 2
    if size <= DIRECT or size % 2:
        visible = (runs[:, :, None] == runs[:, None]) & jnp.tri(size, dtype=bool)[None]
        difference = jnp.where(visible[..., None], total[:, :, None] - total[:, None], jnp.float32(0))
        return jnp.einsum("ygtm,ytsm->ygts", q, jnp.exp(difference) * k[:, None])

    middle = total[:, half - 1 : half]
    from_key = _exp(runs[:, :half] == runs[:, half - 1 : half], middle - total[:, :half]) * k[:, :half]
    to_query = _exp(runs[:, half:] == runs[:, half - 1 : half], total[:, half:] - middle)
    rows = (q[:, :, half:] * to_query[:, None]).reshape(y, -1, features)
    across = jnp.einsum("ytm,ysm->yts", rows, from_key).reshape(y, groups, half, half)

    def halved(x: jax.Array) -> jax.Array:
        """[Y, C, ...] -> [2 Y, C / 2, ...]."""
        return x.reshape(-1, half, *x.shape[2:])

    queries = q.reshape(y, groups, 2, half, features).transpose(0, 2, 1, 3, 4).reshape(-1, groups, half, features)
    within = _halves(queries, halved(k), halved(total), halved(runs)).reshape(y, 2, groups, half, half)
    first = jnp.concatenate([within[:, 0], jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([first, jnp.concatenate([across, within[:, 1]], axis=-1)], axis=2)


def _exp(flags: jax.Array, x: jax.Array) -> jax.Array:
    """exp(x [Y, C, M]) where flags [Y, C] are True, else 0. x may be large elsewhere."""
    return select(flags, jnp.exp(select(flags, x)))
