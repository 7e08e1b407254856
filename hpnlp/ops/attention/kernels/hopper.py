"""Block-sparse flash attention for NVIDIA Hopper: the kernels.

A block of threads has three warpgroups. Two compute a tile of 64 rows each; the third copies their inputs into a ring of
buffers in shared memory, so that copies and products overlap. The active tiles are a list in global memory: a block of threads
goes through its entries, first the fully allowed tiles, then those whose elements are tested.
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
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, PyTree

from hpnlp.ops.attention.block_sparse.block_mask import active_tiles
from hpnlp.ops.attention.kernels.mosaic import THREADS, Machine, matrix, repeat_along
from hpnlp.ops.attention.masks.base import Mask

LOG2E = math.log2(math.e)
# A finite stand-in for the maximum of a row that sees nothing, so that exp2(-inf - FLOOR) is 0 and not NaN.
FLOOR = -1e30

ROWS = 64  # rows of a warpgroup
COMPUTE = 2  # warpgroups that compute
TILE = ROWS * COMPUTE
STAGES = 2  # slots in the ring of buffers


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Static settings of the kernels.

    Attributes:
      mask: The pattern.
      scale: Factor of the scores.
      soft_cap: Scores become soft_cap * tanh(score / soft_cap); None for no cap.
      queries: T without padding.
      keys: S without padding.
      segmented: Whether there are segment ids.
      interpret: Whether Pallas' interpreter runs the kernels.
    """

    mask: Mask
    scale: float
    soft_cap: float | None
    queries: int
    keys: int
    segmented: bool
    interpret: bool


@functools.lru_cache(maxsize=64)
def schedule(options: KernelOptions, rows: int, columns: int, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """The active tiles of each row of tiles.

    Args:
      options: Static settings of the kernels.
      rows: Queries, or keys if transposed, of a tile.
      columns: Keys, or queries if transposed, of a tile.
      transposed: Whether rows are keys.

    Returns:
      int32 [4, R] and int32 [entries]. The first array has the rows of tiles in the order in which they start, longest first,
      and for each row of tiles the index of its first entry, of the first entry whose elements are tested, and behind its
      last entry. Entries are columns of tiles.
    """
    sizes = (columns, rows) if transposed else (rows, columns)
    active = active_tiles(options.mask, options.queries, options.keys, *sizes)
    full = active.every & (not options.segmented)
    # Testing hides padded keys; padded queries need no test, because nothing is read from them.
    full &= (active.columns + 1) * sizes[1] <= options.keys
    row, column = (active.columns, active.rows) if transposed else (active.rows, active.columns)
    order = np.lexsort((column, ~full, row))
    count = -(-(options.keys if transposed else options.queries) // TILE) * (TILE // rows)
    edges = np.searchsorted(row[order], np.arange(count + 1))
    tested = edges[:-1] + np.bincount(row[full], minlength=count)
    longest_first = np.argsort(edges[:-1] - edges[1:], kind="stable")
    entries = np.concatenate([column[order], np.zeros(1, int)])
    return np.stack([longest_first, edges[:-1], tested, edges[1:]]).astype(np.int32), entries.astype(np.int32)


def scores(options: KernelOptions, products: Array) -> tuple[Any, float, Any]:
    """Scores of a tile from the products q k^T.

    Args:
      options: Static settings of the kernels.
      products: float32 [rows, columns].

    Returns:
      (s, factor, capped): s * factor is the score in units of log 2, and capped the tanh of the soft cap, or None. The factor
      is positive and left to the exponential, which applies it in a fused multiply-add.
    """
    if options.soft_cap is not None:
        capped = jnp.tanh(products * (options.scale / options.soft_cap))
        return capped, options.soft_cap * LOG2E, capped
    if options.scale > 0.0:
        return products, options.scale * LOG2E, None
    return products * options.scale, LOG2E, None


def hide(
    options: KernelOptions, machine: Machine, s: Array, q0: Array | int, k0: Array | int, q_axis: int, segments: Any
) -> Any:
    """Sets the scores of pairs that are not visible to -inf.

    Args:
      options: Static settings of the kernels.
      machine: Operations on tiles.
      s: Scores, float32 [rows, columns].
      q0: Index of the first query.
      k0: Index of the first key.
      q_axis: The axis of the queries, 0 or 1.
      segments: (ids of queries, ids of keys, index of the example), or None.

    Returns:
      The scores.
    """
    shape = s.shape
    q, k = machine.iota(shape, q_axis) + q0, machine.iota(shape, 1 - q_axis) + k0
    visible = options.mask.at(q, k) & (k < options.keys)
    if segments is not None:
        q_ids, kv_ids, batch = segments
        sizes = (shape[q_axis], shape[1 - q_axis])
        q_segment = machine.load(q_ids.at[batch, pl.ds(q0, sizes[0])], q_axis, optimized=False)
        k_segment = machine.load(kv_ids.at[batch, pl.ds(k0, sizes[1])], 1 - q_axis, optimized=False)
        visible = visible & (repeat_along(q_segment, shape, q_axis) == repeat_along(k_segment, shape, 1 - q_axis))
    return jnp.where(visible, s, -jnp.inf)


def copy_tiles(count: Array | int, copy: Callable[[Any, Any], None], free: tuple[Any, ...]) -> None:
    """The program of the copying warpgroup.

    Args:
      count: Number of steps.
      copy: Called with (step, slot), starts the copies of a step into a slot of the ring.
      free: Barriers of the slots, on which the computing warpgroups arrive once they have read a slot.
    """
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, count + STAGES)
    def _(step: Array | int) -> None:
        slot = lax.rem(step, jnp.int32(STAGES))

        @pl.when(step >= STAGES)
        def _() -> None:
            for barrier in free:
                plgpu.barrier_wait(barrier.at[slot])

        @pl.when(step < count)
        def _() -> None:
            copy(step, slot)


def over_entries(
    first: Array | int, tested: Array | int, last: Array | int, body: Callable[..., Any], state: PyTree[Array]
) -> Any:
    """Loops over the entries of a row of tiles.

    Args:
      first: Index of the first entry.
      tested: Index of the first entry whose elements are tested.
      last: Index behind the last entry.
      body: (entry, state, test) -> state, with test a Python bool.
      state: Initial value.

    Returns:
      The final state.
    """
    state = lax.fori_loop(first, tested, functools.partial(body, test=False), state)
    return lax.fori_loop(tested, last, functools.partial(body, test=True), state)


def forward(  # noqa: PLR0915  (one kernel, whose parts share references to memory)
    options: KernelOptions,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: tuple[jax.Array, ...],
    columns: int = 128,
) -> tuple[jax.Array, jax.Array]:
    """Attention of padded arrays.

    Args:
      options: Static settings of the kernels.
      q: Queries [B, T, N, H], T a multiple of TILE.
      k: Keys [B, S, K, H], S a multiple of `columns`.
      v: Values [B, S, K, H].
      segments: int32 ids of queries [B, T] and of keys [B, S], or ().
      columns: Keys of a tile.

    Returns:
      (o [B, T, N, H] in q's dtype, lse float32 [B, N, T]).
    """
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    machine = Machine(options.interpret)
    tiles, entries = schedule(options, TILE, columns, False)

    def kernel(  # noqa: PLR0915
        q_ref: Ref, k_ref: Ref, v_ref: Ref, rows_ref: Ref, entries_ref: Ref, *refs: Any
    ) -> None:
        ids = refs[: len(segments)]
        o_ref, lse_ref, q_s, k_s, v_s, lse_s, q_full, k_full, v_full, k_free, v_free, turn = refs[len(segments) :]
        b, head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index(THREADS)
        tile = rows_ref[0, lax.axis_index("tiles")]
        first, tested, last = rows_ref[1, tile], rows_ref[2, tile], rows_ref[3, tile]

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

            # One warpgroup uses the tensor cores while the other computes its exponentials (FlashAttention-3, section 3.1).
            def step(entry: Array | int, state: PyTree[Array], test: bool) -> Any:
                sums, top, total = state
                slot = lax.rem(entry - first, jnp.int32(STAGES))
                plgpu.barrier_wait(k_full.at[slot])
                products = machine.product(q_s.at[wg], k_s.at[slot], take_turns)
                plgpu.barrier_arrive(k_free.at[slot])
                s, factor, _ = scores(options, products)
                if test:
                    s = hide(options, machine, s, q0, entries_ref[entry] * columns, 0, (*ids, b) if ids else None)
                higher = jnp.maximum(top, s.max(axis=1) * factor)
                shrink = jnp.exp2(top - higher)
                p = jnp.exp2(s * factor - repeat_along(higher, s.shape, 0))
                total = total * shrink + p.sum(axis=1)
                sums = sums * repeat_along(shrink, sums.shape, 0)
                # Keeps the compiler from moving some of this behind the barriers, into the turn of the other warpgroup.
                sums, higher, total, p = lax.optimization_barrier((sums, higher, total, p.astype(v.dtype)))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_wait(turn)
                sums = machine.add_product(sums, p, v_s.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return sums, higher, total

            pl.when(wg == 1)(take_turns)
            state = machine.full((ROWS, dim), 0.0), machine.full((ROWS,), FLOOR), machine.full((ROWS,), 0.0)
            sums, top, total = over_entries(first, tested, last, step, state)
            pl.when(wg == 0)(take_turns)
            sees_any = total > 0.0
            q_s.at[wg][...] = (sums / repeat_along(jnp.where(sees_any, total, 1.0), sums.shape, 0)).astype(q.dtype)
            lse = (top + jnp.log(jnp.where(sees_any, total, 1.0)) * LOG2E) * (1 / LOG2E)
            lse_s.at[wg][...] = jnp.where(sees_any, lse, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], o_ref.at[here])
            plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_ref.at[b, head, pl.ds(q0, ROWS)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _() -> None:
            kv_head = lax.div(head, jnp.int32(group))

            def copy(step: Array | int, slot: Array | int) -> None:
                here = (b, pl.ds(entries_ref[first + step] * columns, columns), kv_head)
                plgpu.copy_gmem_to_smem(k_ref.at[here], k_s.at[slot], k_full.at[slot])
                plgpu.copy_gmem_to_smem(v_ref.at[here], v_s.at[slot], v_full.at[slot])

            copy_tiles(last - first, copy, (k_free, v_free))

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
    run = machine.run(kernel, out, scratch, (batch, heads, tiles.shape[1]), COMPUTE + 1)
    return run(q, k, v, jnp.asarray(tiles), jnp.asarray(entries), *segments)
