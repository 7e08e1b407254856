"""The kinds of index that a spec string names: how each is built, searched, taken apart and put together again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from hpnlp.ops.search import IvfIndex, LshIndex, build_ivf, build_lsh, exact_search, ivf_search, lsh_search
from hpnlp.types import InputError

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Settings, and what is done with a state made by them.

    Where `on_devices`, the state is arrays by name, which may be padded with zeros behind their ends, and `search` can be
    compiled.
    """

    on_devices: ClassVar[bool] = True

    def __post_init__(self) -> None:
        types = {"int": int, "int | None": int | None, "str": str}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, types[str(field.type)]) or isinstance(value, bool):
                raise InputError(f"index {type(self).__name__.lower()}: {field.name}={value!r}: expected {field.type}")

        if getattr(self, "seed", 0) < 0:
            raise InputError(
                f"index {type(self).__name__.lower()}: seed={getattr(self, 'seed', 0)}: expected at least 0"
            )

    def __str__(self) -> str:
        """The spec string that stands for it."""
        settings = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self))
        return f"{type(self).__name__.lower()}({', '.join(settings)})"

    def build(self, vectors: np.ndarray) -> Any:
        """The state of an index of these vectors."""
        raise NotImplementedError

    def search(self, state: Any, q: Any, k: int) -> tuple[Array, Array]:
        """(scores, ids) as `Index.search` gives them."""
        raise NotImplementedError

    def check(self, state: Any, dim: int) -> None:
        """Raises what a search of `state` would on settings that only a search looks at, without one."""
        jax.eval_shape(functools.partial(self.search, k=1), state, jax.ShapeDtypeStruct((1, dim), jnp.float32))

    def vectors(self, state: Any, count: int) -> np.ndarray:
        """The `count` vectors of a state, in the order of their ids."""
        raise NotImplementedError

    def add(self, state: Any, vectors: np.ndarray) -> Any:
        """The state with more vectors, for kinds that do so by themselves."""
        raise NotImplementedError

    def pack(self, state: Any) -> dict[str, np.ndarray]:
        """The state as arrays to be saved, and `unpack` back."""
        return {name: np.asarray(x) for name, x in state.items()}

    def unpack(self, arrays: Arrays) -> Any:
        return arrays


@dataclasses.dataclass(frozen=True)
class Exact(Kind):
    """Every vector, a block at a time: `hpnlp.ops.search.exact_search`."""

    block_size: int | None = None

    def build(self, vectors: np.ndarray) -> Arrays:
        return {"w": vectors}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        return exact_search(q, state["w"], k, block_size=self.block_size)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["w"])[:count]


@dataclasses.dataclass(frozen=True)
class Ivf(Kind):
    """The vectors of the `probes` nearest of `cells` cells: `hpnlp.ops.search.build_ivf`, `ivf_search`."""

    cells: int
    probes: int
    iterations: int = 10
    capacity: int | None = None
    seed: int = 0

    def build(self, vectors: np.ndarray) -> Arrays:
        options = {"iterations": self.iterations, "capacity": self.capacity, "seed": self.seed}
        index = build_ivf(vectors, cells=self.cells, **options)
        return {f.name: getattr(index, f.name) for f in dataclasses.fields(index) if f.name not in ("bias", "capacity")}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        # As many rows of nothing stand behind the others as the widest window has.
        capacity = state["rows"].shape[0] - state["ids"].shape[0]
        return ivf_search(IvfIndex(**state, bias=None, capacity=capacity), q, k, probes=self.probes)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["rows"])[:count][np.argsort(np.asarray(state["ids"])[:count])]


@dataclasses.dataclass(frozen=True)
class Lsh(Kind):
    """The vectors of the `probes` nearest buckets of `tables` tables: `hpnlp.ops.search.build_lsh`, `lsh_search`."""

    bits: int
    tables: int
    probes: int
    candidates: int | None = None
    seed: int = 0

    def build(self, vectors: np.ndarray) -> Arrays:
        index = build_lsh(vectors, bits=self.bits, tables=self.tables, seed=self.seed)
        return {f.name: getattr(index, f.name) for f in dataclasses.fields(index) if f.name != "bias"}

    def search(self, state: Arrays, q: Array, k: int) -> tuple[Array, Array]:
        return lsh_search(LshIndex(**state, bias=None), q, k, probes=self.probes, candidates=self.candidates)

    def vectors(self, state: Arrays, count: int) -> np.ndarray:
        return np.asarray(state["w"])[:count]


@dataclasses.dataclass(frozen=True)
class Faiss(Kind):
    """What faiss.index_factory makes of `factory`, as in "IVF1024,Flat"; probes: cells that a query reads, of an IVF.

    On the CPU, in float32. `add` gives it more vectors and does not train it again.
    """

    factory: str = "Flat"
    probes: int | None = None
    on_devices = False

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
                f"faiss cannot build {self.factory!r} of {vectors.shape} vectors ({reason}): choose another factory string"
            ) from error
        self._set_probes(state)
        return state

    def _set_probes(self, state: Any) -> None:
        """Before every search, because indexes that differ in their probes share a state."""
        try:
            cells = _faiss().extract_index_ivf(state)
        except RuntimeError as error:
            if self.probes is None:
                return
            raise InputError(
                f"probes={self.probes}: faiss's {self.factory!r} has no cells; leave probes out"
            ) from error
        probes = 1 if self.probes is None else self.probes  # faiss's own
        if not 1 <= probes <= cells.nlist:
            raise InputError(f"probes is {probes}: expected 1 to {cells.nlist}, the cells of the index")
        cells.nprobe = probes

    def check(self, state: Any, dim: int) -> None:
        self._set_probes(state)

    def search(self, state: Any, q: np.ndarray, k: int) -> tuple[Array, Array]:
        self._set_probes(state)
        scores, ids = state.search(np.ascontiguousarray(q, np.float32), k)
        return jnp.asarray(np.where(ids < 0, -np.inf, scores), jnp.float32), jnp.asarray(ids, jnp.int32)

    def add(self, state: Any, vectors: np.ndarray) -> Any:
        grown = _faiss().clone_index(state)
        grown.add(np.ascontiguousarray(vectors, np.float32))
        return grown

    def pack(self, state: Any) -> dict[str, np.ndarray]:
        return {"faiss": _faiss().serialize_index(state)}

    def unpack(self, arrays: Arrays) -> Any:
        return _faiss().deserialize_index(arrays["faiss"])


KINDS: dict[str, Callable[..., Kind]] = {"exact": Exact, "ivf": Ivf, "lsh": Lsh, "faiss": Faiss}


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise InputError("an index of kind 'faiss' needs the package faiss: pip install faiss-cpu") from error
    return faiss
