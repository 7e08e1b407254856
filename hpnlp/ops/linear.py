"""Products with parameters: every dense layer and every table of logits uses `linear` or `product`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.arrays import accepts_numpy
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.weight import Weight, is_weight


@array_op("... F", x="... D", w="_ F")
def linear(
    x: Float[Array, "*tokens D"], w: Float[Array, "D F"] | Weight, b: Float[Array, " F"] | None = None
) -> Float[Array, "*tokens F"]:
    """Affine map `x w + b` over the last axis, accumulated in float32.

    Tokens are flattened to one axis: on XLA:CPU a product over [B, T, D] takes about twice as long as one over [B*T, D].

    Args:
      x: [..., D].
      w: [D, F], an array or a Weight; an array is cast to the dtype of x for the product. The gradient is accumulated in
        float32 and has the dtype of w.
      b: [F]; None for no bias.

    Returns:
      [..., F] in the dtype of x.

    Cost:
      O(tokens D F), 3 times that with the backward pass.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = _rounded_product(rows, w)
    if b is not None:
        out = out + b.astype(out.dtype)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[-1])


@array_op("... F", x="... D", wt="F D")
def linear_by_transpose(
    x: Float[Array, "*tokens D"], wt: Float[Array, "F D"], b: Float[Array, " F"] | None = None
) -> Float[Array, "*tokens F"]:
    """`linear` with the transpose of the matrix in memory: see `prefers_transpose`.

    Args:
      x: [..., D].
      wt: [F, D]; as w in `linear`.
      b: [F]; None for no bias.

    Returns:
      [..., F] in the dtype of x.

    Cost:
      As `linear`.
    """
    out = product_by_transpose(x.reshape(-1, x.shape[-1]), wt)
    if b is not None:
        out = out + b.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], wt.shape[0])


def _rounded_product(x: Float[Array, "M D"], w: Float[Array, "D F"] | Weight) -> Float[Array, "M F"]:
    """Product `x w` for a result that is rounded to the dtype of x; in that dtype or in float32."""
    weight: Any = w
    matrix = weight.as_array(x.dtype) if is_weight(w) else weight
    if matrix is None:
        return weight.matmul(x)
    result: Any = _product(_rounded_dtype(x), *vary_alike(x, matrix))
    return result


def _rounded_dtype(x: Array) -> Any:
    """Dtype that a product whose result is rounded to the dtype of x should return; sums are float32 in any case.

    On a GPU, XLA rounds the float32 result of a product of 16 bits in a kernel of its own, which moves three times the bytes: a
    product of 16,384 x 2048 by 2048 x 8192 writes 537 MB, reads them and writes 268 MB, in place of writing 268 MB. On XLA:CPU,
    products of bfloat16 are fast with float32 results only.

    Args:
      x: The inputs.

    Returns:
      float32 on a CPU, else the dtype of x.
    """
    return jnp.float32 if jax.default_backend() == "cpu" else x.dtype


def prefers_transpose(rows: int) -> bool:
    """Whether products of a few rows with a matrix are faster by the matrix's transpose.

    On XLA:CPU they are if neither side is transposed on the way: 13 ms in place of 36 for 4 rows, and 21 ms in place of 52 for
    32 rows, with matrices of 100 MB, D = 512, on two cores. For one row there is no difference.

    Args:
      rows: Number of rows.

    Returns:
      True for 2 to 64 rows on a CPU.
    """
    return 2 <= rows <= 64 and jax.default_backend() == "cpu"


@array_op("M F", x="M", w="_ F")
def product(x: Float[Array, "M D"], w: Float[Array, "D F"] | Weight) -> Float[Array, "M F"]:
    """Product `x w` in float32, for results that must not be rounded to the dtype of x, such as logits.

    Args:
      x: [M, D].
      w: [D, F]; as in `linear`.

    Returns:
      [M, F] float32.
    """
    matrix: Any = w
    return matrix.matmul(x) if is_weight(w) else _product(jnp.float32, *vary_alike(x, matrix))


@array_op()
def product_transposed(x: Float[Array, "M F"], w: Float[Array, "D F"] | Weight) -> Float[Array, "M D"]:
    """Product `x w^T` in float32.

    Args:
      x: [M, F].
      w: [D, F], an array or a Weight.

    Returns:
      [M, D] float32.
    """
    matrix: Any = w
    return matrix.matmul_transposed(x) if is_weight(w) else product(x, matrix.T)


@array_op("M F", x="M D", wt="F D")
def product_by_transpose(x: Float[Array, "M D"], wt: Float[Array, "F D"]) -> Float[Array, "M F"]:
    """`product` with the transpose of the matrix in memory.

    Args:
      x: [M, D].
      wt: [F, D]; as w in `linear`.

    Returns:
      [M, F] float32.
    """
    return _product_by_transpose(*vary_alike(x, wt))


@accepts_numpy
def widened(h: Float[Array, "N D"], *tables: Array | None) -> tuple[Any, ...]:
    """Converts float16 operands of a loss to float32, because gradients of a mean underflow in float16.

    Args:
      h: [N, D] hidden states.
      *tables: Arrays of any shape that h is multiplied with, or None.

    Returns:
      (h, *tables). If h is float16, h is returned in float32, and tables are rounded to float16 in value, as in a product with
      h, but not in gradient. Otherwise all are returned as they are.

    Cost:
      For float16 a float32 copy of h, and of each table that is not float16.
    """
    if h.dtype != jnp.float16:
        return h, *tables
    # A float16 table is converted where it is used, a block at a time.
    return h.astype(jnp.float32), *(x if x is None or x.dtype == h.dtype else _rounded(x) for x in tables)


@jax.custom_jvp
def _rounded(x: Array) -> Array:
    """Rounds x to float16 and back to float32; the gradient is that of the identity."""
    return x.astype(jnp.float16).astype(jnp.float32)


@_rounded.defjvp
@accepts_numpy
def _(primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
    return _rounded(*primals), tangents[0].astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype: DTypeLike, x: Float[Array, "M D"], w: Float[Array, "D F"]) -> Float[Array, "M F"]:
    """Product x w in a dtype; its gradients are products in the dtype of x with float32 sums, for any dtype of w."""
    return _dot(x, w.astype(x.dtype), 1, 0, dtype)


@accepts_numpy
def _product_forward(dtype: DTypeLike, x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(x, w.astype(x.dtype), 1, 0, dtype), (
        x,
        w,
    )  # inline: inside `_product`, rematerialisation policies would not find it


def _product_backward(_: DTypeLike | None, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    dy = dy.astype(x.dtype)
    dx = _dot(dy, w.astype(x.dtype), 1, 1, _rounded_dtype(x)).astype(x.dtype)
    # x^T dy equals (dy^T x)^T; XLA:CPU is 1.4 times faster if the result of the product is wide rather than tall.
    dw = _dot(dy, x, 0, 0).T if w.shape[0] > w.shape[1] else _dot(x, dy, 0, 0)
    return dx, dw.astype(w.dtype)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int, dtype: DTypeLike = jnp.float32) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=dtype)


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _product_by_transpose(x: Array, wt: Array) -> Array:
    # The barriers keep XLA from moving the transposes into the product.
    columns = lax.optimization_barrier(x.T)
    return lax.optimization_barrier(_dot(wt.astype(x.dtype), columns, 1, 0)).T


@accepts_numpy
def _product_by_transpose_forward(x: Array, wt: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product_by_transpose(x, wt), (x, wt)


def _product_by_transpose_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, wt = saved
    dx, dw = _product_backward(None, (x, wt.T), dy)
    return dx, dw.T


_product_by_transpose.defvjp(_product_by_transpose_forward, _product_by_transpose_backward)
