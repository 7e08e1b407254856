"""Kinds of index, the entries of KINDS that a spec string names: how each is built, searched, saved and loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array

from hpnlp.ops.search import (
    IvfIndex,
    LshIndex,
    PqCodes,
    PqIndex,
    build_ivf,
    build_lsh,
    build_pq,
    exact_search,
    ivf_search,
    lsh_search,
    pq_search,
)
from hpnlp.retrieval.external_indexes import Faiss, Scann
from hpnlp.retrieval.index_kind import Arrays, IndexKind
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Exact(IndexKind):
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
class Ivf(IndexKind):
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
class Lsh(IndexKind):
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
class Pq(IndexKind):
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
        form = PqCodes(self.parts, self.centroids, self.keep, self.fine)
        options = {"iterations": self.iterations, "capacity": self.capacity, "seed": self.seed}
        index = build_pq(vectors, form, cells=self.cells, **options)
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


KINDS: dict[str, Callable[..., IndexKind]] = {
    "exact": Exact,
    "ivf": Ivf,
    "lsh": Lsh,
    "pq": Pq,
    "faiss": Faiss,
    "scann": Scann,
}
