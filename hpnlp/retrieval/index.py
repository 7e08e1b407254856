"""An index for maximum inner product search: built of vectors, added to, searched, saved, and spread over devices."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.retrieval.index_backends import KINDS, Kind
from hpnlp.spec import build, lookup, parse_one
from hpnlp.types import InputError

FORMAT = 1  # of the file; a reader refuses what it does not know
DTYPES = ("float32", "float16", "bfloat16")


class Index:
    """Vectors that are searched for those with the largest inner product with a query. Ids count them from 0.

        index = Index("ivf(cells=1024,probes=16)").build(vectors)
        scores, ids = index.search(queries, 10)

    kind: a spec string that names an entry of KINDS: "exact", "ivf(cells,probes)", "lsh(bits,tables,probes)" or
    "faiss(factory)", with the arguments of the class there. mesh: the vectors are divided over the devices along its `axis`;
    each searches its own, so cells and buckets are counted a device. Raises InputError on a kind or an axis that is none.
    """

    def __init__(self, kind: str = "exact", *, mesh: Mesh | None = None, axis: str = "data") -> None:
        self.mesh, self.axis = mesh, axis
        self.kind: Kind = build(parse_one(kind, "kind"), KINDS, "index")
        self._parts: int = 1 if mesh is None else lookup(mesh.shape, axis, "mesh axis")
        if self._parts > 1 and not self.kind.on_devices:
            raise InputError(f"an index of kind {kind!r} cannot be divided over a mesh: leave mesh out")
        self._state: Any = None  # of the kind; with more than one part, their arrays are stacked
        self._sizes: tuple[int, ...] = ()
        self._dim, self._dtype = 0, ""

    def __len__(self) -> int:
        """How many vectors it holds."""
        return sum(self._sizes)

    def build(self, vectors: Array | np.ndarray) -> Index:
        """Makes the index hold these vectors and no others; returns it. On failure it stays what it was.

        vectors: [V, D], float32, float16 or bfloat16, and finite. Memory and time are those of the kind.
        Raises InputError on other vectors, on none, on fewer than the mesh has devices, and on what the kind refuses.
        """
        self._hold(_checked(vectors, "vectors", least=self._parts))
        return self

    def add(self, vectors: Array | np.ndarray) -> Index:
        """Holds these vectors [n, D] too, with the ids that follow; returns the index. On failure it stays what it was.

        All kinds but faiss are built anew, of all vectors. Raises InputError as `build`, and on vectors of another dimension
        or dtype than those it holds.
        """
        self._check_built()
        more = _checked(vectors, "vectors", self._dim)
        if more.dtype != self._dtype:
            raise InputError(f"vectors are {more.dtype}, those of the index {self._dtype}: cast them with .astype")
        if self.kind.on_devices:
            self._hold(np.concatenate([self._vectors(), more]))
        else:
            self._state = self.kind.add(self._state, more)
            self._sizes = (len(self) + len(more),)
        return self

    def search(self, q: Array | np.ndarray, k: int) -> tuple[Float[Array, "Q k"], Int[Array, "Q k"]]:
        """The k vectors with the largest inner products, for each query [Q, D]: (scores float32, ids int32), best first.

        Where fewer than k are found (a kind that does not look at all vectors may meet fewer), the rest of a row has id -1
        and score -inf. Every shape of q and every k is compiled once. On a mesh, k + 1 candidates of each device are gathered.
        Raises InputError where nothing was built, on queries that are not finite or of another dimension, and unless
        1 <= k <= len(index).
        """
        self._check_built()
        queries = _checked(q, "q", self._dim, least=0)
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 1 <= k <= len(self):
            raise InputError(f"k is {k!r}: expected a whole number, 1 to {len(self)}, the vectors of the index")
        if not self.kind.on_devices:
            return self.kind.search(self._state, queries, int(k))
        if self._parts == 1:
            return _search(self._state, jnp.asarray(queries), self.kind, int(k))
        assert self.mesh is not None
        with jax.set_mesh(self.mesh):  # the caller may have set another mesh
            return _search_parts(self._state, queries, self.kind, int(k), self._sizes, self.mesh, self.axis)

    def probing(self, probes: int) -> Index:
        """An index of the same vectors, not built anew, of which a query reads `probes` cells or buckets.

        Raises InputError where nothing was built, on a kind without probes, and on more than there are.
        """
        self._check_built()
        if not hasattr(self.kind, "probes"):
            raise InputError(f"an index of kind {str(self.kind)!r} has no probes: it reads every vector")
        other = copy.copy(self)
        other.kind = dataclasses.replace(self.kind, probes=probes)
        other.kind.check(self._shapes(self._state), self._dim)
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a file, whole or not at all: until the new one is complete, an older one stays as it is.

        Raises InputError where nothing was built, and where the disk does not take it.
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
        path = Path(path)
        part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")  # no other process's, and no file of the user's
        try:
            try:
                with open(part, "xb") as file:
                    np.savez(file, record=np.frombuffer(json.dumps(record).encode(), np.uint8), **plain)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot write the index {str(path)!r} ({error.strerror or error}): name a file in a directory that exists "
                "and has space"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mesh: Mesh | None = None, axis: str = "data") -> Index:
        """The index that `save` wrote, divided over `mesh`; built anew where it was divided into another number of parts.

        Raises InputError where there is none, where it is damaged or of another format, and as the constructor.
        """
        record, arrays = _read(path)
        index = cls(record["kind"], mesh=mesh, axis=axis)
        index._sizes, index._dim, index._dtype = tuple(record["sizes"]), record["dim"], record["dtype"]
        index._state = index.kind.unpack(arrays)
        if len(index._sizes) != index._parts:
            index._hold(index._vectors())
        elif index.kind.on_devices:
            index._state = index._placed(index._state)
        return index

    def _hold(self, vectors: np.ndarray) -> None:
        parts = np.array_split(vectors, self._parts)
        states = [self.kind.build(part) for part in parts]
        state = states[0] if self._parts == 1 else jax.tree.map(_stacked, *states)
        self.kind.check(self._shapes(state), vectors.shape[1])
        state = self._placed(state) if self.kind.on_devices else state
        self._state, self._sizes = state, tuple(len(part) for part in parts)
        self._dim, self._dtype = vectors.shape[1], str(vectors.dtype)

    def _shapes(self, state: Any) -> Any:
        """The shapes of one part of a state; of a kind that is not on devices, the state."""
        part = lambda x: jax.ShapeDtypeStruct(x.shape[self._parts > 1 :], x.dtype)  # noqa: E731
        return jax.tree.map(part, state) if self.kind.on_devices else state

    def _placed(self, state: Any) -> Any:
        if self.mesh is None or self._parts == 1:
            return jax.tree.map(jnp.asarray, state)
        return jax.device_put(state, NamedSharding(self.mesh, jax.P(self.axis)))

    def _vectors(self) -> np.ndarray:
        """All vectors, in the order of their ids."""
        if len(self._sizes) == 1:
            return self.kind.vectors(self._state, len(self))
        # Copied to the host first, because an explicit mesh refuses to index a sharded axis.
        state = jax.tree.map(np.asarray, self._state)
        part = lambda i: jax.tree.map(lambda x: x[i], state)  # noqa: E731
        return np.concatenate([self.kind.vectors(part(i), size) for i, size in enumerate(self._sizes)])

    def _check_built(self) -> None:
        if self._state is None:
            raise InputError("the index holds nothing: call build(vectors) first, or load one")


@functools.partial(jax.jit, static_argnums=(2, 3))
def _search(state: Any, q: Array, kind: Kind, k: int) -> tuple[Array, Array]:
    return kind.search(state, q, k)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _search_parts(
    state: Any, q: Array, kind: Kind, k: int, sizes: tuple[int, ...], mesh: Mesh, axis: str
) -> tuple[Array, Array]:
    """sizes: how many vectors each part has; some have a row of padding more."""

    def own(state: Any, q: Array) -> tuple[Array, Array]:
        part = lax.axis_index(axis)
        # One candidate more than asked for, because one may be padding.
        scores, ids = kind.search(jax.tree.map(lambda x: x[0], state), q, min(k + 1, max(sizes)))
        there = (ids >= 0) & (ids < jnp.asarray(sizes, jnp.int32)[part])
        start = jnp.asarray(np.cumsum((0, *sizes[:-1])), jnp.int32)[part]
        return jnp.where(there, scores, -jnp.inf), jnp.where(there, ids + start, -1)

    specs = {"in_specs": (jax.P(axis), jax.P()), "out_specs": jax.P(None, axis)}
    return _best(*jax.shard_map(own, mesh=mesh, **specs)(state, q), k)


@array_op()
def _best(scores: Array, ids: Array, k: int) -> tuple[Array, Array]:
    """The k best of the candidates of all parts, replicated."""
    scores, at = lax.top_k(scores, k)
    return scores, jnp.take_along_axis(ids, at, axis=1)


def _stacked(*parts: Any) -> np.ndarray:
    """Arrays one behind the other on a first axis, padded with zeros to the largest."""
    shapes = [np.shape(part) for part in parts]
    out = np.zeros((len(parts), *map(max, *shapes)), parts[0].dtype)
    for i, shape in enumerate(shapes):
        out[(i, *map(slice, shape))] = parts[i]
    return out


def _checked(x: Any, name: str, dim: int | None = None, least: int = 1) -> np.ndarray:
    """`x` on the host; raises InputError unless it is [`least` or more, dim], of a dtype in DTYPES, and finite."""
    if not isinstance(x, np.ndarray | jax.Array):
        raise InputError(f"{name} is of type {type(x).__name__}: expected an array [n, D] of numpy or JAX")
    if x.ndim != 2 or not x.shape[1] or (dim is not None and x.shape[1] != dim):
        raise InputError(f"{name} has shape {x.shape}: expected [n, {dim or 'D'}], a row for each vector")
    if x.shape[0] < least:
        raise InputError(
            f"{name} has shape {x.shape}: expected at least {least} vector{'s, one a device' * (least > 1)}"
        )
    if str(x.dtype) not in DTYPES:
        raise InputError(f"{name} is {x.dtype}: expected {', '.join(DTYPES)}; cast it with .astype")
    x = np.asarray(x)
    bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if bad.size:
        raise InputError(
            f"{name} has NaN or infinity in {bad.size} of {len(x)} rows, first in row {bad[0]}: leave such rows out"
        )
    return x


def _read(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
    """What `save` wrote: its record and arrays."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}  # which compares checksums
        record = json.loads(arrays.pop("record").tobytes())
        found = record["format"]
        arrays |= {name: arrays[name].view("bfloat16") for name in record["bfloat16"]}
    except FileNotFoundError as error:
        raise InputError(f"there is no index {os.fspath(path)!r}: save one first, or name another file") from error
    except OSError as error:
        raise InputError(f"cannot read the index {os.fspath(path)!r} ({error.strerror or error})") from error
    except Exception as error:  # of zipfile and numpy, anything, depending on which byte is wrong
        raise InputError(
            f"{os.fspath(path)!r} is damaged, or no index that was saved: build and save it again"
        ) from error
    if found != FORMAT:
        raise InputError(
            f"{os.fspath(path)!r} has format {found}, this version reads {FORMAT}: build and save it again"
        )
    return record, arrays
