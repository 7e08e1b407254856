"""The delta rule in chunks: values that correct the state, as the solution of a triangular system."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hpnlp.ops.attention.linear.chunks import Borders
from hpnlp.ops.attention.linear.decay import LogSums, weights


def corrections(
    k: jax.Array, k_start: jax.Array, v: jax.Array, total: LogSums | None, beta: jax.Array, borders: Borders
) -> tuple[jax.Array, jax.Array]:
    """Values that the tokens of a chunk write by the delta rule: `u - w S` for a state S at the beginning of the chunk.

    Token t writes `beta_t (v_t - k_t^T d_t S_{t-1})`, and `S_{t-1}` contains the values written before. The values are
    therefore the solution of a unit lower triangular system, with the same matrix for u and w.

    Args:
      k: `[Y, C, M]`, keys.
      k_start: `[Y, C, M]`, keys as they read the state at the beginning of the chunk.
      v: `[Y, C, H]`, values.
      total: `[Y, C]` or `[Y, C, M]`, sums of logarithms of decays; None for no decay.
      beta: `[Y, C]`, step sizes.
      borders: Borders of segments.

    Returns:
      (u `[Y, C, H]`, w `[Y, C, M]`).

    References: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", arXiv 2406.06484, eq. 7 to 11 (UT
    transform); Yang et al. 2024, "Gated delta networks", arXiv 2412.06464, sec. 3.3, for decays.
    """
    products = beta[..., None] * weights(k, k, total, borders)
    before = jnp.tri(k.shape[1], k=-1, dtype=bool)[None]
    inverse = unit_lower_inverse(jnp.where(before, products, jnp.float32(0))) * beta[:, None]
    return tuple(jnp.einsum("yts,ysh->yth", inverse, x) for x in (v, k_start))  # pyright: ignore[reportReturnType]


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + lower.

    Args:
      lower: float32 `[Y, C, C]`, strictly lower triangular; C is a power of 2.

    Returns:
      float32 `[Y, C, C]`, unit lower triangular.

    Cost: C^3 / 3 multiplications per matrix, as products of blocks. The backward pass keeps the inverse.
    """
    return _inverse(lower)


def _inverse(lower: jax.Array) -> jax.Array:
    """Inverts the diagonal blocks of twice the size in each step: [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]."""
    y, size, _ = lower.shape
    inverse = jnp.ones((y, size, 1, 1), jnp.float32)  # inverses of diagonal blocks, [Y, count, block, block]
    block = 1
    while block < size:
        count = size // (2 * block)
        pairs = inverse.reshape(y * count, 2, block, block)
        a, b = pairs[:, 0], pairs[:, 1]
        blocks = lower.reshape(y, count, 2 * block, count, 2 * block)
        blocks = blocks.transpose(0, 2, 4, 1, 3).diagonal(axis1=3, axis2=4)  # [Y, 2 block, 2 block, count]
        c = blocks[:, block:, :block].transpose(0, 3, 1, 2).reshape(-1, block, block)
        across = -_product(_product(b, c), a)
        top = jnp.concatenate([a, jnp.zeros_like(a)], axis=2)
        inverse = jnp.concatenate([top, jnp.concatenate([across, b], axis=2)], axis=1)
        block *= 2
    return inverse.reshape(y, size, size)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[-1] <= 2:
        return (a[..., None] * b[..., None, :, :]).sum(axis=-2)
    return jnp.einsum("yij,yjk->yik", a, b, precision="highest")


def _forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse(lower)
    return inverse, inverse


def _backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    product = jnp.einsum("yji,yjk->yik", inverse, d_inverse, precision="highest")
    return (-jnp.einsum("yik,ylk->yil", product, inverse, precision="highest"),)


unit_lower_inverse.defvjp(_forward, _backward)
