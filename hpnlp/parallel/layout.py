"""The Layout: a Plan on its devices, with what it comes to for the arrays of one model.

Devices work on parts of arrays, and what travels between them is written down here and beside, collective by collective:
programs are `jax.shard_map`s over all mesh axes, in which nothing is left to the compiler's choice. Between them (norms at the
end, the optimizer) arrays are global, and the compiler has only elementwise operations to place.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from hpnlp.ops.custom_vjp import vary_alike
from hpnlp.parallel.tensor_parallel import MeshTensorParallel
from hpnlp.types import InputError, Zero2Parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """rules: logical axis -> the mesh axes, all of more than one device, that divide it. zero: the stage that the axis `fsdp`
    works at. microbatches, exchange, rounds, recompute_stages, offload_parameters: as the Plan has them."""

    mesh: Mesh | AbstractMesh
    rules: Mapping[str, tuple[str, ...]]
    zero: int
    microbatches: int = 0
    exchange: str = "ring"
    rounds: int = 1
    recompute_stages: bool = False
    offload_parameters: bool = False

    def size(self, *names: str) -> int:
        """How many parts these logical axes are divided into."""
        return math.prod(self.mesh.shape[axis] for name in names for axis in self.rules[name])

    def spec(self, *names: str | None) -> PartitionSpec:
        """Of an array whose axes have these logical names."""
        return _spec([self.rules[name] if name else () for name in names])

    def sharding(self, *names: str | None) -> NamedSharding:
        """As `spec`; none at all means replicated."""
        return NamedSharding(self.mesh, self.spec(*names))

    def held(self, names: Sequence[str | None] | None, shape: Sequence[int], *, divided: bool) -> PartitionSpec:
        """Of a parameter, a gradient or a statistic of it. divided: whether the ZeRO stage divides such over `fsdp`.

        It is the model dimension of a matrix that is divided, or another of its axes where that does not divide. Vectors are
        too small to be worth the messages. An array whose rank differs from its names (a factored optimizer's statistics)
        is replicated.
        """
        if names is None or len(names) != len(shape):
            return PartitionSpec()
        axes = [self.rules[name] if name else () for name in names]
        if divided and sum(name != "layers" for name in names) > 1:
            order = sorted(range(len(names)), key=lambda i: names[i] != "embed")
            parts = [math.prod(self.mesh.shape[axis] for axis in (*axes[i], "fsdp")) for i in range(len(names))]
            fits = [i for i in order if names[i] != "layers" and shape[i] % parts[i] == 0]
            if fits:
                axes[fits[0]] = (*axes[fits[0]], "fsdp")
        return _spec(axes)

    def tree(self, names: Any, shapes: Any, *, divided: bool) -> Any:
        """`held` for a tree of arrays. names: a tree of tuples of logical names, or None where an array has none."""
        return jax.tree.map(lambda n, x: self.held(n, x.shape, divided=divided), names, shapes, is_leaf=_is_names)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The mesh axes whose devices have other tokens."""
        return (*self.rules["batch"], *self.rules["length"])

    def tensor_parallel(self, length: int) -> MeshTensorParallel:
        """How a device takes its part in the tensor_parallel of Blocks, for rows of so many tokens."""
        parts = self.mesh.shape["tensor"]
        shares = parts > 1 and length % (parts * self.size("length")) == 0
        return MeshTensorParallel({name: self.rules[name] for name in ("heads", "mlp", "vocab")}, shares)

    def activations(self, length: int) -> PartitionSpec:
        """Of hidden states [B, T, D] between Blocks."""
        shared = ("tensor",) if self.tensor_parallel(length).shards_tokens else ()
        return _spec([self.rules["batch"], (*self.rules["length"], *shared), ()])

    def check_tokens(self, shape: Sequence[int]) -> None:
        """Raises InputError unless rows and tokens [B, T] divide over the mesh."""
        for size, name, what in zip(shape, ("batch", "length"), ("rows", "tokens a row"), strict=True):
            if size % self.size(name):
                spread = " x ".join(f"plan.{axis}={self.mesh.shape[axis]}" for axis in self.rules[name])
                raise InputError(
                    f"{size} {what} do not divide over {spread}: make them a multiple of {self.size(name)}"
                )

    def parameters(self, names: Any, params: Any, *, stacked: bool = False) -> tuple[Any, Callable[[Any], Any]]:
        """Of parameters in a program: how they are given to a device, and what makes them whole there.

        names: a tree like theirs, of logical names. stacked: it is a slice of the first axis that is made whole.
        """

        def specs(name: Any, leaf: Any) -> Any:
            shape = leaf.full.shape if isinstance(leaf, Zero2Parameter) else leaf.shape
            divided = self.held(name, shape, divided=True)
            if isinstance(leaf, Zero2Parameter):
                return Zero2Parameter(self.held(name, shape, divided=False), divided)
            return divided if self.zero == 3 else self.held(name, shape, divided=False)

        def dim(name: Any, leaf: Any) -> int:
            shape = leaf.full.shape if isinstance(leaf, Zero2Parameter) else leaf.shape
            if self.zero != 3 and not isinstance(leaf, Zero2Parameter):
                return -1
            spec = self.held(name, shape, divided=True)
            found = [i for i, axes in enumerate(spec) if axes == "fsdp" or (isinstance(axes, tuple) and "fsdp" in axes)]
            return found[0] - stacked if found else -1

        dims = jax.tree.map(dim, names, params, is_leaf=_is_names)
        take = lambda held: jax.tree.map(  # noqa: E731
            lambda i, leaf: _whole(leaf, None if i < 0 else i, self.tokens), dims, held
        )
        return jax.tree.map(specs, names, params, is_leaf=_is_names), take

    def undivided(self, names: Any, shapes: Any) -> list[str]:
        """The matrices that lie whole on every device though the plan would divide parameters or their statistics."""
        specs = self.tree(names, shapes, divided=self.zero > 0)
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        axes = jax.tree.leaves(names, is_leaf=lambda node: node is None or isinstance(node, tuple))
        can = self.zero > 0 or self.mesh.shape["tensor"] > 1 or self.mesh.shape["pipeline"] > 1
        return [
            f"{'.'.join(str(key.key) for key in path)} {tuple(leaf.shape)}"
            for (path, leaf), own, spec in zip(leaves, axes, jax.tree.leaves(specs, is_leaf=_is_spec), strict=True)
            if can and len(leaf.shape) > 1 + ("layers" in (own or ())) and not any(spec)
        ]


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in axes))


def _is_names(node: Any) -> bool:
    return node is None or (isinstance(node, tuple) and all(n is None or isinstance(n, str) for n in node))


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def total(value: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of a value and its weight over the devices on which one of them differs."""
    value, weight = vary_alike(value, weight)
    axes = tuple(sorted(jax.typeof(value).manual_axis_type.varying))
    return (lax.psum(value, axes), lax.psum(weight, axes)) if axes else (value, weight)


def zeros_like(shape: Any) -> jax.Array:
    """Zeros of a shape that `jax.eval_shape` has found, which differ over devices where that does."""
    axes = tuple(sorted(shape.manual_axis_type.varying)) if hasattr(shape, "manual_axis_type") else ()
    zeros = jnp.zeros(shape.shape, shape.dtype)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _whole(leaf: Any, dim: int | None, along: tuple[str, ...]) -> jax.Array:
    """A parameter with all that ZeRO divides of it; its gradient is reduced and scattered.

    leaf: the device's part, or a `Zero2Parameter`, of which the whole is there already. dim: the dimension that is divided.
    along: mesh axes whose devices have other tokens; over these the part of the gradient is summed, which is less than the
    whole.
    """
    if dim is None:
        return leaf.shard if isinstance(leaf, Zero2Parameter) else leaf
    if isinstance(leaf, Zero2Parameter):
        return _straight(leaf.full, vary(leaf.shard, along), dim)
    return lax.all_gather(vary(leaf, along), "fsdp", axis=dim, tiled=True)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """x, marked as differing over these mesh axes."""
    new = tuple(sorted(set(axes) - jax.typeof(x).manual_axis_type.varying))
    return lax.pcast(x, new, to="varying") if new else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _straight(full: jax.Array, part: jax.Array, dim: int) -> jax.Array:
    """`full`; the gradient by it goes to `part`, its slice, as the sum over devices."""
    axes = jax.typeof(part).manual_axis_type.varying
    return vary(full, tuple(sorted(axes)))


def _straight_forward(full: jax.Array, part: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _straight(full, part, dim), full


def _straight_backward(dim: int, full: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(full), lax.psum_scatter(d, "fsdp", scatter_dimension=dim, tiled=True)


_straight.defvjp(_straight_forward, _straight_backward)
