"""Attention where several devices share each sequence: by heads for a while, or round a ring.

*heads* (Jacobs et al. 2023, "DeepSpeed Ulysses"): an all-to-all gives each device all tokens of some heads, another takes what
they mixed back. Any mixer; the heads must divide.

*ring* (Liu et al. 2023, "Ring attention"): queries stay, keys and values go round, and what each device makes of each part is
merged by (o, lse). Any mixer with `partial`. Rows are cut into two chunks a device. Where tokens stand in their order, device d
has chunks 2d and 2d + 1; under a causal mask the last device would have most to do, and the order is a zigzag, d and
2 S - 1 - d (Brandon et al. 2023, "Striped attention", has another; this one is of Llama 3's, Grattafiori et al. 2024, sec.
3.3.2). What a mask rules out for a pair of chunks is not computed; parts that no device needs are not waited for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from hpnlp.ops.attention import Full, Mask, merge
from hpnlp.ops.custom_vjp import tied
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.varying import zeros_like
from hpnlp.types import InputError, MixerInputs, MixerOutput, check_method

AXIS = "sequence"
SKIP, WHOLE = 0, 1  # kinds of pairs of chunks; from 2 on, those that a mask allows in part


@dataclasses.dataclass(frozen=True)
class RingSchedule:
    """How keys go round: static.

    chunks: which two chunks each device has. masks: what is allowed of the kinds of pairs from 2 on. kinds: of each pair of
    chunks (query's, key's). first, count: keys come from `first` devices before, one nearer to `first` + 1 each time.
    """

    chunks: tuple[tuple[int, int], ...]
    masks: tuple[Any, ...]
    kinds: tuple[tuple[int, ...], ...]
    first: int
    count: int

    @property
    def steps(self) -> tuple[int, int]:
        """(pairs of chunks that are computed, all there are), over all devices."""
        return sum(kind != SKIP for row in self.kinds for kind in row), len(self.kinds) ** 2


def course(mask: Mask, length: int, chunks: tuple[tuple[int, int], ...]) -> RingSchedule:
    """Of a mask over rows of `length` tokens.

    One that depends on i - j alone is the same for all pairs of chunks that are equally far apart; of another, which is over
    positions that are known at run time, every pair may be allowed in part. Cost: asks the mask for 4 `length` pairs of tokens.
    """
    devices, total = len(chunks), 2 * len(chunks)
    size = length // total
    if not mask.relative:
        return RingSchedule(chunks, (mask,), ((2,) * total,) * total, 0, devices)
    masks: dict[Any, int] = {}
    kinds = np.zeros((total, total), int)
    for apart in range(1 - total, total):
        gaps = np.arange((apart - 1) * size + 1, (apart + 1) * size)  # query's place less key's
        seen = mask.at(np.maximum(gaps, 0), np.maximum(-gaps, 0))
        kind = SKIP if not seen.any() else WHOLE if seen.all() else masks.setdefault(apart * size, 2 + len(masks))
        np.fill_diagonal(kinds[max(apart, 0) :, max(-apart, 0) :], kind)
    own = np.array(chunks)
    # How far keys have come when a device needs them.
    needed = {
        hop
        for hop in range(devices)
        if any(kinds[np.ix_(own[d], own[(d - hop) % devices])].any() for d in range(devices))
    }
    if not needed:
        return RingSchedule(chunks, (), ((SKIP,) * total,) * total, 0, 0)
    gaps = [(start, next(n for n in range(devices) if (start + n) % devices in needed)) for start in range(devices)]
    start, gap = max(gaps, key=lambda found: found[1])
    variants = tuple(mask.shift(distance) if distance else mask for distance in masks)
    table = tuple(tuple(int(kind) for kind in row) for row in kinds)
    return RingSchedule(chunks, variants, table, (start + gap) % devices, devices - gap)


def arrangement(masks: Sequence[Mask], length: int, devices: int) -> tuple[tuple[int, int], ...]:
    """Which two chunks each device is to have: in their order or as a zigzag, whichever is sooner done with all masks."""
    plain = tuple((2 * d, 2 * d + 1) for d in range(devices))
    zigzag = tuple((d, 2 * devices - 1 - d) for d in range(devices))

    def cost(chunks: tuple[tuple[int, int], ...]) -> float:
        total = 0.0
        for mask in masks:
            found, own = course(mask, length, chunks), np.array(chunks)
            work = np.array([0.0, 1.0, *[0.5] * len(found.masks)])[np.array(found.kinds)]
            for hop in range(found.first, found.first + found.count):
                total += max(work[np.ix_(own[d], own[(d - hop) % devices])].sum() for d in range(devices))
        return total

    return zigzag if cost(zigzag) < cost(plain) else plain


def arranged(layout: Layout, masks: Sequence[Any], length: int) -> tuple[Any, np.ndarray | None]:
    """(the chunks of each device, the places in a row device after device, or None where they keep their order).

    Raises InputError where rows do not divide into two chunks a device.
    """
    devices = layout.size("length")
    if devices == 1 or layout.exchange != "ring":
        return None, None
    if length % (2 * devices):
        raise InputError(
            f"rows of {length} tokens do not divide into two chunks for each of plan.sequence={devices} devices: make "
            f"data.seq_len a multiple of {2 * devices}, or choose plan.exchange=heads"
        )
    chunks = arrangement([mask for mask in masks if mask.heads is None], length, devices)
    size = length // (2 * devices)
    places = np.concatenate([np.arange(chunk * size, (chunk + 1) * size) for pair in chunks for chunk in pair])
    return chunks, None if (np.diff(places) == 1).all() else places


def check(layout: Layout, mixers: Sequence[Any], masks: Sequence[Any], heads: Sequence[int], dropout: float) -> None:
    """Raises InputError where devices that share sequences or heads cannot compute what a model asks for.

    Args:
        layout: of the run.
        mixers: of the layers.
        masks: of the layers, as their mixers' `within` gives them.
        heads: numbers of query heads and of key and value heads.
        dropout: rate of dropout on attention probabilities.
    """
    shared = layout.size("length") > 1
    own = any(mask.heads is not None for mask in masks)
    if own and (shared or layout.size("heads") > 1):
        raise InputError(
            "heads with masks of their own (model.mixer) are not alike on all devices: set plan.tensor=1 and plan.sequence=1, "
            "or choose a mixer with one mask"
        )
    if shared and layout.exchange == "ring":
        for mixer in mixers:
            check_mixer(mixer)
    if shared and layout.exchange == "ring" and dropout:
        raise InputError(
            f"model.dropout={dropout} is not dropped in attention on a ring: choose plan.exchange=heads, or model.dropout=0"
        )
    if shared and layout.exchange == "heads":
        for count, field in zip(heads, ("model.heads", "model.kv_heads"), strict=True):
            if count // layout.size("heads") % layout.size("length"):
                raise InputError(
                    f"plan.exchange=heads deals {field}={count} out over plan.sequence={layout.size('length')}"
                    ", which do not divide it: choose plan.exchange=ring, or other sizes"
                )


def check_mixer(mixer: Any) -> None:
    """Raises InputError where the `partial` of a mixer, which a ring calls, is not that of its `__call__`."""
    check_method(mixer, "partial", "a ring", "choose plan.exchange=heads, or plan.sequence=1")


def by_heads(mixer: Any, inputs: MixerInputs, mask: Any) -> MixerOutput:
    """`mixer(inputs, mask)` of a device's part of the tokens, by all-to-alls. Tokens are in their order."""
    devices = lax.axis_size(AXIS)
    if mixer.within(mask).heads is not None:
        raise InputError("heads with masks of their own are not dealt out to devices: set plan.sequence=1")
    for name in ("q", "k", "v"):
        if (heads := getattr(inputs, name)) is not None and heads.shape[2] % devices:
            raise InputError(
                f"plan.exchange='heads' deals out {heads.shape[2]} heads of {name}, which do not divide over "
                f"plan.sequence={devices}: choose plan.exchange=ring, or other numbers of heads"
            )
    spread = functools.partial(lax.all_to_all, axis_name=AXIS, split_axis=2, concat_axis=1, tiled=True)
    gather = functools.partial(lax.all_gather, axis_name=AXIS, axis=1, tiled=True)
    found = {name: spread(x) for name in ("q", "k", "v") if (x := getattr(inputs, name)) is not None}
    of_tokens = ("x", "positions", "kv_positions", "segment_ids", "kv_segment_ids")
    found |= {name: gather(x) for name in of_tokens if (x := getattr(inputs, name)) is not None}
    if inputs.streams is not None:
        count = inputs.streams.shape[1] // devices
        # A row's number is that of its first token, which is the first device's.
        first = gather(inputs.streams[:, None, :])[:, 0]
        found["streams"] = lax.dynamic_slice_in_dim(first, lax.axis_index(AXIS) * count, count, 1)
    out = mixer(dataclasses.replace(inputs, **found), mask)
    return MixerOutput(lax.all_to_all(out.o, AXIS, split_axis=1, concat_axis=2, tiled=True), out.aux)


def ring(mixer: Any, inputs: MixerInputs, mask: Any, chunks: tuple[tuple[int, int], ...]) -> MixerOutput:
    """`mixer(inputs, mask)` of a device's part of the tokens, which are those of its chunks.

    Cost: sends keys and values once round, and once more with their gradients in the backward pass, which computes each part
    again; kept for it are the device's own q, k, v, o and lse.
    Raises InputError for a mixer without `partial`, for dropout in attention, and for heads with masks of their own.
    """
    check_mixer(mixer)
    if inputs.rng is not None:
        raise InputError("model.dropout with plan.exchange=ring: choose plan.exchange=heads, or model.dropout=0")
    mask = mixer.within(mask)
    if mask.heads is not None:
        raise InputError("heads with masks of their own do not go round a ring: set plan.sequence=1")
    assert inputs.q is not None and inputs.k is not None and inputs.v is not None
    going = course(mask, inputs.q.shape[1] * lax.axis_size(AXIS), chunks)
    facts = (inputs.positions, inputs.segment_ids), (inputs.kv_positions, inputs.kv_segment_ids)

    def part(mask: Any, q: Array, k: Array, v: Array, rows: Any, columns: Any) -> tuple[Array, Array]:
        return mixer.partial(MixerInputs(None, q, k, v, rows[0], columns[0], rows[1], columns[1]), mask)

    return MixerOutput(_ring(going, part, inputs.q, inputs.k, inputs.v, *facts))


def _in_chunks(tree: Any) -> Any:
    """[b, t, ...] -> [2, b, t / 2, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0), tree)


def _back(x: Array) -> Array:
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _sent(tree: Any, far: int) -> Any:
    """Each device's to the one `far` places on."""
    devices = lax.axis_size(AXIS)
    if far % devices == 0:
        return tree
    return lax.ppermute(tree, AXIS, [(d, (d + far) % devices) for d in range(devices)])


def _kind(going: RingSchedule, hop: Array, i: Array, j: Array) -> Array:
    """Of the pair of the device's chunk i and chunk j of the keys that have come from `hop` devices before."""
    devices, here = len(going.chunks), lax.axis_index(AXIS)
    chunks = jnp.asarray(going.chunks, jnp.int32)
    return jnp.asarray(going.kinds, jnp.int32)[chunks[here, i], chunks[(here - hop) % devices, j]]


def _hops(going: RingSchedule, step: Callable[..., Any], carry: Any, moving: Any) -> tuple[Any, Any]:
    """`step(carry, moving, hop, i, j) -> (carry, moving)` for each pair of chunks at each hop, while `moving` goes round: it
    ends where the last hop found it, `going.first + going.count - 1` devices from where it was."""
    if not going.count:
        return carry, moving
    moving = _sent(moving, going.first)
    pairs = jnp.asarray([(i, j) for i in range(2) for j in range(2)], jnp.int32)

    def hop(state: Any, number: Array) -> tuple[Any, Any]:
        return lax.scan(lambda state, pair: (step(*state, number, pair[0], pair[1]), None), state, pairs)[0]

    def hop_and_send(state: Any, number: Array) -> tuple[Any, None]:
        carry, moving = hop(state, number)
        return (carry, _sent(moving, 1)), None

    numbers = going.first + jnp.arange(going.count, dtype=jnp.int32)
    numbers = tied(numbers, jax.tree.leaves(moving)[0])
    # The last hop stands apart, as nobody would use what it sent on.
    state = lax.scan(hop_and_send, (carry, moving), numbers[:-1])[0] if going.count > 1 else (carry, moving)
    return hop(state, numbers[-1])


def _at(tree: Any, i: int | Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(x: Array, new: Array, i: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, new, i, 0)


def _ring_forward(
    going: RingSchedule, part: Callable[..., Any], q: Array, k: Array, v: Array, rows: Any, columns: Any
) -> tuple[Array, Any]:
    # In one array: compilers would else find what the backward pass sends again to be the same, and keep it.
    mine, moving = _in_chunks((q, rows)), _in_chunks((jnp.concatenate((k, v), axis=-1), columns))
    masks = (Full(), *going.masks)

    def arguments(mine: Any, moving: Any) -> tuple[Any, ...]:
        kv, columns = moving
        return _arguments(mine, (*jnp.split(kv, [k.shape[-1]], axis=-1), columns))

    shapes = jax.eval_shape(functools.partial(part, masks[-1]), *arguments(_at(mine, 0), _at(moving, 0)))
    nothing = jax.tree.map(zeros_like, shapes)
    nothing = nothing[0], nothing[1] - jnp.inf

    def step(carry: Any, moving: Any, hop: Array, i: Array, j: Array) -> tuple[Any, Any]:
        given = arguments(_at(mine, i), _at(moving, j))
        branches = [lambda *_: nothing, *(functools.partial(part, mask) for mask in masks)]
        o, lse = lax.switch(_kind(going, hop, i, j), branches, *given)
        before = _at(carry, i)
        merged = merge(before, (o.astype(jnp.float32), lse))
        return tuple(_put(x, new, i) for x, new in zip(carry, merged, strict=True)), moving

    start = jax.tree.map(lambda x: jnp.stack([x, x]), (nothing[0].astype(jnp.float32), nothing[1]))
    (o, lse), _ = _hops(going, step, start, moving)
    o, lse = (checkpoint_name(x, "mixed") for x in (o, lse))
    return _back(o).astype(q.dtype), (q, k, v, rows, columns, o, lse)


def _arguments(mine: Any, other: Any) -> tuple[Any, ...]:
    (q, rows), (k, v, columns) = mine, other
    return q, k, v, rows, columns


def _ring_backward(going: RingSchedule, part: Callable[..., Any], saved: Any, do: Array) -> tuple[Any, ...]:
    q, k, v, rows, columns, o, lse = saved
    mine, moving = _in_chunks((q, rows)), _in_chunks((k, v, columns))
    do = _in_chunks(do.astype(jnp.float32))
    lse = jnp.where(jnp.isneginf(lse), jnp.inf, lse)  # a row that saw nothing had a share of 0 in nothing
    masks = (Full(), *going.masks)

    def pull(mask: Any, q: Array, k: Array, v: Array, rows: Any, columns: Any, end: Any) -> tuple[Array, ...]:
        o, lse, do = end
        (own, own_lse), back = jax.vjp(lambda q, k, v: part(mask, q, k, v, rows, columns), q, k, v)
        share = jnp.exp(own_lse - lse)
        by_lse = share * ((own.astype(jnp.float32) - o) * do).sum(axis=-1)
        return tuple(d.astype(jnp.float32) for d in back(((share[..., None] * do).astype(own.dtype), by_lse)))

    given = (*_arguments(_at(mine, 0), _at(moving, 0)), _at((o, lse, do), 0))
    nothing = jax.tree.map(zeros_like, jax.eval_shape(functools.partial(pull, masks[-1]), *given))

    def step(dq: Array, moving: Any, hop: Array, i: Array, j: Array) -> tuple[Any, Any]:
        keys, dk, dv = moving
        given = (*_arguments(_at(mine, i), _at(keys, j)), _at((o, lse, do), i))
        branches = [lambda *_: nothing, *(functools.partial(pull, mask) for mask in masks)]
        found = lax.switch(_kind(going, hop, i, j), branches, *given)
        dq = _put(dq, _at(dq, i) + found[0], i)
        dk, dv = (_put(d, _at(d, j) + new, j) for d, new in zip((dk, dv), found[1:], strict=True))
        return dq, (keys, dk, dv)

    zeros = [jnp.stack([x, x]) for x in nothing]
    # The gradients set out with the keys that they are of, and come home from where the last hop found them.
    dq, (_, dk, dv) = _hops(going, step, zeros[0], (moving, zeros[1], zeros[2]))
    if going.count:
        dk, dv = _sent((dk, dv), 1 - going.first - going.count)
    return _back(dq).astype(q.dtype), _back(dk).astype(k.dtype), _back(dv).astype(v.dtype), None, None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(
    going: RingSchedule, part: Callable[..., Any], q: Array, k: Array, v: Array, rows: Any, columns: Any
) -> Array:
    return _ring_forward(going, part, q, k, v, rows, columns)[0]


_ring.defvjp(_ring_forward, _ring_backward)
