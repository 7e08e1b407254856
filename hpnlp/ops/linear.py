"""The one linear map: every product with a parameter goes through here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op
from hpnlp.ops.arrays import accepts_numpy
from hpnlp.ops.custom_vjp import vary_alike


@array_op("... F", x="... D", w="_ F")
def linear(
    x: Float[Array, "*tokens D"], w: Float[Array, "D F"], b: Float[Array, " F"] | None = None
) -> Float[Array, "*tokens F"]:
    """`x w + b` over the last axis, accumulated in float32, returned in x's dtype.

    w, b: parameters; they are cast to x's dtype for the product, and their gradients are accumulated and returned in
    their own dtype. Cost: O(tokens D F), three times that with the backward pass.

    The tokens are flattened to one axis: on XLA:CPU a product over `[B, T, D]` costs about twice one over `[B*T, D]`.
    """
    out = product(x.reshape(-1, x.shape[-1]), w)
    if b is not None:
        out = out + b.astype(jnp.float32)[None, :]
    return out.astype(x.dtype).reshape(*x.shape[:-1], w.shape[-1])


@array_op("M F", x="M", w="_ F")
def product(x: Float[Array, "M D"], w: Float[Array, "D F"]) -> Float[Array, "M F"]:
    """`x w` in float32, for what must not be rounded to x's dtype (logits); otherwise as `linear`."""
    return _product(*vary_alike(x, w))


@accepts_numpy
def widened(h: Float[Array, "N D"], *tables: Any) -> tuple[Any, ...]:
    """(h, *tables) as a loss takes them: float32 for h of float16, which has no numbers for the gradients of a mean.

    Tables, arrays or None, keep their values as the product with h has them, rounded to float16, but not their gradients.
    Other h and their tables are returned as they are. Cost for float16: a float32 copy of h, and of each table that is not
    float16 itself.
    """
    if h.dtype != jnp.float16:
        return h, *tables
    # A float16 table is made wide where it is used, a block at a time.
    return h.astype(jnp.float32), *(x if x is None or x.dtype == h.dtype else _rounded(x) for x in tables)


@jax.custom_jvp
def _rounded(x: Array) -> Array:
    """float32 x, with the digits of float16, and the gradient as if it had its own."""
    return x.astype(jnp.float16).astype(jnp.float32)


@_rounded.defjvp
@accepts_numpy
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _rounded(*primals), tangents[0].astype(jnp.float32)


@jax.custom_vjp
def _product(x: Float[Array, "M D"], w: Float[Array, "D F"]) -> Float[Array, "M F"]:
    """float32 x w. Its gradients are products of x's dtype with float32 sums, whatever the dtype of w."""
    return _dot(x, w.astype(x.dtype), 1, 0)


@accepts_numpy
def _product_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(x, w.astype(x.dtype), 1, 0), (x, w)  # not `_product`, in which policies of remat would see no product


def _product_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    dy = dy.astype(x.dtype)
    dx = _dot(dy, w.astype(x.dtype), 1, 1).astype(x.dtype)
    # x^T dy and (dy^T x)^T are the same numbers; XLA:CPU is 1.4 times faster where the result is wide rather than tall.
    dw = _dot(dy, x, 0, 0).T if w.shape[0] > w.shape[1] else _dot(x, dy, 0, 0)
    return dx, dw.astype(w.dtype)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


_product.defvjp(_product_forward, _product_backward)
