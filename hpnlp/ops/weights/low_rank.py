"""Matrices as products of two thin ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product, product_transposed
from hpnlp.ops.weight import Weight, dense, is_weight, weight_axes
from hpnlp.types import InputError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankWeight(Weight):
    """w = left right. A product takes r (D + F) operations a row in place of D F.

    Attributes:
      left: [D, r], an array or a Weight.
      right: [r, F], an array or a Weight.
    """

    left: Any
    right: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[-2], self.right.shape[-1]

    @property
    def stages(self) -> set[str]:
        return {"factorize"}.union(*(w.stages for w in (self.left, self.right) if is_weight(w)))

    def dense(self) -> Float[Array, "D F"]:
        return product(dense(self.left).astype(jnp.float32), dense(self.right))

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        return product(product(x, self.left).astype(x.dtype), self.right)

    def matmul_transposed(self, x: Float[Array, "M F"]) -> Float[Array, "M D"]:
        return product_transposed(product_transposed(x, self.right).astype(x.dtype), self.left)

    def take(self, ids: Array) -> Float[Array, "*tokens F"]:
        rows = self.left[ids]
        return product(rows.reshape(-1, rows.shape[-1]), self.right).reshape(*rows.shape[:-1], -1)

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, row, column = names
        return LowRankWeight(
            weight_axes(self.left, (*leading, row, None)), weight_axes(self.right, (*leading, None, column))
        )


def rank_for_share(shape: tuple[int, int], share: int | float) -> int:
    """The rank at which two factors have a share of a matrix's parameters.

    Args:
      shape: (D, F).
      share: Share of D F, over 0.

    Returns:
      The largest rank whose factors have at most `share * D * F` numbers; at least 1.
    """
    d, f = shape
    return max(1, min(d, f, int(share * d * f / (d + f))))


def rank_by_energy(singular_values: np.ndarray, energy: int | float) -> int:
    """The rank that keeps a share of the sum of squared singular values.

    Args:
      singular_values: Falling.
      energy: The share, in (0, 1].

    Returns:
      The smallest such rank.
    """
    kept = np.cumsum(np.asarray(singular_values, np.float64) ** 2)
    return int(np.searchsorted(kept, energy * kept[-1] * (1 - 1e-12)) + 1)


@array_op()
def factorize(w: Float[Array, "D F"], rank: int, *, covariance: Float[Array, "D D"] | None = None) -> LowRankWeight:
    """The best approximation of a matrix by one of a rank.

    Args:
      w: [D, F].
      rank: 1 to min(D, F).
      covariance: [D, D], the mean of x x^T over inputs x of the matrix, positive semidefinite: the mean error of x w is
        minimised. None, or zeros, minimises the error of w.

    Returns:
      The factors, each with the root of the singular values.

    Raises:
      InputError: `rank` is out of range.

    Cost:
      A singular value decomposition, O(D F min(D, F)).

    References:
      Eckart and Young 1936, "The approximation of one matrix by another of lower rank".
      Chen et al. 2021, "DRONE: data-aware low-rank compression for large NLP models", section 3.
    """
    if not 1 <= rank <= min(w.shape):
        raise InputError(f"rank={rank} of a {w.shape[0]} x {w.shape[1]} matrix: expected 1 to {min(w.shape)}")
    w = w.astype(jnp.float32)
    if covariance is None:
        u, s, v = jnp.linalg.svd(w, full_matrices=False)
        root = jnp.sqrt(s[:rank])
        return LowRankWeight(u[:, :rank] * root[None], root[:, None] * v[:rank])
    # With covariance C = R R^T, the error of x w is that of R^T w, whose approximation is R^T times the result.
    values, vectors = jnp.linalg.eigh(covariance.astype(jnp.float32))
    values = jnp.where(values[-1] == 0, 1.0, values / values[-1])  # a matrix without inputs is approximated by itself
    scales = jnp.sqrt(jnp.maximum(values, 1e-6))
    whitened = (vectors * scales[None]).T @ w
    u, s, v = jnp.linalg.svd(whitened, full_matrices=False)
    root = jnp.sqrt(s[:rank])
    left = (vectors / scales[None]) @ (u[:, :rank] * root[None])
    return LowRankWeight(left, root[:, None] * v[:rank])
