"""Tensor parallelism within a Block: heads and MLP columns divided over devices, with the collectives written out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
from jax import lax

from hpnlp.types import InputError, TensorParallel

# Primitives that take parameters from a stack, from the host or from other devices, and such that leave their numbers as they
# are: what they make of parameters a backward pass would keep in their place.
TAKES = ("all_gather", "device_put", "dynamic_slice")


MOVES = ("broadcast_in_dim", "convert_element_type", "pcast", "pvary", "reshape", "squeeze", "transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class MeshTensorParallel(TensorParallel):
    """A device's part in a Block whose heads and MLP columns are divided: what goes in and out of its branches.

    divided: what is, by the mesh axes. shares: between branches, each device of `tensor` has a part of each row's tokens
    (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", sec. 4.2.2); else all of them.
    mixed: `(mixer, inputs, mask) -> MixerOutput` of the device's tokens. take: what makes a layer's parameters whole. again:
    where the backward pass is to do so again, how many numbers parameters have, before and after.
    """

    is_identity: ClassVar[bool] = False

    divided: Mapping[str, tuple[str, ...]]
    shares: bool
    mixed: Callable[..., Any] = lambda mixer, inputs, mask: mixer(inputs, mask)
    take: Callable[[Any], Any] = lambda params: params
    again: frozenset[int] = frozenset()

    @property
    def takes_again(self) -> bool:
        return bool(self.again)

    def local(self, name: str, size: int) -> int:
        """What a device has of `size` heads or columns."""
        return size // math.prod(lax.axis_size(axis) for axis in self.divided[name])

    def first(self, name: str, size: int) -> Any:
        """The number of the first of them."""
        axes = self.divided[name]
        return lax.axis_index(axes) * self.local(name, size) if axes else 0

    def enter(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, T, D]: all tokens of the device's rows."""
        return lax.all_gather(x, "tensor", axis=1, tiled=True) if self.shares else x

    def leave(self, y: jax.Array, name: str) -> jax.Array:
        """[B, T, D] -> [B, t, D]: the sum over the devices that each made a part of it, for the device's own tokens."""
        axes = self.divided[name]
        if not self.shares:
            return lax.psum(y, axes) if axes else y
        if others := tuple(axis for axis in axes if axis != "tensor"):
            y = lax.psum(y, others)
        return lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True) if "tensor" in axes else self.own(y, 1)

    def mix(self, mixer: Any, inputs: Any, mask: Any) -> Any:
        """`mixer(inputs, mask)` of the device's tokens and heads."""
        if self.divided["heads"] and mixer.within(mask).heads is not None:
            raise InputError(
                "heads with masks of their own are not alike on all devices of plan.tensor: set plan.tensor=1"
            )
        return self.mixed(mixer, inputs, mask)

    def whole(self, params: Any) -> Any:
        """A layer's parameters, with all that ZeRO divides of them."""
        return self.take(params)

    def policy(self, policy: Any) -> Any:
        """`policy`, None for one that saves everything, but for parameters that the backward pass takes again."""
        if not self.again:
            return policy
        base = policy or jax.checkpoint_policies.everything_saveable

        def saved(primitive: Any, *arrays: Any, **more: Any) -> Any:  # a bool, or where to
            moved = primitive.name in MOVES and arrays[0].size in self.again
            return primitive.name not in TAKES and not moved and base(primitive, *arrays, **more)

        return saved

    def own(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array of all the row's tokens that belongs to the device's own."""
        if not self.shares:
            return x
        count = x.shape[axis] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * count, count, axis)
