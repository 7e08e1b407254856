"""Convolutions of images: standard and depthwise, with zeros around the image.

A kernel has an odd side K, and the image has a border of (K - 1) / 2 zeros on each side, so that an image of side n with a
stride s leaves ceil(n / s) positions (the padding of torch.nn.Conv2d with padding=K // 2).

XLA:CPU runs a depthwise convolution (one with as many groups as channels) several times more slowly than the sums of products
that it consists of. The implementation "shifts" writes these sums out, for the gradients as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.ops.linear import linear
from hpnlp.types import InputError

DEPTHWISE = ("auto", "shifts", "xla")
_LAYOUT = ("NHWC", "HWIO", "NHWC")


@array_op("B", x="B")
def conv2d(
    x: Float[Array, "B Y X C"], kernel: Float[Array, "K K2 _ F"], *, stride: int = 1
) -> Float[Array, "B Y2 X2 F"]:
    """Convolves images: `y[b, i, j, f] = sum_{u, v, c} x[b, s i + u - p, s j + v - p, c] kernel[u, v, c, f]`, p = (K - 1) / 2.

    Args:
      x: The images, channels last.
      kernel: Weights of K x K pixels, K odd.
      stride: Distance s of neighbouring outputs in pixels.

    Returns:
      The images, in the dtype of x; sums are float32.

    Raises:
      InputError: The kernel has no odd side or another number of channels than x, or the stride is below 1.

    Cost: Y2 X2 K^2 C F multiplications for each image. On XLA:CPU, the product of a matrix with the pixels around each position
    (im2col) takes 1.3 to 3.3 times as long.
    """
    _check(x, kernel, stride)
    if kernel.shape[:2] == (1, 1):
        return linear(x[:, ::stride, ::stride], kernel[0, 0])
    return _conv_xla(*vary_alike(x, kernel), stride, 1)


@array_op("B", x="B")
def depthwise_conv2d(
    x: Float[Array, "B Y X C"], kernel: Float[Array, "K K2 _"], *, stride: int = 1, impl: str = "auto"
) -> Float[Array, "B Y2 X2 C"]:
    """Convolves each channel of images with a kernel of its own.

    `y[b, i, j, c] = sum_{u, v} x[b, s i + u - p, s j + v - p, c] kernel[u, v, c]`, p = (K - 1) / 2.

    Args:
      x: The images, channels last.
      kernel: Weights of K x K pixels, K odd.
      stride: Distance s of neighbouring outputs in pixels.
      impl: "shifts", a sum of K^2 shifted images times a weight per channel; "xla", the convolution of the compiler with a
        group for each channel; or "auto", "shifts" on a CPU, otherwise "xla".

    Returns:
      The images, in the dtype of x; sums are float32.

    Raises:
      InputError: As `conv2d`, or `impl` is unknown.

    Cost: Y2 X2 K^2 C multiplications for each image: too few for the memory that is read, so that the time is that of a few
    passes over x.

    References:
      Howard et al. 2017, "MobileNets", sec. 3.1.
    """
    _check(x, kernel, stride)
    if impl not in DEPTHWISE:
        raise InputError(f"impl={impl!r}: known: {', '.join(DEPTHWISE)}")
    x, kernel = vary_alike(x, kernel)
    if impl == "xla" or (impl == "auto" and jax.default_backend() != "cpu"):
        return _conv_xla(x, kernel[:, :, None], stride, x.shape[-1])
    return _depthwise_shifts(x, kernel, stride)


def _check(x: Array, kernel: Array, stride: int) -> None:
    """Raises InputError for a kernel that does not fit x, or an invalid stride."""
    side, channels = kernel.shape[0], kernel.shape[2]
    if side % 2 == 0 or kernel.shape[1] != side or channels != x.shape[-1]:
        raise InputError(
            f"kernel {kernel.shape}: expected an odd side, twice, and the {x.shape[-1]} channels of x, as in "
            f"(3, 3, {x.shape[-1]}, ...)"
        )
    if stride < 1:
        raise InputError(f"stride={stride}: expected at least 1")


def _shifted(x: Array, side: int, stride: int) -> Iterator[Array]:
    """The pixel at each place of the window, for all positions: K^2 arrays `[B, Y2, X2, C]`."""
    border = side // 2
    padded = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
    last = [(n - 1) // stride * stride for n in x.shape[1:3]]
    for row in range(side):
        for column in range(side):
            yield padded[:, row : row + last[0] + 1 : stride, column : column + last[1] + 1 : stride]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv_xla(x: Array, kernel: Array, stride: int, groups: int) -> Array:
    """The convolution of the compiler, accumulated in float32."""
    return _dilated(x, kernel.astype(x.dtype), stride, groups, jnp.float32).astype(x.dtype)


def _dilated(x: Array, kernel: Array, stride: int, groups: int, dtype: jnp.dtype | type | None) -> Array:
    border = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(border, border)] * 2,
        dimension_numbers=_LAYOUT,
        feature_group_count=groups,
        preferred_element_type=dtype,
    )


@accepts_numpy
def _conv_xla_forward(x: Array, kernel: Array, stride: int, groups: int) -> tuple[Array, tuple[Array, Array]]:
    return _conv_xla(x, kernel, stride, groups), (x, kernel)


def _conv_xla_backward(stride: int, groups: int, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # JAX cannot transpose a convolution of bfloat16 whose result is float32.
    x, kernel = residuals
    low = kernel.astype(x.dtype)
    (dx,) = jax.linear_transpose(lambda x: _dilated(x, low, stride, groups, None), x)(dy)
    (dk,) = jax.linear_transpose(lambda kernel: _dilated(x, kernel, stride, groups, None), low)(dy)
    return dx, dk.astype(kernel.dtype)


_conv_xla.defvjp(_conv_xla_forward, _conv_xla_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _depthwise_shifts(x: Array, kernel: Array, stride: int) -> Array:
    return _weighted_sum(x, kernel, stride).astype(x.dtype)


def _weighted_sum(x: Array, kernel: Array, stride: int) -> Array:
    """Sum of the shifted images times a weight per channel, float32."""
    weights = kernel.astype(jnp.float32).reshape(-1, 1, 1, 1, kernel.shape[-1])
    total = None
    for weight, image in zip(weights, _shifted(x, kernel.shape[0], stride), strict=True):
        term = weight * image.astype(jnp.float32)
        total = term if total is None else total + term
    assert total is not None
    return total


@accepts_numpy
def _depthwise_forward(x: Array, kernel: Array, stride: int) -> tuple[Array, tuple[Array, Array]]:
    return _depthwise_shifts(x, kernel, stride), (x, kernel)


def _depthwise_backward(stride: int, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    dy = dy.astype(jnp.float32)
    dk = _products_with_shifts(x, dy, kernel.shape[0], stride).reshape(kernel.shape).astype(kernel.dtype)
    if stride > 1:  # zeros between the outputs, at the pixels where no window has its centre
        gaps = [(0, n - 1 - (m - 1) * stride, stride - 1) for n, m in zip(x.shape[1:3], dy.shape[1:3], strict=True)]
        dy = lax.pad(dy, jnp.zeros((), dy.dtype), ((0, 0, 0), *gaps, (0, 0, 0)))
    dx = _weighted_sum(dy, kernel[::-1, ::-1], 1)
    return dx.astype(x.dtype), dk


def _products_with_shifts(x: Array, dy: Array, side: int, stride: int) -> Array:
    """Sums over images and positions of each shifted image times dy: `[K^2, C]`, float32.

    A loop over rows of pixels adds up K^2 arrays `[B, X2, C]`. XLA:CPU sums over positions in columns, channel by channel,
    which takes 2 to 13 times as long.
    """
    border, width = side // 2, (dy.shape[2] - 1) * stride + 1
    padded = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))

    def of_row(row: Any) -> tuple[Array, ...]:
        cotangent = lax.dynamic_index_in_dim(dy, row, 1, keepdims=False)
        lines = [lax.dynamic_index_in_dim(padded, row * stride + i, 1, keepdims=False) for i in range(side)]
        return tuple(
            line[:, j : j + width : stride].astype(jnp.float32) * cotangent for line in lines for j in range(side)
        )

    def add(row: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(total + term for total, term in zip(totals, of_row(row), strict=True))

    totals = lax.fori_loop(1, dy.shape[1], add, of_row(0))
    return jnp.stack([jnp.sum(total, axis=(0, 1)) for total in totals])


_depthwise_shifts.defvjp(_depthwise_forward, _depthwise_backward)
