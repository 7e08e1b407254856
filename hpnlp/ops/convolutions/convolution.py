"""Convolutions along the sequence, in which segments do not influence each other."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.types import InputError


@array_op("B T", x="B T")
def causal_conv(
    x: Float[Array, "B T D"], kernel: Float[Array, "W D"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T D"]:
    """Convolves each feature with a kernel of its own: `y[t] = sum_j kernel[j] * x[t - j]`.

    Tokens before the sequence, and tokens of another segment, count as 0, even if they are NaN.

    Args:
      x: The sequences.
      kernel: Weights of the current token, the one before it, and so on.
      segment_ids: Segment of each token; None for one segment per sequence.

    Returns:
      The convolved sequences, in the dtype of x; sums are float32.

    Raises:
      InputError: The kernel has no weight, or another number of features than x.

    Cost: B T W D multiplications, which the compiler fuses into one pass over x. A gradient keeps x only.

    References:
      The token mixer of Gu and Dao 2023, "Mamba", fig. 3, and of So et al. 2021, "Primer", sec. 3 (there after the
      projections).
    """
    return _checked(x, kernel, segment_ids, 0)


@array_op("B T", x="B T")
def depthwise_conv(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "W D"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    ahead: int = 0,
) -> Float[Array, "B T D"]:
    """Convolves each feature with a kernel of its own: `y[t] = sum_j kernel[j] * x[t + ahead - j]`.

    Tokens outside of the sequence, and tokens of another segment, count as 0, even if they are NaN.

    Args:
      x: The sequences.
      kernel: Weights, of the latest token that is read first.
      segment_ids: Segment of each token; None for one segment per sequence.
      ahead: Number of later tokens that an output reads; 0 for `causal_conv`.

    Returns:
      The convolved sequences, in the dtype of x; sums are float32.

    Raises:
      InputError: The kernel has no weight, or another number of features than x.

    Cost: that of `causal_conv`.
    """
    return _checked(x, kernel, segment_ids, ahead)


@array_op("B T", x="B T")
def token_windows(
    x: Float[Array, "B T D"],
    width: int,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    ahead: int = 0,
    dilation: int = 1,
) -> Float[Array, "B T _"]:
    """The tokens around each token side by side, by whose product with a matrix `[W D, F]` a convolution is computed.

    Args:
      x: The sequences.
      width: Number of tokens W.
      segment_ids: Segment of each token; None for one segment per sequence.
      ahead: Number of later tokens.
      dilation: Distance d between neighbouring tokens of a window.

    Returns:
      The features of the tokens t + d ahead, t + d (ahead - 1), ..., t + d (ahead - W + 1) in this order, with 0 for tokens
      outside of the sequence and of other segments.

    Cost: memory of W times x.
    """
    distances = [dilation * (tap - ahead) for tap in range(width)]
    return jnp.concatenate([_earlier(x, distance, segment_ids) for distance in distances], axis=-1)


@array_op("B T N", x="B T N", segment_ids="B T")
def dilated_conv(
    x: Float[Array, "B T N H"],
    kernel: Float[Array, "N W H F"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    ahead: int = 0,
    dilation: int = 1,
    preceding: Float[Array, "B P N H"] | None = None,
) -> Float[Array, "B T N F"]:
    """Convolves each head over every d-th token: `y[t] = sum_j x[t + d (ahead - j)] @ kernel[j]`.

    Tokens outside of the sequence, and tokens of another segment, count as 0, even if they are NaN.

    Args:
      x: Features of the heads.
      kernel: A matrix for each head and each of W tokens, of the latest token that is read first.
      segment_ids: Segment of each token; None for one segment per sequence.
      ahead: Number of later tokens that an output reads; 0 for a causal convolution.
      dilation: Distance d between the tokens.
      preceding: The P = d (W - 1 - ahead) tokens before x, zeros before the sequence; None for zeros.

    Returns:
      The convolved features, in the dtype of x; sums are float32.

    Raises:
      InputError: The shapes of the arguments do not agree, there is no tap, `ahead` is not below the number of taps, or
        `dilation` is below 1.

    Cost: B T W N H F multiplications, as one product for each head; memory of W times x, which a gradient does not keep.

    References:
      Kalchbrenner et al. 2016, "Neural machine translation in linear time" (ByteNet), sec. 3.2 and 3.3.
    """
    heads, width, features = kernel.shape[:3]
    if width < 1 or (heads, features) != x.shape[2:]:
        raise InputError(
            f"kernel {kernel.shape} for x {x.shape}: expected ({x.shape[2]}, taps, {x.shape[3]}, features) with at least one "
            "tap"
        )
    if not 0 <= ahead < width:
        raise InputError(f"ahead={ahead}: expected 0 to {width - 1}, since there are {width} taps")
    if dilation < 1:
        raise InputError(f"dilation={dilation}: expected at least 1")
    earlier = (x.shape[0], dilation * (width - 1 - ahead), *x.shape[2:])
    if preceding is not None and (preceding.shape != earlier or segment_ids is not None):
        raise InputError(f"preceding {preceding.shape}: expected {earlier}, and no segment_ids")
    # Without the checkpoint, a gradient would keep the windows.
    convolve = jax.checkpoint(functools.partial(_products_of_taps, ahead, dilation), prevent_cse=False)
    if preceding is None:
        return convolve(x, kernel, segment_ids)
    return convolve(jnp.concatenate([preceding, x], axis=1), kernel, None)[:, preceding.shape[1] :]


def _products_of_taps(ahead: int, dilation: int, x: Array, kernel: Array, segment_ids: Array | None) -> Array:
    (heads, width, features, _), (batch, length) = kernel.shape, x.shape[:2]
    windows = token_windows(
        x.reshape(batch, length, heads * features), width, segment_ids, ahead=ahead, dilation=dilation
    )
    windows = windows.reshape(batch, length, width, heads, features)
    y = jnp.einsum("btwnh,nwhf->btnf", windows, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return y.astype(x.dtype)


def _checked(x: Array, kernel: Array, segment_ids: Array | None, ahead: int) -> Array:
    if kernel.shape[0] < 1 or kernel.shape[1] != x.shape[2]:
        raise InputError(
            f"kernel {kernel.shape}: expected at least one weight for each of the {x.shape[2]} features of x"
        )
    ids = () if segment_ids is None else (segment_ids,)
    x, kernel, *ids = vary_alike(x, kernel, *ids)
    return _convolve(ahead, x, kernel, ids[0] if ids else None)


@array_op("B P", x="B T", lengths="B")
def last_tokens(
    x: Float[Array, "B T *features"], lengths: Int[Array, " B"], count: int
) -> Float[Array, "B P *features"]:
    """The last tokens of each sequence, which a convolution of new tokens reads.

    Args:
      x: Tokens, of which the first `lengths` are those of the sequence.
      lengths: Number of tokens of each sequence.
      count: Number of tokens P.

    Returns:
      The tokens, in the dtype of x; zeros in place of tokens before the first one.

    Cost: a gather of B P tokens.
    """
    indices = lengths[:, None] + jnp.arange(-count, 0, dtype=jnp.int32)[None]
    indices = indices.reshape(*indices.shape, *[1] * (x.ndim - 2))
    return jnp.where(indices >= 0, jnp.take_along_axis(x, jnp.maximum(indices, 0), axis=1), jnp.zeros((), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(ahead: int, x: Array, kernel: Array, segment_ids: Array | None) -> Array:
    weights = kernel.astype(jnp.float32)[:, None, None]
    return _sum_of_taps(x, weights, [tap - ahead for tap in range(kernel.shape[0])], segment_ids)


def _convolve_forward(ahead: int, x: Array, kernel: Array, segment_ids: Array | None) -> tuple[Any, Any]:
    return _convolve(ahead, x, kernel, segment_ids), (x, kernel, segment_ids)


def _convolve_backward(ahead: int, saved: PyTree, dy: Array) -> tuple[Array, Array, None]:
    x, kernel, segment_ids = saved
    weights, length = kernel.astype(jnp.float32)[:, None, None], x.shape[1]
    dx = _sum_of_taps(dy, weights, [ahead - tap for tap in range(kernel.shape[0])], segment_ids)
    around, ids = (_around(array, kernel.shape[0] - 1, ahead) for array in (x, segment_ids))
    dy = dy.astype(jnp.float32)

    def tap_gradient(tap: Array) -> Array:
        """The gradient of one weight of each feature."""
        start = kernel.shape[0] - 1 + ahead - tap
        earlier = lax.dynamic_slice_in_dim(around, start, length, axis=1).astype(jnp.float32)
        if ids is not None:
            same = lax.dynamic_slice_in_dim(ids, start, length, axis=1) == segment_ids
            earlier = jnp.where(same[..., None], earlier, jnp.float32(0))
        product = dy * earlier
        # A sum over tokens as a product with ones, which XLA:CPU computes faster.
        ones = jnp.ones_like(product[..., :1])
        return jnp.einsum("bto,btd->bod", ones, product, precision=lax.Precision.HIGHEST).sum(axis=(0, 1))

    # A loop, so that dy is computed once. XLA:CPU would compute it again from its inputs for each tap, transposed.
    dkernel = lax.map(tap_gradient, jnp.arange(kernel.shape[0], dtype=jnp.int32))
    return dx, dkernel.astype(kernel.dtype), None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _sum_of_taps(x: Array, weights: Iterable[Array], distances: Sequence[int], segment_ids: Array | None) -> Array:
    """The sum of the tokens at some distances, weighted in float32, in the dtype of x."""
    total = None
    for weight, distance in zip(weights, distances, strict=True):
        if abs(distance) < x.shape[1]:
            term = weight * _earlier(x, distance, segment_ids).astype(jnp.float32)
            total = term if total is None else total + term
    return jnp.zeros_like(x) if total is None else total.astype(x.dtype)


def _earlier(x: Array, distance: int, segment_ids: Array | None) -> Array:
    """The tokens at a distance before each token; 0 outside of its segment."""
    shifted = _shifted(x, distance)
    if segment_ids is None or distance == 0:
        return shifted
    same = _shifted(segment_ids, distance) == segment_ids
    return jnp.where(same[..., None], shifted, jnp.zeros((), x.dtype))


def _shifted(x: Array, distance: int) -> Array:
    """Moves x later by `distance` tokens, which may be negative, with zeros in the places of tokens outside of the sequence."""
    if distance == 0:
        return x
    if abs(distance) >= x.shape[1]:
        return jnp.zeros_like(x)
    padding = [(0, 0)] * x.ndim
    padding[1] = (max(distance, 0), max(-distance, 0))
    start = max(-distance, 0)
    return jnp.pad(x, padding)[:, start : start + x.shape[1]]


def _around(x: Array | None, before: int, after: int) -> Any:
    """Zeros before and after the tokens of x, or None."""
    return None if x is None else jnp.pad(x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
