"""Nystrom approximation of softmax attention by landmarks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.attention.attend import attend
from hpnlp.ops.attention.low_rank.compression import padding_ids, pool_tokens
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError

ITERATIONS = 6  # the pseudo-inverse takes as many as in the paper


@array_op("B T N", q="B T N")
def nystrom_attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B _ K H"],
    landmarks: int,
    real: Bool[Array, "B T"] | None = None,
    *,
    dropout_rate: float = 0.0,
    rng: Array | None = None,
    streams: Int[Array, "B N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Self-attention through landmarks: `softmax(Q L_k^T) pinv(softmax(L_q L_k^T)) softmax(L_q K^T) V`.

    The landmarks L_q and L_k are means of windows of ceil(T / landmarks) tokens; the last window may be shorter. Where a window
    would be one token, the result is exact softmax attention.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      landmarks: Largest number of landmarks, M.
      real: False for padding, which no token attends to and whose output is 0; None if there is none.
      dropout_rate: Probability of dropping a weight, in the first and the last of the three softmaxes.
      rng: PRNG key of dropout.
      streams: As for `attend`.

    Returns:
      The mixed values, in the dtype of q; computed in float32.

    Raises:
      InputError: `landmarks` is less than 1, or q, k and v have different numbers of tokens.

    Cost: O(B N T M H) time, and O(B N (T H + M^2)) memory.

    References:
      Xiong et al. 2021, "Nystromformer: a Nystrom-based algorithm for approximating self-attention", eq. 13. The landmarks of a
      padded sequence are means of its tokens without padding.
    """
    length = q.shape[1]
    if landmarks < 1 or k.shape[1] != length or v.shape[1] != length:
        raise InputError(
            f"{landmarks} landmarks, {length} queries, {k.shape[1]} keys and {v.shape[1]} values: expected at least 1 "
            "landmark, and as many keys and values as queries"
        )
    size = -(-length // landmarks)
    tokens, seen_tokens = padding_ids(real)
    dropout = {"dropout_rate": dropout_rate, "rng": rng, "streams": streams}
    if size <= 1:
        exact: Any = attend(q, k, v, segment_ids=tokens, kv_segment_ids=seen_tokens, **dropout)
        return exact
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    # Rounding to 16 bits before the product with the inverse would be amplified by it.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    (queries, filled), (keys, _) = pool_tokens(q, size, real), pool_tokens(k, size, real)
    # Without the barrier, XLA merges the division of the means with the scale of the scores in one of the passes only, and the
    # weights of large scores differ between the passes.
    queries, keys = lax.optimization_barrier((queries, keys))
    keys = jnp.repeat(keys, group, axis=2)
    windows, seen_windows = padding_ids(None if real is None else filled)
    summaries: Any = attend(queries, k, v, segment_ids=windows, kv_segment_ids=seen_tokens, **dropout)
    inverse = pseudo_inverse(_landmark_weights(queries, keys, filled))
    values = jnp.einsum("bnlm,bmnh->blnh", inverse, summaries, precision="highest")
    if rng is not None:
        dropout["rng"] = jax.random.fold_in(rng, 1)
    o: Any = attend(q, keys, values, segment_ids=tokens, kv_segment_ids=seen_windows, **dropout)
    return o.astype(dtype)


def pseudo_inverse(a: Array, iterations: int = ITERATIONS) -> Float[Array, "*B M M"]:
    """Iterative approximation of the Moore-Penrose inverse, of each matrix by itself.

    Args:
      a: float32 matrices of numbers that are not negative, with row sums of at most 1.
      iterations: Number of iterations, of third order.

    Returns:
      The approximations. Rows and columns of zeros stay zeros.

    Cost: 4 products of M x M matrices in each iteration.

    References:
      Xiong et al. 2021, eq. 11 (Razavi et al. 2014), with the start of the authors' code: the transpose, divided by the largest
      column sum. Theirs is the largest of all heads and sequences, by which these would depend on each other.
    """
    identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape)
    largest = jnp.max(jnp.sum(a, axis=-2), axis=-1)[..., None, None]
    inverse = jnp.swapaxes(a, -1, -2) / jnp.where(largest > 0, largest, 1)
    for _ in range(iterations):
        product = _product(a, inverse)
        inner = 15 * identity - _product(product, 7 * identity - product)
        inverse = 0.25 * _product(inverse, 13 * identity - _product(product, inner))
    return inverse


@array_op("B T N", q="B T N")
def nystrom_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    landmarks: int,
    real: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
    """`nystrom_attend` by its definition, with dense matrices, for one head at a time.

    Args:
      q: Queries.
      k: Keys.
      v: Values.
      landmarks: Largest number of landmarks.
      real: False for padding; None if there is none.

    Returns:
      The mixed values, in the dtype of q.

    Cost: O(B N T M) memory.
    """
    (batch, length, heads, width), dtype = q.shape, q.dtype
    real = jnp.ones((batch, length), bool) if real is None else real
    size = -(-length // landmarks)
    # [windows, T]: the tokens of each window.
    members = (jnp.arange(-(-length // size))[:, None] == jnp.arange(length)[None] // size).astype(jnp.float32)

    def one_head(q: Array, k: Array, v: Array, real: Array) -> Array:
        q, k, v = (jnp.where(real[:, None], x.astype(jnp.float32), jnp.float32(0)) for x in (q, k, v))
        counts = members @ real.astype(jnp.float32)
        lq, lk = (members @ x / jnp.maximum(counts, 1)[:, None] for x in (q, k))
        windows, scale = counts > 0, width**-0.5
        first, kernel, last = (
            _masked_softmax(a @ b.T * scale, rows, columns)
            for a, b, rows, columns in ((q, lk, real, windows), (lq, lk, windows, windows), (lq, k, windows, real))
        )
        return first @ (pseudo_inverse(kernel) @ (last @ v)) if size > 1 else last @ v

    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    over_heads = jax.vmap(one_head, (1, 1, 1, None), 1)
    return jax.vmap(over_heads)(q, k, v, real).astype(dtype)


def _masked_softmax(scores: Array, rows: Array, columns: Array) -> Array:
    """Softmax over the allowed columns, and 0 in all other places."""
    visible = rows[..., :, None] & columns[..., None, :]
    # Rows of -inf would have NaN as their gradient.
    weights = jax.nn.softmax(jnp.where(visible | ~rows[..., :, None], scores, -jnp.inf), axis=-1)
    return jnp.where(visible, weights, jnp.float32(0))


def _landmark_weights(queries: Array, keys: Array, filled: Array) -> Array:
    """[B, N, M, M]: attention weights of the landmarks among each other."""
    scores = jnp.einsum("blnh,bmnh->bnlm", queries, keys, precision="highest") * queries.shape[-1] ** -0.5
    return _masked_softmax(scores, filled[:, None], filled[:, None])


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")
