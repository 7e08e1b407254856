"""Training of some rows of a table: they are taken out of the state before a step, and put back after it.

What a step does to a state in which a table and its statistics are a few rows is what it does to the whole, for an
optimizer that moves each number by its own gradients; rows that a batch does not look up wait, with their statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp.types import TableRows

Path = tuple[str, ...]


def keys(path: Any) -> Path:
    """The names on the way to a leaf."""
    return tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))


def owner(path: Any, shape: tuple[int, ...], shapes: Mapping[Path, tuple[int, ...]]) -> Path | None:
    """The parameter that a leaf of the state is, or is a statistic of: one whose path ends the leaf's, and of its shape.

    A statistic of rows has 1 in the place of the last axis.
    shapes: of parameters, by path. None where there is none.
    """
    names = keys(path)
    ends = (names[i:] for i in range(len(names)) if names[i:] in shapes)
    return next((end for end in ends if shape in (shapes[end], (*shapes[end][:-1], 1))), None)


def distinct(ids: jax.Array, size: int) -> jax.Array:
    """The ids once each, rising, int32 [min(R, size)]; one out of range counts as the nearest in it, and is not found.

    Places left over hold the largest int32, which is no row of any table.
    """
    inside = jnp.clip(ids.astype(jnp.int32), 0, size - 1)
    return jnp.unique(inside, size=min(ids.size, size), fill_value=np.iinfo(np.int32).max)


def gather(state: Any, ids: Mapping[Path, jax.Array], shapes: Mapping[Path, tuple[int, ...]]) -> Any:
    """The state with the rows `ids`, as `distinct` gives them, in place of each table and each statistic of it."""
    if not ids:
        return state
    return _at_tables(lambda table, rows: table.at[rows].get(**_KNOWN, fill_value=0), ids, shapes, state)


def scatter(state: Any, rows: Any, ids: Mapping[Path, jax.Array], shapes: Mapping[Path, tuple[int, ...]]) -> Any:
    """The state with what `gather` took out of it put back, as it is now in `rows`, and all else as in `rows`."""
    if not ids:
        return rows
    put = lambda table, at, new: table.at[at].set(new, **_KNOWN)  # noqa: E731
    return _at_tables(put, ids, shapes, state, rows, otherwise=lambda old, new: new)


def as_tables(params: Any, ids: Mapping[Path, jax.Array]) -> Any:
    """Gathered parameters as a model takes them: `TableRows` in the place of tables."""
    take = lambda path, leaf: TableRows(ids[keys(path)], leaf) if keys(path) in ids else leaf  # noqa: E731
    return jax.tree_util.tree_map_with_path(take, params)


_KNOWN = {"mode": "fill", "unique_indices": True, "indices_are_sorted": True}


def _at_tables(
    function: Callable[..., Any],
    ids: Mapping[Path, jax.Array],
    shapes: Mapping[Path, tuple[int, ...]],
    tree: Any,
    *others: Any,
    otherwise: Callable[..., Any] = lambda leaf: leaf,
) -> Any:
    def one(path: Any, leaf: Any, *rest: Any) -> Any:
        table = owner(path, leaf.shape, shapes)
        return function(leaf, ids[table], *rest) if table and table in ids else otherwise(leaf, *rest)

    return jax.tree_util.tree_map_with_path(one, tree, *others)
