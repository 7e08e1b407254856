"""Host offloading: parameters, optimizer state and averages that rest in the host's memory.

The parameters of layers are fetched one layer at a time, in the forward pass, the backward pass and the update (Pudipeddi et
al. 2020, "Training large neural networks with constant memory using a new execution algorithm", algorithm 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

HOST = "pinned_host"  # the memory that devices fetch from by themselves


def hosted(shardings: Any) -> Any:
    """Shardings of arrays that rest in the host's memory."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def hosted_layers(shardings: Any) -> Any:
    """Shardings of parameters, of which those of layers rest in the host's memory."""
    return {**shardings, "layers": hosted(shardings["layers"])}


def fetched(tree: Any, after: jax.Array) -> Any:
    """Arrays that rest in the host's memory, on the device, not before `after` is known."""
    held, _ = lax.optimization_barrier((tree, after))
    return here(held)


def here(tree: Any) -> Any:
    """Arrays, on the device; those that rest in the host's memory are fetched. What they get of gradients goes back there."""
    away = lambda x: jax.typeof(x).memory_space == jax.memory.Space.Host  # noqa: E731
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if away(x) else x, tree)


def by_layer(function: Callable[..., Any], state: Any, *given: Any) -> Any:
    """`function(state, *given) -> state`, which treats each layer by itself, run for one layer at a time.

    state, given: trees in which dicts with a key "layers" hold stacks there, [L, ...] each, and all else beside. The function
    is called for all else, and then for every layer, as a stack of one, with what is in no such dict as it was before; in
    calls for a layer the dicts hold "layers" alone. What a layer has is fetched for its call, and goes back to where it was.
    """
    nodes, form = jax.tree.flatten((state, *given), is_leaf=_has_layers)
    of_state = jax.tree.structure(state, is_leaf=_has_layers)
    stacks = [node["layers"] if _has_layers(node) else None for node in nodes]
    own, others = stacks[: of_state.num_leaves], stacks[of_state.num_leaves :]

    def run(parts: list[Any]) -> list[Any]:
        return of_state.flatten_up_to(function(*form.unflatten(here(parts))))

    def turn(own: list[Any], i: jax.Array) -> tuple[list[Any], None]:
        layer = jax.tree.map(lambda stack: lax.dynamic_slice_in_dim(stack, i, 1), [*own, *others])
        found = run([node if part is None else {"layers": part} for node, part in zip(nodes, layer, strict=True)])
        found = [None if stack is None else made["layers"] for made, stack in zip(found, own, strict=True)]
        return jax.tree.map(lambda stack, made: _written(stack, made, i), own, found), None

    rest = run([{k: v for k, v in n.items() if k != "layers"} if _has_layers(n) else n for n in nodes])
    count = jax.tree.leaves(stacks)[0].shape[0]
    own, _ = lax.scan(turn, own, jnp.arange(count, dtype=jnp.int32))
    whole = [part if stack is None else {**part, "layers": stack} for part, stack in zip(rest, own, strict=True)]
    return of_state.unflatten(whole)


def _written(stack: jax.Array, made: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(stack, jax.device_put(made, jax.typeof(stack).memory_space), i, 0)


def _has_layers(node: Any) -> bool:
    return isinstance(node, dict) and "layers" in node
