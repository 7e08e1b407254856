"""Blocks of convolutional networks: standard convolutions, depthwise-separable ones, and inverted residuals.

A block maps images `[B, Y, X, C]` to images, and returns the statistics of its batch normalisations by the names of their
modules. Its config says what it computes from how many channels, so that blocks of one network may have any widths.

BLOCKS lists the blocks by their name in `model.blocks`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.nn.image_norms import make_norm
from hpnlp.nn.layers import Initializer, param
from hpnlp.ops.convolutions.image_convolution import conv2d, depthwise_conv2d, window_taps
from hpnlp.ops.weight import dense
from hpnlp.spec import Spec
from hpnlp.types import REQUIRED, InputError, Statistics, check_options, keyword_only, option

Images = Float[Array, "B Y X C"]

# For layers whose activation is ReLU (He et al. 2015, "Delving deep into rectifiers", eq. 10).
conv_init: Initializer = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
depthwise_init: Initializer = nn.initializers.variance_scaling(
    2.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=(), batch_axis=2
)


# Axes of arrays: (path of a parameter or buffer of a block, index of the axis).
ArrayAxes = tuple[tuple[tuple[str, ...], int], ...]


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """Shape of a block of a network.

    Attributes:
      inputs: Channels that the block reads.
      filters: Channels that the block returns.
      kernel: Side of its kernel in pixels.
      stride: Distance of neighbouring outputs in pixels.
      hidden: Channels between the products of an inverted residual; 0 for other blocks.
      residual: Whether the block adds its input to its result.
      taps: Indices of the positions of the window, row by row, that the kernel has weights for; empty for all.
    """

    inputs: int
    filters: int
    kernel: int
    stride: int
    hidden: int = 0
    residual: bool = False
    taps: tuple[int, ...] = ()

    @property
    def tap_count(self) -> int:
        """Number of positions of the window that the kernel has weights for."""
        return len(self.taps) or self.kernel**2

    @property
    def offsets(self) -> tuple[tuple[int, int], ...] | None:
        """Positions of the taps relative to the centre of the window, as `image_convolution` takes them; None for all."""
        positions = window_taps(self.kernel)
        return tuple(positions[i] for i in self.taps) or None


@dataclasses.dataclass(frozen=True)
class ConvBlock:
    """An entry of `model.blocks`."""

    filters: int = option(REQUIRED, "Channels of the result.", least=1)
    stride: int = option(1, "Distance of neighbouring outputs in pixels.", least=1)
    kernel: int = option(3, "Side of the kernel in pixels.", least=1, rule=("odd", lambda kernel: kernel % 2 == 1))
    taps: str = keyword_only(
        option(
            "",
            "Indices of the positions of the window, row by row, that the kernel has weights for, as '3 4 5' for the middle "
            "row of 3 x 3; '' for all.",
        )
    )

    def __post_init__(self) -> None:
        check_options(self)
        taps = self.taps.split()
        if not all(part.isdecimal() and int(part) < self.kernel**2 for part in taps) or any(
            int(a) >= int(b) for a, b in itertools.pairwise(taps)
        ):
            raise InputError(
                f"taps={self.taps!r}: expected ascending indices of the {self.kernel**2} positions of the window, as '3 4 5'"
            )

    @property
    def tap_indices(self) -> tuple[int, ...]:
        """`taps` as numbers."""
        return tuple(map(int, self.taps.split()))

    def shape(self, inputs: int, width: float) -> BlockShape:
        """The shape of the block.

        Args:
          inputs: Channels that the block reads.
          width: Factor of the number of filters.

        Returns:
          The shape.

        Raises:
          InputError: The block cannot have this shape.
        """
        return BlockShape(inputs, scaled(self.filters, width), self.kernel, self.stride, taps=self.tap_indices)

    def resized(self, old: BlockShape, new: BlockShape) -> Any:
        """The entry of the block with other numbers of channels or taps, for a network whose `width` is 1.

        Args:
          old: Shape of the block.
          new: Shape of the new block.

        Returns:
          The entry.
        """
        taps = " ".join(map(str, new.taps))
        return dataclasses.replace(self, filters=new.filters, taps=taps)


@dataclasses.dataclass(frozen=True)
class Conv(ConvBlock):
    """A standard convolution, normalisation and ReLU6."""

    #: Path of the parameter that has weights for each tap of the window: taps times channels along its first axes.
    window: ClassVar[tuple[str, ...]] = ("conv", "kernel")

    def channel_axes(self, shape: BlockShape) -> dict[str, ArrayAxes]:
        """The axes of the arrays along which channels lie.

        Args:
          shape: Shape of the block.

        Returns:
          Axes of the channels that the block reads, "inputs", of those that it returns, "filters", and of those between the
          products of an inverted residual, "hidden". A longer axis has all channels of each tap, one tap after the other.
        """
        return {"inputs": ((self.window, 0),), "filters": ((self.window, 1), *_norm_axes("norm"))}

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """Multiplications of the products of an image.

        Args:
          shape: Shape of the block.
          positions: Pixels of the result.
          inner: Pixels of the images that the block reads.

        Returns:
          The number, without those of normalisations and activations.
        """
        return positions * shape.tap_count * shape.inputs * shape.filters


@dataclasses.dataclass(frozen=True)
class Separable(ConvBlock):
    """A depthwise convolution and a product of the channels of each pixel, each with normalisation and ReLU6 (MobileNet)."""

    #: Parameters with the window, see `Conv.window`.
    window: ClassVar[tuple[str, ...]] = ("depthwise", "filters")

    def channel_axes(self, shape: BlockShape) -> dict[str, ArrayAxes]:
        """Axes of the channels; see `Conv.channel_axes`."""
        return {"inputs": _depthwise_axes(self.window), "filters": (*_POINTWISE, *_norm_axes("norm"))}

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """Multiplications of an image; see `Conv.multiply_adds`."""
        return positions * shape.inputs * (shape.tap_count + shape.filters)


@dataclasses.dataclass(frozen=True)
class Inverted(ConvBlock):
    """An inverted residual with a linear bottleneck (MobileNetV2)."""

    expand: int | float = option(
        6, "Channels of the depthwise convolution over those of the input. 1 leaves out the first product.", above=0
    )
    hidden: int = option(0, "Number of these channels in place of `expand`; 0 for none.", least=0)
    residual: bool | None = option(None, "Add the input to the result; None where the shapes allow it.")

    #: Parameters with the window, see `Conv.window`.
    window: ClassVar[tuple[str, ...]] = ("depthwise", "filters")

    def shape(self, inputs: int, width: float) -> BlockShape:
        filters = scaled(self.filters, width)
        fits = self.stride == 1 and inputs == filters
        if self.residual and not fits:
            raise InputError(
                f"residual=True adds {inputs} channels to {filters} with stride={self.stride}: make the channels equal and the "
                "stride 1, or leave residual out"
            )
        hidden = scaled(self.hidden, width) if self.hidden else max(1, round(self.expand * inputs))
        residual = fits if self.residual is None else self.residual
        return BlockShape(inputs, filters, self.kernel, self.stride, hidden, residual, self.tap_indices)

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """Multiplications of an image; see `Conv.multiply_adds`."""
        expansion = inner * shape.inputs * shape.hidden if self.expands(shape) else 0
        return expansion + positions * shape.hidden * (shape.tap_count + shape.filters)

    def channel_axes(self, shape: BlockShape) -> dict[str, ArrayAxes]:
        """Axes of the channels; see `Conv.channel_axes`."""
        inner, filters = _depthwise_axes(self.window), (*_POINTWISE, *_norm_axes("norm"))
        if not self.expands(shape):
            return {"inputs": inner, "filters": filters}
        kernel = ("expand", "kernel")
        hidden = ((kernel, 1), *_norm_axes("expand_norm"), *inner)
        return {"inputs": ((kernel, 0),), "hidden": hidden, "filters": filters}

    def resized(self, old: BlockShape, new: BlockShape) -> Inverted:
        """The block of other sizes (`ConvBlock.resized`), with the first product and the residual connection of the old one."""
        expands = self.expands(old)
        fits = new.stride == 1 and new.inputs == new.filters
        return dataclasses.replace(
            super().resized(old, new),
            expand=6 if expands else 1,
            hidden=new.hidden if expands else 0,
            residual=None if old.residual == fits else old.residual,
        )

    def expands(self, shape: BlockShape) -> bool:
        """Whether the block begins with a product.

        Args:
          shape: Shape of the block.

        Returns:
          False for expand=1, which has as many channels inside as it reads.
        """
        return bool(self.hidden) or shape.hidden != shape.inputs


_POINTWISE: ArrayAxes = ((("pointwise", "kernel"), 1),)


def _norm_axes(name: str) -> ArrayAxes:
    """Axes of the channels of a batch normalisation."""
    return tuple(((name, array), 0) for array in ("scale", "bias", "mean", "variance"))


def _depthwise_axes(window: tuple[str, ...]) -> ArrayAxes:
    """Axes of the channels of a depthwise convolution, and of the product that reads them."""
    return ((window, 2), *_norm_axes("depthwise_norm"), (("pointwise", "kernel"), 0))


def scaled(count: int, width: float) -> int:
    """A number of channels times a width multiplier.

    Args:
      count: The number.
      width: The multiplier.

    Returns:
      The nearest whole number, at least 1.
    """
    return max(1, round(count * width))


BLOCKS: dict[str, Callable[..., Any]] = {"conv": Conv, "separable": Separable, "inverted": Inverted}


def block_spec(block: ConvBlock) -> str:
    """The entry of `model.blocks` that makes a block.

    Returns:
      The spec, without arguments that have their default.
    """
    name = next(name for name, kind in BLOCKS.items() if kind is type(block))
    fields = [field for field in dataclasses.fields(block) if field.name != "filters"]
    changed = tuple((f.name, getattr(block, f.name)) for f in fields if getattr(block, f.name) != f.default)
    return str(Spec(name, (block.filters,), changed))


class ConvModule(nn.Module):
    """The modules of a block of a network.

    Attributes:
      block: The entry of `model.blocks`.
      shape: Its shape in the network.
      norm: The normalisation, a spec of an entry of IMAGE_NORMS.
    """

    block: Any
    shape: BlockShape
    norm: str

    @nn.compact
    def __call__(
        self, x: Images, weights: Float[Array, " B"] | None, deterministic: bool
    ) -> tuple[Float[Array, "B _ _ _"], Statistics]:
        """Runs the block.

        Args:
          x: The images.
          weights: Weights of the images in the moments of the batch; None if `deterministic`.
          deterministic: Whether to normalise by moving averages.

        Returns:
          `(images, statistics by the name of a normalisation)`.
        """
        statistics: dict[str, Statistics] = {}

        def normalize(name: str, y: Images) -> Images:
            y, sums = make_norm(self.norm, name=name)(y, weights, deterministic)
            if sums:
                statistics[name] = sums
            return y

        s, inputs = self.shape, x
        if isinstance(self.block, Conv):
            x = relu6(normalize("norm", Convolution(s.filters, s.kernel, s.stride, s.offsets, name="conv")(x)))
            return x, statistics
        if s.hidden and self.block.expands(s):
            x = relu6(normalize("expand_norm", Convolution(s.hidden, 1, 1, name="expand")(x)))
        x = relu6(normalize("depthwise_norm", Depthwise(s.kernel, s.stride, s.offsets, name="depthwise")(x)))
        x = normalize("norm", Convolution(s.filters, 1, 1, name="pointwise")(x))
        if not s.hidden:
            return relu6(x), statistics
        return (inputs + x if s.residual else x), statistics


def relu6(x: Images) -> Images:
    """min(max(x, 0), 6), which keeps activations in a range that few bits represent.

    Args:
      x: The images.

    Returns:
      The images.
    """
    return jnp.clip(x, jnp.zeros((), x.dtype), jnp.full((), 6, x.dtype))


class Convolution(nn.Module):
    """A convolution without a bias, which the normalisation that follows adds.

    Its kernel is a matrix `[K K C, F]`: a filter is a column, and a channel of the input K K rows, at a distance of C. With n
    taps it is `[n C, F]`.

    Attributes:
      filters: Channels F of the result.
      kernel: Side K of the kernel.
      stride: Distance of neighbouring outputs in pixels.
      taps: Positions of the window that have weights, relative to its centre; None for all.
    """

    filters: int
    kernel: int
    stride: int
    taps: tuple[tuple[int, int], ...] | None = None

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B _ _ _"]:
        taps = self.taps or window_taps(self.kernel)
        rows = len(taps) * x.shape[-1]
        kernel = param(self, "kernel", conv_init, (rows, self.filters), ("channels", "filters"))
        return conv2d(x, dense(kernel).reshape(len(taps), x.shape[-1], self.filters), stride=self.stride, taps=taps)


class Depthwise(nn.Module):
    """A depthwise convolution without a bias.

    Its parameter is not named "kernel", so that weight decay leaves it alone (Howard et al. 2017, sec. 3.2: "very little or no
    weight decay").

    Attributes:
      kernel: Side K of the kernel.
      stride: Distance of neighbouring outputs in pixels.
      taps: Positions of the window that have weights, relative to its centre; None for all. With n taps, the parameter is
        `[1, n, C]` in place of `[K, K, C]`.
    """

    kernel: int
    stride: int
    taps: tuple[tuple[int, int], ...] | None = None

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B _ _ _"]:
        sides = (1, len(self.taps)) if self.taps else (self.kernel, self.kernel)
        filters = param(self, "filters", depthwise_init, (*sides, x.shape[-1]), ("taps", "taps", "filters"))
        if self.taps:
            return depthwise_conv2d(x, filters[0], stride=self.stride, taps=self.taps)
        return depthwise_conv2d(x, filters, stride=self.stride)
