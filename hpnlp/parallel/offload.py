"""What a step finds kept, makes again, or fetches from the host's memory.

Layers name what is dear to make (`jax.ad_checkpoint.checkpoint_name`), so that policies may speak of it:
    projected: queries, keys and values of attention.
    mixed: what attention has made of them, with its sums.
    hidden: the products that go into an MLP's activation.

Parameters of layers that rest in the host's memory come and go one layer at a time, in every pass (Pudipeddi et al. 2020,
"Training large neural networks with constant memory using a new execution algorithm", algorithm 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.spec import build, did_you_mean, parse_one
from hpnlp.types import InputError

NAMES = ("projected", "mixed", "hidden")
HOST = "pinned_host"  # the memory that devices fetch from by themselves


def _names(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*_known(names))


def _offload(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(_known(names)),
        offload_src="device",
        offload_dst=HOST,
    )


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in NAMES:
            raise InputError(f"plan.remat: no layer names {name!r}: {did_you_mean(str(name), NAMES)}")
    return names or ("mixed",)


# What the forward pass leaves for the backward pass beside the inputs of each layer; all else is computed again (Chen et al.
# 2016, "Training deep nets with sublinear memory cost"). dots: what linear layers give. names, offload: what layers name, by
# default `mixed`, kept where it is or on the host.
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": _names,
    "offload": _offload,
}


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


def policy(text: str) -> Any:
    """The policy of `jax.checkpoint` that a spec such as "names(mixed, hidden)" stands for; None for one that keeps all.

    Raises InputError on an unknown policy or name.
    """
    return build(parse_one(text, "plan.remat"), REMAT, "plan.remat")
