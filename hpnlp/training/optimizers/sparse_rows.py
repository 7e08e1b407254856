"""Row-sparse training: a step works on the rows of a table that its batch looks up, and leaves all other rows alone.

Before a step, `gather` replaces each table, and each of the optimizer's statistics of it, by the rows that the batch looks up;
after the step, `scatter` writes these rows back. For an optimizer that moves each number by its own gradients, a step on the
gathered state is the step on the full state. Rows that are not looked up keep their values and statistics (lazy updates).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.ops.table_rows import TableRows

Path = tuple[str, ...]  # names of the dicts that lead to a parameter, such as ("embed", "table")
# (path of a parameter, function of whole matrices, sharded matrices) -> the function's result, sharded like the matrices.
ApplyToWhole = Callable[[Path, Callable[[jax.Array], jax.Array], jax.Array], jax.Array]

# Ids from `distinct` are sorted, distinct and padded by an id that no table has: padding reads 0 and writes nothing.
_INDEXING = {"mode": "fill", "unique_indices": True, "indices_are_sorted": True}


def keys(path: KeyPath) -> Path:
    """Names of the dicts that lead to a leaf.

    Args:
      path: A path of `jax.tree_util`; keys that are not of dicts are left out.

    Returns:
      The names.
    """
    return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def owner(path: KeyPath, shape: tuple[int, ...], shapes: Mapping[Path, tuple[int, ...]]) -> Path | None:
    """Finds the parameter that a leaf of the training state holds, or holds a statistic of.

    Args:
      path: Path of the leaf, as `jax.tree_util` gives it; it ends with the path of its parameter.
      shape: Shape of the leaf: that of the parameter, or for statistics of rows the same with 1 as the last axis.
      shapes: Shapes of the parameters by path.

    Returns:
      The path of the parameter, or None for leaves that belong to no parameter.
    """
    names = keys(path)
    endings = (names[i:] for i in range(len(names)) if names[i:] in shapes)
    return next((end for end in endings if shape in (shapes[end], (*shapes[end][:-1], 1))), None)


def distinct(ids: jax.Array, size: int) -> jax.Array:
    """Distinct row ids in ascending order.

    Args:
      ids: Integers `[R]`. Ids outside of `[0, size)` count as the nearest valid id.
      size: Number of rows of the table.

    Returns:
      int32 `[min(R, size)]`, padded at the end by the largest int32, which is no row of any table.
    """
    valid = jnp.clip(ids.astype(jnp.int32), 0, size - 1)
    return jnp.unique(valid, size=min(ids.size, size), fill_value=np.iinfo(np.int32).max)


def gather(state: PyTree, ids: Mapping[Path, jax.Array], shapes: Mapping[Path, tuple[int, ...]]) -> Any:
    """Replaces each table in `ids`, and each statistic of it, by its rows.

    Args:
      state: A tree of arrays, such as a training state.
      ids: Rows by the path of their table, as `distinct` returns them.
      shapes: Shapes of the parameters by path.

    Returns:
      The state with rows in place of tables; rows of padding are 0.
    """
    if not ids:
        return state

    def select(path: KeyPath, leaf: jax.Array) -> jax.Array:
        table = owner(path, leaf.shape, shapes)
        return leaf.at[ids[table]].get(**_INDEXING, fill_value=0) if table is not None and table in ids else leaf

    return jax.tree_util.tree_map_with_path(select, state)


def scatter(state: PyTree, rows: PyTree, ids: Mapping[Path, jax.Array], shapes: Mapping[Path, tuple[int, ...]]) -> Any:
    """Writes gathered rows back.

    Args:
      state: The state that `gather` was called with.
      rows: The new state with rows in place of tables.
      ids: The ids that `gather` was called with.
      shapes: Shapes of the parameters by path.

    Returns:
      The new state: tables of `state` with the rows of `rows`, and all other leaves of `rows`.
    """
    if not ids:
        return rows

    def write(path: KeyPath, leaf: jax.Array, new: jax.Array) -> jax.Array:
        table = owner(path, leaf.shape, shapes)
        return leaf.at[ids[table]].set(new, **_INDEXING) if table is not None and table in ids else new

    return jax.tree_util.tree_map_with_path(write, state, rows)


def as_tables(params: PyTree, ids: Mapping[Path, jax.Array]) -> Any:
    """Parameters for a model, in which gathered rows are looked up by the ids of their table.

    Args:
      params: Parameters after `gather`.
      ids: Rows by the path of their table.

    Returns:
      The parameters with `TableRows` in place of the tables in `ids`.
    """

    def as_table(path: KeyPath, leaf: jax.Array) -> Any:
        table = keys(path)
        return TableRows(ids[table], leaf) if table in ids else leaf

    return jax.tree_util.tree_map_with_path(as_table, params)
