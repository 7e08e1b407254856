"""Context parallelism: attention where several devices hold parts of each sequence, by heads or by a ring.

*heads* (Jacobs et al. 2023, "DeepSpeed Ulysses"): an all-to-all gives each device all tokens of some heads, and another one
takes the mixed values back. Works with any mixer; the number of devices must divide the heads.

*ring* (Liu et al. 2023, "Ring attention"): queries stay while keys and values travel round a ring of devices, and the partial
results of each device are merged by their log-sum-exp. Works with any mixer that has `partial`. The schedule is in
`ring_schedule`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from hpnlp.compatibility import ring_refusal
from hpnlp.model_interfaces.branch import Mixer
from hpnlp.ops.attention import Full, merge
from hpnlp.ops.attention.masks.base import Mask
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.helpers.custom_vjp import tied
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.ring_schedule import Chunks, RingSchedule, assign_chunks, make_schedule
from hpnlp.parallel.varying import on_first_device, shard_in_place, zeros_like
from hpnlp.types import InputError, MixerInputs, MixerOutput

AXIS = "sequence"

# Attention between two chunks: (mask, q, k, v, query_info, key_info) -> (o, lse), where info is (positions, segment_ids).
_Partial = Callable[..., tuple[Array, Array]]


def token_order(layout: Layout, masks: Sequence[Any], length: int) -> tuple[Chunks | None, np.ndarray | None]:
    """Order of the tokens of each sequence over the devices of a ring.

    Args:
      layout: Layout of the run.
      masks: The masks of the layers.
      length: Tokens per sequence.

    Returns:
      `(chunks, indices)`. chunks: the two chunks of each device, None without a ring. indices: int `[length]`, the tokens of
      a sequence in the order of the devices that hold them, None if they keep their order.

    Raises:
      InputError: The tokens do not divide into two chunks per device.
    """
    devices = layout.size("length")
    if devices == 1 or layout.exchange != "ring":
        return None, None
    if length % (2 * devices):
        raise InputError(
            f"sequences of {length} tokens do not divide into two chunks for each of plan.sequence={devices} devices: make "
            f"data.seq_len a multiple of {2 * devices}, or choose plan.exchange=heads"
        )
    chunks = assign_chunks([mask for mask in masks if mask.heads is None], length, devices)
    size = length // (2 * devices)
    indices = np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for pair in chunks for chunk in pair])
    return chunks, None if (np.diff(indices) == 1).all() else indices


def check_variables(layout: Layout, axes: Any) -> None:
    """Checks that a mixer of some of the heads has no variables of all of them.

    Args:
      layout: Layout of the run.
      axes: Logical axis names of the model's weights.

    Raises:
      InputError: Devices exchange tokens for heads, and a mixer has a parameter or buffer with an axis of heads.
    """
    if layout.size("length") == 1 or layout.exchange != "heads":
        return
    leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda node: node is None or isinstance(node, tuple))
    for path, names in leaves:
        if any(key.key == "mixer" for key in path) and {"heads", "kv_heads"} & set(names or ()):
            raise InputError(
                "plan.exchange=heads gives each device some of the heads, and model.mixer has "
                f"{jax.tree_util.keystr(path[-1:])} of the heads of all devices: choose plan.exchange=ring, or plan.sequence=1"
            )


@contextlib.contextmanager
def losses_of_mixers_checked(layout: Layout) -> Iterator[None]:
    """Checks in the block that no mixer returns losses or metrics which a ring would drop, since it calls `partial`.

    Args:
      layout: Layout of the run.

    Yields:
      None. In the block, calls of mixers, as in the initialisation of a model, are checked.

    Raises:
      InputError: The layout has a ring, and a mixer returns `MixerOutput.aux`.
    """
    if layout.size("length") == 1 or layout.exchange != "ring":
        yield
        return

    def check(
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        context: nn.module.InterceptorContext,
    ) -> Any:
        out = call(*args, **kwargs)
        if context.module.name == "mixer" and context.method_name == "__call__" and out.aux:
            raise InputError(
                f"{type(context.module).__name__} returns {', '.join(out.aux)} in MixerOutput.aux, which a ring does not "
                "compute: make it a function of statistics (`auxiliary_loss`), choose plan.exchange=heads, or plan.sequence=1"
            )
        return out

    with nn.intercept_methods(check):
        yield


def by_heads(mixer: Mixer, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
    """Runs a mixer on all tokens of some heads per device, between two all-to-alls.

    Args:
      mixer: A mixer.
      inputs: Inputs of the device's tokens, a contiguous slice of each sequence.
      mask: A static Mask over all tokens.

    Returns:
      `mixer(inputs, mask)` for the device's tokens.

    Raises:
      InputError: The devices do not divide the heads, or heads have different masks.
    """
    devices = lax.axis_size(AXIS)
    if mixer.within(mask).heads is not None:
        raise InputError("heads with masks of their own are not divided over devices: set plan.sequence=1")
    of_heads = {name: x for name in ("q", "k", "v") if (x := getattr(inputs, name)) is not None}
    for name, heads in (of_heads | dict(inputs.projections)).items():
        if heads.shape[2] % devices:
            raise InputError(
                f"plan.exchange='heads' divides {heads.shape[2]} heads of {name} over plan.sequence={devices} devices: choose "
                "plan.exchange=ring, or numbers of heads that are multiples of plan.sequence"
            )
    fields: dict[str, Any] = {name: _scatter_heads(x) for name, x in of_heads.items()}
    fields["projections"] = {name: _scatter_heads(x) for name, x in inputs.projections.items()}
    for name in ("x", "positions", "kv_positions", "segment_ids", "kv_segment_ids"):
        if (x := getattr(inputs, name)) is not None:
            fields[name] = _gather_tokens(x)
    if inputs.streams is not None:
        count = inputs.streams.shape[1] // devices
        # A sequence's number is that of its first token, which the first device has.
        first = _gather_tokens(inputs.streams[:, None, :])[:, 0]
        fields["streams"] = lax.dynamic_slice_in_dim(first, lax.axis_index(AXIS) * count, count, 1)
    out = mixer(dataclasses.replace(inputs, **fields), mask)
    axes = mixer.statistic_axes
    statistics = {name: _device_terms(x, axes.get(name, ())) for name, x in out.statistics.items()}
    return MixerOutput(lax.all_to_all(out.o, AXIS, split_axis=1, concat_axis=2, tiled=True), out.aux, statistics)


def _device_terms(statistic: Array, axes: Sequence[str | None]) -> Array:
    """The device's terms of a statistic of all tokens, for the heads of all devices of the axis."""
    dims = [dim for dim, name in enumerate(axes) if name in ("heads", "kv_heads")]
    return shard_in_place(statistic, dims[0], (AXIS,)) if dims else on_first_device(statistic, AXIS)


def _scatter_heads(x: Array) -> Array:
    """[B, t, N, H] -> [B, T, N / devices, H]."""
    return lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)


def _gather_tokens(x: Array) -> Array:
    """[B, t, ...] -> [B, T, ...]."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True)


def ring(mixer: Any, inputs: MixerInputs, mask: AnyMask, chunks: Chunks | None) -> MixerOutput:
    """Runs a mixer on queries of the device's tokens while keys and values travel round a ring.

    Args:
      mixer: A mixer with `partial`; with `prepare` if it has statistics or buffers.
      inputs: Inputs of the device's tokens, which are those of its two chunks.
      mask: A static Mask over all tokens.
      chunks: The two chunks of each device, `Context.order`.

    Returns:
      `mixer(inputs, mask)` for the device's tokens.

    Raises:
      InputError: The mixer has no `partial`, attention has dropout, heads have different masks, or the model sets no order.

    Cost: sends keys and values once round the ring, and once more with their gradients in the backward pass, which computes
    every partial result again. The device's q, k, v, o and lse are kept for the backward pass.
    """
    if message := ring_refusal(mixer):
        raise InputError(message)
    if chunks is None:
        raise InputError(
            "plan.exchange=ring with a model that does not set Context.order: bring the tokens into the order that "
            "model_parallel.token_order returns, and pass that order to Context; or choose plan.exchange=heads"
        )
    if inputs.rng is not None:
        raise InputError("model.dropout with plan.exchange=ring: choose plan.exchange=heads, or model.dropout=0")
    mask = mixer.within(mask)
    if mask.heads is not None:
        raise InputError("heads with masks of their own do not run on a ring: set plan.sequence=1")
    inputs, statistics = mixer.prepare(inputs) if mixer.has_state else (inputs, {})
    assert inputs.q is not None and inputs.k is not None and inputs.v is not None
    schedule = make_schedule(cast(Mask, mask), inputs.q.shape[1] * lax.axis_size(AXIS), chunks)

    def partial(
        mask: AnyMask, q: Array, k: Array, v: Array, query_info: PyTree, key_info: PyTree
    ) -> tuple[Array, Array]:
        (positions, segment_ids), (kv_positions, kv_segment_ids) = query_info, key_info
        return mixer.partial(MixerInputs(None, q, k, v, positions, kv_positions, segment_ids, kv_segment_ids), mask)

    query_info, key_info = (inputs.positions, inputs.segment_ids), (inputs.kv_positions, inputs.kv_segment_ids)
    o: Any = _ring(schedule, partial, inputs.q, inputs.k, inputs.v, query_info, key_info)
    return MixerOutput(o, statistics=statistics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    schedule: RingSchedule, partial: _Partial, q: Array, k: Array, v: Array, query_info: PyTree, key_info: PyTree
) -> Array:
    """Attention o `[B, t, N, H]` of the device's queries over all keys of the ring."""
    return _ring_forward(schedule, partial, q, k, v, query_info, key_info)[0]


def _ring_forward(
    schedule: RingSchedule, partial: _Partial, q: Array, k: Array, v: Array, query_info: PyTree, key_info: PyTree
) -> tuple[Array, Any]:
    """(o, residuals of `_ring_backward`); partial results of the hops are merged as they arrive."""
    # k and v travel in one array. As two, the compiler would recognise the transfers of the backward pass as the same, and
    # keep the keys and values of all devices instead of sending them again.
    local, moving = _in_chunks((q, query_info)), _in_chunks((jnp.concatenate((k, v), axis=-1), key_info))
    masks = (Full(), *schedule.masks)

    def operands(local: PyTree, moving: PyTree) -> tuple[Any, ...]:
        kv, key_info = moving
        return _partial_operands(local, (*jnp.split(kv, [k.shape[-1]], axis=-1), key_info))

    shapes = jax.eval_shape(functools.partial(partial, masks[-1]), *operands(_at(local, 0), _at(moving, 0)))
    o_zeros, lse_zeros = jax.tree.map(zeros_like, shapes)
    empty = o_zeros, lse_zeros - jnp.inf
    by_kind = [lambda *_: empty, *(functools.partial(partial, mask) for mask in masks)]

    def step(carry: PyTree, moving: PyTree, hop: Array, i: Array, j: Array) -> tuple[Any, Any]:
        pair = operands(_at(local, i), _at(moving, j))
        o, lse = lax.switch(_kind(schedule, hop, i, j), by_kind, *pair)
        merged = merge(_at(carry, i), (o.astype(jnp.float32), lse))
        return tuple(_put(x, new, i) for x, new in zip(carry, merged, strict=True)), moving

    start = jax.tree.map(lambda x: jnp.stack([x, x]), (empty[0].astype(jnp.float32), empty[1]))
    (o, lse), _ = _run_hops(schedule, step, start, moving)
    o, lse = (checkpoint_name(x, "mixed") for x in (o, lse))
    return _join_chunks(o).astype(q.dtype), (q, k, v, query_info, key_info, o, lse)


def _ring_backward(schedule: RingSchedule, partial: _Partial, saved: PyTree, do: Array) -> tuple[Any, ...]:
    """Gradients of q, k and v, by a second pass round the ring; None for positions and segments."""
    q, k, v, query_info, key_info, o, lse = saved
    local, moving = _in_chunks((q, query_info)), _in_chunks((k, v, key_info))
    do = _in_chunks(do.astype(jnp.float32))
    # exp(-inf - -inf) would be NaN: queries that see no key get +inf, so that every partial result has weight 0.
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)
    gradients = [
        functools.partial(_partial_gradients, functools.partial(partial, mask)) for mask in (Full(), *schedule.masks)
    ]
    first_pair = (*_partial_operands(_at(local, 0), _at(moving, 0)), _at((o, lse, do), 0))
    zeros = jax.tree.map(zeros_like, jax.eval_shape(gradients[-1], *first_pair))
    by_kind = [lambda *_: zeros, *gradients]

    def step(dq: Array, moving: PyTree, hop: Array, i: Array, j: Array) -> tuple[Any, Any]:
        keys, dk, dv = moving
        pair = (*_partial_operands(_at(local, i), _at(keys, j)), _at((o, lse, do), i))
        gain = lax.switch(_kind(schedule, hop, i, j), by_kind, *pair)
        dq = _put(dq, _at(dq, i) + gain[0], i)
        dk, dv = (_put(d, _at(d, j) + new, j) for d, new in zip((dk, dv), gain[1:], strict=True))
        return dq, (keys, dk, dv)

    dq, dk, dv = (jnp.stack([x, x]) for x in zeros)
    # dk and dv travel with their keys and values; after the last hop they are sent back to the device of these keys.
    dq, (_, dk, dv) = _run_hops(schedule, step, dq, (moving, dk, dv))
    if schedule.hop_count:
        dk, dv = _send((dk, dv), 1 - schedule.first_hop - schedule.hop_count)
    dq, dk, dv = (_join_chunks(d).astype(x.dtype) for d, x in zip((dq, dk, dv), (q, k, v), strict=True))
    return dq, dk, dv, None, None


_ring.defvjp(_ring_forward, _ring_backward)


def _partial_gradients(
    partial: _Partial, q: Array, k: Array, v: Array, query_info: PyTree, key_info: PyTree, merged: PyTree
) -> tuple[Array, ...]:
    """Float32 gradients by q, k and v through one partial result (o_p, lse_p).

    The merged result is o = sum_p w_p o_p with weights w_p = exp(lse_p - lse), so that d/d o_p = w_p do and
    d/d lse_p = w_p <o_p - o, do>. merged: (o, lse, do).
    """
    o, lse, do = merged
    (partial_o, partial_lse), pull = jax.vjp(lambda q, k, v: partial(q, k, v, query_info, key_info), q, k, v)
    weight = jnp.exp(partial_lse - lse)
    d_lse = weight * ((partial_o.astype(jnp.float32) - o) * do).sum(axis=-1)
    return tuple(d.astype(jnp.float32) for d in pull(((weight[..., None] * do).astype(partial_o.dtype), d_lse)))


def _partial_operands(local: PyTree, moving: PyTree) -> tuple[Any, ...]:
    """The operands of a partial result, from a chunk of queries and a chunk of keys and values."""
    (q, query_info), (k, v, key_info) = local, moving
    return q, k, v, query_info, key_info


def _run_hops(schedule: RingSchedule, step: Callable[..., Any], carry: PyTree, moving: PyTree) -> tuple[Any, Any]:
    """Runs `step(carry, moving, hop, i, j) -> (carry, moving)` for each pair of chunks at each hop.

    i and j are the device's query chunk and the key chunk in `moving`, 0 or 1 each. `moving` travels round the ring, and is
    left where the last hop used it, `first_hop + hop_count - 1` devices from where it started.
    """
    if not schedule.hop_count:
        return carry, moving
    moving = _send(moving, schedule.first_hop)
    pairs = jnp.asarray([(i, j) for i in range(2) for j in range(2)], jnp.int32)

    def run_pairs(state: PyTree, hop: Array) -> tuple[Any, Any]:
        return lax.scan(lambda state, pair: (step(*state, hop, pair[0], pair[1]), None), state, pairs)[0]

    def run_pairs_and_send(state: PyTree, hop: Array) -> tuple[Any, None]:
        carry, moving = run_pairs(state, hop)
        return (carry, _send(moving, 1)), None

    hops = schedule.first_hop + jnp.arange(schedule.hop_count, dtype=jnp.int32)
    # Without this, JAX would compute the masks of all hops ahead of a differentiated loop over layers, and keep them.
    hops = tied(hops, jax.tree.leaves(moving)[0])
    state = (carry, moving)
    if schedule.hop_count > 1:
        state = lax.scan(run_pairs_and_send, state, hops[:-1])[0]
    # The last hop is outside of the loop because its keys and values need not be sent on.
    return run_pairs(state, hops[-1])


def _kind(schedule: RingSchedule, hop: Array, i: Array, j: Array) -> Array:
    """The kind of the pair of the device's query chunk i and of key chunk j, which came from `hop` devices before."""
    devices, here = len(schedule.chunks), lax.axis_index(AXIS)
    chunks = jnp.asarray(schedule.chunks, jnp.int32)
    return jnp.asarray(schedule.kinds, jnp.int32)[chunks[here, i], chunks[(here - hop) % devices, j]]


def _send(tree: PyTree, distance: int) -> Any:
    """Sends the arrays of each device `distance` devices on round the ring."""
    devices = lax.axis_size(AXIS)
    if distance % devices == 0:
        return tree
    return lax.ppermute(tree, AXIS, [(d, (d + distance) % devices) for d in range(devices)])


def _in_chunks(tree: PyTree) -> Any:
    """[B, t, ...] -> [2, B, t / 2, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0), tree)


def _join_chunks(x: Array) -> Array:
    """[2, B, t / 2, ...] -> [B, t, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _at(tree: PyTree, i: int | Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(x: Array, new: Array, i: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, i, 0)
