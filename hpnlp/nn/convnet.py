"""Blocks of convolutional networks: standard convolutions, depthwise-separable ones, and inverted residuals.

A block maps images `[B, Y, X, C]` to images, and returns the statistics of its batch normalisations by the names of their
modules. Its config says what it computes from how many channels, so that blocks of one network may have any widths.

BLOCKS lists the blocks by their name in `model.blocks`, IMAGE_NORMS the normalisations by their name in `model.image_norm`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.nn.layers import Initializer, buffer, param
from hpnlp.ops.image_convolution import conv2d, depthwise_conv2d
from hpnlp.ops.norms import channel_moments, group_norm, normalize_channels
from hpnlp.ops.weight import dense
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, Statistics

Images = Float[Array, "B Y X C"]

# For layers whose activation is ReLU (He et al. 2015, "Delving deep into rectifiers", eq. 10).
conv_init: Initializer = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
depthwise_init: Initializer = nn.initializers.variance_scaling(
    2.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=(), batch_axis=2
)


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
    """

    inputs: int
    filters: int
    kernel: int
    stride: int
    hidden: int = 0
    residual: bool = False


@dataclasses.dataclass(frozen=True)
class Block:
    """An entry of `model.blocks`.

    Attributes:
      filters: Channels of the result.
      stride: Distance of neighbouring outputs in pixels.
      kernel: Side of the kernel in pixels, odd.
    """

    filters: int
    stride: int = 1
    kernel: int = 3

    def __post_init__(self) -> None:
        for name in ("filters", "stride", "kernel"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.kernel % 2 == 0:
            raise InputError(f"kernel={self.kernel}: expected an odd number")

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
        return BlockShape(inputs, scaled(self.filters, width), self.kernel, self.stride)


@dataclasses.dataclass(frozen=True)
class Conv(Block):
    """A standard convolution, normalisation and ReLU6."""

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """Multiplications of the products of an image.

        Args:
          shape: Shape of the block.
          positions: Pixels of the result.
          inner: Pixels of the images that the block reads.

        Returns:
          The number, without those of normalisations and activations.
        """
        return positions * shape.kernel**2 * shape.inputs * shape.filters


@dataclasses.dataclass(frozen=True)
class Separable(Block):
    """A depthwise convolution and a product of the channels of each pixel, each with normalisation and ReLU6 (MobileNet)."""

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """As `Conv.multiply_adds`."""
        return positions * shape.inputs * (shape.kernel**2 + shape.filters)


@dataclasses.dataclass(frozen=True)
class Inverted(Block):
    """An inverted residual with a linear bottleneck (MobileNetV2).

    Attributes:
      expand: Channels of the depthwise convolution over those of the input. 1 leaves out the first product.
      hidden: Number of these channels in place of `expand`; 0 for none.
      residual: Add the input to the result; None where the shapes allow it.
    """

    expand: int | float = 6
    hidden: int = 0
    residual: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.expand <= 0:
            raise InputError(f"expand={self.expand}: expected a number over 0")
        if self.hidden < 0:
            raise InputError(f"hidden={self.hidden}: expected at least 1, or 0 for expand times the input channels")

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
        return BlockShape(inputs, filters, self.kernel, self.stride, hidden, residual)

    def multiply_adds(self, shape: BlockShape, positions: int, inner: int) -> int:
        """As `Conv.multiply_adds`."""
        expansion = inner * shape.inputs * shape.hidden if self.expands(shape) else 0
        return expansion + positions * shape.hidden * (shape.kernel**2 + shape.filters)

    def expands(self, shape: BlockShape) -> bool:
        """Whether the block begins with a product.

        Args:
          shape: Shape of the block.

        Returns:
          False for expand=1, which has as many channels inside as it reads.
        """
        return bool(self.hidden) or shape.hidden != shape.inputs


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


class BatchNorm(nn.Module):
    """Batch normalisation of each channel: by the moments of the batch in training, by their moving averages otherwise.

    In training, statistics are sums over the examples of the batch on all devices, or of a part of the batch under gradient
    accumulation. `advance` makes the moving averages of the sums over all parts.

    Attributes:
      decay: Share of the moving averages that a step keeps.
      eps: Added to the variance.

    References:
      Ioffe and Szegedy 2015, "Batch normalization", algorithms 1 and 2.
    """

    decay: int | float = 0.9
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise InputError(f"model.image_norm: decay={self.decay}: expected 0 or more, and less than 1")
        super().__post_init__()

    #: Statistics of a layer, with the logical names of their axes.
    statistic_axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "count": (),
        "sum": ("filters",),
        "squares": ("filters",),
    }

    @nn.compact
    def __call__(self, x: Images, weights: Float[Array, " B"] | None, deterministic: bool) -> tuple[Images, Statistics]:
        channels = (x.shape[-1],), ("filters",)
        scale = param(self, "scale", nn.initializers.ones, *channels)
        bias = param(self, "bias", nn.initializers.zeros, *channels)
        moving_mean = buffer(self, "mean", nn.initializers.zeros, *channels)
        moving_variance = buffer(self, "variance", nn.initializers.ones, *channels)
        if deterministic:
            return normalize_channels(x, moving_mean, moving_variance, scale, bias, self.eps), {}
        assert weights is not None
        mean, variance, count = channel_moments(x, weights)
        # Deviations from the moving mean, so that little is lost where the mean is large beside the deviation.
        shift = mean - moving_mean
        sums = {"count": count, "sum": count * shift, "squares": count * (variance + jnp.square(shift))}
        y = normalize_channels(x, mean, variance, scale, bias, self.eps)
        return y, jax.tree.map(jax.lax.stop_gradient, sums)

    @nn.nowrap
    def advance(self, buffers: Mapping[str, Array], statistics: Statistics) -> dict[str, Array]:
        """Moving averages after a step.

        Args:
          buffers: "mean" and "variance".
          statistics: Sums over the batch.

        Returns:
          The new averages. As in torch, that of the variance is of the estimate without bias. Without an example of weight
          over 0 they stay as they are.
        """
        count = statistics["count"]
        safe = jnp.maximum(count, 1.0)
        shift = statistics["sum"] / safe
        variance = (
            jnp.maximum(statistics["squares"] / safe - jnp.square(shift), 0.0) * safe / jnp.maximum(safe - 1.0, 1.0)
        )
        rate = jnp.where(count > 0, 1.0 - self.decay, 0.0).astype(jnp.float32)
        return {
            "mean": buffers["mean"] + rate * shift,
            "variance": buffers["variance"] + rate * (variance - buffers["variance"]),
        }


class GroupNorm(nn.Module):
    """Group normalisation, which has no state and treats each image by itself.

    Attributes:
      groups: Number of groups of channels, which divides the channels of every layer.
      eps: Added to the variance.
    """

    groups: int = 8
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise InputError(f"model.image_norm: groups={self.groups}: expected at least 1")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: Images, weights: Float[Array, " B"] | None, deterministic: bool) -> tuple[Images, Statistics]:
        channels = (x.shape[-1],), ("filters",)
        if x.shape[-1] % self.groups:
            raise InputError(
                f"model.image_norm='group({self.groups})' does not divide {x.shape[-1]} channels: choose a divisor, or other "
                "widths in model.blocks"
            )
        scale = param(self, "scale", nn.initializers.ones, *channels)
        bias = param(self, "bias", nn.initializers.zeros, *channels)
        return group_norm(x, scale, bias, self.groups, self.eps), {}


IMAGE_NORMS: dict[str, Callable[..., Any]] = {"batch": BatchNorm, "group": GroupNorm}


def make_norm(text: str, **extra: Any) -> Any:
    """Makes a normalisation.

    Args:
      text: A spec of an entry of IMAGE_NORMS.
      **extra: Further arguments of the module, such as its name.

    Returns:
      The module.

    Raises:
      InputError: Unknown entry or invalid options.
    """
    return build(parse_one(text, "model.image_norm"), IMAGE_NORMS, "normalisation of images", **extra)


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
            x = relu6(normalize("norm", Convolution(s.filters, s.kernel, s.stride, name="conv")(x)))
            return x, statistics
        if s.hidden and self.block.expands(s):
            x = relu6(normalize("expand_norm", Convolution(s.hidden, 1, 1, name="expand")(x)))
        x = relu6(normalize("depthwise_norm", Depthwise(s.kernel, s.stride, name="depthwise")(x)))
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

    Its kernel is a matrix `[K K C, F]`: a filter is a column, and a channel of the input K K rows, at a distance of C.

    Attributes:
      filters: Channels F of the result.
      kernel: Side K of the kernel.
      stride: Distance of neighbouring outputs in pixels.
    """

    filters: int
    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B _ _ _"]:
        rows = self.kernel**2 * x.shape[-1]
        kernel = param(self, "kernel", conv_init, (rows, self.filters), ("channels", "filters"))
        return conv2d(x, dense(kernel).reshape(self.kernel, self.kernel, x.shape[-1], self.filters), stride=self.stride)


class Depthwise(nn.Module):
    """A depthwise convolution without a bias.

    Its parameter is not named "kernel", so that weight decay leaves it alone (Howard et al. 2017, sec. 3.2: "very little or no
    weight decay").

    Attributes:
      kernel: Side K of the kernel.
      stride: Distance of neighbouring outputs in pixels.
    """

    kernel: int
    stride: int

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B _ _ _"]:
        shape = (self.kernel, self.kernel, x.shape[-1])
        filters = param(self, "filters", depthwise_init, shape, ("taps", "taps", "filters"))
        return depthwise_conv2d(x, filters, stride=self.stride)
