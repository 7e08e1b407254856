"""Matrices with equally many nonzero numbers in each column, whose products skip the zeros."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.custom_vjp import vary_alike
from hpnlp.ops.weight import Weight
from hpnlp.ops.weights.sparse import check_share

UNROLLED = (
    4  # steps in an iteration of the loop of a product. XLA:CPU, 128 rows: 0.8 to 1 times the time with other numbers
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BalancedWeight(Weight):
    """k numbers of each column, and 0 elsewhere: the ELLPACK format of the transposed matrix.

    `matmul` is a loop of k steps. Each step multiplies one number of every column by the entry of x that it meets, and adds the
    products to the result: k / D of the operations of a dense product. On XLA:CPU a product with 90 % zeros is faster than a
    dense one, but models of narrow layers are not: measure. The other methods take the time of the dense matrix. The
    derivative of M rows with respect to `values` keeps k F M numbers. In float32, the arrays take 1.5 k / D of the memory of
    the dense matrix, or 2 k / D with int32 indices. A NaN of x reaches the columns that read it.

    Attributes:
      values: float [k, F].
      indices: uint16 (int32 if D > 65,536) [k, F], the row of each number, rising in each column.
      rows: D.
    """

    stage: ClassVar[str] = "balanced"

    values: Any
    indices: Any
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.values.shape[-1]

    def dense(self) -> Float[Array, "D F"]:
        columns = jnp.arange(self.values.shape[-1])
        zeros = jnp.zeros(self.shape, jnp.float32)
        return zeros.at[self.indices, columns].set(self.values.astype(jnp.float32), unique_indices=True)

    def matmul(self, x: Float[Array, "M D"]) -> Float[Array, "M F"]:
        inputs = x.T

        def step(sums: Array, entries: tuple[Array, Array]) -> tuple[Array, None]:
            values, indices = entries
            taken = inputs.at[indices.astype(jnp.int32)].get(mode="promise_in_bounds")
            return sums + taken.astype(jnp.float32) * values.astype(jnp.float32)[:, None], None

        zeros = jnp.zeros((self.values.shape[-1], x.shape[0]), jnp.float32)
        zeros, *_ = vary_alike(zeros, x, self.values, self.indices)
        # The number of steps is a multiple of those unrolled, since XLA:CPU fuses a remainder with later operations.
        unroll = math.gcd(len(self.values), UNROLLED)
        return jax.lax.scan(step, zeros, (self.values, self.indices), unroll=unroll)[0].T

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, _, column = names
        return dataclasses.replace(self, values=(*leading, None, column), indices=(*leading, None, column))


@array_op()
def keep_balanced(w: Float[Array, "D F"], share: int | float) -> BalancedWeight:
    """Keeps the numbers of the largest magnitude of each column, equally many of each.

    Args:
      w: [D, F].
      share: Share of the numbers that is kept, in (0, 1], see `kept_count`.

    Returns:
      The sparse matrix. Of equal magnitudes, the first are kept.

    Raises:
      InputError: `share` is out of range.

    Cost:
      A sort of each column.

    References:
      Yao et al. 2019, "Balanced sparsity for efficient DNN inference on GPU", with the columns as the groups.
    """
    rows = w.shape[0]
    count = kept_count(rows, share)
    order = jnp.argsort(-jnp.abs(w), axis=0, stable=True)[:count]
    indices = jnp.sort(order, axis=0)
    dtype = jnp.uint16 if rows <= 1 << 16 else jnp.int32
    return BalancedWeight(jnp.take_along_axis(w, indices, axis=0), indices.astype(dtype), rows)


def kept_count(rows: int, share: int | float) -> int:
    """Number of entries that are kept of each column.

    Args:
      rows: D.
      share: Share of the entries that is kept, in (0, 1].

    Returns:
      k: round(share D), but at least 1, rounded up to a multiple of 4, since products take 4 at a time; at most D.

    Raises:
      InputError: `share` is out of range.
    """
    check_share(share)
    return min(rows, UNROLLED * math.ceil(max(1, round(share * rows)) / UNROLLED))
