"""A subset of the rows of a table."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableRows:
    """A subset of the rows of a table `[V, D]`, indexed by row id like the full table: `rows[ids]`.

    Attributes:
      ids: int32 `[R]`, ascending and distinct; unused entries at the end hold numbers of at least V.
      values: `[R, D]`, the rows of these ids.
    """

    ids: Array
    values: Array

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def find(self, ids: Array | np.ndarray) -> Array:
        """Indices of rows in `values`.

        Args:
          ids: int32 `[...]`, ids of rows.

        Returns:
          int32 `[...]`, the index of each id in `self.ids`; R for an id that is not among them.

        Cost: log2(R) steps per id.
        """
        index = jnp.searchsorted(self.ids, ids).astype(jnp.int32)
        matches = self.ids.at[index].get(mode="fill", fill_value=-1) == ids
        return jnp.where(matches, index, self.ids.shape[0])

    def __getitem__(self, ids: Array | np.ndarray) -> Array:
        """The rows of these ids, `[..., D]`; NaN for an id that is not among them."""
        return self.values.at[self.find(ids)].get(mode="fill", fill_value=np.nan)


def is_row_subset(table: object) -> bool:
    """Whether a table is a TableRows; False for an array or a Weight."""
    return isinstance(table, TableRows)


def find_rows(table: Any, ids: Array) -> tuple[Any, Array]:
    """The array that holds the rows of a table or a TableRows, and the indices in it of the rows of these ids."""
    return (table.values, table.find(ids)) if isinstance(table, TableRows) else (table, ids)
