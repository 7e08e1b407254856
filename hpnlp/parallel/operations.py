"""Operation-wise parallelism: independent functions of the same inputs on different devices.

Examples: the two directions of a recurrent layer, the members of an ensemble. XLA runs the operations of one device one after
the other, even if they do not depend on each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from hpnlp.cost.flop_count import count_flops
from hpnlp.parallel.varying import vary
from hpnlp.types import InputError

# A function of (weights, inputs), both trees of arrays, that returns a tree of arrays.
Function = Callable[[Any, Any], Any]
# Arrays of all functions: for each dtype an array `[devices, size]`, whose rows are the arrays of a device one after the other.
Packed = Mapping[str, jax.Array]

AXIS = "operation"


@dataclasses.dataclass(frozen=True)
class OperationParallel:
    """Independent functions divided over devices, made by `divide_operations`.

    A device holds only the weights of its functions, runs only its functions, and sends their results to all devices, in one
    all-gather per dtype. The backward pass sums the gradient of the inputs over the devices; the gradients of the weights stay
    on the device that holds the weights.

    Attributes:
      functions: The functions.
      mesh: The devices, along one axis.
      device_functions: Indices of the functions of each device.
      weights: Shapes of the weights of each function.
      inputs: Shapes of the inputs of all functions.
      outputs: Shapes of the results of each function.
    """

    functions: tuple[Function, ...]
    mesh: Mesh
    device_functions: tuple[tuple[int, ...], ...]
    weights: tuple[Any, ...]
    inputs: Any
    outputs: tuple[Any, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device receives from the others in a forward pass."""
        packed = jax.eval_shape(lambda: _pack(_zeros(self.outputs), self.device_functions))
        return sum(x.size // len(x) * (len(x) - 1) * x.dtype.itemsize for x in packed.values())

    def pack(self, weights: Sequence[Any]) -> Packed:
        """Places the weights of each function on the device that runs it.

        Args:
          weights: The weights of each function, in the order of `functions`.

        Returns:
          One array `[devices, size]` per dtype, divided over the devices. Devices with fewer weights have zeros at the end.

        Raises:
          InputError: The shapes or dtypes of weights are not those that `divide_operations` was given.
        """
        _check_shapes("weights", tuple(weights), self.weights)
        sharding = NamedSharding(self.mesh, P(AXIS))
        return {name: jax.device_put(x, sharding) for name, x in _pack(weights, self.device_functions).items()}

    def unpack(self, packed: Packed) -> list[Any]:
        """The inverse of `pack`.

        Args:
          packed: A result of `pack`, or the gradient with respect to one.

        Returns:
          The weights of each function, or their gradients, in the order of `functions`.
        """
        return _unpack(packed, self.weights, self.device_functions)

    def __call__(self, packed: Packed, inputs: PyTree) -> list[Any]:
        """Runs all functions. Outside of `jax.jit`, each call traces them again.

        Args:
          packed: A result of `pack`.
          inputs: The inputs of all functions, of the shapes that `divide_operations` was given.

        Returns:
          The result of each function, in the order of `functions`, on all devices.

        Raises:
          InputError: The inputs have other shapes or dtypes.
        """
        _check_shapes("inputs", inputs, self.inputs)
        sizes = _sizes(self.outputs, self.device_functions)
        branches = [self._branch(indices, sizes) for indices in self.device_functions]

        def run(local: Packed, inputs: PyTree) -> Packed:
            local, inputs = jax.tree.map(lambda x: vary(x, (AXIS,)), (local, inputs))
            return lax.switch(lax.axis_index(AXIS), branches, local, inputs)

        gathered = jax.shard_map(run, mesh=self.mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS))(packed, inputs)
        on_all = lax.with_sharding_constraint(gathered, NamedSharding(self.mesh, P()))
        return _unpack(on_all, self.outputs, self.device_functions)

    def _branch(self, indices: tuple[int, ...], sizes: Mapping[str, int]) -> Callable[[Packed, Any], Packed]:
        """Runs the functions of a device: packed weights `[1, size]` to packed results `[1, size]`."""

        def run(local: Packed, inputs: PyTree) -> Packed:
            weights = _unpack(local, [self.weights[i] for i in indices], [range(len(indices))])
            outputs = [self.functions[i](w, inputs) for i, w in zip(indices, weights, strict=True)]
            packed = _pack(outputs, [range(len(outputs))], sizes)
            return jax.tree.map(lambda x: vary(x, (AXIS,)), packed)

        return run


def divide_operations(
    functions: Sequence[Function],
    weights: Sequence[Any],
    inputs: PyTree,
    devices: Sequence[Any] | None = None,
) -> OperationParallel:
    """Divides independent functions of the same inputs over devices.

    Functions are assigned in the order of falling FLOPs, each to the device with the fewest FLOPs so far. FLOPs are those of
    matrix products and convolutions; a `while` loop of unknown length counts as one iteration.

    Args:
      functions: Functions of (weights, inputs), both trees of arrays, which return a tree of arrays. They may not contain
        collectives, since each device runs a different function.
      weights: The weights of each function, () for none, or their shapes (`jax.ShapeDtypeStruct`).
      inputs: The inputs of all functions, or their shapes. Every device holds them. Random keys belong here, not to weights.
      devices: The devices, by default all. No more are used than there are functions.

    Returns:
      A function of (packed weights, inputs); `pack` makes packed weights.

    Raises:
      InputError: There are no functions, no devices, or not as many weights as functions.

    Cost:
      The time of the device with the most work, and an all-gather of the results. This call traces each function twice.

    References:
      Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", and Jia et al. 2019, "Beyond data and
      model parallelism for deep neural networks" (the operation dimension).
    """
    if not functions or len(functions) != len(weights):
        raise InputError(
            f"{len(functions)} functions and {len(weights)} weights: expected at least one function, each with its weights "
            "(() for none)"
        )
    used = list(jax.devices() if devices is None else devices)[: len(functions)]
    if not used:
        raise InputError("devices is empty: expected at least one device, or None for all")
    of_weights, of_inputs = _shapes((tuple(weights), inputs))
    pairs = list(zip(functions, of_weights, strict=True))
    costs = [count_flops(function, w, of_inputs, while_trips=1) for function, w in pairs]
    outputs = tuple(jax.eval_shape(function, w, of_inputs) for function, w in pairs)
    return OperationParallel(
        tuple(functions),
        jax.make_mesh((len(used),), (AXIS,), axis_types=(AxisType.Auto,), devices=used),
        _assign(costs, len(used)),
        of_weights,
        of_inputs,
        outputs,
    )


def _assign(costs: Sequence[int], devices: int) -> tuple[tuple[int, ...], ...]:
    """Indices of the functions of each device: by falling cost, to the device of least cost, then of fewest functions."""
    assigned: list[list[int]] = [[] for _ in range(devices)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        min(assigned, key=lambda indices: (sum(costs[j] for j in indices), len(indices))).append(i)
    return tuple(map(tuple, assigned))


def _shapes(tree: PyTree) -> Any:
    """Shapes of arrays, numbers and ShapeDtypeStructs, in the dtypes that jax gives them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda tree: tree, tree))


def _check_shapes(name: str, arrays: PyTree, expected: PyTree) -> None:
    """Raises InputError unless the arrays have the expected structure, shapes and dtypes."""
    shapes = _shapes(arrays)
    if shapes != expected:
        raise InputError(
            f"{name} have the shapes {shapes}: expected {expected}, with which divide_operations was called: pass arrays of "
            "these shapes, or call divide_operations again"
        )


def _zeros(shapes: PyTree) -> Any:
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
    """The arrays of each group of trees in one row, `[groups, size]` per dtype, padded with zeros to the largest group."""
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
    """The trees from the result of `_pack`, by the shapes of their arrays."""
    trees: list[Any] = [None] * len(shapes)
    for row, group in enumerate(groups):
        leaves, structure = jax.tree.flatten([shapes[i] for i in group])
        pieces = {}
        for name, rows in packed.items():
            sizes = [math.prod(x.shape) for x in leaves if x.dtype.name == name]
            # The derivative of a split is one concatenation; that of each slice would be an array of the size of the row.
            pieces[name] = iter(lax.split(rows[row], (*sizes, rows.shape[1] - sum(sizes))))
        arrays = [next(pieces[x.dtype.name]).reshape(x.shape) for x in leaves]
        for i, tree in zip(group, jax.tree.unflatten(structure, arrays), strict=True):
            trees[i] = tree
    return trees
