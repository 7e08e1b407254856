"""The layers of a model over a mesh, and the pipeline schedule.

Each device runs the layers of its stage on its own sequences, which pass the stages in microbatches.

GPipe (Huang et al. 2019, sec. 2.3): with S stages and M microbatches, a pass takes M + S - 1 ticks, forward and backward, and a
stage is busy in M of them. Between ticks a stage sends the hidden states of one microbatch to the next stage.

Circular, or interleaved (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", sec. 2.2.2):
with R rounds, a stage holds R chunks of c = L / (R S) layers; chunk r has the layers from (r S + stage) c on. Microbatches
circulate in groups of S, so that one that leaves the last stage enters the first in the next tick, and none waits: M must be a
multiple of S. A pass takes R M + S - 1 ticks, each 1 / R as long. The bubble is (S - 1) / (R M + S - 1) of the time, and R
times as many hidden states are sent.

An idle stage computes on data that no stage reads. Skipping the computation would gain nothing, as the stage would wait for
the others, which take the same time in each tick; and a branch around the layers would keep their parameters for the backward
pass, once per tick.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from hpnlp.model_interfaces.layer_report import CARRY, LayerReport
from hpnlp.model_interfaces.model_parallel import Zero2Parameter, is_zero2
from hpnlp.parallel import context_parallel
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.memory import host_offload
from hpnlp.parallel.tensor_parallel import MeshTensorParallel
from hpnlp.parallel.varying import sum_over_devices, total_over_devices, vary, zeros_like
from hpnlp.types import InputError

AXIS = "pipeline"

# Without plan.microbatches, at most so many microbatches per stage: the bubble is a fifth of the time, or less with rounds.
MICROBATCHES_PER_STAGE = 4

# Runs a chunk of the layers: (tensor_parallel, stacks of shards of their parameters by name, x, context, rngs, index of the
# chunk) -> (x, report). `tensor_parallel.gather_parameters` makes full parameters from one layer's shards.
Run = Callable[..., tuple[jax.Array, LayerReport]]

# Runs the layers of one stage and round: (chunk of parameters, x, context, round) -> (x, report).
Stage = Callable[..., tuple[jax.Array, LayerReport]]


def run_layers(
    layout: Layout,
    names: PyTree,
    run: Run,
    params: PyTree,
    x: Float[Array, "B T D"],
    context: PyTree[Array],
    rngs: Mapping[str, jax.Array],
    *,
    carry_names: PyTree = None,
) -> tuple[Float[Array, "B T D"], LayerReport]:
    """Runs all layers of a model over a mesh.

    Args:
      layout: Layout of the run.
      names: Logical names of the parameters' axes, of which the first is "layers"; a tree like `params` without the carry.
      run: Function that runs some layers on one device.
      params: Stacks of parameters by name, `[n, ...]` in the layers' order, laid out by the layout. A stage holds an equal
          part of each. Without stages, a stack may have a carry.
      x: Hidden states, laid out by `Layout.activations`.
      context: A pytree of arrays `[B, ...]` and `[B, T, ...]`.
      rngs: Keys for the layers by name, which are the same on all devices; empty for none.
      carry_names: Logical names of the carry's axes, by the name of the stack; None without a carry.

    Returns:
      `(x, report)`: the hidden states after all layers, and the report of the layers, summed over devices; the
      statistics of a stack are in the layers' order.

    Raises:
      InputError: A device's sequences do not divide into microbatches.

    Cost: with stages, the gradients of parameters are summed over `data` once per pass. Parameters that ZeRO divides are
    gathered in every tick, forward and backward, and their gradients scattered. With rounds, see `_redistribute`.
    """
    length = context.positions.shape[1]
    names = {
        name: {**names[name], CARRY: (carry_names or {})[name]} if CARRY in stack else names[name]
        for name, stack in params.items()
    }
    layouts = {name: layout.parameters(names[name], stack, stacked=True) for name, stack in params.items()}
    param_specs = {name: specs for name, (specs, _) in layouts.items()}
    gathers = {name: gather for name, (_, gather) in layouts.items()}
    tensor_parallel = _tensor_parallel(layout, length, gathers, context.order)
    count = microbatches(layout, x.shape[0])
    leaves, treedef = jax.tree.flatten(context)

    def run_on_device(
        params: PyTree, x: jax.Array, leaves: PyTree, rngs: Mapping[str, Array]
    ) -> tuple[jax.Array, LayerReport]:
        context = jax.tree.unflatten(treedef, leaves)
        local = dataclasses.replace(tensor_parallel, regathered_sizes=_regathered_sizes(layout, params))
        if layout.size("layers") == 1:
            x, report = run(local, params, x, context, rngs, 0)
        else:
            x, report = _run_stages(layout, local, run, params, x, context, rngs, count)
        aux = {name: sum_over_devices(*pair) for name, pair in report.aux.items()}
        return x, LayerReport(aux, jax.tree.map(total_over_devices, report.statistics), report.carry, report.taps)

    x_spec = layout.activations(length)
    context_specs = [PartitionSpec(*layout.spec("batch", "length")[: leaf.ndim]) for leaf in leaves]
    carry_specs = {name: specs[CARRY] for name, specs in param_specs.items() if CARRY in specs}
    tap_spec = PartitionSpec(None, *x_spec)
    program = jax.shard_map(
        run_on_device,
        mesh=layout.mesh,
        in_specs=(param_specs, x_spec, context_specs, PartitionSpec()),
        out_specs=(x_spec, LayerReport(PartitionSpec(), PartitionSpec(), carry_specs, tap_spec)),  # pyright: ignore
    )
    return program(params, x, leaves, rngs)


def _tensor_parallel(
    layout: Layout, length: int, gathers: Mapping[str, Callable[[Any], Any]], order: Any
) -> MeshTensorParallel:
    """Collectives of one device in a layer: gathering of its parameters, and mixing over a divided sequence.

    gathers: by the name of a stack, the function that gathers one of its layers. order: the chunks of each device of a ring,
    from `context_parallel.token_order`.
    """

    def gather(shards: PyTree, stack: str) -> Any:
        return gathers[stack](host_offload.to_device(shards) if layout.offload_parameters else shards)

    fields: dict[str, Any] = {"gather": gather}
    if layout.size("length") > 1:
        ring = functools.partial(context_parallel.ring, chunks=order)
        fields["run_mixer"] = context_parallel.by_heads if layout.exchange == "heads" else ring
    return dataclasses.replace(layout.tensor_parallel(length), **fields)


def _regathered_sizes(layout: Layout, params: PyTree) -> frozenset[int]:
    """Numbers of elements of a layer's parameters, before and after gathering; none if gathered parameters are kept."""
    if not (layout.zero == 3 or layout.rounds > 1 or layout.offload_parameters):
        return frozenset()
    sizes = {math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(params)}
    return frozenset(sizes | {size * layout.mesh.shape["fsdp"] for size in sizes})


def microbatches(layout: Layout, batch_size: int) -> int:
    """Number of microbatches of a batch.

    Without plan.microbatches, it is the largest number that divides a device's sequences, up to MICROBATCHES_PER_STAGE times
    the stages.

    Args:
      layout: Layout of the run.
      batch_size: Sequences of the batch, over all devices.

    Returns:
      The number of microbatches that each device's sequences are divided into; 1 without a pipeline.

    Raises:
      InputError: The sequences do not divide into microbatches, or the microbatches into groups.
    """
    sequences, stages, count = batch_size // layout.size("batch"), layout.size("layers"), layout.microbatches
    if stages == 1:
        return 1
    group = stages if layout.rounds > 1 else 1
    if count and sequences % count:
        raise InputError(
            f"plan.microbatches={count} does not divide the {sequences} sequences that each device has of a batch: choose a "
            f"divisor of {sequences}, or another data.batch_size"
        )
    if (count or sequences) % group:
        subject = f"plan.microbatches={count} is" if count else f"{sequences} sequences per device and batch are"
        raise InputError(
            f"{subject} not a multiple of plan.pipeline={stages}, as plan.rounds={layout.rounds} requires: choose another "
            f"{'plan.microbatches' if count else 'data.batch_size'}, or set plan.rounds=1"
        )
    most = min(sequences, MICROBATCHES_PER_STAGE * stages)
    return count or max(m for m in range(group, most + 1, group) if sequences % m == 0)


def ticks(stages: int, count: int, rounds: int) -> int:
    """Duration of a pass in ticks. In a tick, a stage runs one microbatch through one chunk of its layers.

    Args:
      stages: S.
      count: M, the number of microbatches.
      rounds: R.

    Returns:
      R M + S - 1.
    """
    return rounds * count + stages - 1


def _run_stages(
    layout: Layout,
    tensor_parallel: MeshTensorParallel,
    run: Run,
    params: PyTree,
    x: jax.Array,
    context: PyTree,
    rngs: Mapping[str, Array],
    count: int,
) -> tuple[jax.Array, LayerReport]:
    """Runs the device's sequences through all stages, of which the device holds one."""
    # Marked before the loop over ticks: the gradient is summed where an array begins to vary, and so only once.
    params = jax.tree.map(lambda leaf: vary(leaf, jax.typeof(x).manual_axis_type.varying), params)
    if tensor_parallel.regathers:
        stage, chunks = _regathering_stage(tensor_parallel, run, params, rngs, layout.rounds)
    else:
        stage, chunks = _stage(tensor_parallel, run, params, rngs), ()
    if layout.recompute_stages:
        stage = jax.checkpoint(stage, prevent_cse=False)
    return _run_ticks(stage, chunks, x, context, count, layout.rounds)


def _stage(tensor_parallel: MeshTensorParallel, run: Run, params: PyTree, rngs: Mapping[str, Array]) -> Stage:
    """A stage of one round, whose gathered parameters are kept for the backward pass. It does not read its argument `chunk`."""
    here = lax.axis_index(AXIS)

    def stage(chunk: PyTree, x: jax.Array, context: PyTree, round_: jax.Array) -> tuple[jax.Array, LayerReport]:
        return run(tensor_parallel, params, x, context, rngs, here)

    return stage


def _regathering_stage(
    tensor_parallel: MeshTensorParallel, run: Run, params: PyTree, rngs: Mapping[str, Array], rounds: int
) -> tuple[Stage, Any]:
    """`(stage, chunks)`: a stage whose parameters are gathered again in the backward pass.

    If the loop over ticks took a round's chunk out of the stack, it would keep the chunk for the backward pass in every tick.
    And if parameters were gathered before the loop, all of a stage's would be held at once. Each layer therefore takes its
    own parameters from the stack, in the forward pass and again in the backward pass. The stack itself has no gradient:
    chunks `[R, c, ...]` are arguments of the stage only in order to receive it.
    """
    here = lax.axis_index(AXIS)
    stacks = jax.tree.map(functools.partial(_redistribute, rounds=rounds), params)
    sizes = {name: jax.tree.leaves(stack)[0].shape[1] for name, stack in stacks.items()}  # layers in a chunk
    chunks = jax.tree.map(lambda leaf: leaf.shard if is_zero2(leaf) else leaf, stacks, is_leaf=is_zero2)
    stacks = lax.stop_gradient(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacks))

    def gather(layer: PyTree, stack: str) -> Any:
        def take(leaf: PyTree, receiver: jax.Array) -> Any:
            if is_zero2(leaf):
                return Zero2Parameter(_at(leaf.full, layer["index"]), receiver)
            return _redirect_gradient(_at(leaf, layer["index"]), receiver)

        parameters = jax.tree.map(take, stacks[stack], layer["gradient_receivers"], is_leaf=is_zero2)
        return tensor_parallel.gather(parameters, stack)

    gathering = dataclasses.replace(tensor_parallel, gather=gather)

    def stage(chunk: PyTree, x: jax.Array, context: PyTree, round_: jax.Array) -> tuple[jax.Array, LayerReport]:
        layers = {
            name: {"index": round_ * size + jnp.arange(size, dtype=jnp.int32), "gradient_receivers": chunk[name]}
            for name, size in sizes.items()
        }
        return run(gathering, layers, x, context, rngs, round_ * lax.axis_size(AXIS) + here)

    return stage, chunks


def _run_ticks(
    stage: Stage, chunks: PyTree, x: jax.Array, context: PyTree, count: int, rounds: int
) -> tuple[jax.Array, LayerReport]:
    """Runs the schedule on x `[b, t, D]`: in tick n, each stage works on item n - (index of the stage) of `_schedule`."""
    stages, here = lax.axis_size(AXIS), lax.axis_index(AXIS)
    inputs, contexts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), (x, context))
    inputs, contexts = jax.tree.map(lambda a: vary(a, (AXIS,)), (inputs, contexts))
    # With rounds, the last stage sends to the first.
    neighbours = [(i, (i + 1) % stages) for i in range(stages if rounds > 1 else stages - 1)]

    def tick(carry: PyTree, now: jax.Array) -> tuple[Any, Any]:
        received, outputs, chunks = carry
        busy, round_, index = _schedule(now - here, stages, count, rounds)
        microbatch, microbatch_context = jax.tree.map(lambda a: _at(a, index), (inputs, contexts))
        chunks, chunk = _take_chunk(chunks, round_)
        enters = (here == 0) & (round_ == 0)
        y, report = stage(chunk, jnp.where(enters, microbatch, received), microbatch_context, round_)
        # Results of earlier rounds, and of idle ticks before the first item, are overwritten later; the last stage, whose
        # outputs count, is never idle after its first item.
        outputs = lax.dynamic_update_index_in_dim(outputs, y, index, 0)
        report = jax.tree.map(lambda a: jnp.where(busy, a, 0), report)
        return (lax.ppermute(y, AXIS, neighbours), outputs, chunks), (report, round_)

    received, outputs = jax.tree.map(zeros_like, jax.eval_shape(lambda: (inputs[0], inputs)))
    numbers = jnp.arange(ticks(stages, count, rounds), dtype=jnp.int32)
    (_, outputs, _), (reports, rounds_of_ticks) = lax.scan(tick, (received, outputs, chunks), numbers)
    outputs = lax.psum(jnp.where(here == stages - 1, outputs, 0), AXIS)
    aux = jax.tree.map(lambda a: jnp.sum(a, axis=0), reports.aux)
    in_order = functools.partial(_sum_by_chunk, rounds_of_ticks, rounds)
    return outputs.reshape(x.shape), LayerReport(aux, jax.tree.map(in_order, reports.statistics))


def _sum_by_chunk(rounds_of_ticks: jax.Array, rounds: int, x: Float[Array, "ticks c ..."]) -> Float[Array, "n ..."]:
    """Sums over microbatches for each layer of the model, in order; 0 for layers of other stages.

    rounds_of_ticks: the round that the stage worked on in each tick.
    """
    stages, here = lax.axis_size(AXIS), lax.axis_index(AXIS)
    chunk = rounds_of_ticks * stages + here
    is_chunk = chunk[:, None] == jnp.arange(rounds * stages, dtype=jnp.int32)
    by_chunk = jnp.where(is_chunk.reshape(*is_chunk.shape, *(1,) * (x.ndim - 1)), x[:, None], 0.0).sum(axis=0)
    return by_chunk.reshape(-1, *x.shape[2:])


def _schedule(item: jax.Array, stages: int, count: int, rounds: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(busy, round, microbatch)` of a stage's work item, of R M in all; not busy before the first and after the last.

    Microbatches circulate in groups of as many as there are stages: a group passes all rounds before the next one enters.
    """
    busy = (item >= 0) & (item < rounds * count)
    group, place = jnp.divmod(jnp.clip(item, 0, rounds * count - 1), rounds * stages)
    round_, member = jnp.divmod(place, stages)
    return busy, round_, group * stages + member


def _redistribute(held: Float[Array, "rows ..."], rounds: int) -> Float[Array, "R c ..."]:
    """Sends the layers that a stage holds, which are consecutive, to the stages that run them.

    Thereby parameters, their statistics and checkpoints are laid out the same under every plan. In return, a stage holds a
    copy of its parameters during a pass, and sends up to all of them before the pass, and all of their gradients after it:
    2 / S of the layers' bytes, as much as a replica sends of gradients.

    Chunk b = r S + s is held by stage b // R and run by stage b % S. In step (b - b // lcm(R, S)) % R, every stage sends one
    chunk and receives one.
    """
    blocks, stages = held.reshape(rounds, -1, *held.shape[1:]), lax.axis_size(AXIS)
    if rounds == 1:
        return blocks
    chunk = np.arange(rounds * stages)
    step = (chunk - chunk // math.lcm(rounds, stages)) % rounds
    source, target = chunk // rounds, chunk % stages
    send_order, receive_order = np.zeros((2, stages, rounds), np.int32)
    send_order[source, step], receive_order[target, chunk // stages] = chunk % rounds, step

    def permute(x: jax.Array, orders: np.ndarray) -> jax.Array:
        order = _at(jnp.asarray(orders), lax.axis_index(AXIS))
        return x.at[order].get(unique_indices=True, mode="promise_in_bounds")

    to_send = permute(blocks, send_order)
    pairs = [[(int(source[b]), int(target[b])) for b in chunk[step == n]] for n in range(rounds)]
    received = [
        to_send[n] if all(a == b for a, b in pairs[n]) else lax.ppermute(to_send[n], AXIS, pairs[n])
        for n in range(rounds)
    ]
    return permute(jnp.stack(received), receive_order)


@jax.custom_vjp
def _take_chunk(chunks: PyTree, round_: jax.Array) -> tuple[Any, Any]:
    """Takes the chunk of a round: `(chunks, chunk)`.

    The chunk's gradient is added in place to that of `chunks`. The gradient of a slice would be an array of zeros as large as
    `chunks`, in every tick.
    """
    return chunks, jax.tree.map(lambda a: _at(a, round_), chunks)


def _take_chunk_forward(chunks: PyTree, round_: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
    return _take_chunk(chunks, round_), round_


def _take_chunk_backward(round_: jax.Array, cotangents: tuple[Any, Any]) -> tuple[Any, None]:
    def add(d_stack: jax.Array, d_chunk: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(d_stack, _at(d_stack, round_) + d_chunk, round_, 0)

    return jax.tree.map(add, *cotangents), None


_take_chunk.defvjp(_take_chunk_forward, _take_chunk_backward)


@jax.custom_vjp
def _redirect_gradient(value: jax.Array, receiver: jax.Array) -> jax.Array:
    """Returns `value`, whose cotangent becomes the gradient by `receiver`."""
    return value


def _redirect_forward(value: jax.Array, receiver: jax.Array) -> tuple[jax.Array, None]:
    return value, None


def _redirect_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(cotangent), cotangent


_redirect_gradient.defvjp(_redirect_forward, _redirect_backward)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, keepdims=False)
