"""`array_op`, the decorator of every public operation: accepts numpy arrays, and works on explicit meshes.

Under a mesh of `AxisType.Explicit`, the default of `jax.make_mesh`, the type of an array includes its sharding, and JAX
refuses every reshape, gather, scatter or loop for which it cannot infer the sharding of the result. The operations of
`hpnlp.ops` consist of these. Each public operation therefore runs as under a mesh of `AxisType.Auto`, where the compiler
chooses; only what it receives and returns has a sharding in its type.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from hpnlp.ops.helpers.arrays import as_arrays, has_numpy
from hpnlp.types import InputError

# Functions that may close over arrays.
_FUNCTIONS = (types.FunctionType, types.MethodType)

Function = TypeVar("Function", bound=Callable[..., Any])


def array_op(out: str = "", /, **inputs: str) -> Callable[[Function], Function]:
    """A decorator for functions of arrays, which then accept numpy arrays and, with their derivatives, explicit meshes.

    Each axis of a result is sharded as the input axis of the same name, and replicated if there is none. Gradients are
    sharded as the inputs. If neither the inputs nor the surrounding `jax.set_mesh` have an explicit mesh axis, as inside a
    `jax.shard_map` over all axes of a mesh, the function is called as it is, and its jaxpr does not change.

    In a `jax.shard_map` over only some axes of an explicit mesh, the backward pass computes the forward pass again, because
    JAX cannot pass the intermediate results out of such a shard_map; names for rematerialisation policies
    (`jax.ad_checkpoint.checkpoint_name`) inside the operation have no effect there.

    Args:
      out: Names of the leading axes of a result, as in "B T N"; an array with fewer axes has the first of them. In
        "B T N | B", the first part describes the first returned array, and the last part all others.
      **inputs: Names of the leading axes of arguments, as in q="B T N". For an argument that is a tree, they describe the
        first array. "..." stands for any number of leading axes, here and in `out`.

    Returns:
      The decorator. A decorated function raises InputError if a function among its arguments closes over an array of an
      explicit mesh.
    """
    patterns = [part.split() for part in out.split("|")]

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def at_edge(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs))
            if has_numpy(leaves):
                leaves = as_arrays(leaves)
                args, kwargs = jax.tree.unflatten(structure, leaves)
            mesh = _explicit_mesh(leaves)
            if mesh is None:
                return function(*args, **kwargs)
            shardings = _by_name(signature.bind(*args, **kwargs).arguments, inputs)
            leaves, structure = jax.tree.flatten(_without_explicit(function, mesh)(*args, **kwargs))
            last = len(patterns) - 1
            leaves = [_reshard(x, mesh, _spec(patterns[min(i, last)], shardings, x)) for i, x in enumerate(leaves)]
            return jax.tree.unflatten(structure, leaves)

        return cast(Function, at_edge)

    return decorate


def _explicit_mesh(leaves: Sequence[Any]) -> AbstractMesh | None:
    """The mesh with explicit axes that surrounds the call or that an array is sharded over; None without one."""
    arrays = (x for x in leaves if isinstance(x, jax.Array))
    for mesh in (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)):
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _without_explicit(function: Callable[..., Any], mesh: AbstractMesh) -> Callable[..., Any]:
    """The function in a context where the compiler chooses shardings over the explicit axes of the mesh."""
    automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))

    def inside(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        _check_closures(leaves)

        def run(arrays: dict[int, jax.Array]) -> Any:
            with jax.sharding.use_abstract_mesh(automatic):
                arrays = {i: _reshard(x, automatic) if _is_explicit(x) else x for i, x in arrays.items()}
                args, kwargs = jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(leaves)])
                return function(*args, **kwargs)

        # Inside a shard_map, residuals of the automatic mesh would get types of the explicit mesh, and JAX would refuse
        # them in the backward pass ("Closing over inputs to shard_map ... is not implemented").
        run = jax.checkpoint(run) if mesh.manual_axes else run
        return run({i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array)})

    return inside


def _check_closures(leaves: Sequence[Any]) -> None:
    """Raises InputError if a function closes over an array of an explicit mesh, which cannot be resharded."""
    for leaf in leaves:
        if any(map(_is_explicit, _arrays(list(_captured(leaf))))):
            name = leaf.__qualname__ if isinstance(leaf, _FUNCTIONS) else leaf
            raise InputError(
                f"function {name} closes over an array of an explicit mesh: pass the array as its first argument with "
                "jax.tree_util.Partial(function, array), or make the mesh with AxisType.Auto"
            )


def _captured(function: Any) -> Iterator[Any]:
    """Values that a function closes over, or that functools.partial binds."""
    for cell in (isinstance(function, _FUNCTIONS) and function.__closure__) or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents
    if isinstance(function, functools.partial):
        yield function.args, function.keywords
        yield from _captured(function.func)


def _by_name(arguments: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, tuple[Any, ...]]:
    """The mesh axes of each named array axis: one entry of a PartitionSpec, and for "..." several."""
    mesh_axes: dict[str, tuple[Any, ...]] = {}
    for argument, pattern in inputs.items():
        array = next(_arrays(arguments.get(argument)), None)
        if array is None:
            continue
        spec, names = tuple(jax.typeof(array).sharding.spec), pattern.split()
        if names[0] == "...":
            ellipsis_axes = array.ndim - len(names) + 1
            spec = (spec[:ellipsis_axes], *((x,) for x in spec[ellipsis_axes:]))
        else:
            spec = tuple((x,) for x in spec)
        for name, entries in zip(names, spec, strict=False):
            mesh_axes.setdefault(name, entries)
    return mesh_axes


def _spec(names: Sequence[str], mesh_axes: Mapping[str, tuple[Any, ...]], x: jax.Array) -> PartitionSpec:
    """The sharding of a result. A mesh axis that several of its axes would take goes to the first of them."""
    spec, used = [], set()
    for entry in [entry for name in names for entry in mesh_axes.get(name, (None,))][: x.ndim]:
        axes = set(entry) if isinstance(entry, tuple) else {entry} - {None}
        spec.append(None if used & axes else entry)
        used |= axes
    return PartitionSpec(*spec)


def _reshard(x: jax.Array, mesh: AbstractMesh, spec: PartitionSpec = PartitionSpec()) -> jax.Array:  # noqa: B008  (frozen)
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _is_explicit(x: jax.Array) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _arrays(tree: PyTree) -> Iterator[jax.Array]:
    return (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
