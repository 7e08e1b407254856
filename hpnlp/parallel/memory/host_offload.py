"""Host offloading: parameters, optimizer state and averaged parameters kept in the host's memory.

The parameters of layers are fetched one layer at a time, in the forward pass, the backward pass and the update (Pudipeddi et
al. 2020, "Training large neural networks with constant memory using a new execution algorithm", algorithm 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

HOST = "pinned_host"  # the memory that devices copy from without the host's help


def on_host(shardings: PyTree) -> Any:
    """Moves shardings to the host's memory.

    Args:
      shardings: A tree of shardings.

    Returns:
      The same shardings with memory kind HOST.
    """
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def layers_on_host(shardings: PyTree) -> Any:
    """Moves the shardings of the layers' parameters to the host's memory.

    Args:
      shardings: A dict like the parameters, with the key "layers".

    Returns:
      The same shardings, those under "layers" with memory kind HOST.
    """
    return {**shardings, "layers": on_host(shardings["layers"])}


def to_device_after(tree: PyTree, after: jax.Array) -> Any:
    """Copies arrays from the host to the device once `after` has been computed.

    Args:
      tree: A tree of arrays, in the host's or the device's memory.
      after: The array that the copies wait for, so that the device does not hold them earlier.

    Returns:
      The tree in the device's memory.
    """
    tree, _ = lax.optimization_barrier((tree, after))
    return to_device(tree)


def to_device(tree: PyTree) -> Any:
    """Copies arrays from the host to the device; arrays on the device are returned as they are.

    Args:
      tree: A tree of arrays, in the host's or the device's memory.

    Returns:
      The tree in the device's memory. Gradients by an array from the host are copied back to the host.
    """
    return jax.tree.map(_on_device, tree)


def _on_device(x: PyTree) -> Any:
    on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if on_host else x


def by_layer(function: Callable[..., Any], state: PyTree, *operands: PyTree) -> Any:
    """Runs a function that treats each layer by itself for one layer at a time, fetching that layer from the host.

    Dicts with a key "layers", anywhere in `state` and `operands`, hold stacks `[L, ...]` under that key and all other
    parameters beside it. The function is called once for all other parameters, with "layers" left out of these dicts, and
    then once per layer, with dicts that hold only "layers", a stack of one. Nodes outside such dicts are passed to every
    call with their original values.

    Args:
      function: `function(state, *operands) -> state`.
      state: A tree of arrays, in the host's or the device's memory.
      *operands: Trees of arrays, in the host's or the device's memory.

    Returns:
      The new state; each array is in the memory that it came from.
    """
    nodes, treedef = jax.tree.flatten((state, *operands), is_leaf=_has_layers)
    state_treedef = jax.tree.structure(state, is_leaf=_has_layers)
    stacks = [node["layers"] if _has_layers(node) else None for node in nodes]
    state_stacks, operand_stacks = stacks[: state_treedef.num_leaves], stacks[state_treedef.num_leaves :]

    def call(nodes: list[Any]) -> list[Any]:
        return state_treedef.flatten_up_to(function(*treedef.unflatten(to_device(nodes))))

    def update_layer(stacks: list[Any], i: jax.Array) -> tuple[list[Any], None]:
        layer = jax.tree.map(lambda stack: lax.dynamic_slice_in_dim(stack, i, 1), [*stacks, *operand_stacks])
        results = call([node if x is None else {"layers": x} for node, x in zip(nodes, layer, strict=True)])
        updated = [None if stack is None else node["layers"] for node, stack in zip(results, stacks, strict=True)]
        return jax.tree.map(lambda stack, x: _write_layer(stack, x, i), stacks, updated), None

    other_results = call([_without_layers(node) for node in nodes])
    count = jax.tree.leaves(stacks)[0].shape[0]
    state_stacks, _ = lax.scan(update_layer, state_stacks, jnp.arange(count, dtype=jnp.int32))
    return state_treedef.unflatten(
        node if stack is None else {**node, "layers": stack}
        for node, stack in zip(other_results, state_stacks, strict=True)
    )


def _has_layers(node: object) -> bool:
    return isinstance(node, dict) and "layers" in node


def _without_layers(node: PyTree) -> Any:
    return {key: value for key, value in node.items() if key != "layers"} if _has_layers(node) else node


def _write_layer(stack: jax.Array, layer: jax.Array, i: jax.Array) -> jax.Array:
    """Writes one layer, a stack of one, into the stack, in the memory of the stack."""
    return lax.dynamic_update_slice_in_dim(stack, jax.device_put(layer, jax.typeof(stack).memory_space), i, 0)
