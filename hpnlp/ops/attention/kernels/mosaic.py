"""The parts of Pallas Mosaic GPU that the kernels use, in one place because they change between versions of JAX.

The interpreter, which runs kernels on a CPU, has no register layouts, no products with a transposed side and no products with
a side in registers. For it, `Machine` computes the same values by plain operations; copies, barriers, loops and the division
of work among warpgroups stay those of the kernel.
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
from jax.typing import DTypeLike
from jaxtyping import Array

THREADS = "warpgroup"
AXES = ("batch", "heads", "tiles")

_TILE = plgpu.Layout.WGMMA


def interpreter() -> Any:
    """Parameters of the interpreter, which simulates shared memory, copies and barriers; from a private module of JAX.

    Returns:
      A value for the argument `interpret` of `plgpu.kernel`.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def matrix(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for operands of products, tiled and swizzled as the tensor cores read it.

    Args:
      shape: [..., rows, columns].
      dtype: Dtype of the elements.

    Returns:
      plgpu.SMEM.
    """
    width = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = min(width, 128)
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


@dataclasses.dataclass(frozen=True)
class Machine:
    """Operations on tiles of 64 rows that a warpgroup holds in registers.

    Attributes:
      interpret: Whether the interpreter runs the kernel.
    """

    interpret: bool

    def run(
        self,
        body: Callable[..., None],
        out: Sequence[Any],
        scratch: Sequence[Any],
        grid: tuple[int, int, int],
        wgs: int,
    ) -> Callable[..., Any]:
        """The kernel with one block of threads for each (batch, head, tile), neighbouring tiles side by side.

        Args:
          body: Body of the kernel.
          out: Shapes of the results.
          scratch: Shared memory and barriers.
          grid: (batch, heads, tiles).
          wgs: Warpgroups of a block.

        Returns:
          A function of arrays.
        """
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
        """float32 [64] or [64, columns] with all elements equal to a value.

        Args:
          shape: Shape of the result.
          value: Value of every element.

        Returns:
          The vector or tile.
        """
        layout = _TILE if len(shape) == 2 else _TILE.reduce(1)
        x = jnp.full(shape, value, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def load(self, ref: Any, axis: int, *, optimized: bool = True) -> Any:
        """Loads a vector from memory, for use with tiles.

        Args:
          ref: The vector.
          axis: 0 for one element per row of a tile, 1 for one per column.
          optimized: As in `plgpu.load`.

        Returns:
          The vector in registers.
        """
        if self.interpret:
            return ref[...]
        # From jax 0.12 on, plgpu.load has no index argument.
        index = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
        return plgpu.load(ref, *index, layout=_TILE.reduce(1 - axis), optimized=optimized)

    def iota(self, shape: tuple[int, ...], axis: int) -> Any:
        """Indices along an axis of a tile.

        Args:
          shape: [64, columns].
          axis: 0 or 1.

        Returns:
          int32 [64, columns].
        """
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILE)

    def product(self, left: Any, right: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """The product left @ right^T.

        Args:
          left: [64, H] in shared memory.
          right: [columns, H] in shared memory.
          meanwhile: Called after the product has started and before its result is read.

        Returns:
          float32 [64, columns].
        """
        if self.interpret:
            meanwhile()
            return jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)

        def body(sums: Any) -> Any:
            plgpu.wgmma(sums, left, right.transpose((1, 0)))
            meanwhile()
            return sums[...]

        return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((left.shape[0], right.shape[0]), jnp.float32))

    def add_product(self, sums: Array, left: Any, right: Any) -> Any:
        """Adds a product to sums.

        Args:
          sums: float32 [64, H] in registers.
          left: [64, columns] in registers.
          right: [columns, H] in shared memory.

        Returns:
          sums + left @ right.
        """
        if self.interpret:
            return sums + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, left, right))(plgpu.WGMMAAccumulatorRef.init(sums))


def repeat_along(vector: jax.Array, shape: tuple[int, ...], axis: int) -> Any:
    """A vector repeated over one axis of a tile.

    Args:
      vector: [rows] or [columns].
      shape: [rows, columns] of the tile.
      axis: The axis of the vector in the tile.

    Returns:
      [rows, columns].
    """
    return lax.broadcast_in_dim(vector, shape, [axis])
