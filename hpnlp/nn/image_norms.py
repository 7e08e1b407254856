"""Normalisations of images: by the moments of the batch, and by groups of channels.

IMAGE_NORMS lists them by their name in `model.image_norm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.nn.layers import buffer, param
from hpnlp.ops.norms import channel_moments, group_norm, normalize_channels
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, Statistics, check_options, option

Images = Float[Array, "B Y X C"]


def _eps_option() -> Any:
    return option(1e-5, "Added to the variance.", above=0)


class BatchNorm(nn.Module):
    """Batch normalisation of each channel: by the moments of the batch in training, by their moving averages otherwise.

    In training, statistics are sums over the examples of the batch on all devices, or of a part of the batch under gradient
    accumulation. `advance` makes the moving averages of the sums over all parts.

    References:
      Ioffe and Szegedy 2015, "Batch normalization", algorithms 1 and 2.
      Courbariaux et al. 2016, "Binarized neural networks", shift-based batch normalization.
    """

    decay: int | float = option(0.9, "Share of the moving averages that a step keeps.", least=0, below=1)
    eps: float = _eps_option()
    powers: bool = option(
        False, "Factors of channels are rounded to powers of two, in training as well: see `normalize_channels`."
    )

    def __post_init__(self) -> None:
        check_options(self)
        super().__post_init__()

    #: Whether a channel is normalised without the others, so that channels can be removed.
    is_by_channel: ClassVar[bool] = True
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
            return normalize_channels(x, moving_mean, moving_variance, scale, bias, self.eps, self.powers), {}
        assert weights is not None
        mean, variance, count = channel_moments(x, weights)
        # Deviations from the moving mean, so that little is lost where the mean is large beside the deviation.
        shift = mean - moving_mean
        sums = {"count": count, "sum": count * shift, "squares": count * (variance + jnp.square(shift))}
        y = normalize_channels(x, mean, variance, scale, bias, self.eps, self.powers)
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
    """Group normalisation, which has no state and treats each image by itself."""

    groups: int = option(8, "Number of groups of channels, which divides the channels of every layer.", least=1)
    eps: float = _eps_option()

    #: As of BatchNorm.
    is_by_channel: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)
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
    return build(parse_one(text, "model.image_norm"), IMAGE_NORMS, "model.image_norm", **extra)
