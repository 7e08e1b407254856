"""Block-sparse flash attention for NVIDIA Hopper: the kernels.

A block of threads has three warpgroups. Two compute, each a tile of 64 rows; the third copies what they read into a ring
of buffers in shared memory, so that copies and products overlap. Which tiles meet is read from a list in memory: a block
walks its own entries, first those in which every pair is allowed, then those whose elements are asked for.
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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hpnlp.ops.attention.block_sparse.block_mask import live
from hpnlp.ops.attention.kernels.mosaic import THREADS, Machine, along, matrix
from hpnlp.ops.attention.masks.base import Mask

LOG2E = math.log2(math.e)
# A finite stand-in for the maximum of a row that has seen nothing, so that exp2(-inf - FLOOR) is 0 and not NaN.
FLOOR = -1e30

ROWS = 64  # what one warpgroup computes
COMPUTE = 2  # warpgroups that compute
TILE = ROWS * COMPUTE
STAGES = 2


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call. keys: how many there are without padding."""

    mask: Mask
    scale: float
    soft_cap: float | None
    queries: int
    keys: int
    segmented: bool
    interpret: bool


@functools.lru_cache(maxsize=64)
def plan(spec: Spec, rows: int, columns: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """int32 [4, R] and [entries]: which tiles of columns each tile of rows meets, for rows and columns of the given sizes.

    The first array holds the tiles of rows in the order in which they start, longest first, and for each tile where its
    entries start, where those begin whose elements are asked for, and where they end. transposed: rows are keys.
    """
    sizes = (columns, rows) if transposed else (rows, columns)
    found = live(spec.mask, spec.queries, spec.keys, *sizes)
    whole = found.every & (not spec.segmented)
    # A padded key is hidden by asking; a padded query needs no asking, for nothing is read from it.
    whole &= (found.columns + 1) * sizes[1] <= spec.keys
    own, other = (found.columns, found.rows) if transposed else (found.rows, found.columns)
    by = np.lexsort((other, ~whole, own))
    count = -(-(spec.keys if transposed else spec.queries) // TILE) * (TILE // rows)
    edges = np.searchsorted(own[by], np.arange(count + 1))
    asked = edges[:-1] + np.bincount(own[whole], minlength=count)
    order = np.argsort(edges[:-1] - edges[1:], kind="stable")
    entries = np.concatenate([other[by], np.zeros(1, int)])
    return np.stack([order, edges[:-1], asked, edges[1:]]).astype(np.int32), entries.astype(np.int32)


def scores(spec: Spec, products: Any) -> tuple[Any, float, Any]:
    """(s, factor, capped): s * factor is the score in units of log 2, and capped what the soft cap's derivative needs.

    The factor is positive and left to the exponential, which takes it in a fused multiply-add.
    """
    if spec.soft_cap is not None:
        capped = jnp.tanh(products * (spec.scale / spec.soft_cap))
        return capped, spec.soft_cap * LOG2E, capped
    if spec.scale > 0.0:
        return products, spec.scale * LOG2E, None
    return products * spec.scale, LOG2E, None


def visible(spec: Spec, machine: Machine, q0: Any, k0: Any, shape: tuple[int, ...], q_axis: int, segments: Any) -> Any:
    """bool [rows, columns] of a tile whose first query and key are q0 and k0."""
    q, k = machine.iota(shape, q_axis) + q0, machine.iota(shape, 1 - q_axis) + k0
    see = spec.mask.at(q, k) & (k < spec.keys)
    if segments is None:
        return see
    q_ids, kv_ids, batch = segments
    sizes = (shape[q_axis], shape[1 - q_axis])
    mine = machine.load(q_ids.at[batch, pl.ds(q0, sizes[0])], q_axis, optimized=False)
    theirs = machine.load(kv_ids.at[batch, pl.ds(k0, sizes[1])], 1 - q_axis, optimized=False)
    return see & (along(mine, shape, q_axis) == along(theirs, shape, 1 - q_axis))


def feed(count: Any, copy: Callable[[Any, Any], None], free: tuple[Any, ...]) -> None:
    """The copying warpgroup: `copy(step, slot)` for each step, each slot once the computing ones have left it."""
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, count + STAGES)
    def _(step: Any) -> None:
        slot = lax.rem(step, jnp.int32(STAGES))

        @pl.when(step >= STAGES)
        def _() -> None:
            for barrier in free:
                plgpu.barrier_wait(barrier.at[slot])

        @pl.when(step < count)
        def _() -> None:
            copy(step, slot)


def walk(first: Any, asked: Any, last: Any, body: Callable[..., Any], state: Any) -> Any:
    """Runs `body(entry, state, ask)` over the entries of a tile."""
    state = lax.fori_loop(first, asked, functools.partial(body, ask=False), state)
    return lax.fori_loop(asked, last, functools.partial(body, ask=True), state)


def forward(
    spec: Spec, q: jax.Array, k: jax.Array, v: jax.Array, segments: tuple[jax.Array, ...], columns: int = 128
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, N, H] in q's dtype and the log-sum-exp, float32 [B, N, T]; T is a multiple of TILE, S of `columns`."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    machine = Machine(spec.interpret)
    rows_plan, entries = plan(spec, TILE, columns, False)

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, rows_ref: Any, entries_ref: Any, *refs: Any) -> None:
        ids = refs[: len(segments)]
        o_ref, lse_ref, q_s, k_s, v_s, lse_s, q_full, k_full, v_full, k_free, v_free, turn = refs[len(segments) :]
        b, head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index(THREADS)
        tile = rows_ref[0, lax.axis_index("tiles")]
        first, asked, last = rows_ref[1, tile], rows_ref[2, tile], rows_ref[3, tile]

        @pl.when(wg < COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = tile * TILE + wg * ROWS
            here = (b, pl.ds(q0, ROWS), head)
            plgpu.copy_gmem_to_smem(q_ref.at[here], q_s.at[wg], q_full.at[wg])
            plgpu.barrier_wait(q_full.at[wg])

            def take_turns() -> None:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            # While one warpgroup has the tensor cores, the other computes its exponentials: FlashAttention-3, sec. 3.1.
            def step(entry: Any, state: Any, ask: bool) -> Any:
                sums, top, total = state
                slot = lax.rem(entry - first, jnp.int32(STAGES))
                plgpu.barrier_wait(k_full.at[slot])
                products = machine.product(q_s.at[wg], k_s.at[slot], take_turns)
                plgpu.barrier_arrive(k_free.at[slot])
                s, factor, _ = scores(spec, products)
                if ask:
                    given = (*ids, b) if ids else None
                    see = visible(spec, machine, q0, entries_ref[entry] * columns, s.shape, 0, given)
                    s = jnp.where(see, s, -jnp.inf)
                higher = jnp.maximum(top, s.max(axis=1) * factor)
                shrink = jnp.exp2(top - higher)
                p = jnp.exp2(s * factor - along(higher, s.shape, 0))
                total = total * shrink + p.sum(axis=1)
                sums = sums * along(shrink, sums.shape, 0)
                # Without it the compiler moves some of this behind the barriers, into the other's turn.
                sums, higher, total, p = lax.optimization_barrier((sums, higher, total, p.astype(v.dtype)))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_wait(turn)
                sums = machine.add_product(sums, p, v_s.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return sums, higher, total

            pl.when(wg == 1)(take_turns)
            state = machine.full((ROWS, dim), 0.0), machine.full((ROWS,), FLOOR), machine.full((ROWS,), 0.0)
            sums, top, total = walk(first, asked, last, step, state)
            pl.when(wg == 0)(take_turns)
            some = total > 0.0
            q_s.at[wg][...] = (sums / along(jnp.where(some, total, 1.0), sums.shape, 0)).astype(q.dtype)
            lse = (top + jnp.log(jnp.where(some, total, 1.0)) * LOG2E) * (1 / LOG2E)
            lse_s.at[wg][...] = jnp.where(some, lse, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], o_ref.at[here])
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_ref.at[b, head, pl.ds(q0, ROWS)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _() -> None:
            kv_head = lax.div(head, jnp.int32(group))

            def copy(step: Any, slot: Any) -> None:
                here = (b, pl.ds(entries_ref[first + step] * columns, columns), kv_head)
                plgpu.copy_gmem_to_smem(k_ref.at[here], k_s.at[slot], k_full.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[here], v_s.at[slot], v_full.at[slot])

            feed(last - first, copy, (k_free, v_free))

    ring = plgpu.Barrier(num_barriers=STAGES)
    freed = plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=STAGES)
    scratch = [
        matrix((COMPUTE, ROWS, dim), q.dtype),
        matrix((STAGES, columns, dim), q.dtype),
        matrix((STAGES, columns, dim), q.dtype),
        plgpu.SMEM((COMPUTE, ROWS), jnp.float32),
        plgpu.Barrier(num_barriers=COMPUTE),
        *(ring, ring, freed, freed),
        plgpu.Barrier(num_arrivals=COMPUTE),
    ]
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)]
    run = machine.run(kernel, out, scratch, (batch, heads, rows_plan.shape[1]), COMPUTE + 1)
    return run(q, k, v, jnp.asarray(rows_plan), jnp.asarray(entries), *segments)
