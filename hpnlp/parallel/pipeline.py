"""The layers of a model over a mesh: each device takes its stage's layers through its own rows, in microbatches.

GPipe (Huang et al. 2019, sec. 2.3): with S stages and M microbatches, a pass lasts M + S - 1 ticks, forward and backward, and a
stage has something to do in M of them. Between ticks a stage sends what it has made, one microbatch of hidden states, to the
next one.

Circular, or interleaved (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", sec. 2.2.2):
with R rounds a stage holds R chunks of c = L / (R S) layers, chunk r the layers from (r S + stage) c on. Microbatches go round
in groups of S, so that one that leaves the last stage enters the first in the next tick, and none waits: M must be a multiple
of S. A pass lasts R M + S - 1 ticks, each 1 / R as long: (S - 1) / (R M + S - 1) of the time is idle, and R times as many
hidden states are sent.

An idle stage computes on what nobody reads. It would wait for the others otherwise, which are as long in each tick; and a
branch around its layers would keep their parameters for the backward pass, once a tick.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from hpnlp.parallel import context_parallel, host_offload
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.tensor_parallel import MeshTensorParallel
from hpnlp.parallel.varying import sum_over_devices, vary, zeros_like
from hpnlp.types import Aux, InputError, Zero2Parameter

# Runs some layers: (tensor_parallel, stacked shards of the layers' parameters, x, context, rng, index of the first layer)
# -> (x, aux). `tensor_parallel.gather_parameters` makes full parameters from one layer's shards.
Run = Callable[..., tuple[jax.Array, Aux]]


def through(
    layout: Layout, names: Any, run: Run, params: Any, x: Float[Array, "B T D"], context: Any, rng: jax.Array | None
) -> tuple[Float[Array, "B T D"], Aux]:
    """x through all layers: `(x, what they report, summed)`.

    names: the logical names of the parameters' axes, of which the first is "layers". params: stacked in the layers' order, held
    as the layout has it. x: laid out as `Layout.activations` says. context: a pytree of arrays [B, ...] and [B, T, ...].
    Cost: over stages, the gradients of parameters are summed over `data` once a pass; what ZeRO divides is gathered in every
    tick, forward and backward, and its gradients scattered. With rounds see `_dealt`.
    Raises InputError where the rows of a device do not divide into microbatches.
    """
    length = context.positions.shape[1]
    given, take = layout.parameters(names, params, stacked=True)
    whole = (lambda held: take(host_offload.here(held))) if layout.offload_parameters else take
    tensor_parallel = dataclasses.replace(layout.tensor_parallel(length), gather=whole)
    if layout.size("length") > 1:
        ring = functools.partial(context_parallel.ring, chunks=context.order)
        tensor_parallel = dataclasses.replace(
            tensor_parallel, run_mixer=context_parallel.by_heads if layout.exchange == "heads" else ring
        )
    count = microbatches(layout, x.shape[0])
    leaves, form = jax.tree.flatten(context)

    def body(params: Any, x: jax.Array, leaves: Any, rng: Any) -> tuple[jax.Array, Aux]:
        context = jax.tree.unflatten(form, leaves)
        part = tensor_parallel
        if layout.zero == 3 or layout.rounds > 1 or layout.offload_parameters:
            sizes = {math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(params)}
            whole = {size * layout.mesh.shape["fsdp"] for size in sizes}
            part = dataclasses.replace(tensor_parallel, regathered_sizes=frozenset(sizes | whole))
        if layout.size("layers") == 1:
            x, aux = run(part, params, x, context, rng, 0)
        else:
            # Before the loop over ticks: where an array begins to vary, its gradient is summed.
            params = jax.tree.map(lambda leaf: vary(leaf, jax.typeof(x).manual_axis_type.varying), params)
            stage, lent = _stage(part, run, params, rng, layout.rounds)
            if layout.recompute_stages:
                stage = jax.checkpoint(stage, prevent_cse=False)
            x, aux = _ticks(stage, lent, x, context, count, layout.rounds)
        return x, {name: sum_over_devices(*pair) for name, pair in aux.items()}

    of = layout.activations(length)
    contexts = [PartitionSpec(*layout.spec("batch", "length")[: leaf.ndim]) for leaf in leaves]
    program = jax.shard_map(
        body, mesh=layout.mesh, in_specs=(given, of, contexts, PartitionSpec()), out_specs=(of, PartitionSpec())
    )
    return program(params, x, leaves, rng)


def microbatches(layout: Layout, rows: int) -> int:
    """How many microbatches the rows of a batch make: as the plan says, else the most that divide a device's rows, up to four
    times the stages, which leaves a fifth of the time idle, or less with rounds. Raises InputError where they do not divide."""
    own, stages, count = rows // layout.size("batch"), layout.size("layers"), layout.microbatches
    if stages == 1:
        return 1
    group = stages if layout.rounds > 1 else 1
    if count and own % count:
        raise InputError(
            f"plan.microbatches={count} do not divide the {own} rows that a device has of a batch: choose a divisor of it, or "
            "another data.batch_size"
        )
    if (count or own) % group:
        what = f"plan.microbatches={count} are" if count else f"the {own} rows that a device has of a batch are"
        raise InputError(
            f"{what} not a multiple of plan.pipeline={stages}, by which microbatches go round where plan.rounds="
            f"{layout.rounds}: make them one, or set plan.rounds=1"
        )
    return count or max(m for m in range(group, min(own, 4 * stages) + 1, group) if own % m == 0)


def ticks(stages: int, count: int, rounds: int) -> int:
    """How long a pass lasts, in times that a stage takes for a chunk of its layers and a microbatch."""
    return rounds * count + stages - 1


def _stage(
    tensor_parallel: MeshTensorParallel, run: Run, params: Any, rng: Any, rounds: int
) -> tuple[Callable[..., Any], Any]:
    """`stage(own, x, context, round) -> (x, aux)`, and the stack [rounds, c, ...] of which `own` is the round's chunk.

    With more than one round, a loop over ticks that took a chunk out of the stack would keep it for the backward pass, in every
    tick; and what ZeRO divides would be gathered before it, all of a stage's, where that is the same in every tick. A layer
    therefore takes its row of the stack itself, and takes it again; `own` is there for the gradient alone.
    """
    here = lax.axis_index("pipeline")
    if not tensor_parallel.regathers:
        local = jax.tree.leaves(params)[0].shape[0]
        first = (here * local).astype(jnp.uint32)
        return lambda own, x, context, now: run(tensor_parallel, params, x, context, rng, first), ()

    stack = jax.tree.map(functools.partial(_dealt, rounds=rounds), params)
    local = jax.tree.leaves(stack)[0].shape[1]
    lent = jax.tree.map(lambda leaf: leaf.shard if _is_split(leaf) else leaf, stack, is_leaf=_is_split)
    stack = lax.stop_gradient(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stack))

    def whole(layer: Any) -> Any:
        def one(leaf: Any, own: jax.Array) -> Any:
            if _is_split(leaf):
                return Zero2Parameter(_at(leaf.full, layer["row"]), own)
            return _credited(_at(leaf, layer["row"]), own)

        return tensor_parallel.gather(jax.tree.map(one, stack, layer["own"], is_leaf=_is_split))

    picking = dataclasses.replace(tensor_parallel, gather=whole)

    def stage(own: Any, x: jax.Array, context: Any, now: jax.Array) -> tuple[jax.Array, Aux]:
        rows = now * local + jnp.arange(local, dtype=jnp.int32)
        first = ((now * lax.axis_size("pipeline") + here) * local).astype(jnp.uint32)
        return run(picking, {"row": rows, "own": own}, x, context, rng, first)

    return stage, lent


def _ticks(
    stage: Callable[..., Any], lent: Any, x: jax.Array, context: Any, count: int, rounds: int
) -> tuple[jax.Array, Aux]:
    """x [b, t, D] of a device through all stages: in tick n each is at its unit n - its number of the schedule."""
    stages, here = lax.axis_size("pipeline"), lax.axis_index("pipeline")
    parts, contexts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), (x, context))
    parts, contexts = jax.tree.map(lambda a: vary(a, ("pipeline",)), (parts, contexts))

    def tick(carry: Any, now: jax.Array) -> tuple[Any, Aux]:
        received, out, lent = carry
        unit = now - here
        busy = (unit >= 0) & (unit < rounds * count)
        group, place = jnp.divmod(jnp.clip(unit, 0, rounds * count - 1), rounds * stages)
        round_, member = jnp.divmod(place, stages)
        at = group * stages + member
        part, of_part = jax.tree.map(lambda a: _at(a, at), (parts, contexts))
        lent, own = _lend(lent, round_)
        made, aux = stage(own, jnp.where((here == 0) & (round_ == 0), part, received), of_part, round_)
        # Earlier rounds, and idle ticks before the first, are written over; in the last stage none is idle after it.
        out = lax.dynamic_update_index_in_dim(out, made, at, 0)
        ring = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else stages - 1)]
        aux = jax.tree.map(lambda a: jnp.where(busy, a, 0), aux)
        return (lax.ppermute(made, "pipeline", ring), out, lent), aux

    start = jax.tree.map(zeros_like, jax.eval_shape(lambda: (parts[0], parts)))
    lasting = jnp.arange(ticks(stages, count, rounds), dtype=jnp.int32)
    (_, out, _), aux = lax.scan(tick, (*start, lent), lasting)
    out = lax.psum(jnp.where(here == stages - 1, out, 0), "pipeline")
    return out.reshape(x.shape), jax.tree.map(lambda a: jnp.sum(a, axis=0), aux)


def _dealt(held: Float[Array, "rows ..."], rounds: int) -> Float[Array, "R c ..."]:
    """The rows of a stage's chunks, from those that it holds: as many, of consecutive layers.

    So parameters, their statistics and checkpoints are the same under every plan. In return, a stage holds a copy of its
    parameters during a pass, and sends up to all of them before it and of their gradients after it: 2 / S of the layers'
    bytes, as much as one of many replicas sends of gradients.
    Chunk b = r S + s is held by stage b // R and wanted by stage b % S. In step (b - b // lcm(R, S)) % R every stage sends one
    and receives one.
    """
    blocks, stages = held.reshape(rounds, -1, *held.shape[1:]), lax.axis_size("pipeline")
    if rounds == 1:
        return blocks
    chunk = np.arange(rounds * stages)
    step = (chunk - chunk // math.lcm(rounds, stages)) % rounds
    source, target = chunk // rounds, chunk % stages
    sent, come = np.zeros((2, stages, rounds), np.int32)
    sent[source, step], come[target, chunk // stages] = chunk % rounds, step

    def order(x: jax.Array, table: np.ndarray) -> jax.Array:
        mine = _at(jnp.asarray(table), lax.axis_index("pipeline"))
        return x.at[mine].get(unique_indices=True, mode="promise_in_bounds")

    leaving = order(blocks, sent)
    pairs = [[(int(source[b]), int(target[b])) for b in chunk[step == n]] for n in range(rounds)]
    moved = [
        leaving[n] if all(a == b for a, b in pairs[n]) else lax.ppermute(leaving[n], "pipeline", pairs[n])
        for n in range(rounds)
    ]
    return order(jnp.stack(moved), come)


@jax.custom_vjp
def _lend(stack: Any, now: jax.Array) -> tuple[Any, Any]:
    """(stack, its part `now`): the part's gradient is added in its place. A slice's would be as large as the stack."""
    return stack, jax.tree.map(lambda a: _at(a, now), stack)


def _lend_backward(now: jax.Array, d: tuple[Any, Any]) -> tuple[Any, None]:
    add = lambda stack, own: lax.dynamic_update_index_in_dim(stack, _at(stack, now) + own, now, 0)  # noqa: E731
    return jax.tree.map(add, *d), None


_lend.defvjp(lambda stack, now: (_lend(stack, now), now), _lend_backward)


@jax.custom_vjp
def _credited(value: jax.Array, own: jax.Array) -> jax.Array:
    """`value`; the gradient by it is `own`'s."""
    return value


_credited.defvjp(lambda value, own: (value, None), lambda _, d: (jnp.zeros_like(d), d))


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)


def _is_split(node: Any) -> bool:
    return isinstance(node, Zero2Parameter)
