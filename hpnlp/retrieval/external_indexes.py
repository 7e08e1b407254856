"""Kinds of index that other libraries search on the host: faiss and ScaNN, both optional."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.retrieval.index_kind import Arrays, IndexKind
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Faiss(IndexKind):
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


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError("an index of kind 'faiss' needs the package faiss: pip install faiss-cpu") from error
    return faiss


@dataclasses.dataclass(frozen=True)
class Scann(IndexKind):
    """An index of ScaNN: 4-bit codes whose error along each vector counts more than across it (Guo et al. 2020), on the CPU.

    The best vectors by their codes are ranked again by their float32 products. `add` adds vectors without training again.
    """

    #: Number of cells, about the root of the number of vectors; None to score the codes of all vectors.
    cells: int | None = None
    #: Number of cells that a query reads.
    probes: int | None = None
    #: Vectors that are scored again exactly, or the number asked for if that is larger.
    rerank: int = 100
    #: Features of a vector that share a code.
    block: int = 2
    on_devices = False
    search_settings = ("probes", "rerank")

    def build(self, vectors: np.ndarray) -> Any:
        scann = _scann()
        self._check_settings()
        vectors = np.ascontiguousarray(vectors, np.float32)
        builder = scann.builder(vectors, 1, "dot_product")
        if self.cells is not None:
            builder = builder.tree(self.cells, self.probes, training_sample_size=SCANN_SAMPLE)
        builder = builder.score_ah(self.block, anisotropic_quantization_threshold=SCANN_THRESHOLD)
        try:
            return builder.reorder(self.rerank).build()
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise InputError(f"scann cannot build {self} from vectors {vectors.shape} ({reason})") from error

    def _check_settings(self) -> None:
        if (self.cells is None) != (self.probes is None):
            raise InputError(
                f"an index of kind scann with cells={self.cells} and probes={self.probes}: set both, or none of them"
            )
        if self.cells is not None and self.probes is not None and not 1 <= self.probes <= self.cells:
            raise InputError(f"probes is {self.probes}: expected 1 to {self.cells}, the number of cells")
        for name in ("rerank", "block"):
            if getattr(self, name) < 1:
                raise InputError(f"an index of kind scann with {name}={getattr(self, name)}: expected at least 1")

    def check(self, state: Any, dim: int) -> None:
        self._check_settings()

    def search_host(self, state: Any, q: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        if not len(q):
            return np.zeros((0, k), np.float32), np.zeros((0, k), np.int32)
        ids, scores = state.search_batched_parallel(
            np.ascontiguousarray(q, np.float32), k, max(k, self.rerank), self.probes, batch_size=SCANN_QUERIES
        )
        is_missing = np.isnan(scores)  # fewer vectors than k are in the cells that were read
        return np.where(is_missing, -np.inf, scores).astype(np.float32), np.where(is_missing, -1, ids).astype(np.int32)

    def nbytes(self, state: Any, reranking: bool) -> int:
        return sum(x.nbytes for name, x in self.pack(state).items() if reranking or name != "dataset.npy")

    def add(self, state: Any, vectors: np.ndarray) -> Any:
        grown = self.unpack(self.pack(state))  # ScaNN adds in place, and indexes of other settings share the state
        vectors = np.ascontiguousarray(vectors, np.float32)
        grown.searcher.upsert([None] * len(vectors), vectors, len(vectors))
        return grown

    def pack(self, state: Any) -> dict[str, np.ndarray]:
        with tempfile.TemporaryDirectory() as directory:
            state.serialize(directory, relative_path=True)
            return {path.name: np.fromfile(path, np.uint8) for path in sorted(Path(directory).iterdir())}

    def unpack(self, arrays: Arrays) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            for name, content in arrays.items():
                np.asarray(content).tofile(Path(directory) / name)
            return _scann().load_searcher(directory)


SCANN_MODULE = "scann.scann_ops.py.scann_ops_pybind"  # without the operations for TensorFlow
SCANN_SAMPLE = 100_000  # vectors that train the cells
# Queries whose inner product with a vector is less than this share of its length do not count in the error of its code, as
# ScaNN's documentation advises.
SCANN_THRESHOLD = 0.2
SCANN_QUERIES = 32  # queries of one thread at a time


def _scann() -> Any:
    try:
        return importlib.import_module(SCANN_MODULE)
    except ImportError as error:
        raise InputError("an index of kind 'scann' needs the package scann: pip install scann") from error
