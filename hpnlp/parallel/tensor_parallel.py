"""Tensor parallelism within a Block: heads and MLP columns divided over devices, with explicit collectives.

Megatron-LM (Shoeybi et al. 2019): the first product of a branch is divided by columns, the second by rows, and the partial
results are summed. With sequence parallelism (Korthikanti et al. 2022, "Reducing activation recomputation in large
transformer models", sec. 4.2.2) the sum is a reduce-scatter over tokens, and an all-gather precedes the next branch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.model_parallel import TensorParallel
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.parallel.varying import on_first_device, shard_in_place, vary
from hpnlp.types import InputError, MixerInputs, MixerOutput

if TYPE_CHECKING:
    from jax.extend.core import Primitive

# Primitives that take parameters from a stack, from the host or from other devices. If a policy saved their results, the
# backward pass would keep gathered parameters, which is what regathering avoids.
GATHERS = ("all_gather", "device_put", "dynamic_slice")
# Primitives that only convert or reshape a gathered parameter: saving their results would keep it as well.
CONVERSIONS = ("broadcast_in_dim", "convert_element_type", "pcast", "pvary", "reshape", "squeeze", "transpose")


def _run_mixer(mixer: Mixer, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
    return mixer(inputs, mask)


def _identity(params: PyTree, stack: str) -> Any:
    return params


@dataclasses.dataclass(frozen=True, eq=False)
class MeshTensorParallel(TensorParallel):
    """Collectives of one device around the branches of a Block whose heads and MLP columns are divided over a mesh.

    Methods are called inside `jax.shard_map`.

    Attributes:
      mesh_axes: "heads", "mlp", "vocab" and "experts" -> the mesh axes that divide them.
      shards_tokens: True where, between branches, each device of the axis `tensor` holds a slice of the tokens of each
          sequence (sequence parallelism); False where it holds all of them.
      run_mixer: `(mixer, inputs, mask) -> MixerOutput` for the device's tokens.
      gather: `(shards, name of the stack)`: makes a layer's full parameters from the device's shards.
      regathered_sizes: Numbers of elements that parameters have before and after `gather`, where the backward pass gathers
          them again; empty where it keeps the gathered parameters.
    """

    is_identity: ClassVar[bool] = False

    mesh_axes: Mapping[str, tuple[str, ...]]
    shards_tokens: bool
    run_mixer: Callable[[Any, MixerInputs, Any], MixerOutput] = _run_mixer
    gather: Callable[[Any, str], Any] = _identity
    regathered_sizes: frozenset[int] = frozenset()

    @property
    def regathers(self) -> bool:
        return bool(self.regathered_sizes)

    def local_size(self, name: str, size: int) -> int:
        return size // math.prod(lax.axis_size(axis) for axis in self.mesh_axes[name])

    def local_start(self, name: str, size: int) -> Any:
        axes = self.mesh_axes[name]
        return lax.axis_index(axes) * self.local_size(name, size) if axes else 0

    def gather_tokens(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "tensor", axis=1, tiled=True) if self.shards_tokens else x

    def reduce_output(self, y: jax.Array, name: str) -> jax.Array:
        axes = self.mesh_axes[name]
        if not self.shards_tokens:
            return lax.psum(y, axes) if axes else y
        if other_axes := tuple(axis for axis in axes if axis != "tensor"):
            y = lax.psum(y, other_axes)
        if "tensor" in axes:
            return lax.psum_scatter(y, "tensor", scatter_dimension=1, tiled=True)
        return self.local_tokens(y, 1)

    def exchange(self, x: jax.Array, name: str) -> jax.Array:
        axes = self.mesh_axes[name]
        return lax.all_to_all(vary(x, axes), axes, split_axis=0, concat_axis=0, tiled=True) if axes else x

    def mix(self, mixer: Mixer, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        if self.mesh_axes["heads"] and mixer.within(mask).heads is not None:
            raise InputError(
                "heads with masks of their own are not alike on all devices of plan.tensor: set plan.tensor=1"
            )
        return self.run_mixer(mixer, inputs, mask)

    def gather_parameters(self, params: PyTree, stack: str) -> Any:
        return self.gather(params, stack)

    def remat_policy(self, policy: Callable[..., Any] | None) -> Any:
        if not self.regathered_sizes:
            return policy
        base_policy = policy or jax.checkpoint_policies.everything_saveable

        def policy_without_parameters(primitive: Primitive, *avals: Any, **params: Any) -> Any:
            """False for a gathered parameter, else the result of `base_policy`: a bool or an offloading directive."""
            converts = primitive.name in CONVERSIONS and avals[0].size in self.regathered_sizes
            return primitive.name not in GATHERS and not converts and base_policy(primitive, *avals, **params)

        return policy_without_parameters

    def local_statistic(self, value: jax.Array, axes: Sequence[str | None]) -> jax.Array:
        for dim, name in enumerate(axes):
            mesh_axes = self.mesh_axes.get("heads" if name == "kv_heads" else name or "", ())
            if mesh_axes:
                return shard_in_place(value, dim, mesh_axes)
        # In a branch, the devices of the axis have the same tokens.
        is_repeated = "tensor" in jax.typeof(value).manual_axis_type.varying
        return on_first_device(value, "tensor") if is_repeated else value

    def same_on_all(self, x: jax.Array) -> jax.Array:
        if "tensor" not in jax.typeof(x).manual_axis_type.varying:
            return x
        return lax.psum(jnp.where(lax.axis_index("tensor") == 0, x, 0), "tensor")

    def local_tokens(self, x: jax.Array, axis: int) -> jax.Array:
        if not self.shards_tokens:
            return x
        count = x.shape[axis] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * count, count, axis)
