"""Matrices with equally many nonzero numbers in each column, whose products skip the zeros."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.array_op import array_op
from hpnlp.ops.weight import Weight
from hpnlp.ops.weights.sparse import check_share

MOST_UNROLLED = 4  # XLA:CPU, 128 rows: 1 to 0.8 of the time of no or more unrolling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BalancedWeight(Weight):
    """k numbers of each column, and 0 elsewhere: the ELLPACK format of the transposed matrix.

    `matmul` takes k steps, each of which adds a number of each column times a row of x^T, so that its operations are those of
    the dense matrix times k / D. On XLA:CPU, products by themselves are faster than dense ones with 90 % zeros; a narrow model
    gains nothing: measure. The other methods take the time of the dense matrix. float32 takes 1.5 k / D of its
    memory. A NaN of x reaches the columns that read it.

    Attributes:
      values: float [k, F].
      indices: uint16 or int32 [k, F], the row of each number, rising in each column.
      rows: D.
    """

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

        zeros = jnp.zeros((self.values.shape[-1], len(x)), jnp.float32)
        return jax.lax.scan(step, zeros, (self.values, self.indices), unroll=_unroll(len(self.values)))[0].T

    def axes(self, names: tuple[str | None, ...]) -> Any:
        *leading, _, column = names
        return dataclasses.replace(self, values=(*leading, None, column), indices=(*leading, None, column))


@array_op()
def keep_balanced(w: Float[Array, "D F"], share: int | float) -> BalancedWeight:
    """Keeps the numbers of the largest magnitude of each column, equally many of each.

    Args:
      w: [D, F].
      share: Share of the numbers that is kept, in (0, 1]: k = round(share D) of each column, rounded up to a multiple of 4,
        since products take 4 at a time; at most D.

    Returns:
      The sparse matrix. Of equal magnitudes, the first are kept.

    Raises:
      InputError: `share` is out of range.

    Cost:
      A sort of each column.

    References:
      Yao et al. 2019, "Balanced sparsity for efficient DNN inference on GPU", with the columns as the groups.
    """
    check_share(share)
    rows = w.shape[0]
    count = min(rows, MOST_UNROLLED * max(1, -(-round(share * rows) // MOST_UNROLLED)))
    order = jnp.argsort(-jnp.abs(w), axis=0, stable=True)[:count]
    indices = jnp.sort(order, axis=0)
    dtype = jnp.uint16 if rows <= 1 << 16 else jnp.int32
    return BalancedWeight(jnp.take_along_axis(w, indices, axis=0), indices.astype(dtype), rows)


def _unroll(steps: int) -> int:
    """Steps of an iteration of the loop; they divide all steps, since XLA:CPU fuses a remainder with later operations."""
    return max(n for n in range(1, MOST_UNROLLED + 1) if steps % n == 0)
