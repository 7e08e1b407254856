"""Grouped products on NVIDIA Hopper GPUs, by kernels of JAX in Pallas Mosaic GPU (`jax.experimental.pallas.ops.gpu`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.cost.flop_count import kernel_flops
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.helpers.device import hopper_limits

DTYPES = ("bfloat16", "float16")
ROWS = 128  # the number of rows is a multiple of it
# The kernels unroll their search for the expert of a tile: beyond this number, ptxas of CUDA 13.0 spills registers.
MOST_EXPERTS = 128

_DEPTH = 64  # numbers that a step of a sum reads from each row
_STEPS = 4  # steps whose operands are in shared memory
_GROUP = 4  # neighbouring tiles of columns that are computed one after another, and share rows in the L2 cache


def limits(assignments: Any, experts: int, sizes: tuple[int, ...], dtype: DTypeLike) -> list[str]:
    """Properties of an expert computation that the kernels cannot compute.

    Args:
      assignments: Number of assignments; a symbol in an exported program that takes any number.
      experts: Number of experts E.
      sizes: Sizes of the experts' matrices, D and F.
      dtype: Dtype of the tokens.

    Returns:
      Short descriptions, empty where there are none.
    """
    reasons = hopper_limits()
    reasons += [] if str(dtype) in DTYPES else [f"dtype {dtype}"]
    reasons += [f"size {size} is no multiple of {_DEPTH}" for size in sorted({*sizes}) if size % _DEPTH]
    reasons += [] if experts <= MOST_EXPERTS else [f"{experts} experts, at most {MOST_EXPERTS}"]
    reasons += [] if isinstance(assignments, int) and assignments else [f"{assignments} assignments"]
    return reasons


def grouped_product(
    x: Float[Array, "R D"], stack: Float[Array, "E D F"], counts: Int[Array, " E"]
) -> Float[Array, "R F"]:
    """`jax.lax.ragged_dot` for calls without `limits`. Gradients are exact; second derivatives are not defined.

    Args:
      x: Rows sorted by expert, bfloat16 or float16; R is a multiple of `ROWS`.
      stack: Matrices of the experts, in the dtype of x.
      counts: int32, rows of each expert. Later rows belong to none.

    Returns:
      The products in the dtype of x, accumulated in float32; 0 for rows of no expert.

    Cost: up to R + 128 E rows, since a tile of 128 rows (64 for few rows or more than 64 experts) has one expert.
    """
    return _product(*vary_alike(x, stack, counts))


@jax.custom_vjp
def _product(x: jax.Array, stack: jax.Array, counts: jax.Array) -> jax.Array:
    return _rows(x, stack, counts, transposed=False)


def _product_forward(x: jax.Array, stack: jax.Array, counts: jax.Array) -> Any:
    return _rows(x, stack, counts, transposed=False), (x, stack, counts)


def _product_backward(residuals: PyTree, dy: jax.Array) -> Any:
    x, stack, counts = residuals
    return _rows(dy, stack, counts, transposed=True), _sums(x, dy, counts), None


_product.defvjp(_product_forward, _product_backward)


def _rows(x: jax.Array, stack: jax.Array, counts: jax.Array, *, transposed: bool) -> jax.Array:
    """Rows times the matrices of their experts, or times the transposed matrices."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # imports absl and tests of JAX

    (rows, _), (experts, *shape) = x.shape, stack.shape

    @sequential_vmap  # the kernels do not run under `jax.vmap`
    def product(x: jax.Array, stack: jax.Array, counts: jax.Array) -> jax.Array:
        with kernel_flops(2 * rows * shape[0] * shape[1]):
            return ragged_dot(
                x,
                stack,
                group_sizes=counts,
                block_m=128 if experts <= 64 and rows >= 128 * experts else 64,
                block_n=_columns(shape[0 if transposed else 1]),
                block_k=_DEPTH,
                max_concurrent_steps=_STEPS,
                grid_block_n=_GROUP,
                transpose_rhs=transposed,
            )

    # The kernel does not write the rows of no expert, and the sums of `_sums` multiply some of these by 0.
    y = product(x, stack, counts)
    return jnp.where((jnp.arange(rows, dtype=jnp.int32) < jnp.sum(counts))[:, None], y, jnp.zeros((), y.dtype))


def _sums(x: jax.Array, dy: jax.Array, counts: jax.Array) -> jax.Array:
    """`x^T dy` over the rows of each expert, `[E, D, F]`."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    @sequential_vmap
    def product(x: jax.Array, dy: jax.Array, counts: jax.Array) -> jax.Array:
        with kernel_flops(2 * x.size * dy.shape[1]):
            return transposed_ragged_dot(
                x,
                dy,
                group_sizes=counts,
                block_m=_columns(x.shape[1]),
                block_n=_columns(dy.shape[1]),
                block_k=_DEPTH,
                max_concurrent_steps=_STEPS,
                grid_block_n=_GROUP,
            )

    return vary_alike(product(x, dy, counts), x)[0]  # inside shard_map, results of kernels are not marked as varying


def _columns(size: int) -> int:
    """Columns of a tile of the result."""
    return 128 if size % 128 == 0 else 64
