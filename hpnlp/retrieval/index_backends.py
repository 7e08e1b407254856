"""Kinds of index, the entries of KINDS that a spec string names: how each is built, searched, saved and loaded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.ops.search import (
    IvfIndex,
    LshIndex,
    PqIndex,
    build_ivf,
    build_lsh,
    build_pq,
    exact_search,
    ivf_search,
    lsh_search,
    pq_search,
)
from hpnlp.types import InputError

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
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

    def search(self, state: Any, q: Any, k: int) -> tuple[Array, Array]:
        """Searches an index.

        Args:
          state: The state.
          q: [Q, D] queries.
          k: Number of vectors.

        Returns:
          (scores [Q, k], ids [Q, k]) as `Index.search`.
        """
        raise NotImplementedError

    def search_host(self, state: Any, q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, with numpy arrays. Only kinds without `on_devices` define it, in place of `search`."""
        raise NotImplementedError

    def check(self, state: Any, dim: int) -> None:
        """Checks that the settings of searches fit the state.

        Args:
          state: The state, or the shapes of its arrays.
          dim: Dimension D of the vectors.

        Raises:
          InputError: The settings do not fit, so that a search would raise the same error.
        """
        # A search is traced and not run.
        jax.eval_shape(functools.partial(self.search, k=1), state, jax.ShapeDtypeStruct((1, dim), jnp.float32))

    def vectors(self, state: Any, count: int) -> np.ndarray:
        """The vectors of a state.

        Args:
          state: The state, whose arrays may be padded.
          count: Number of vectors.

        Returns:
          [count, D] vectors in the order of their ids.
        """
        raise NotImplementedError

    def nbytes(self, state: Any, reranking: bool) -> int:
        """Size of a state.

        Args:
          state: The state.
          reranking: Whether to count what is read only to rank the best vectors again.

        Returns:
          Bytes.
        """
        return sum(x.nbytes for name, x in state.items() if reranking or name not in self.rerank_arrays)

    def add(self, state: Any, vectors: np.ndarray) -> Any:
        """Adds vectors. Only kinds without `on_devices` define it; an index of another kind is built again from all vectors.

        Args:
          state: The state.
          vectors: [n, D].

        Returns:
          The new state.
        """
        raise NotImplementedError

    def pack(self, state: Any) -> dict[str, np.ndarray]:
        """Converts the state to arrays that can be saved.

        Args:
          state: The state.

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


@dataclasses.dataclass(frozen=True)
class Exact(Kind):
    """Exact search of all vectors: `hpnlp.ops.search.exact_search`."""

    #: Vectors of a block; None for a default.
    block_size: int | None = None
    search_settings = ("block_size",)

    def build(self, vectors: np.ndarray) -> Arrays:
        return {"w": vectors}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        return exact_search(q, state["w"], k, block_size=self.block_size)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["w"])[:count]


@dataclasses.dataclass(frozen=True)
class Ivf(Kind):
    """Search of the vectors in the nearest cells of k-means: `hpnlp.ops.search.build_ivf`, `ivf_search`."""

    #: Number of cells.
    cells: int
    #: Number of cells that a query reads.
    probes: int
    #: Iterations of k-means.
    iterations: int = 10
    #: Bound on the vectors of a cell; None is 4 times the mean.
    capacity: int | None = None
    #: Seed of the sample for k-means.
    seed: int = 0
    search_settings = ("probes",)

    def build(self, vectors: np.ndarray) -> Arrays:
        options = {"iterations": self.iterations, "capacity": self.capacity, "seed": self.seed}
        index = build_ivf(vectors, cells=self.cells, **options)
        return {f.name: getattr(index, f.name) for f in dataclasses.fields(index) if f.name not in ("bias", "capacity")}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        # The rows end with padding of the size of the widest window, which has at least the capacity.
        capacity = state["rows"].shape[0] - state["ids"].shape[0]
        return ivf_search(IvfIndex(**state, bias=None, capacity=capacity), q, k, probes=self.probes)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["rows"])[:count][np.argsort(np.asarray(state["ids"])[:count])]


@dataclasses.dataclass(frozen=True)
class Lsh(Kind):
    """Search of the vectors in the nearest hash buckets: `hpnlp.ops.search.build_lsh`, `lsh_search`."""

    #: Bits of a hash.
    bits: int
    #: Number of hash tables.
    tables: int
    #: Number of buckets that a query reads in each hash table.
    probes: int
    #: Number of vectors that a query reads in each hash table; None is twice that of `probes` mean buckets.
    candidates: int | None = None
    #: Seed of the random projections.
    seed: int = 0
    search_settings = ("probes", "candidates")

    def build(self, vectors: np.ndarray) -> Arrays:
        index = build_lsh(vectors, bits=self.bits, tables=self.tables, seed=self.seed)
        return {f.name: getattr(index, f.name) for f in dataclasses.fields(index) if f.name != "bias"}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        return lsh_search(LshIndex(**state, bias=None), q, k, probes=self.probes, candidates=self.candidates)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["w"])[:count]


@dataclasses.dataclass(frozen=True)
class Pq(Kind):
    """Search of product-quantized vectors in the nearest cells of k-means: `hpnlp.ops.search.build_pq`, `pq_search`."""

    #: Number of parts of a vector, each with a code.
    parts: int
    #: Number of cells.
    cells: int
    #: Number of cells that a query reads.
    probes: int
    #: Number of vectors that are scored again by what is kept of them; at least 8 times the number asked for.
    rerank: int = 128
    #: Centroids of a part: 256 for codes of 8 bits, 16 for 4.
    centroids: int = 256
    #: Vectors that are kept to score the best again: same, float16, int8 or none.
    keep: str = "same"
    #: Parts of a second code of what the first leaves, which stands in for the vectors with keep="none".
    fine: int = 0
    #: Iterations of each k-means.
    iterations: int = 10
    #: Bound on the vectors of a cell; None is twice the mean.
    capacity: int | None = None
    #: Seed of the samples for k-means.
    seed: int = 0
    search_settings = ("probes", "rerank")
    rerank_arrays = ("vectors", "scales", "fine_codes", "fine_books")

    def build(self, vectors: np.ndarray) -> Arrays:
        names = ("cells", "parts", "centroids", "keep", "fine", "seed", "iterations", "capacity")
        index = build_pq(vectors, **{name: getattr(self, name) for name in names})
        state = {f.name: getattr(index, f.name) for f in dataclasses.fields(index) if f.name != "capacity"}
        return {name: x for name, x in state.items() if x is not None}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        # The codes end with padding of the size of the widest window, which has at least the capacity.
        capacity = state["codes"].shape[0] - state["ids"].shape[0]
        return pq_search(PqIndex(**state, capacity=capacity), q, k, probes=self.probes, rerank=self.rerank)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        if self.keep == "none" or "scales" in state:
            raise InputError(
                f"an index of kind pq with keep={self.keep!r} has its vectors only approximately: build it again from all "
                "vectors, or with keep='same'"
            )
        return np.asarray(state["vectors"])[:count][np.argsort(np.asarray(state["ids"])[:count])]


@dataclasses.dataclass(frozen=True)
class Faiss(Kind):
    """An index of faiss, on the CPU and in float32. `add` adds vectors without training the index again."""

    #: Argument of faiss.index_factory, as in "IVF1024,Flat".
    factory: str = "Flat"
    #: Number of cells that a query reads, for an IVF index; None is faiss's default of 1.
    probes: int | None = None
    #: Vectors that an index with refinement ranks again, over the number asked for; None is faiss's default of 1.
    refine: int | None = None
    on_devices = False
    search_settings = ("probes", "refine")

    def build(self, vectors: np.ndarray) -> Any:
        faiss = _faiss()
        vectors = np.ascontiguousarray(vectors, np.float32)
        try:
            state = faiss.index_factory(vectors.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
            state.train(vectors)
            state.add(vectors)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(
                f"faiss cannot build {self.factory!r} from vectors {vectors.shape} ({reason}): choose another factory string"
            ) from error
        self._set_probes(state)
        return state

    def _set_probes(self, state: Any) -> None:
        """Sets the probes and the refinement before every search, because indexes of different settings share a state."""
        refined = self._refined(state)
        if refined is not None:
            refined.k_factor = 1 if self.refine is None else self.refine
        elif self.refine is not None:
            raise InputError(
                f"refine={self.refine}: the faiss index {self.factory!r} ranks nothing again; leave refine out"
            )
        try:
            cells = _faiss().extract_index_ivf(state)
        except RuntimeError as error:
            if self.probes is None:
                return
            raise InputError(
                f"probes={self.probes}: the faiss index {self.factory!r} has no cells; leave probes out"
            ) from error
        probes = 1 if self.probes is None else self.probes
        if not 1 <= probes <= cells.nlist:
            raise InputError(f"probes is {probes}: expected 1 to {cells.nlist}, the number of cells")
        cells.nprobe = probes

    def _refined(self, state: Any) -> Any:
        """The faiss index that ranks vectors again; None if there is none."""
        index = _faiss().downcast_index(state)
        return index if isinstance(index, _faiss().IndexRefine) else None

    def nbytes(self, state: Any, reranking: bool) -> int:
        refined = None if reranking else self._refined(state)
        return len(_faiss().serialize_index(state if refined is None else refined.base_index))

    def check(self, state: Any, dim: int) -> None:
        self._set_probes(state)

    def search_host(self, state: Any, q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        self._set_probes(state)
        scores, ids = state.search(np.ascontiguousarray(q, np.float32), k)
        return np.where(ids < 0, -np.inf, scores).astype(np.float32), ids.astype(np.int32)

    def add(self, state: Any, vectors: np.ndarray) -> Any:
        grown = _faiss().clone_index(state)
        grown.add(np.ascontiguousarray(vectors, np.float32))
        return grown

    def pack(self, state: Any) -> dict[str, np.ndarray]:
        return {"faiss": _faiss().serialize_index(state)}

    def unpack(self, arrays: Arrays) -> Any:
        return _faiss().deserialize_index(arrays["faiss"])


KINDS: dict[str, Callable[..., Kind]] = {"exact": Exact, "ivf": Ivf, "lsh": Lsh, "pq": Pq, "faiss": Faiss}


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError("an index of kind 'faiss' needs the package faiss: pip install faiss-cpu") from error
    return faiss
