"""Tensor parallelism within a Block: heads and MLP columns mesh_axes over devices, with the collectives written out."""

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
    """Collectives of one device around the branches of a Block whose heads and MLP columns are divided over a mesh.

    Args:
        mesh_axes: "heads", "mlp" and "vocab" -> the mesh axes that divide them.
        shards_tokens: True where, between branches, each device of the axis `tensor` holds a part of the tokens of each
            sequence (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", sec. 4.2.2);
            False where it holds all of them.
        run_mixer: `(mixer, inputs, mask) -> MixerOutput` for the device's tokens.
        gather: full parameters of a layer from the device's shards.
        regathered_sizes: numbers of elements that parameters have before and after `gather`, where the backward pass is to
            gather them again; empty where it keeps the gathered parameters.
    """

    is_identity: ClassVar[bool] = False

    mesh_axes: Mapping[str, tuple[str, ...]]
    shards_tokens: bool
    run_mixer: Callable[..., Any] = lambda mixer, inputs, mask: mixer(inputs, mask)
    gather: Callable[[Any], Any] = lambda params: params
    regathered_sizes: frozenset[int] = frozenset()

    @property
    def regathers(self) -> bool:
        return bool(self.regathered_sizes)

    def local_size(self, name: str, size: int) -> int:
        """What a device has of `size` heads or columns."""
        return size // math.prod(lax.axis_size(axis) for axis in self.mesh_axes[name])

    def local_start(self, name: str, size: int) -> Any:
        """The number of the first of them."""
        axes = self.mesh_axes[name]
        return lax.axis_index(axes) * self.local_size(name, size) if axes else 0

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        """[B, t, D] -> [B, T, D]: all tokens of the device's rows."""
        return lax.all_gather(x, "tensor", axis=1, tiled=True) if self.shards_tokens else x

    def reduce_output(self, y: jax.Array, name: str) -> jax.Array:
        """[B, T, D] -> [B, t, D]: the sum over the devices that each made a part of it, for the device's own tokens."""
        axes = self.mesh_axes[name]
        if not self.shards_tokens:
            return lax.psum(y, axes) if axes else y
        if others := tuple(axis for axis in axes if axis != "tensor"):
            y = lax.psum(y, others)
        return (
            lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
            if "tensor" in axes
            else self.local_tokens(y, 1)
        )

    def mix(self, mixer: Any, inputs: Any, mask: Any) -> Any:
        """`mixer(inputs, mask)` of the device's tokens and heads."""
        if self.mesh_axes["heads"] and mixer.within(mask).heads is not None:
            raise InputError(
                "heads with masks of their own are not alike on all devices of plan.tensor: set plan.tensor=1"
            )
        return self.run_mixer(mixer, inputs, mask)

    def gather_parameters(self, params: Any) -> Any:
        """A layer's parameters, with all that ZeRO divides of them."""
        return self.gather(params)

    def remat_policy(self, policy: Any) -> Any:
        """`policy`, None for one that saves everything, but for parameters that the backward pass takes again."""
        if not self.regathered_sizes:
            return policy
        base = policy or jax.checkpoint_policies.everything_saveable

        def saved(primitive: Any, *arrays: Any, **more: Any) -> Any:  # a bool, or where to
            moved = primitive.name in MOVES and arrays[0].size in self.regathered_sizes
            return primitive.name not in TAKES and not moved and base(primitive, *arrays, **more)

        return saved

    def local_tokens(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an array of all the row's tokens that belongs to the device's own."""
        if not self.shards_tokens:
            return x
        count = x.shape[axis] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * count, count, axis)
