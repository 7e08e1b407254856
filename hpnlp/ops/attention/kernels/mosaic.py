"""What the kernels use of Pallas Mosaic GPU, kept in one place because it changes from one jax to the next.

The interpreter, which runs kernels on a CPU, knows no register layouts, and of products neither those with a transposed
side nor those with a side in registers. There `Machine` gives the same values by plain operations; copies, barriers,
loops and the work of the warpgroups are the kernel's own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = "warpgroup"
AXES = ("batch", "heads", "tiles")

_TILE = plgpu.Layout.WGMMA


def interpreter() -> Any:
    """What `interpret=True` stands for: a simulation of shared memory, copies and barriers, in a private module of jax."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def matrix(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for operands of products, [..., rows, columns], laid out as the tensor cores read it."""
    width = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = min(width, 128)
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


@dataclasses.dataclass(frozen=True)
class Machine:
    """The operations on tiles of 64 rows that a warpgroup holds in registers."""

    interpret: bool

    def run(
        self,
        body: Callable[..., None],
        out: Sequence[Any],
        scratch: Sequence[Any],
        grid: tuple[int, int, int],
        wgs: int,
    ) -> Callable[..., Any]:
        """The kernel: one block of `wgs` warpgroups for each (batch, head, tile), neighbouring tiles side by side."""
        return plgpu.kernel(
            body,
            out_type=tuple(out),
            scratch_types=list(scratch),
            grid=grid,
            grid_names=AXES,
            num_threads=wgs,
            thread_name=THREADS,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpreter() if self.interpret else None,
        )

    def full(self, shape: tuple[int, ...], value: float) -> Any:
        """float32 [64] or [64, columns] of one value."""
        layout = _TILE if len(shape) == 2 else _TILE.reduce(1)
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def load(self, ref: Any, axis: int, *, optimized: bool = True) -> Any:
        """A vector that stands along the rows (axis 0) or along the columns (axis 1) of a tile."""
        if self.interpret:
            return ref[...]
        # jax 0.12 has the index in the reference alone.
        index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
        return plgpu.load(ref, *index, layout=_TILE.reduce(1 - axis), optimized=optimized)

    def iota(self, shape: tuple[int, ...], axis: int) -> Any:
        """int32 [64, columns] that counts along an axis."""
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)

    def product(self, left: Any, right: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """float32 left @ right^T of two matrices in shared memory; `meanwhile` is done before the result is waited for."""
        if self.interpret:
            meanwhile()
            return jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)

        def body(sums: Any) -> Any:
            plgpu.wgmma(sums, left, right.transpose((1, 0)))
            meanwhile()
            return sums[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[0]), jnp.float32))

    def add_product(self, sums: Any, left: Any, right: Any) -> Any:
        """sums + left @ right, `left` in registers and `right` in shared memory."""
        if self.interpret:
            return sums + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.WGMMAAccumulatorRef.init(sums))


def along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> Any:
    """[rows] or [columns] repeated over the other axis of a tile."""
    return lax.broadcast_in_dim(vector, shape, [axis])
