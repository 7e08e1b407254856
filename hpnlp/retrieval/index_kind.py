"""The interface of a kind of index: settings, and how it is built, searched, extended, saved and loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from hpnlp.types import InputError

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class IndexKind:
    """Settings of an index, and the operations on its state.

    The state of a kind with `on_devices` is a dict of arrays, which may be padded with zeros at their ends, and `search` can be
    compiled. The state of other kinds is any object, on the host.
    """

    # Whether the state can be divided over the devices of a mesh.
    on_devices: ClassVar[bool] = True
    # Settings that `search` reads and `build` does not.
    search_settings: ClassVar[tuple[str, ...]] = ()
    # Arrays of the state that are read only to rank the best vectors again.
    rerank_arrays: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        types = {"int": int, "int | None": int | None, "str": str}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, types[str(field.type)]) or isinstance(value, bool):
                raise InputError(f"index {self._name}: {field.name}={value!r}: expected {field.type}")
            if field.name == "seed" and value < 0:
                raise InputError(f"index {self._name}: seed={value}: expected at least 0")

    def __str__(self) -> str:
        """The spec string that `build` of `hpnlp.spec` turns into these settings."""
        settings = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
        return f"{self._name}({', '.join(settings)})"

    @property
    def _name(self) -> str:
        return type(self).__name__.lower()

    def build(self, vectors: np.ndarray) -> Any:
        """Builds an index.

        Args:
          vectors: [V, D].

        Returns:
          The state.
        """
        raise NotImplementedError

    def search(self, state: PyTree, q: Array, k: int) -> tuple[Array, Array]:
        """Searches an index.

        Args:
          state: The state.
          q: [Q, D] queries.
          k: Number of vectors.

        Returns:
          (scores [Q, k], ids [Q, k]) as `Index.search`.
        """
        raise NotImplementedError

    def search_host(self, state: PyTree, q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, with numpy arrays. Only kinds without `on_devices` define it, in place of `search`."""
        raise NotImplementedError

    def check(self, state: PyTree, dim: int) -> None:
        """Checks that the settings of searches fit the state.

        Args:
          state: The state, or the shapes of its arrays.
          dim: Dimension D of the vectors.

        Raises:
          InputError: The settings do not fit, so that a search would raise the same error.
        """
        # A search is traced and not run.
        jax.eval_shape(functools.partial(self.search, k=1), state, jax.ShapeDtypeStruct((1, dim), jnp.float32))

    def vectors(self, state: PyTree, count: int) -> np.ndarray:
        """The vectors of a state.

        Args:
          state: The state, whose arrays may be padded.
          count: Number of vectors.

        Returns:
          [count, D] vectors in the order of their ids.
        """
        raise NotImplementedError

    def nbytes(self, state: PyTree, reranking: bool) -> int:
        """Size of a state.

        Args:
          state: The state.
          reranking: Whether to count what is read only to rank the best vectors again.

        Returns:
          Bytes.
        """
        return sum(x.nbytes for name, x in state.items() if reranking or name not in self.rerank_arrays)

    def add(self, state: PyTree, vectors: np.ndarray) -> Any:
        """Adds vectors. Only kinds without `on_devices` define it; an index of another kind is built again from all vectors.

        Args:
          state: The state.
          vectors: [n, D].

        Returns:
          The new state.
        """
        raise NotImplementedError

    def pack(self, state: PyTree) -> dict[str, np.ndarray]:
        """Converts the state to arrays that can be saved.

        Returns:
          Arrays by name.
        """
        return {name: np.asarray(x) for name, x in state.items()}

    def unpack(self, arrays: Arrays) -> Any:
        """Inverse of `pack`.

        Args:
          arrays: Name -> array.

        Returns:
          The state.
        """
        return arrays
