"""Causal depthwise convolution along the sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
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
    if kernel.shape[0] < 1 or kernel.shape[1] != x.shape[2]:
        raise InputError(
            f"kernel {kernel.shape}: expected at least one weight for each of the {x.shape[2]} features of x"
        )
    # Without the checkpoint, a gradient would keep W float32 copies of x.
    return jax.checkpoint(_convolve, prevent_cse=False)(x, kernel, segment_ids)


@array_op("B P", x="B T", lengths="B")
def last_tokens(
    x: Float[Array, "B T *features"], lengths: Int[Array, " B"], count: int
) -> Float[Array, "B P *features"]:
    """The last tokens of each sequence, which a convolution of further tokens reads.

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


def _convolve(x: Array, kernel: Array, segment_ids: Array | None) -> Array:
    weights = kernel.astype(jnp.float32)[:, None, None]
    total = weights[0] * x.astype(jnp.float32)
    for distance in range(1, min(kernel.shape[0], x.shape[1])):
        earlier = _shifted(x, distance).astype(jnp.float32)
        if segment_ids is not None:
            same = _shifted(segment_ids, distance) == segment_ids
            earlier = jnp.where(same[..., None], earlier, jnp.float32(0))
        total = total + weights[distance] * earlier
    return total.astype(x.dtype)


def _shifted(x: Array, distance: int) -> Array:
    """Moves x later by `distance` tokens, with zeros at the beginning."""
    padding = [(0, 0)] * x.ndim
    padding[1] = (distance, 0)
    return jnp.pad(x, padding)[:, : x.shape[1]]
