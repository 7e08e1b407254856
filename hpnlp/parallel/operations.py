"""Operation-wise parallelism: independent functions of the same inputs, each on a device of its own.

Examples: the two directions of a recurrent layer, the towers of a pair model, the members of an ensemble. XLA runs the
operations of one device one after the other, whether they depend on each other or not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hpnlp.flop_count import count_flops
from hpnlp.parallel.varying import vary
from hpnlp.types import InputError

# A function of (weights, inputs), both trees of arrays, that returns a tree of arrays. All functions have the same inputs.
Function = Callable[[Any, Any], Any]
# Arrays of several functions as one array `[devices, size]` per dtype.
Packed = Mapping[str, jax.Array]

AXIS = "operation"


@dataclasses.dataclass(frozen=True)
class OperationParallel:
    """Independent functions over devices, made by `divide_operations`.

    A device holds the weights of its functions only, computes only these, and then sends their results to all devices, in one
    all-gather per dtype. The backward pass sums the gradient of the inputs over the devices, and leaves the gradients of the
    weights where the weights are.

    Attributes:
      functions: The functions.
      mesh: The devices, along one axis.
      device_functions: Indices of each device's functions.
      weights: Shapes of each function's weights.
      outputs: Shapes of each function's results.
    """

    functions: tuple[Function, ...]
    mesh: Mesh
    device_functions: tuple[tuple[int, ...], ...]
    weights: tuple[Any, ...]
    outputs: tuple[Any, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device receives from the others in a call."""
        packed = jax.eval_shape(lambda: _pack(_zeros(self.outputs), self.device_functions))
        return sum(x.size // len(x) * (len(x) - 1) * x.dtype.itemsize for x in packed.values())

    def pack(self, weights: Sequence[Any]) -> Packed:
        """Places each function's weights on its device.

        Args:
          weights: The weights of each function, in the order of `functions`.

        Returns:
          One array `[devices, size]` per dtype, divided over the devices. Devices with fewer weights have zeros at the end.

        Raises:
          InputError: Weights of other shapes than those that the functions were divided with.
        """
        shapes = jax.tree.map(_shape, tuple(weights))
        if shapes != self.weights:
            raise InputError(
                f"weights have the shapes {shapes}: expected {self.weights}, with which divide_operations was called"
            )
        sharding = NamedSharding(self.mesh, P(AXIS))
        return {name: jax.device_put(x, sharding) for name, x in _pack(weights, self.device_functions).items()}

    def unpack(self, packed: Packed) -> list[Any]:
        """Weights, or gradients, of each function from those of all devices.

        Args:
          packed: A result of `pack`, or an array of its structure, as a gradient.

        Returns:
          The weights of each function, in the order of `functions`.
        """
        return _unpack(packed, self.weights, self.device_functions)

    def __call__(self, packed: Packed, inputs: Any) -> list[Any]:
        """Runs all functions.

        Args:
          packed: The weights, by `pack`.
          inputs: The inputs of every function, with the shapes that the functions were divided with.

        Returns:
          The result of each function, in the order of `functions`, on all devices.
        """

        def run(local: Packed, inputs: Any) -> Packed:
            local, inputs = jax.tree.map(lambda x: vary(x, (AXIS,)), (local, inputs))
            return lax.switch(lax.axis_index(AXIS), branches, local, inputs)

        sizes = _sizes(self.outputs, self.device_functions)
        branches = [self._branch(indices, sizes) for indices in self.device_functions]
        gathered = jax.shard_map(run, mesh=self.mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS))(packed, inputs)
        on_all = lax.with_sharding_constraint(gathered, NamedSharding(self.mesh, P()))
        return _unpack(on_all, self.outputs, self.device_functions)

    def _branch(self, indices: tuple[int, ...], sizes: Mapping[str, int]) -> Callable[[Packed, Any], Packed]:
        """The functions of one device, from and to packed arrays `[1, size]`."""

        def run(local: Packed, inputs: Any) -> Packed:
            weights = _unpack(local, [self.weights[i] for i in indices], [range(len(indices))])
            outputs = [self.functions[i](w, inputs) for i, w in zip(indices, weights, strict=True)]
            packed = _pack(outputs, [range(len(outputs))], sizes)
            return jax.tree.map(lambda x: vary(x, (AXIS,)), packed)

        return run


def divide_operations(
    functions: Sequence[Function],
    weights: Sequence[Any],
    inputs: Any,
    devices: Sequence[Any] | None = None,
) -> OperationParallel:
    """Divides independent functions of the same inputs over devices.

    The function with the most FLOPs goes first, each to the device with the fewest so far.

    Args:
      functions: Functions of (weights, inputs), which return arrays. They may not contain collectives over devices, since
        each device runs a different function.
      weights: Each function's weights, or their shapes (`jax.ShapeDtypeStruct`).
      inputs: The inputs of all functions, or their shapes. Every device holds them.
      devices: The devices, all by default. No more are used than there are functions.

    Returns:
      A callable, for use inside or outside of `jax.jit`.

    Raises:
      InputError: No functions, or another number of weights.

    Cost:
      The time of the device with the most work, and an all-gather of the results.

    References:
      Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", and Jia et al. 2019, "Beyond data and
      model parallelism for deep neural networks" (the operation dimension).
    """
    if not functions or len(functions) != len(weights):
        raise InputError(
            f"{len(functions)} functions and {len(weights)} weights: expected at least one function, each with its weights "
            "(() for none)"
        )
    devices = jax.devices() if devices is None else devices
    used = devices[: len(functions)]
    shapes = jax.tree.map(_shape, (tuple(weights), inputs))
    costs = [count_flops(function, w, shapes[1]) for function, w in zip(functions, shapes[0], strict=True)]
    outputs = tuple(jax.eval_shape(function, w, shapes[1]) for function, w in zip(functions, shapes[0], strict=True))
    return OperationParallel(
        tuple(functions),
        jax.make_mesh((len(used),), (AXIS,), axis_types=(AxisType.Auto,), devices=used),
        _assign(costs, len(used)),
        shapes[0],
        outputs,
    )


def _assign(costs: Sequence[int], devices: int) -> tuple[tuple[int, ...], ...]:
    """Indices of each device's functions: the most expensive first, to the device with the least work and fewest functions."""
    assigned: list[list[int]] = [[] for _ in range(devices)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(assigned, key=lambda indices: (sum(costs[j] for j in indices), len(indices))).append(i)
    return tuple(map(tuple, assigned))


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _sizes(trees: Sequence[Any], groups: Sequence[Sequence[int]]) -> dict[str, int]:
    """Number of elements of each dtype in the group of trees that has the most."""
    sizes: dict[str, int] = {}
    for group in groups:
        elements: dict[str, int] = {}
        for x in jax.tree.leaves([trees[i] for i in group]):
            elements[x.dtype.name] = elements.get(x.dtype.name, 0) + math.prod(x.shape)
        sizes |= {name: max(size, sizes.get(name, 0)) for name, size in elements.items()}
    return dict(sorted(sizes.items()))


def _pack(
    trees: Sequence[Any], groups: Sequence[Sequence[int]], sizes: Mapping[str, int] | None = None
) -> dict[str, jax.Array]:
    """The arrays of each group of trees in one row, `[groups, size]` per dtype, with zeros up to the largest group."""
    trees, packed = jax.tree.map(jnp.asarray, list(trees)), {}
    for name, size in (sizes or _sizes(trees, groups)).items():
        rows = []
        for group in groups:
            leaves = [x for x in jax.tree.leaves([trees[i] for i in group]) if x.dtype.name == name]
            row = jnp.concatenate([jnp.ravel(x) for x in leaves]) if leaves else jnp.zeros(0, name)
            rows.append(jnp.pad(row, (0, size - row.size)))
        packed[name] = jnp.stack(rows)
    return packed


def _unpack(packed: Packed, shapes: Sequence[Any], groups: Sequence[Sequence[int]]) -> list[Any]:
    """Trees of arrays from their packed form."""
    trees: list[Any] = [None] * len(shapes)
    for row, group in enumerate(groups):
        start = dict.fromkeys(packed, 0)
        for i in group:
            leaves, structure = jax.tree.flatten(shapes[i])
            arrays = []
            for leaf in leaves:
                name, size = leaf.dtype.name, math.prod(leaf.shape)
                arrays.append(packed[name][row, start[name] : start[name] + size].reshape(leaf.shape))
                start[name] += size
            trees[i] = jax.tree.unflatten(structure, arrays)
    return trees
