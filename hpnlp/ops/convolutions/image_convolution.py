"""Convolutions of images: standard and depthwise, with zeros around the image.

A kernel has an odd side K, and the image has a border of (K - 1) / 2 zeros on each side, so that an image of side n with a
stride s leaves ceil(n / s) positions (the padding of torch.nn.Conv2d with padding=K // 2).

XLA:CPU runs a depthwise convolution (one with as many groups as channels) several times more slowly than the sums of products
that it consists of. The implementation "shifts" writes these sums out, for the gradients as well.

A kernel may have weights at some positions of its window only, its taps. A depthwise convolution by shifts has the cost of the
taps. Other convolutions have the cost of the smallest window around the taps, with zeros between them: on XLA:CPU, products
with the single taps of 5 of 9 positions take 0.5 to 1.0 of the time of the whole window, of 7 positions up to 8 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.linear import linear
from hpnlp.types import InputError

DEPTHWISE = ("auto", "shifts", "xla")
_LAYOUT = ("NHWC", "HWIO", "NHWC")
# Positions of a window, (row, column) relative to its centre.
Taps = tuple[tuple[int, int], ...]


@array_op("B", x="B")
def conv2d(
    x: Float[Array, "B Y X C"],
    kernel: Float[Array, "K K2 _ F"] | Float[Array, "n _ F"],
    *,
    stride: int = 1,
    taps: Sequence[tuple[int, int]] | None = None,
) -> Float[Array, "B Y2 X2 F"]:
    """Convolves images: `y[b, i, j, f] = sum_{u, v, c} x[b, s i + u - p, s j + v - p, c] kernel[u, v, c, f]`, p = (K - 1) / 2.

    Args:
      x: The images, channels last.
      kernel: Weights of K x K pixels, K odd.
      stride: Distance s of neighbouring outputs in pixels.
      taps: Positions (u - p, v - p) of the window that the kernel, [n, C, F], has weights for; None for all K x K.

    Returns:
      The images, in the dtype of x; sums are float32.

    Raises:
      InputError: The kernel has no odd side, or another number of channels than x or of taps; or the stride is below 1.

    Cost: Y2 X2 K^2 C F multiplications for each image, or those of the smallest rectangle around the taps. On XLA:CPU, the
    product of a matrix with the pixels around each position (im2col) takes 1.3 to 3.3 times as long.
    """
    taps, kernel = _with_taps(x, kernel, stride, taps, "f")
    if taps == ((0, 0),):
        return linear(x[:, ::stride, ::stride], kernel[0])
    x, kernel = vary_alike(x, kernel)
    x, borders = _bordered(x, taps, stride)
    return _conv_xla(x, _window(kernel, taps), stride, 1, borders)


@array_op("B", x="B")
def depthwise_conv2d(
    x: Float[Array, "B Y X C"],
    kernel: Float[Array, "K K2 _"] | Float[Array, "n _"],
    *,
    stride: int = 1,
    impl: str = "auto",
    taps: Sequence[tuple[int, int]] | None = None,
) -> Float[Array, "B Y2 X2 C"]:
    """Convolves each channel of images with a kernel of its own.

    `y[b, i, j, c] = sum_{u, v} x[b, s i + u - p, s j + v - p, c] kernel[u, v, c]`, p = (K - 1) / 2.

    Args:
      x: The images, channels last.
      kernel: Weights of K x K pixels, K odd.
      stride: Distance s of neighbouring outputs in pixels.
      taps: Positions (u - p, v - p) of the window that the kernel, [n, C], has weights for; None for all K x K.
      impl: "shifts", a sum of K^2 shifted images times a weight per channel; "xla", the convolution of the compiler with a
        group for each channel; or "auto", "shifts" on a CPU, otherwise "xla".

    Returns:
      The images, in the dtype of x; sums are float32.

    Raises:
      InputError: As `conv2d`, or `impl` is unknown.

    Cost: Y2 X2 K^2 C multiplications for each image, or Y2 X2 n C with n taps and "shifts": too few for the memory that is
    read, so that the time is that of a few passes over x.

    References:
      Howard et al. 2017, "MobileNets", sec. 3.1.
    """
    if impl not in DEPTHWISE:
        raise InputError(f"impl={impl!r}: known: {', '.join(DEPTHWISE)}")
    taps, kernel = _with_taps(x, kernel, stride, taps, "")
    x, kernel = vary_alike(x, kernel)
    if impl == "xla" or (impl == "auto" and jax.default_backend() != "cpu"):
        x, borders = _bordered(x, taps, stride)
        return _conv_xla(x, _window(kernel, taps)[:, :, None], stride, x.shape[-1], borders)
    return _depthwise_shifts(x, kernel, stride, taps)


def window_taps(side: int) -> Taps:
    """All positions of a window.

    Args:
      side: Side K of the window in pixels, odd.

    Returns:
      K^2 pairs (row, column), relative to the centre, row by row.
    """
    offsets = range(-(side // 2), side // 2 + 1)
    return tuple((row, column) for row in offsets for column in offsets)


def _with_taps(
    x: Array, kernel: Array, stride: int, taps: Sequence[tuple[int, int]] | None, filters: str
) -> tuple[Taps, Array]:
    """The taps, and the kernel as `[n, C, ...]`; InputError for a kernel that does not fit x, or an invalid stride."""
    if stride < 1:
        raise InputError(f"stride={stride}: expected at least 1")
    if taps is None:
        side = kernel.shape[0]
        window = (side, side, x.shape[-1])
        if kernel.ndim != len(window) + len(filters) or side % 2 == 0 or kernel.shape[:3] != window:
            raise InputError(
                f"kernel {kernel.shape}: expected an odd side, twice, and the {x.shape[-1]} channels of x, as in "
                f"(3, 3, {x.shape[-1]}, ...)"
            )
        return window_taps(side), kernel.reshape(side**2, *kernel.shape[2:])
    expected = (len(taps), x.shape[-1])
    if not taps:
        raise InputError("taps=(): expected at least one position, or None for all of the window")
    if kernel.ndim != len(expected) + len(filters) or kernel.shape[:2] != expected or len(set(taps)) != len(taps):
        raise InputError(
            f"kernel {kernel.shape} with taps={tuple(taps)}: expected the number of taps, which differ, and the channels of "
            f"x, as in ({len(taps)}, {x.shape[-1]}, ...)"
        )
    return tuple(taps), kernel


def _bounds(taps: Taps) -> list[tuple[int, int]]:
    """(first, last) row and column of the smallest window around the taps, relative to the centre."""
    return [(min(axis), max(axis)) for axis in zip(*taps, strict=True)]


def _window(kernel: Array, taps: Taps) -> Array:
    """The kernel `[n, ...]` as the smallest window around its taps, `[h, w, ...]`, 0 between them."""
    (top, bottom), (left, right) = _bounds(taps)
    shape = (bottom - top + 1, right - left + 1)
    index = [(row - top) * shape[1] + column - left for row, column in taps]
    if index != list(range(shape[0] * shape[1])):
        zeros = jnp.zeros((shape[0] * shape[1], *kernel.shape[1:]), kernel.dtype)
        kernel = zeros.at[jnp.asarray(index)].set(kernel, unique_indices=True)
    return kernel.reshape(*shape, *kernel.shape[1:])


def _bordered(x: Array, taps: Taps, stride: int) -> tuple[Array, Taps]:
    """The images that a convolution reads, and the zeros before and behind their rows and their columns."""
    bounds = _bounds(taps)
    if all(first == -last for first, last in bounds):  # also where the last zeros are not read
        return x, tuple((last, last) for _, last in bounds)
    borders = tuple(
        (-first, (n - 1) // stride * stride + last + 1 - n)
        for n, (first, last) in zip(x.shape[1:3], bounds, strict=True)
    )
    if min(map(min, borders)) >= 0:
        return x, borders
    # Pixels are left out. With negative borders, XLA:CPU reads beyond arrays in the gradients of kernels of a single tap.
    pads = [(before, behind, 0) for before, behind in borders]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)]), ((0, 0), (0, 0))


def _shifted(x: Array, taps: Taps, stride: int) -> Iterator[Array]:
    """The pixel at each tap, for all positions: n arrays `[B, Y2, X2, C]`."""
    border = max(abs(offset) for tap in taps for offset in tap)
    padded = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
    last = [(n - 1) // stride * stride for n in x.shape[1:3]]
    for tap in taps:
        row, column = (border + offset for offset in tap)
        yield padded[:, row : row + last[0] + 1 : stride, column : column + last[1] + 1 : stride]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv_xla(x: Array, kernel: Array, stride: int, groups: int, borders: Taps) -> Array:
    """The convolution of the compiler, accumulated in float32."""
    return _dilated(x, kernel.astype(x.dtype), stride, groups, borders, jnp.float32).astype(x.dtype)


def _dilated(x: Array, kernel: Array, stride: int, groups: int, borders: Taps, dtype: jnp.dtype | type | None) -> Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        borders,
        dimension_numbers=_LAYOUT,
        feature_group_count=groups,
        preferred_element_type=dtype,
    )


@accepts_numpy
def _conv_xla_forward(
    x: Array, kernel: Array, stride: int, groups: int, borders: Taps
) -> tuple[Array, tuple[Array, Array]]:
    return _conv_xla(x, kernel, stride, groups, borders), (x, kernel)


def _conv_xla_backward(
    stride: int, groups: int, borders: Taps, residuals: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    # JAX cannot transpose a convolution of bfloat16 whose result is float32.
    x, kernel = residuals
    low = kernel.astype(x.dtype)
    (dx,) = jax.linear_transpose(lambda x: _dilated(x, low, stride, groups, borders, None), x)(dy)
    (dk,) = jax.linear_transpose(lambda kernel: _dilated(x, kernel, stride, groups, borders, None), low)(dy)
    return dx, dk.astype(kernel.dtype)


_conv_xla.defvjp(_conv_xla_forward, _conv_xla_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _depthwise_shifts(x: Array, kernel: Array, stride: int, taps: Taps) -> Array:
    return _weighted_sum(x, kernel, stride, taps).astype(x.dtype)


def _weighted_sum(x: Array, kernel: Array, stride: int, taps: Taps) -> Array:
    """Sum of the shifted images times a weight per channel, float32."""
    weights = kernel.astype(jnp.float32).reshape(-1, 1, 1, 1, kernel.shape[-1])
    total = None
    for weight, image in zip(weights, _shifted(x, taps, stride), strict=True):
        term = weight * image.astype(jnp.float32)
        total = term if total is None else total + term
    assert total is not None
    return total


@accepts_numpy
def _depthwise_forward(x: Array, kernel: Array, stride: int, taps: Taps) -> tuple[Array, tuple[Array, Array]]:
    return _depthwise_shifts(x, kernel, stride, taps), (x, kernel)


def _depthwise_backward(stride: int, taps: Taps, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    dy = dy.astype(jnp.float32)
    dk = _products_with_shifts(x, dy, taps, stride).reshape(kernel.shape).astype(kernel.dtype)
    if stride > 1:  # zeros between the outputs, at the pixels where no window has its centre
        gaps = [(0, n - 1 - (m - 1) * stride, stride - 1) for n, m in zip(x.shape[1:3], dy.shape[1:3], strict=True)]
        dy = lax.pad(dy, jnp.zeros((), dy.dtype), ((0, 0, 0), *gaps, (0, 0, 0)))
    dx = _weighted_sum(dy, kernel, 1, tuple((-row, -column) for row, column in taps))
    return dx.astype(x.dtype), dk


def _products_with_shifts(x: Array, dy: Array, taps: Taps, stride: int) -> Array:
    """Sums over images and positions of each shifted image times dy: `[n, C]`, float32.

    A loop over rows of pixels adds up n arrays `[B, X2, C]`. XLA:CPU sums over positions in columns, channel by channel,
    which takes 2 to 13 times as long.
    """
    border, width = max(abs(offset) for tap in taps for offset in tap), (dy.shape[2] - 1) * stride + 1
    padded = jnp.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
    columns: dict[int, list[int]] = {}  # row of taps -> columns of the taps
    for i, j in sorted(taps):
        columns.setdefault(i + border, []).append(j + border)

    def line_gradients(row: Array | int) -> tuple[Array, ...]:
        cotangent = lax.dynamic_index_in_dim(dy, row, 1, keepdims=False)
        lines = [lax.dynamic_index_in_dim(padded, row * stride + i, 1, keepdims=False) for i in columns]
        return tuple(
            line[:, j : j + width : stride].astype(jnp.float32) * cotangent
            for line, of_line in zip(lines, columns.values(), strict=True)
            for j in of_line
        )

    def add(row: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(total + term for total, term in zip(totals, line_gradients(row), strict=True))

    totals = lax.fori_loop(1, dy.shape[1], add, line_gradients(0))
    by_tap = dict(zip(sorted(taps), totals, strict=True))
    return jnp.stack([jnp.sum(by_tap[tap], axis=(0, 1)) for tap in taps])


_depthwise_shifts.defvjp(_depthwise_forward, _depthwise_backward)
