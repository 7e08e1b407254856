"""Shardings of the training state: how ZeRO shards parameters, gradients, optimizer statistics and averages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hpnlp.models import variables
from hpnlp.ops.weight import Weight, is_weight
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.memory import host_offload
from hpnlp.parallel.plan import Plan
from hpnlp.training.optimizers import sparse_rows
from hpnlp.types import AnyArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: arrays, or their shapes or shardings.

    The names of the fields are part of the checkpoint format.

    Attributes:
      step: Number of steps done, int32.
      params: Parameters.
      opt_state: State of the optimizer.
      ema: Averaged parameters, or None.
      scale: A `LossScale`, or None.
      buffers: Buffers, or None if the model has none.
      carry: Carry of the last batch, or None if the model has none.
      averaged: Number of steps in the average, int32; None for an exponential average or none.
    """

    step: Any
    params: Any
    opt_state: Any
    ema: Any = None
    scale: Any = None
    buffers: Any = None
    carry: Any = None
    averaged: Any = None

    @property
    def best_params(self) -> Any:
        """The weights for evaluation, generation and export: parameters, averaged ones if there are some, and buffers."""
        return variables.join(self.params if self.ema is None else self.ema, self.buffers)


def state_shardings(
    layout: Layout, plan: Plan, axes: PyTree, carry_axes: PyTree, statistic_specs: PyTree, shapes: TrainState
) -> TrainState:
    """Shardings of a training state.

    Args:
      layout: The plan on its devices; its ZeRO stage decides whether parameters are divided over `fsdp`.
      plan: The plan; its offloading options place parts of the state in host memory.
      axes: A tree like the weights, of tuples of logical axis names.
      carry_axes: The same of the carry, or None.
      statistic_specs: A tree like the parameters, of the PartitionSpec of each one's gradient and statistics.
      shapes: Shapes of the state.

    Returns:
      Parameters, buffers and carry by their logical axes, and each statistic of the optimizer as its parameter.
    """
    axes, buffer_axes = variables.split(axes)
    param_specs = layout.state_specs(axes, shapes.params, divided=layout.zero == 3)
    params, statistics = (
        jax.tree.map(lambda _, spec: NamedSharding(layout.mesh, spec), shapes.params, specs)
        for specs in (param_specs, statistic_specs)
    )
    state = TrainState(
        step=layout.sharding(),
        params=params,
        opt_state=_optimizer_shardings(layout, statistics, shapes),
        ema=None if shapes.ema is None else statistics,
        scale=jax.tree.map(lambda _: layout.sharding(), shapes.scale),
        buffers=None if buffer_axes is None else variable_shardings(layout, buffer_axes, shapes.buffers),
        carry=None if carry_axes is None else variable_shardings(layout, carry_axes, shapes.carry),
        averaged=None if shapes.averaged is None else layout.sharding(),
    )
    if plan.offload_optimizer:
        state = dataclasses.replace(state, opt_state=host_offload.on_host(state.opt_state))
    if plan.offload_parameters:
        ema = state.ema and host_offload.layers_on_host(state.ema)
        state = dataclasses.replace(state, params=host_offload.layers_on_host(state.params), ema=ema)
    return state


def frozen_shapes(layout: Layout, axes: PyTree, shapes: PyTree) -> tuple[Any, ...]:
    """Shapes of a model's frozen variables, as the last arguments of a step or an evaluation.

    Args:
      layout: The plan on its devices.
      axes: Logical axes of the model's weights.
      shapes: Shapes of the weights.

    Returns:
      A tuple of one tree of shapes with shardings; empty for a model without frozen variables.
      They may have other sizes than the model, such as the layers of a teacher: an axis that the devices do not divide is
      replicated.
    """
    if variables.FROZEN not in shapes:
        return ()
    axes, shapes = axes[variables.FROZEN], shapes[variables.FROZEN]
    shardings = jax.tree.map(_dividing, shapes, variable_shardings(layout, axes, shapes))
    return (shapes_with(shapes, shardings),)


def _dividing(x: jax.Array | jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """The sharding without the mesh axes that do not divide the array."""
    entries = [
        names if size % math.prod(sharding.mesh.shape[name] for name in _mesh_axes(names)) == 0 else None
        for size, names in zip(x.shape, sharding.spec, strict=False)
    ]
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


def _mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def gradient_shapes(mesh: Mesh | AbstractMesh, shapes: PyTree, param_shardings: PyTree, statistic_specs: PyTree) -> Any:
    """Shapes of the gradients.

    Args:
      mesh: The mesh.
      shapes: Shapes of the parameters.
      param_shardings: Shardings of the parameters.
      statistic_specs: PartitionSpecs of the optimizer's statistics.

    Returns:
      Shapes with the statistics' specs, in the parameters' memory (device or host).
    """

    def gradient_shape(x: jax.ShapeDtypeStruct, sharding: NamedSharding, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        placed = NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)

    return jax.tree.map(gradient_shape, shapes, param_shardings, statistic_specs)


def variable_shardings(layout: Layout, axes: PyTree, shapes: PyTree) -> Any:
    """Shardings of buffers, frozen variables or a carry.

    ZeRO 3 divides these variables as it divides parameters, so that a layer gathers all of its variables in the same way.

    Args:
      layout: The plan on its devices.
      axes: A tree of tuples of logical axis names.
      shapes: A tree like it, of shapes.

    Returns:
      A tree of shardings.
    """
    specs = layout.state_specs(axes, shapes, divided=layout.zero == 3)
    return jax.tree.map(lambda _, spec: NamedSharding(layout.mesh, spec), shapes, specs)


def _optimizer_shardings(layout: Layout, statistics: PyTree, shapes: TrainState) -> Any:
    """Shardings of the optimizer's state; each statistic is found by the path of its parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params)
    param_shapes = {sparse_rows.keys(path): leaf.shape for path, leaf in leaves}
    by_path = {
        sparse_rows.keys(path): sharding
        for (path, _), sharding in zip(leaves, jax.tree.leaves(statistics), strict=True)
    }

    def statistic_sharding(path: Any, leaf: Any) -> NamedSharding:
        # Counters and the factored statistics of adafactor, which are small, are replicated.
        owner = sparse_rows.owner(path, leaf.shape, param_shapes)
        if owner is None or leaf.shape == param_shapes[owner]:
            return by_path.get(owner or (), layout.sharding())
        per_row = by_path[owner].spec[: len(leaf.shape) - 1]  # statistics of rows have 1 in place of the last axis
        return NamedSharding(layout.mesh, PartitionSpec(*per_row))

    return jax.tree_util.tree_map_with_path(statistic_sharding, shapes.opt_state)


def shapes_with(shapes: PyTree, shardings: PyTree) -> Any:
    """Shapes with shardings.

    Args:
      shapes: A tree of arrays or shapes.
      shardings: A tree like it, of shardings.

    Returns:
      A tree of `jax.ShapeDtypeStruct`.
    """
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def place(shape: jax.ShapeDtypeStruct, value: AnyArray) -> jax.Array:
    """Places an array in the memory of devices.

    Args:
      shape: A shape with a sharding, whose memory kind is ignored: the array comes to the devices even if it is host memory.
      value: The array, the same in every process.

    Returns:
      The array with this sharding, in device memory.
    """
    sharding = NamedSharding(shape.sharding.mesh, shape.sharding.spec)
    return jax.make_array_from_callback(shape.shape, sharding, lambda index: value[index])


def resharded(sharding: NamedSharding, weight: jax.Array | Weight) -> Any:
    """A parameter in the sharding that the model expects, within a jitted function.

    Args:
      sharding: The sharding.
      weight: An array, or a Weight, of which only compressed models have any.

    Returns:
      The array with this sharding; a Weight as it is.
    """
    return weight if is_weight(weight) else jax.lax.with_sharding_constraint(weight, sharding)
