"""An index for maximum inner product search: built from vectors, extended, searched, saved, and divided over devices."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.atomic_file import replaced
from hpnlp.ops.helpers.array_op import array_op
from hpnlp.retrieval.index_backends import KINDS
from hpnlp.retrieval.index_kind import IndexKind
from hpnlp.spec import build, lookup, parse_one
from hpnlp.types import InputError

FORMAT = 1  # version of the file format; files of other versions are not read
BLOCK = 1 << 16  # vectors that are checked at a time
DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True, eq=False)
class HostSearch:
    """The search of a kind without `on_devices`, which a compiled program calls on the host.

    Attributes:
      kind: The kind.
      state: Its state.
    """

    kind: IndexKind
    state: Any

    def search(self, state: PyTree, q: Array, k: int) -> tuple[Array, Array]:
        """Searches the index; `state` is not read."""
        shapes = tuple(jax.ShapeDtypeStruct((q.shape[0], k), dtype) for dtype in (jnp.float32, jnp.int32))
        return jax.pure_callback(lambda q: self.kind.search_host(self.state, np.asarray(q), k), shapes, q)


class Index:
    """An index of vectors that returns those with the largest inner products with a query. Ids are positions, from 0.

        index = Index("ivf(cells=1024,probes=16)").build(vectors)
        scores, ids = index.search(queries, 10)

    With a mesh, the vectors are divided over the devices along one axis, and each device searches its part; numbers of cells,
    probes and buckets are then those of each device.

    Args:
      kind: Spec string of an entry of KINDS: "exact", "ivf(cells,probes)", "lsh(bits,tables,probes)",
        "pq(parts,cells,probes)", "faiss(factory)" or "scann(cells,probes)", with the arguments of that class.
      mesh: Devices over which the vectors are divided; None for one device.
      axis: Axis of the mesh.

    Raises:
      InputError: Kind or axis is unknown, or the kind cannot be divided.
    """

    def __init__(self, kind: str = "exact", *, mesh: Mesh | None = None, axis: str = "data") -> None:
        self.mesh, self.axis = mesh, axis
        self.kind: IndexKind = build(parse_one(kind, "kind"), KINDS, "index")
        self._part_count: int = 1 if mesh is None else lookup(mesh.shape, axis, "mesh axis")
        if self._part_count > 1 and not self.kind.on_devices:
            raise InputError(f"an index of kind {kind!r} cannot be divided over a mesh: leave mesh out")
        # State of the kind; the arrays of several parts are stacked on a first axis.
        self._state: Any = None
        # Number of vectors of each part.
        self._sizes: tuple[int, ...] = ()
        self._dim, self._dtype = 0, ""

    def __len__(self) -> int:
        """The number of vectors."""
        return sum(self._sizes)

    def build(self, vectors: Array | np.ndarray) -> Index:
        """Builds the index from vectors, in place of those that it has. On failure it does not change.

        Args:
          vectors: [V, D], float32, float16 or bfloat16, finite.

        Returns:
          The index itself.

        Raises:
          InputError: The vectors are not as described, there are none or fewer than devices, or they do not suit the settings
            of the kind.
        """
        self._set_vectors(_checked(vectors, "vectors", least=self._part_count))
        return self

    def add(self, vectors: Array | np.ndarray) -> Index:
        """Adds vectors, with the ids that follow. On failure the index does not change.

        All kinds but faiss and scann are built again from all vectors, so that pq must keep them (keep="same").

        Args:
          vectors: [n, D], of the dtype of those in the index, finite.

        Returns:
          The index itself.

        Raises:
          InputError: As `build`, or nothing was built, the vectors have another dimension or dtype than those in the index, or
            the index does not have its vectors.
        """
        self._check_built()
        added = _checked(vectors, "vectors", self._dim)
        if added.dtype != self._dtype:
            raise InputError(f"vectors are {added.dtype}, those of the index {self._dtype}: cast them with .astype")
        if self.kind.on_devices:
            self._set_vectors(np.concatenate([self._vectors(), added]))
        else:
            self._state = self.kind.add(self._state, added)
            self._sizes = (len(self) + len(added),)
        return self

    def search(self, q: Array | np.ndarray, k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
        """The k vectors with the largest inner products, for each query.

        Each shape of q and each k is compiled once. On a mesh, k + 1 candidates of each device are gathered.

        Args:
          q: [Q, D] queries, finite.
          k: Number of vectors, 1 to len(index).

        Returns:
          (scores [Q, k] float32, ids [Q, k] int32), best first; -inf and -1 where an approximate kind reads fewer than k
          vectors.

        Raises:
          InputError: Nothing was built, queries are not finite or have another dimension, or k is out of range.
        """
        self._check_built()
        queries = _checked(q, "q", self._dim, least=0)
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= len(self):
            raise InputError(f"k is {k!r}: expected an integer, 1 to {len(self)}, the number of vectors")
        if not self.kind.on_devices:
            scores, ids = self.kind.search_host(self._state, queries, int(k))
            return jnp.asarray(scores), jnp.asarray(ids)
        if self._part_count == 1:
            return _search(self._state, jnp.asarray(queries), self.kind, int(k))
        assert self.mesh is not None
        with jax.set_mesh(self.mesh):  # the caller may have set another mesh
            return _search_parts(self._state, queries, self.kind, int(k), self._sizes, self.mesh, self.axis)

    def as_search(self) -> tuple[IndexKind | HostSearch, Any]:
        """The search as a function of arrays, for use in compiled programs.

        Returns:
          `(search, state)`, such that `search.search(state, q, k)` searches for float32 queries on one device.

        Raises:
          InputError: Nothing was built, or the vectors are divided over devices.
        """
        self._check_built()
        if self._part_count > 1:
            raise InputError("an index that is divided over a mesh is searched by `search`: load it without a mesh")
        return (self.kind, self._state) if self.kind.on_devices else (HostSearch(self.kind, self._state), {})

    def probing(self, probes: int) -> Index:
        """An index of the same vectors with another number of probes; nothing is built or copied.

        Args:
          probes: Number of cells or buckets that a query reads.

        Returns:
          The new index.

        Raises:
          InputError: Nothing was built, the kind has no probes, or there are fewer cells or buckets.
        """
        if "probes" not in self.kind.search_settings:
            raise InputError(
                f"an index of kind {str(self.kind)!r} has no probes, because it reads all vectors: expected "
                "ivf, lsh, pq, faiss or scann"
            )
        return self.searching(probes=probes)

    def searching(self, **settings: int | None) -> Index:
        """An index of the same vectors with other settings of searches; nothing is built or copied.

        Args:
          **settings: Arguments of the kind that only searches read: `probes`, `rerank` of pq and scann, `refine` of faiss,
            `candidates` of lsh, `block_size` of exact.

        Returns:
          The new index.

        Raises:
          InputError: Nothing was built, the kind has no such setting, or the value is out of range.
        """
        self._check_built()
        for name in settings:
            lookup({setting: None for setting in self.kind.search_settings}, name, "setting of searches")
        other = copy.copy(self)
        other.kind = dataclasses.replace(self.kind, **settings)
        other.kind.check(self._shapes(self._state), self._dim)
        return other

    def bytes_per_vector(self, *, reranking: bool = True) -> float:
        """Size of the index over the number of vectors, with ids, centroids and padding.

        Args:
          reranking: Whether to count what is read only to rank the best vectors again: the vectors or fine codes that pq keeps
            beside its codes, and those of scann, and of a faiss index with refinement.

        Returns:
          Bytes.

        Raises:
          InputError: Nothing was built.
        """
        self._check_built()
        return self.kind.nbytes(self._state, reranking) / len(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a file, atomically: a file of that name is replaced once the new one is complete.

        Args:
          path: Path of the file.

        Raises:
          InputError: Nothing was built, or the file cannot be written.
        """
        self._check_built()
        arrays = self.kind.pack(self._state)
        record = {
            "format": FORMAT,
            "kind": str(self.kind),
            "sizes": self._sizes,
            "dim": self._dim,
            "dtype": self._dtype,
            "bfloat16": [name for name, x in arrays.items() if x.dtype == "bfloat16"],
        }
        plain: Any = {name: x.view(np.uint16) if x.dtype == "bfloat16" else x for name, x in arrays.items()}
        with replaced(path, "the index") as file:
            np.savez(file, record=np.frombuffer(json.dumps(record).encode(), np.uint8), **plain)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mesh: Mesh | None = None, axis: str = "data") -> Index:
        """Reads an index that `save` wrote. It is built again if it was divided into another number of parts.

        Args:
          path: Path of the file.
          mesh: As in the constructor; need not be the mesh of the saved index.
          axis: As in the constructor.

        Returns:
          The index.

        Raises:
          InputError: The file does not exist, is damaged or has another format, or as the constructor.
        """
        record, arrays = _read(path)
        index = cls(record["kind"], mesh=mesh, axis=axis)
        index._sizes, index._dim, index._dtype = tuple(record["sizes"]), record["dim"], record["dtype"]
        index._state = index.kind.unpack(arrays)
        if len(index._sizes) != index._part_count:
            index._set_vectors(index._vectors())
        elif index.kind.on_devices:
            index._state = index._put_on_devices(index._state)
        return index

    def _set_vectors(self, vectors: np.ndarray) -> None:
        """Builds the state; attributes are set last, so that a failure changes nothing."""
        vectors_of_parts = np.array_split(vectors, self._part_count)
        states = [self.kind.build(part) for part in vectors_of_parts]
        state = states[0] if self._part_count == 1 else jax.tree.map(_stack_padded, *states)
        self.kind.check(self._shapes(state), vectors.shape[1])
        state = self._put_on_devices(state) if self.kind.on_devices else state
        self._state, self._sizes = state, tuple(len(part) for part in vectors_of_parts)
        self._dim, self._dtype = vectors.shape[1], str(vectors.dtype)

    def _shapes(self, state: PyTree) -> Any:
        """Shapes of one part of a state; the state itself for kinds that are not on devices."""
        if not self.kind.on_devices:
            return state
        first_axis = 1 if self._part_count > 1 else 0
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[first_axis:], x.dtype), state)

    def _put_on_devices(self, state: PyTree) -> Any:
        if self.mesh is None or self._part_count == 1:
            return jax.tree.map(jnp.asarray, state)
        return jax.device_put(state, NamedSharding(self.mesh, jax.P(self.axis)))

    def _vectors(self) -> np.ndarray:
        """All vectors, in the order of their ids."""
        if len(self._sizes) == 1:
            return self.kind.vectors(self._state, len(self))
        # Copied to the host first: under an explicit mesh, JAX does not index a sharded axis.
        state = jax.tree.map(np.asarray, self._state)
        states = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(len(self._sizes))]
        return np.concatenate([self.kind.vectors(part, size) for part, size in zip(states, self._sizes, strict=True)])

    def _check_built(self) -> None:
        if self._state is None:
            raise InputError("the index is empty: call build(vectors) first, or load one")


@functools.partial(jax.jit, static_argnums=(2, 3))
def _search(state: Any, q: Array, kind: IndexKind, k: int) -> tuple[Array, Array]:
    return kind.search(state, q, k)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _search_parts(
    state: Any, q: Array, kind: IndexKind, k: int, sizes: tuple[int, ...], mesh: Mesh, axis: str
) -> tuple[Array, Array]:
    """Searches all parts; sizes are their numbers of vectors. Sizes differ by 1 at most, and smaller parts are padded."""

    def search_part(state: PyTree, q: Array) -> tuple[Array, Array]:
        part = lax.axis_index(axis)
        # k + 1 candidates, because one of them may be the padding.
        scores, ids = kind.search(jax.tree.map(lambda x: x[0], state), q, min(k + 1, max(sizes)))
        exists = (ids >= 0) & (ids < jnp.asarray(sizes, jnp.int32)[part])
        start = jnp.asarray(np.cumsum((0, *sizes[:-1])), jnp.int32)[part]
        return jnp.where(exists, scores, -jnp.inf), jnp.where(exists, ids + start, -1)

    specs = {"in_specs": (jax.P(axis), jax.P()), "out_specs": jax.P(None, axis)}
    return _best_of_parts(*jax.shard_map(search_part, mesh=mesh, **specs)(state, q), k)


@array_op()
def _best_of_parts(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """The k best of the candidates of all parts, replicated."""
    scores, at = lax.top_k(scores, k)
    return scores, jnp.take_along_axis(ids, at, axis=1)


def _stack_padded(*arrays: np.ndarray) -> np.ndarray:
    """Stacks arrays on a first axis, padded with zeros to the largest shape."""
    shapes = [np.shape(x) for x in arrays]
    out = np.zeros((len(arrays), *map(max, *shapes)), arrays[0].dtype)
    for i, shape in enumerate(shapes):
        out[(i, *map(slice, shape))] = arrays[i]
    return out


def _checked(x: Any, name: str, dim: int | None = None, least: int = 1) -> np.ndarray:
    """Copies x to the host; raises InputError unless it is [`least` or more, dim], of a dtype in DTYPES, and finite."""
    if not isinstance(x, np.ndarray | jax.Array):
        raise InputError(f"{name} has type {type(x).__name__}: expected an array [n, D] of numpy or JAX")
    if x.ndim != 2 or not x.shape[1] or (dim is not None and x.shape[1] != dim):
        raise InputError(f"{name} has shape {x.shape}: expected [n, {dim or 'D'}], one row for each vector")
    if x.shape[0] < least:
        vectors = "vector" if least == 1 else "vectors, one for each device"
        raise InputError(f"{name} has shape {x.shape}: expected at least {least} {vectors}")
    if str(x.dtype) not in DTYPES:
        raise InputError(f"{name} is {x.dtype}: expected {', '.join(DTYPES)}; cast it with .astype")
    x = np.asarray(x)
    blocks = (
        x[i : i + BLOCK] for i in range(0, len(x), BLOCK)
    )  # a mask of all numbers takes half of the memory of float16
    invalid = np.flatnonzero(
        ~np.concatenate([np.isfinite(block).all(axis=1) for block in blocks] or [np.ones(0, bool)])
    )
    if invalid.size:
        raise InputError(
            f"{name} has NaN or infinity in {invalid.size} of {len(x)} rows, first in row {invalid[0]}: remove such rows"
        )
    return x


def _read(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """Reads the record and the arrays of a file that `save` wrote."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}  # compares checksums
        record = json.loads(arrays.pop("record").tobytes())
        file_format = record["format"]
        arrays |= {name: arrays[name].view("bfloat16") for name in record["bfloat16"]}
    except FileNotFoundError as error:
        raise InputError(f"there is no index {os.fspath(path)!r}: save one first, or pass another path") from error
    except OSError as error:
        raise InputError(f"cannot read the index {os.fspath(path)!r} ({error.strerror or error})") from error
    except Exception as error:  # damaged files raise all kinds of errors in zipfile and numpy
        raise InputError(f"{os.fspath(path)!r} is damaged, or no saved index: build and save it again") from error
    if file_format != FORMAT:
        raise InputError(
            f"{os.fspath(path)!r} has format {file_format}, this version reads {FORMAT}: build and save it again"
        )
    return record, arrays
