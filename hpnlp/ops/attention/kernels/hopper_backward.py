"""Block-sparse flash attention for NVIDIA Hopper: the kernels of the backward pass (FlashAttention, algorithm 4).

One kernel loops over the keys of each tile of queries for dQ; the other loops over the queries of each tile of keys, in all
query heads that read it, for dK and dV. Each tile is written once, so that gradients do not depend on the order of work.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Ref, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, PyTree

from hpnlp.ops.attention.kernels.hopper import (
    COMPUTE,
    ROWS,
    STAGES,
    TILE,
    KernelOptions,
    copy_tiles,
    hide,
    over_entries,
    schedule,
    scores,
)
from hpnlp.ops.attention.kernels.mosaic import THREADS, Machine, matrix, repeat_along


def _tile_gradient(options: KernelOptions, p: Array, dp: Array, delta: Array, capped: Any) -> Any:
    """The gradient of the scores before `scale`."""
    ds = p * (dp - delta)
    return ds if options.soft_cap is None else ds * (1.0 - capped * capped)


def queries(  # noqa: PLR0915  (one kernel, whose parts share references to memory)
    options: KernelOptions, arrays: tuple[jax.Array, ...], segments: tuple[jax.Array, ...], columns: int = 128
) -> jax.Array:
    """The gradient of the queries.

    Args:
      options: Static settings of the kernels.
      arrays: (q, k, v, do, lse, delta). q and do [B, T, N, H], k and v [B, S, K, H]; lse and delta float32 [B, N, T]: lse in
        units of log 2, +inf for rows that see nothing, and delta = rowsum(do * o) - dlse.
      segments: int32 ids of queries [B, T] and of keys [B, S], or ().
      columns: Keys of a tile.

    Returns:
      dQ [B, T, N, H] in q's dtype.
    """
    q, k = arrays[:2]
    batch, _, heads, dim = q.shape
    group = heads // k.shape[2]
    machine = Machine(options.interpret)
    tiles, entries = schedule(options, TILE, columns, False)

    def kernel(  # noqa: PLR0915
        q_ref: Ref, k_ref: Ref, v_ref: Ref, do_ref: Ref, lse_ref: Ref, delta_ref: Ref, rows_ref: Ref, entries_ref: Ref,
        *refs: Any,
    ) -> None:  # fmt: skip
        ids = refs[: len(segments)]
        dq_ref, q_s, do_s, k_s, v_s, lse_s, delta_s, full, k_full, v_full, k_free, v_free = refs[len(segments) :]
        b, head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index(THREADS)
        tile = rows_ref[0, lax.axis_index("tiles")]
        first, tested, last = rows_ref[1, tile], rows_ref[2, tile], rows_ref[3, tile]

        @pl.when(wg < COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            q0 = tile * TILE + wg * ROWS
            here, line = (b, pl.ds(q0, ROWS), head), (b, head, pl.ds(q0, ROWS))
            plgpu.copy_gmem_to_smem(q_ref.at[here], q_s.at[wg], full.at[wg])
            plgpu.copy_gmem_to_smem(do_ref.at[here], do_s.at[wg], full.at[wg])
            plgpu.copy_gmem_to_smem(lse_ref.at[line], lse_s.at[wg], full.at[wg])
            plgpu.copy_gmem_to_smem(delta_ref.at[line], delta_s.at[wg], full.at[wg])
            plgpu.barrier_wait(full.at[wg])
            lse, delta = machine.load(lse_s.at[wg], 0), machine.load(delta_s.at[wg], 0)

            def step(entry: Array | int, dq: PyTree[Array], test: bool) -> Any:
                slot = lax.rem(entry - first, jnp.int32(STAGES))
                plgpu.barrier_wait(k_full.at[slot])
                s, factor, capped = scores(options, machine.product(q_s.at[wg], k_s.at[slot]))
                if test:
                    s = hide(options, machine, s, q0, entries_ref[entry] * columns, 0, (*ids, b) if ids else None)
                p = jnp.exp2(s * factor - repeat_along(lse, s.shape, 0))
                plgpu.barrier_wait(v_full.at[slot])
                dp = machine.product(do_s.at[wg], v_s.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                ds = _tile_gradient(options, p, dp, repeat_along(delta, s.shape, 0), capped)
                dq = machine.add_product(dq, ds.astype(q.dtype), k_s.at[slot])
                plgpu.barrier_arrive(k_free.at[slot])
                return dq

            dq = over_entries(first, tested, last, step, machine.full((ROWS, dim), 0.0))
            q_s.at[wg][...] = (dq * options.scale).astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_s.at[wg], dq_ref.at[here])
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
    resident, streamed = matrix((COMPUTE, ROWS, dim), q.dtype), matrix((STAGES, columns, dim), q.dtype)
    line = plgpu.SMEM((COMPUTE, ROWS), jnp.float32)
    scratch = [resident, resident, streamed, streamed, line, line, plgpu.Barrier(num_arrivals=4, num_barriers=COMPUTE)]
    scratch += [ring, ring, freed, freed]
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    run = machine.run(kernel, out, scratch, (batch, heads, tiles.shape[1]), COMPUTE + 1)
    return run(*arrays, jnp.asarray(tiles), jnp.asarray(entries), *segments)[0]


def keys(  # noqa: PLR0915  (one kernel, whose parts share references to memory)
    options: KernelOptions, arrays: tuple[jax.Array, ...], segments: tuple[jax.Array, ...], columns: int = 64
) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys and values.

    Args:
      options: Static settings of the kernels.
      arrays: As for `queries`.
      segments: As for `queries`.
      columns: Queries of a tile.

    Returns:
      (dK, dV), [B, S, K, H] each, in k's dtype.
    """
    q, k = arrays[:2]
    batch, _, kv_heads, dim = k.shape
    group = q.shape[2] // kv_heads
    machine = Machine(options.interpret)
    tiles, entries = schedule(options, TILE, columns, True)

    def kernel(  # noqa: PLR0915
        q_ref: Ref, k_ref: Ref, v_ref: Ref, do_ref: Ref, lse_ref: Ref, delta_ref: Ref, rows_ref: Ref, entries_ref: Ref,
        *refs: Any,
    ) -> None:  # fmt: skip
        ids = refs[: len(segments)]
        dk_ref, dv_ref, k_s, v_s, q_s, do_s, lse_s, delta_s, full, q_full, do_full, q_free, do_free = refs[
            len(segments) :
        ]
        b, kv_head, wg = lax.axis_index("batch"), lax.axis_index("heads"), lax.axis_index(THREADS)
        tile = rows_ref[0, lax.axis_index("tiles")]
        first, tested, last = rows_ref[1, tile], rows_ref[2, tile], rows_ref[3, tile]
        count = last - first

        @pl.when(wg < COMPUTE)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            k0 = tile * TILE + wg * ROWS
            here = (b, pl.ds(k0, ROWS), kv_head)
            plgpu.copy_gmem_to_smem(k_ref.at[here], k_s.at[wg], full.at[wg])
            plgpu.copy_gmem_to_smem(v_ref.at[here], v_s.at[wg], full.at[wg])
            plgpu.barrier_wait(full.at[wg])

            def head(number: Array | int, state: PyTree[Array]) -> Any:
                def step(entry: Array | int, state: PyTree[Array], test: bool) -> Any:
                    dk, dv = state
                    slot = lax.rem(number * count + entry - first, jnp.int32(STAGES))
                    plgpu.barrier_wait(q_full.at[slot])
                    s, factor, capped = scores(options, machine.product(k_s.at[wg], q_s.at[slot]))
                    if test:
                        s = hide(options, machine, s, entries_ref[entry] * columns, k0, 1, (*ids, b) if ids else None)
                    p = jnp.exp2(s * factor - repeat_along(machine.load(lse_s.at[slot], 1), s.shape, 1))
                    plgpu.barrier_wait(do_full.at[slot])
                    dv = machine.add_product(dv, p.astype(q.dtype), do_s.at[slot])
                    dp = machine.product(v_s.at[wg], do_s.at[slot])
                    delta = repeat_along(machine.load(delta_s.at[slot], 1), s.shape, 1)
                    plgpu.barrier_arrive(do_free.at[slot])
                    ds = _tile_gradient(options, p, dp, delta, capped)
                    dk = machine.add_product(dk, ds.astype(q.dtype), q_s.at[slot])
                    plgpu.barrier_arrive(q_free.at[slot])
                    return dk, dv

                return over_entries(first, tested, last, step, state)

            zeros = machine.full((ROWS, dim), 0.0), machine.full((ROWS, dim), 0.0)
            dk, dv = lax.fori_loop(0, group, head, zeros)
            k_s.at[wg][...] = (dk * options.scale).astype(q.dtype)
            v_s.at[wg][...] = dv.astype(q.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_s.at[wg], dk_ref.at[here])
            plgpu.copy_smem_to_gmem(v_s.at[wg], dv_ref.at[here])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == COMPUTE)
        def _() -> None:
            def copy(step: Array | int, slot: Array | int) -> None:
                head = kv_head * group + lax.div(step, count)
                rows = pl.ds(entries_ref[first + lax.rem(step, count)] * columns, columns)
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows, head], q_s.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_ref.at[b, head, rows], lse_s.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(do_ref.at[b, rows, head], do_s.at[slot], do_full.at[slot])
                plgpu.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_s.at[slot], do_full.at[slot])

            copy_tiles(count * group, copy, (q_free, do_free))

    ring = plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
    freed = plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=STAGES)
    resident, streamed = matrix((COMPUTE, ROWS, dim), q.dtype), matrix((STAGES, columns, dim), q.dtype)
    line = plgpu.SMEM((STAGES, columns), jnp.float32)
    scratch = [resident, resident, streamed, streamed, line, line, plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE)]
    scratch += [ring, ring, freed, freed]
    out = [jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2
    run = machine.run(kernel, out, scratch, (batch, kv_heads, tiles.shape[1]), COMPUTE + 1)
    return run(*arrays, jnp.asarray(tiles), jnp.asarray(entries), *segments)
