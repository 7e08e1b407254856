"""Structured pruning of convolutional networks: filters and positions of kernel windows are removed from the arrays.

A channel is an axis of several arrays: the filter that computes it, its normalisation, and the weights that read it. All are
removed, so that the result equals the network in which scale and bias of the channel's normalisation are 0. Blocks that add
their input to their result have channels in common with the blocks before them.

References:
  Li et al. 2017, "Pruning filters for efficient ConvNets": filters, with the channels of the next layer.
  Wen et al. 2016, "Learning structured sparsity in deep neural networks": filters, channels and shapes.
  Anwar et al. 2015, "Structured pruning of deep convolutional neural networks".
  Michel et al. 2019, "Are sixteen heads really better than one?", eq. 2: importance |weight x gradient|.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from hpnlp.compress.layers import join_entries
from hpnlp.compress.stages import (
    Calibration,
    Stage,
    UnitStage,
    by_option,
    calibration_gradients,
    check_known_widths,
    share_option,
)
from hpnlp.compress.stages.structure import choose_units
from hpnlp.models.convnet import ConvNetConfig
from hpnlp.models.variables import BUFFERS
from hpnlp.nn.convnet import BlockShape, block_spec
from hpnlp.nn.image_norms import make_norm
from hpnlp.types import REQUIRED, AnyArray, InputError, option

if TYPE_CHECKING:
    from hpnlp.models.shared.body import ConfigOfModel

# Units: channels of the images between blocks, and those between the products of an inverted residual.
CHANNELS, HIDDEN = "channels", "hidden"


@dataclasses.dataclass(frozen=True)
class ChannelGroup:
    """Channels that are removed together from all arrays that have them.

    Attributes:
      unit: CHANNELS or HIDDEN.
      count: Number of channels.
      blocks: Indices of the blocks that return them, or of the block that has them inside.
      axes: (path of a parameter or buffer, axis) of the arrays along which they lie.
    """

    unit: str
    count: int
    blocks: tuple[int, ...]
    axes: tuple[tuple[tuple[str, ...], int], ...]


@dataclasses.dataclass(frozen=True)
class ChannelStage(UnitStage):
    """Removes channels of convolutional networks."""

    channel_units: ClassVar[tuple[str, ...]]  # units of the groups of which some channels are removed
    described: ClassVar[str]  # their name in messages

    share: int | float = share_option()

    def groups(self, config: Any) -> list[ChannelGroup]:
        """The groups of channels of which some are removed; InputError for a model without such."""
        _check_convolutional(self.unit, config)
        groups = [group for group in channel_groups(config) if group.unit in self.channel_units]
        if not groups:
            raise InputError(
                f"{self.text}: the network has no {self.described} that can be removed: leave the stage out"
            )
        return groups

    def unit_counts(self, config: Any, weights: PyTree) -> list[int]:
        return [group.count for group in self.groups(config)]

    def compress(self, config: Any, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        groups = self.groups(config)
        _check_normalisation(config)
        check_known_widths(self.unit, calibration, self.across_layers)
        if calibration is not None and calibration.is_outline:
            scores = [np.ones(group.count) for group in groups]
        else:
            by_weights = self.by == "magnitude"
            slopes = None if by_weights else calibration_gradients(self.unit, config, weights, calibration)
            scores = [channel_importance(group, weights, slopes) for group in groups]
        self.check_keeps_units([group.count for group in groups])
        kept = choose_units(scores, self.share, across_layers=self.across_layers)
        return keep_channels(config, weights, list(zip(groups, kept, strict=True)))


@dataclasses.dataclass(frozen=True)
class FiltersStage(ChannelStage):
    """Removes filters of all convolutions of images: those of `channels` and of `hidden`."""

    unit = described = "filters"
    channel_units = CHANNELS, HIDDEN


@dataclasses.dataclass(frozen=True)
class ChannelsStage(ChannelStage):
    """Removes channels of the images between blocks; blocks that a residual connection joins lose the same channels."""

    unit, described = "channels", "channels between blocks"
    channel_units = (CHANNELS,)


@dataclasses.dataclass(frozen=True)
class HiddenStage(ChannelStage):
    """Removes channels between the products of inverted residuals."""

    unit, described = "hidden", "hidden channels of inverted blocks"
    channel_units = (HIDDEN,)


@dataclasses.dataclass(frozen=True)
class ShapesStage(Stage):
    """Removes positions of the window of each convolution, the same ones of all filters of a layer (shape-wise pruning).

    The most important rectangle of positions stays, such as the middle row of 3 x 3, and the convolution is one with a smaller
    window. Networks of standard convolutions become faster; those of depthwise ones hardly, because most of their
    multiplications are in products of the channels. With `scattered=True` the most important positions stay wherever they
    are. Depthwise convolutions on a CPU then compute them alone; others compute the smallest rectangle around them, with zeros
    in between, so that their arrays become smaller and they become faster only if whole rows or columns at the border are
    removed.
    """

    share: int | float = option(
        REQUIRED,
        "Share of the positions of each window that stays; the number is rounded, and at least 1. Rectangles have the largest "
        "area up to this number.",
        above=0,
        most=1,
    )
    by: str = by_option()
    scattered: bool = option(False, "Positions may have any places.")

    def compress(self, config: Any, weights: PyTree, calibration: Calibration | None) -> tuple[Any, Any]:
        _check_convolutional("shapes", config)
        old = config.shapes()
        windows = [i for i, shape in enumerate(old) if shape.tap_count > 1]
        if not windows:
            raise InputError(f"{self.text}: the windows of all convolutions are single positions: leave the stage out")
        arrays, slopes = _arrays_and_slopes("shapes", self.by, config, weights, calibration)
        new, result = list(old), dict(flatten_dict(weights))
        for i in windows:
            path = (f"block_{i}", *config.entries[i].window)
            scores = _scores(arrays, slopes, path, old[i].tap_count)
            current = old[i].taps or tuple(range(old[i].kernel ** 2))
            count = max(1, round(self.share * len(current)))
            kept = _largest(scores, count) if self.scattered else _rectangle(scores, current, old[i].kernel, count)
            if len(kept) < len(current):
                new[i] = dataclasses.replace(old[i], taps=tuple(current[k] for k in kept))
                result[path] = _keep_taps(result[path], len(current), kept)
        return _with_shapes(config, new), unflatten_dict(result)


def channel_groups(config: ConvNetConfig) -> list[ChannelGroup]:
    """The channels of a network that can be removed.

    Args:
      config: Config of the network.

    Returns:
      Groups of channels: those of the images between blocks in the order of the blocks, then those inside of blocks. The
      channels of the image itself, and of blocks that add it to their result, are not among them.
    """
    image, head = 0, len(config.entries)  # images 1, 2, ... are the results of the blocks
    source = [image]  # the first image with the same channels
    axes: dict[int, list[Any]] = {}
    inner: list[ChannelGroup] = []
    for i, (entry, shape) in enumerate(zip(config.entries, config.shapes(), strict=True)):
        source.append(source[i] if shape.residual else i + 1)
        by_role = {
            role: tuple(((f"block_{i}", *path), axis) for path, axis in of_role)
            for role, of_role in entry.channel_axes(shape).items()
        }
        axes.setdefault(source[i], []).extend(by_role["inputs"])
        axes.setdefault(source[i + 1], []).extend(by_role["filters"])
        if HIDDEN in by_role:
            inner.append(ChannelGroup(HIDDEN, shape.hidden, (i,), by_role[HIDDEN]))
    axes.setdefault(source[head], []).append((("head",), 1))
    outer = []
    for first in sorted(set(source) - {image}):
        blocks = tuple(i - 1 for i, other in enumerate(source) if other == first)
        outer.append(ChannelGroup(CHANNELS, config.shapes()[first - 1].filters, blocks, tuple(axes[first])))
    return outer + inner


def keep_channels(
    config: ConvNetConfig, weights: PyTree, kept: Sequence[tuple[ChannelGroup, Sequence[int] | np.ndarray]]
) -> tuple[ConvNetConfig, Any]:
    """Removes channels.

    Args:
      config: Config of the network.
      weights: Its weights, with buffers.
      kept: Groups of `channel_groups`, with the ascending indices of the channels that stay.

    Returns:
      `(config, weights)` of the network without the other channels of these groups. It computes what the network computes in
      which scale and bias of these channels' normalisations are 0.

    Raises:
      InputError: No channel of a group would be left, or the normalisation is over several channels.
    """
    _check_normalisation(config)
    arrays: dict[Any, Any] = dict(flatten_dict(weights))
    new = config.shapes()
    for group, indices in kept:
        if not len(indices):
            raise InputError("all filters of a convolution would be removed: keep at least one")
        for path, axis in group.axes:
            for full in (path, (BUFFERS, *path)):
                if full in arrays:
                    split = _by_channel(arrays[full], axis, group.count)
                    smaller = jnp.take(split, jnp.asarray(indices), axis=axis + 1)
                    shape = list(arrays[full].shape)
                    shape[axis] = -1
                    arrays[full] = smaller.reshape(shape)
        for i in group.blocks:
            field = "filters" if group.unit == CHANNELS else "hidden"
            new[i] = dataclasses.replace(new[i], **{field: len(indices)})
    return _with_shapes(config, new), unflatten_dict(arrays)


def channel_importance(group: ChannelGroup, params: PyTree, gradients: PyTree = None) -> np.ndarray:
    """Importance of each channel of a group.

    Args:
      group: The group.
      params: Parameters of the network.
      gradients: Gradients of the loss, a tree like the parameters; None for the magnitude of the weights.

    Returns:
      float64 [channels]: the sum over all parameters of a channel of |weight x gradient|, or of squared weights.
    """
    arrays = flatten_dict(params)
    slopes = None if gradients is None else flatten_dict(gradients)
    total = np.zeros(group.count)
    for path, axis in group.axes:
        if path in arrays:  # buffers are no parameters
            scores = _by_channel(_importance(arrays, slopes, path), axis, group.count)
            total += np.moveaxis(scores, axis + 1, 0).reshape(group.count, -1).sum(axis=1)
    return total


def _check_convolutional(name: str, config: Any) -> None:
    if not config.has_convolutions:
        raise InputError(
            f"{name}: a model of {type(config).__name__} has no convolutions of images: remove heads, mlp or layers, or leave "
            "the stage out"
        )


def _check_normalisation(config: ConvNetConfig) -> None:
    if not make_norm(config.image_norm, parent=None).is_by_channel:
        raise InputError(
            f"channels of a network with model.image_norm={config.image_norm!r} cannot be removed, because it normalises "
            "several channels together: train with model.image_norm=batch, or remove positions of windows by shapes"
        )


def _with_shapes(config: ConvNetConfig, new: Sequence[BlockShape]) -> ConvNetConfig:
    """The config of a network whose blocks have these filters, hidden channels and taps."""
    entries, inputs = [], 1
    for entry, before, after in zip(config.entries, config.shapes(), new, strict=True):
        after = dataclasses.replace(after, inputs=inputs)
        entries.append(block_spec(entry.resized(before, after)))
        inputs = after.filters
    return dataclasses.replace(config, blocks=join_entries(entries), width=1.0)


def _arrays_and_slopes(
    name: str, by: str, config: ConfigOfModel, weights: PyTree, calibration: Calibration | None
) -> tuple[Any, Any]:
    """Arrays and gradients by path. The arrays are None if only shapes are known; the gradients, if `by` does not read them."""
    if calibration is not None and calibration.is_outline:
        return None, None
    slopes = None if by == "magnitude" else flatten_dict(calibration_gradients(name, config, weights, calibration))
    return flatten_dict(weights), slopes


def _scores(
    arrays: Mapping[Any, Any] | None, slopes: Mapping[Any, Any] | None, path: tuple[str, ...], count: int
) -> np.ndarray:
    """Importance of each tap of a window; equal where the weights are unknown."""
    if arrays is None:
        return np.ones(count)
    return _importance(arrays, slopes, path).reshape(count, -1).sum(axis=1)


def _importance(arrays: Mapping[Any, Any], slopes: Mapping[Any, Any] | None, path: tuple[str, ...]) -> np.ndarray:
    """Importance of each weight of an array, float64."""
    w = np.asarray(arrays[path], np.float64)
    return w**2 if slopes is None else np.abs(w * np.asarray(slopes[path], np.float64))


def _by_channel(array: AnyArray, axis: int, count: int) -> Any:
    """The array with its axis of taps times channels as two axes."""
    return array.reshape(*array.shape[:axis], -1, count, *array.shape[axis + 1 :])


def _keep_taps(array: Any, count: int, kept: np.ndarray) -> Any:
    """Keeps some taps of a kernel: `[m C, F]` from `[n C, F]`, or `[1, m, C]` from `[K, K, C]`."""
    by_tap = jnp.take(array.reshape(count, -1, array.shape[-1]), jnp.asarray(kept), axis=0)
    return by_tap.reshape(-1, array.shape[-1]) if array.ndim == 2 else by_tap.reshape(1, -1, array.shape[-1])


def _largest(scores: np.ndarray, count: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def _rectangle(scores: np.ndarray, current: Sequence[int], side: int, count: int) -> np.ndarray:
    """Indices of the taps of the rectangle with the highest score, among those of the largest area of at most `count` taps."""
    grid = np.full(side**2, -1)
    grid[list(current)] = np.arange(len(current))
    grid = grid.reshape(side, side)
    sizes = [(h, w) for h in range(1, side + 1) for w in range(1, side + 1) if h * w <= count]
    for area in sorted({h * w for h, w in sizes}, reverse=True):
        candidates = [
            window.ravel()
            for h, w in sizes
            if h * w == area
            for row in range(side - h + 1)
            for column in range(side - w + 1)
            if (window := grid[row : row + h, column : column + w]).min() >= 0
        ]
        if candidates:
            return max(candidates, key=lambda taps: scores[taps].sum())
    raise AssertionError("a window has at least one tap")
