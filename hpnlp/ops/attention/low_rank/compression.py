"""Compression of keys and values along the sequence: by a learned matrix, by means, or by a strided convolution."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.types import InputError


@array_op("B R K", x="B S K")
def project_tokens(
    x: Float[Array, "B S K H"],
    projection: Float[Array, "R _"] | Float[Array, "_ R _"],
    real: Bool[Array, "B S"] | None = None,
) -> Float[Array, "B R K H"]:
    """Products of a matrix and the tokens: `y[r] = sum_s projection[r, s] * x[s]`.

    Args:
      x: Keys or values.
      projection: One matrix for all heads, or one for each.
      real: False for tokens that count as 0, even if they are NaN; None if all count.

    Returns:
      R compressed tokens, in the dtype of x; sums are float32.

    Raises:
      InputError: The matrix is for another number of tokens.

    Cost: B R S K H multiplications.

    References:
      Wang et al. 2020, "Linformer: self-attention with linear complexity", eq. 7.
    """
    batch, length, heads, width = x.shape
    if projection.shape[-1] != length:
        raise InputError(
            f"projection {projection.shape}: expected matrices of {length} columns, one for each token of x"
        )
    x, projection = _masked(x, real), projection.astype(x.dtype)
    if projection.ndim == 3:
        y = jnp.einsum("krs,bskh->brkh", projection, x, preferred_element_type=jnp.float32)
    else:  # one product for all heads and features
        flat = x.reshape(batch, length, heads * width)
        y = jnp.einsum("rs,bsf->brf", projection, flat, preferred_element_type=jnp.float32)
    return y.reshape(batch, projection.shape[-2], heads, width).astype(x.dtype)


@array_op("B R K | B R", x="B S K")
def pool_tokens(
    x: Float[Array, "B S K H"], size: int, real: Bool[Array, "B S"] | None = None
) -> tuple[Float[Array, "B R K H"], Bool[Array, "B R"]]:
    """Means of windows of consecutive tokens; the last window may be shorter.

    Args:
      x: Queries, keys or values.
      size: Tokens in a window.
      real: False for tokens that do not count, even if they are NaN; None if all count.

    Returns:
      `(means, filled)`: R = ceil(S / size) means in the dtype of x, computed in float32, and False for windows in which no
      token counts, whose mean is 0.

    Raises:
      InputError: `size` is less than 1.

    Cost: one pass over x.

    References:
      Wang et al. 2020, "Linformer", sec. 4, "general projections"; Xiong et al. 2021, "Nystromformer", sec. 3.3 (segment
      means).
    """
    if size < 1:
        raise InputError(f"size {size}: expected windows of at least 1 token")
    batch, length, *features = x.shape
    counted = jnp.ones((batch, length), bool) if real is None else real
    counts = _windows(counted, size).sum(axis=2, dtype=jnp.int32)
    sums = _windows(_masked(x, real), size).sum(axis=2, dtype=jnp.float32)
    divisor = jnp.maximum(counts, 1).astype(jnp.float32).reshape(*counts.shape, *[1] * len(features))
    return (sums / divisor).astype(x.dtype), counts > 0


@array_op("B R K | B R", x="B S K")
def convolve_tokens(
    x: Float[Array, "B S K H"], taps: Float[Array, "W _ _"], real: Bool[Array, "B S"] | None = None
) -> tuple[Float[Array, "B R K H"], Bool[Array, "B R"]]:
    """Depthwise convolution whose width is its stride: a weighted sum of each window of W tokens.

    Args:
      x: Keys or values.
      taps: Weights of the tokens of a window, for each feature.
      real: False for tokens that count as 0, even if they are NaN; None if all count.

    Returns:
      `(sums, filled)`: R = ceil(S / W) compressed tokens in the dtype of x, summed in float32, and False for windows in which
      no token counts.

    Raises:
      InputError: The taps are for other heads or features than those of x.

    Cost: B S K H multiplications.

    References:
      Wang et al. 2020, "Linformer", sec. 4, "general projections".
    """
    if taps.shape[1:] != x.shape[2:]:
        raise InputError(
            f"taps {taps.shape}: expected [W, {x.shape[2]}, {x.shape[3]}], as x has these heads and features"
        )
    size = taps.shape[0]
    counted = jnp.ones(x.shape[:2], bool) if real is None else real
    windows = _windows(_masked(x, real), size).astype(jnp.float32)
    sums = jnp.sum(windows * taps.astype(jnp.float32)[None, None], axis=2)
    return sums.astype(x.dtype), _windows(counted, size).any(axis=2)


def padding_ids(
    queries: Bool[Array, "B T"] | None, keys: Bool[Array, "B S"] | None = None
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B S"] | None]:
    """Segment ids with which padding neither sees a key nor is seen by a query.

    Args:
      queries: False for queries that are padding; None if there is none.
      keys: False for keys that are padding; None for those of `queries`.

    Returns:
      `(segment_ids, kv_segment_ids)` for `attend`; both are None if `queries` is.
    """
    if queries is None:
        return None, None
    keys = queries if keys is None else keys
    return jnp.where(queries, 1, 0).astype(jnp.int32), jnp.where(keys, 1, 2).astype(jnp.int32)


def _masked(x: Array, real: Array | None) -> Array:
    """Tokens with zeros in place of those that do not count."""
    if real is None:
        return x
    return jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


def _windows(x: Array, size: int) -> Array:
    """[B, S, ...] -> [B, ceil(S / size), size, ...], with zeros after the last token."""
    batch, length, *features = x.shape
    count = -(-length // size)
    padding = [(0, 0), (0, count * size - length), *[(0, 0)] * len(features)]
    return jnp.pad(x, padding).reshape(batch, count, size, *features)
