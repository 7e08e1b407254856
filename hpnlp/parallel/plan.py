"""The Plan: how a computation is laid out on a mesh of devices, and the one table from logical axes to mesh axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hpnlp.spec import lookup
from hpnlp.types import InputError

AXES = ("data", "fsdp", "tensor")

# A named plan gives the axis sizes that the fields of the Plan leave open; -1 takes the devices that are left over.
PLANS: dict[str, dict[str, int]] = {
    "data": {"data": -1, "fsdp": 1, "tensor": 1},
    "fsdp": {"data": 1, "fsdp": -1, "tensor": 1},
    "tensor": {"data": 1, "fsdp": 1, "tensor": -1},
}

# Logical axis -> mesh axes. Layers name their arrays' axes on the left; nothing else in the project names a mesh axis.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": (),
    "layers": (),
    "embed": ("fsdp",),  # the model dimension of parameters: ZeRO-3
    "hidden": (),  # the model dimension of activations
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "classes": (),  # outputs that are no words: of clusters, classes and bits
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Axis sizes of the device mesh.

    name: an entry of PLANS, which fills the sizes left None. data: replicas with their own part of the batch. fsdp:
    devices that share the batch and, each holding a slice, the parameters and optimizer state (ZeRO-3). tensor: devices
    that share each layer's heads, MLP columns and vocabulary. One size may be -1: all devices that are left.
    """

    name: str = "data"
    data: int | None = None
    fsdp: int | None = None
    tensor: int | None = None

    def sizes(self, device_count: int) -> dict[str, int]:
        """The mesh's axis sizes over `device_count` devices. Raises InputError where they do not multiply to it."""
        named = lookup(PLANS, self.name, "plan")
        own = {axis: getattr(self, axis) for axis in AXES}
        # An explicit -1 takes what is left, so the named plan's own -1 gives way to it.
        explicit_fill = any(size == -1 for size in own.values())
        sizes = {a: (1 if explicit_fill and named[a] == -1 else named[a]) if own[a] is None else own[a] for a in AXES}
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
            raise InputError(f"plan ({shown}): sizes are at least 1, and one of them may be -1, which takes the rest")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            sizes = {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
        if math.prod(sizes.values()) != device_count:
            raise InputError(
                f"plan ({shown}) does not divide {device_count} device{'s' * (device_count > 1)}: "
                f"{fixed} is the product of the given sizes; choose sizes whose product is {device_count}, "
                f"or set one of plan.data, plan.fsdp, plan.tensor to -1"
            )
        return sizes

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh over `devices` (default: all)."""
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def check(mesh: Mesh, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Raises InputError unless every named size divides over the mesh axes that its logical axis is mapped to.

    sizes: logical axis -> (size, the config field that sets it).
    """
    for axis, (size, field) in sizes.items():
        parts = math.prod(mesh.shape[name] for name in RULES[axis])
        if size % parts:
            spread = " x ".join(f"plan.{name}={mesh.shape[name]}" for name in RULES[axis])
            raise InputError(
                f"{field}={size} does not divide over {spread}: make {field} a multiple of {parts}, or change the plan"
            )


def partition_spec(axes: Sequence[str | None], ndim: int | None = None) -> PartitionSpec:
    """Logical axis names -> PartitionSpec over mesh axes.

    An array whose rank differs from its names (a factored optimizer's row and column statistics) is replicated.
    """
    if ndim is not None and ndim != len(axes):
        return PartitionSpec()
    spec: list[Any] = [(RULES[axis] or None) if axis else None for axis in axes]
    return PartitionSpec(*(s[0] if s and len(s) == 1 else s for s in spec))


def flax_rules() -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """RULES in the form that flax.linen.logical_axis_rules takes."""
    return tuple((name, axes or None) for name, axes in RULES.items())


def sharding(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; none at all means replicated."""
    return NamedSharding(mesh, partition_spec(axes))


def tree_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """Shardings for a tree of arrays.

    axes: a tree of tuples of logical names, or None where an array has none. shapes: the same tree of shaped leaves.
    Raises InputError, naming the array, where a dimension does not divide.
    """

    def one(path: Any, names: tuple[str | None, ...] | None, leaf: Any) -> NamedSharding:
        spec = partition_spec(names or (), len(leaf.shape))
        for size, part in zip(leaf.shape, spec, strict=False):
            mesh_axes = () if part is None else (part,) if isinstance(part, str) else part
            parts = math.prod(mesh.shape[name] for name in mesh_axes)
            if size % parts:
                raise InputError(
                    f"parameter {jax.tree_util.keystr(path)} of shape {tuple(leaf.shape)} has a dimension {size} that "
                    f"does not divide over {' x '.join(f'plan.{n}={mesh.shape[n]}' for n in mesh_axes)}: "
                    "change the model's size or the plan"
                )
        return NamedSharding(mesh, spec)

    def is_names(node: Any) -> bool:
        return node is None or (isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node))

    return jax.tree_util.tree_map_with_path(one, axes, shapes, is_leaf=is_names)
