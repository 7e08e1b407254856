"""The Layout: a Plan resolved on its devices, with the PartitionSpec of every array of one model.

Each device computes on shards of arrays, in programs that are `jax.shard_map`s over all mesh axes; their collectives are
written out in this package, and nothing in them is left to the compiler. Between these programs (the final norm, the
optimizer) arrays are global, and the compiler has only elementwise operations to place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hpnlp.compatibility import Facts
from hpnlp.model_interfaces.model_parallel import Zero2Parameter, is_zero2
from hpnlp.ops.weight import Weight, is_weight
from hpnlp.parallel.memory import zero
from hpnlp.parallel.tensor_parallel import MeshTensorParallel
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A Plan resolved on a mesh.

    Attributes:
      mesh: The devices; an AbstractMesh for devices that do not exist.
      rules: Logical axis -> the mesh axes that divide it, each of more than one device.
      zero: The ZeRO stage of the mesh axis `fsdp`, 0 to 3.
      microbatches, exchange, rounds, recompute_stages, offload_parameters: Fields of the Plan.
    """

    mesh: Mesh | AbstractMesh
    rules: Mapping[str, tuple[str, ...]]
    zero: int
    microbatches: int = 0
    exchange: str = "ring"
    rounds: int = 1
    recompute_stages: bool = False
    offload_parameters: bool = False

    def size(self, *names: str) -> int:
        """Number of shards that logical axes are divided into.

        Args:
          names: Logical axes.

        Returns:
          The product of the sizes of the mesh axes that divide them.
        """
        return math.prod(self.mesh.shape[axis] for name in names for axis in self.rules[name])

    def spec(self, *names: str | None) -> PartitionSpec:
        """PartitionSpec of an array.

        Args:
          names: The logical name of each axis; None for an axis that is not divided.

        Returns:
          The PartitionSpec. ZeRO does not divide the array.
        """
        return _partition_spec([self.rules[name] if name else () for name in names])

    def sharding(self, *names: str | None) -> NamedSharding:
        """Sharding of an array.

        Args:
          names: As for `spec`; no names for a replicated array.

        Returns:
          A NamedSharding of `spec(*names)`.
        """
        return NamedSharding(self.mesh, self.spec(*names))

    def state_spec(self, names: Sequence[str | None] | None, shape: Sequence[int], *, divided: bool) -> PartitionSpec:
        """PartitionSpec of a parameter, a gradient or an optimizer statistic.

        Args:
          names: Logical names of the parameter's axes, or None.
          shape: Shape of the array. If its rank differs from the number of names (a factored statistic), it is replicated.
          divided: Whether ZeRO divides the array over `fsdp`; see `zero.fsdp_dimension`.

        Returns:
          The PartitionSpec.
        """
        if names is None or len(names) != len(shape):
            return PartitionSpec()
        axes = [self.rules[name] if name else () for name in names]
        if divided and (dim := self._fsdp_dimension(names, shape)) != zero.NOT_DIVIDED:
            axes[dim] = (*axes[dim], zero.AXIS)
        return _partition_spec(axes)

    def _fsdp_dimension(self, names: Sequence[str | None], shape: Sequence[int]) -> int:
        """The dimension of an array that ZeRO divides, or NOT_DIVIDED."""
        return zero.fsdp_dimension(names, shape, [self.rules[name] if name else () for name in names], self.mesh.shape)

    def state_specs(self, names: PyTree, shapes: PyTree, *, divided: bool) -> Any:
        """PartitionSpecs of a tree of arrays.

        Args:
          names: A tree of tuples of logical names, None for an array without names.
          shapes: A tree of arrays or their shapes.
          divided: As for `state_spec`.

        Returns:
          A tree of PartitionSpecs.
        """
        return jax.tree.map(lambda n, x: self.state_spec(n, x.shape, divided=divided), names, shapes, is_leaf=_is_names)

    def added_to(self, facts: Facts) -> Facts:
        """Adds this layout to the facts on a model.

        Args:
          facts: Facts on the layers of a model.

        Returns:
          Facts that `compatibility.check` reads.
        """
        devices = {axis: self.size(axis) for axis in ("length", "heads", "layers")}
        return dataclasses.replace(facts, devices=devices, exchange=self.exchange, zero=self.zero, rounds=self.rounds)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices have different tokens."""
        return (*self.rules["batch"], *self.rules["length"])

    def tensor_parallel(self, length: int) -> MeshTensorParallel:
        """Tensor parallelism of Blocks.

        Args:
          length: Tokens per sequence.

        Returns:
          A MeshTensorParallel, with sequence parallelism if the tokens divide over the axis `tensor`.
        """
        devices = self.mesh.shape["tensor"]
        shards_tokens = devices > 1 and length % (devices * self.size("length")) == 0
        return MeshTensorParallel(
            {name: self.rules[name] for name in ("heads", "mlp", "vocab", "experts")}, shards_tokens
        )

    def activations(self, length: int) -> PartitionSpec:
        """PartitionSpec of hidden states `[B, T, D]` between Blocks.

        Args:
          length: Tokens per sequence.

        Returns:
          The PartitionSpec.
        """
        axes = ("tensor",) if self.tensor_parallel(length).shards_tokens else ()
        return _partition_spec([self.rules["batch"], (*self.rules["length"], *axes), ()])

    def check_tokens(self, shape: Sequence[int]) -> None:
        """Checks that sequences and tokens divide over the mesh.

        Args:
          shape: `(B, T)` of a batch, or `(B,)` of numbers that each sequence has one of.

        Raises:
          InputError: B or T is not a multiple of the number of devices that divide it.
        """
        for size, name, unit in zip(shape, ("batch", "length"), ("sequences", "tokens per sequence"), strict=False):
            if size % self.size(name):
                axes = " x ".join(f"plan.{axis}={self.mesh.shape[axis]}" for axis in self.rules[name])
                raise InputError(f"{size} {unit} do not divide over {axes}: make them a multiple of {self.size(name)}")

    def parameters(self, names: PyTree, params: PyTree, *, stacked: bool = False) -> tuple[Any, Callable[[Any], Any]]:
        """Specs under which parameters enter a `shard_map`, and the function that gathers them there.

        Args:
          names: A tree like `params` of tuples of logical names.
          params: A tree of arrays, `Zero2Parameter`s and Weights, for which names are those of the matrix.
          stacked: True if the function is given slices of the first axis ("layers") instead of the complete stacks.

        Returns:
          `(specs, gather)`. specs: a tree of PartitionSpecs. gather: maps a tree of a device's shards to full parameters;
          its derivative reduce-scatters gradients as the ZeRO stage has it.

        Raises:
          InputError: A Weight has arrays that do not divide as its matrix does.
        """
        names = jax.tree.map(
            lambda axes, leaf: self._weight_axes(axes, leaf) if is_weight(leaf) else axes,
            names,
            params,
            is_leaf=_is_names,
        )
        specs = jax.tree.map(self._parameter_spec, names, params, is_leaf=_is_names)
        gather_dimension = functools.partial(self._gather_dimension, stacked=stacked)
        dims = jax.tree.map(gather_dimension, names, params, is_leaf=_is_names)

        def gather(shards: PyTree) -> Any:
            return jax.tree.map(lambda dim, leaf: zero.gather_parameter(leaf, dim, self.token_axes), dims, shards)

        return specs, gather

    def _weight_axes(self, names: tuple[str | None, ...], weight: Weight) -> Any:
        """Logical axes of a Weight's arrays; InputError if the arrays of a device do not represent its part of the matrix."""
        axes = weight.axes(names)
        is_even = True

        def shard(names: tuple[str | None, ...] | None, leaf: PyTree) -> Any:
            nonlocal is_even
            if names is None:  # an optional array that the Weight does not have
                return leaf
            sizes = [self.size(name) if name else 1 for name in names]
            is_even = is_even and all(n % size == 0 for n, size in zip(leaf.shape, sizes, strict=True))
            return jax.ShapeDtypeStruct([n // size for n, size in zip(leaf.shape, sizes, strict=True)], leaf.dtype)

        local = jax.tree.map(shard, axes, weight, is_leaf=_is_names)
        sizes = [self.size(name) if name else 1 for name in names[-2:]]
        expected = tuple(n // size for n, size in zip(weight.shape, sizes, strict=True))
        if not is_even or tuple(local.shape) != expected:
            rows, columns = weight.shape
            divided = " and ".join(
                f"{side} over {size}" for side, size in zip(("rows", "columns"), sizes, strict=True) if size > 1
            )
            axes = dict.fromkeys(axis for name in names[-2:] if name for axis in self.rules[name])
            fields, ones = (
                " and ".join(f"plan.{axis}={n}" for axis, n in values.items())
                for values in ({axis: self.mesh.shape[axis] for axis in axes}, dict.fromkeys(axes, 1))
            )
            raise InputError(
                f"{fields} divides a matrix of {rows} x {columns} ({divided} devices), and its "
                f"{type(weight).__name__} does not divide like that: set {ones}, or pass the weights through "
                "hpnlp.ops.weights.dense_tree"
            )
        return axes

    def _parameter_spec(self, names: PyTree, leaf: PyTree) -> Any:
        """PartitionSpec of a parameter, or the two of a `Zero2Parameter`; None for None, an optional array of a Weight."""
        if leaf is None:
            return None
        shape = zero.full_shape(leaf)
        divided, complete = (self.state_spec(names, shape, divided=divided) for divided in (True, False))
        if is_zero2(leaf):
            return Zero2Parameter(complete, divided)
        return divided if self.zero == 3 else complete

    def _gather_dimension(self, names: PyTree, leaf: PyTree, stacked: bool) -> int | None:
        """The dimension along which a parameter, or a slice of a stack of them, is gathered; or NOT_DIVIDED; None for None."""
        if leaf is None:
            return None
        if self.zero != 3 and not is_zero2(leaf):
            return zero.NOT_DIVIDED
        dim = zero.NOT_DIVIDED if names is None else self._fsdp_dimension(names, zero.full_shape(leaf))
        return dim - stacked if dim != zero.NOT_DIVIDED else dim

    def undivided(self, names: PyTree, shapes: PyTree) -> list[str]:
        """Matrices that every device holds in full although the plan divides parameters or their statistics.

        Args:
          names: A tree of tuples of logical names, None for an array without names.
          shapes: A tree of arrays or their shapes.

        Returns:
          The path and shape of each such matrix; empty if the plan divides no parameters at all.
        """
        if not (self.zero > 0 or self.mesh.shape["tensor"] > 1 or self.mesh.shape["pipeline"] > 1):
            return []
        specs = jax.tree.leaves(self.state_specs(names, shapes, divided=self.zero > 0), is_leaf=_is_spec)
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        axes = jax.tree.leaves(names, is_leaf=lambda node: node is None or isinstance(node, tuple))
        return [
            f"{'.'.join(str(key.key) for key in path)} {tuple(leaf.shape)}"
            for (path, leaf), leaf_names, spec in zip(leaves, axes, specs, strict=True)
            if len(leaf.shape) > 1 + ("layers" in (leaf_names or ())) and not any(spec)
        ]


def _partition_spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in axes))


def _is_names(node: object) -> bool:
    return node is None or (isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node))


def _is_spec(node: object) -> bool:
    return isinstance(node, PartitionSpec)
