"""The patterns from which masks are made: `Causal() & (Window(256) | Global(16))`.

Everywhere i is the query position and j the key position, from 0. A pattern of one's own is a frozen dataclass that
derives from Mask and has `at` and, so that its live blocks need not be found element by element, `tile`; with `Where` a
function is enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.masks.base import NO_KEYS, Lookback, Mask
from hpnlp.ops.counter_rng import drawn_blocks
from hpnlp.types import InputError

# Positions are int32, and so are their sums with what a mask holds.
MOST = 1 << 30


def _whole(mask: Mask, **least: int) -> None:
    """Checks fields that are whole numbers, each with its least value."""
    Mask.__post_init__(mask)
    for name, bound in least.items():
        value = getattr(mask, name)
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool | np.bool_) or number < bound:
            raise InputError(f"{type(mask).__name__}.{name}={value!r}: expected a whole number of at least {bound}")
        if number > MOST and name != "seed":
            raise InputError(
                f"{type(mask).__name__}.{name}={value!r}: expected at most {MOST}, which is beyond any sequence"
            )
        object.__setattr__(mask, name, number)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """j <= i."""

    relative = True
    cheap = True

    def at(self, q: Any, k: Any) -> Any:
        return k <= q

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return k0 <= q1, k1 <= q0

    def complement_lookback(self) -> Lookback:
        return Lookback(-math.inf, -1)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return self, True

    def band(self) -> tuple[int | None, int | None]:
        return None, 0


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """i - left <= j <= i + right; right = left where it is None (Beltagy et al. 2020, "Longformer", sec. 3.1)."""

    left: int
    right: int | None = None
    relative = True
    cheap = True

    def __post_init__(self) -> None:
        if self.right is None:
            object.__setattr__(self, "right", self.left)
        _whole(self, left=0, right=0)

    def at(self, q: Any, k: Any) -> Any:
        return (k - q >= -self.left) & (k - q <= self.right)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        low, high = k0 - q1, k1 - q0
        return (low <= self.right) & (high >= -self.left), (high <= self.right) & (low >= -self.left)

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.left)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return Window(self.left // stride, (self.right or 0) // stride), True

    def band(self) -> tuple[int | None, int | None]:
        return self.left, self.right


@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """|i - j| <= width * dilation and (i - j) % dilation == 0 ("Longformer", sec. 3.1)."""

    width: int
    dilation: int
    relative = True

    def __post_init__(self) -> None:
        _whole(self, width=0, dilation=1)

    def at(self, q: Any, k: Any) -> Any:
        reach = self.width * self.dilation
        return (k - q >= -reach) & (k - q <= reach) & ((k - q) % self.dilation == 0)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        some, every = Window(self.width * self.dilation).tile(q0, q1, k0, k1)
        residue, single = Strided(self.dilation).tile(q0, q1, k0, k1)
        return some & residue, every & single

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.width * self.dilation)

    def residue_period(self) -> int:
        return self.dilation

    def fold(self, stride: int) -> tuple[Mask, bool]:
        near = Window(self.width * self.dilation // stride)
        return near & Strided(self.dilation // math.gcd(self.dilation, stride)), True


@dataclasses.dataclass(frozen=True)
class Blockwise(Mask):
    """i // block == j // block: blocks of the sequence see themselves (Qiu et al. 2020, "BlockBERT")."""

    block: int
    cheap = True

    def __post_init__(self) -> None:
        _whole(self, block=1)

    def at(self, q: Any, k: Any) -> Any:
        return q // self.block == k // self.block

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        q0, q1, k0, k1 = (x // self.block for x in (q0, q1, k0, k1))
        return (q0 <= k1) & (k0 <= q1), (q0 == k1) & (k0 == q1)

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.block - 1)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return (Blockwise(self.block // stride), True) if self.block % stride == 0 else super().fold(stride)


@dataclasses.dataclass(frozen=True)
class Strided(Mask):
    """(i - j) % stride == 0 (Child et al. 2019, "Sparse Transformer", sec. 4.3)."""

    stride: int
    relative = True

    def __post_init__(self) -> None:
        _whole(self, stride=1)

    def at(self, q: Any, k: Any) -> Any:
        return (k - q) % self.stride == 0

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        low, high = k0 - q1, k1 - q0
        return high // self.stride * self.stride >= low, (low == high) & (low % self.stride == 0) | (self.stride == 1)

    def residue_period(self) -> int:
        return self.stride

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return Strided(self.stride // math.gcd(self.stride, stride)), True


@dataclasses.dataclass(frozen=True)
class Fixed(Mask):
    """j % block >= block - columns: the summary columns of each block ("Sparse Transformer", sec. 4.3)."""

    block: int
    columns: int

    def __post_init__(self) -> None:
        _whole(self, block=1, columns=0)
        if self.columns > self.block:
            raise InputError(f"Fixed.columns={self.columns}: expected at most block={self.block}")

    def at(self, q: Any, k: Any) -> Any:
        return (k % self.block >= self.block - self.columns) & (q == q)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        first = self.block - self.columns
        into, length = k0 % self.block, k1 - k0
        # It reaches a summary column before its end; it never leaves the summary columns that it starts in.
        some = (into + length >= first) & (self.columns > 0)
        return some, (into >= first) & (into + length < self.block) | (self.columns == self.block)

    def key_indices(self, length: int) -> Sequence[int] | None:
        if 2 * self.columns > self.block:
            return None
        return np.flatnonzero(self.at(np.zeros(1, int), np.arange(length))).tolist()


@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """i < count or j < count: the first tokens see all and are seen by all ("Longformer", sec. 3.1)."""

    count: int

    def __post_init__(self) -> None:
        _whole(self, count=0)

    def at(self, q: Any, k: Any) -> Any:
        return (q < self.count) | (k < self.count)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return (q0 < self.count) | (k0 < self.count), (q1 < self.count) | (k1 < self.count)

    def lookback(self) -> Lookback:
        return Lookback(self.count, -1)  # the keys from `count` on that a query below `count` sees lie after it

    def union_terms(self) -> tuple[Mask, ...]:
        return _FirstQueries(self.count), Sinks(self.count)


@dataclasses.dataclass(frozen=True)
class GlobalAt(Mask):
    """As Global, for tokens at the positions `indices`."""

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        try:
            indices = tuple(sorted({operator.index(i) for i in self.indices}))
        except TypeError as error:
            raise InputError(f"GlobalAt.indices={self.indices!r}: expected whole numbers, as in (0, 7)") from error
        if indices and indices[0] < 0:
            raise InputError(f"GlobalAt.indices holds {indices[0]}: expected positions from 0 on")
        object.__setattr__(self, "indices", indices)

    def at(self, q: Any, k: Any) -> Any:
        return (_count(self.indices, q, q) > 0) | (_count(self.indices, k, k) > 0)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        q, k = _count(self.indices, q0, q1), _count(self.indices, k0, k1)
        return (q > 0) | (k > 0), (q == q1 - q0 + 1) | (k == k1 - k0 + 1)

    def lookback(self) -> Lookback:
        return Lookback(self.indices[-1] + 1, -1) if self.indices else NO_KEYS

    def union_terms(self) -> tuple[Mask, ...]:
        return _Queries(self.indices), _Keys(self.indices)

    def check_length(self, length: int) -> None:
        if self.indices and self.indices[-1] >= length:
            raise InputError(
                f"GlobalAt.indices holds {self.indices[-1]}, but there are {length} tokens: leave it out, or pass positions"
            )


@dataclasses.dataclass(frozen=True)
class _FirstQueries(Mask):
    """i < count."""

    count: int

    def at(self, q: Any, k: Any) -> Any:
        return (q < self.count) & (k == k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return q0 < self.count, q1 < self.count

    def query_indices(self, length: int) -> Sequence[int]:
        return range(min(self.count, length))


@dataclasses.dataclass(frozen=True)
class _Queries(Mask):
    """The queries at `indices`, ascending, see every key."""

    indices: tuple[int, ...]

    def at(self, q: Any, k: Any) -> Any:
        return (_count(self.indices, q, q) > 0) & (k == k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        count = _count(self.indices, q0, q1)
        return count > 0, count == q1 - q0 + 1

    def query_indices(self, length: int) -> Sequence[int]:
        return [i for i in self.indices if i < length]


@dataclasses.dataclass(frozen=True)
class _Keys(Mask):
    """Every query sees the keys at `indices`, ascending."""

    indices: tuple[int, ...]

    def at(self, q: Any, k: Any) -> Any:
        return (_count(self.indices, k, k) > 0) & (q == q)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        count = _count(self.indices, k0, k1)
        return count > 0, count == k1 - k0 + 1

    def key_indices(self, length: int) -> Sequence[int]:
        return [i for i in self.indices if i < length]


def _count(indices: tuple[int, ...], first: Any, last: Any) -> Any:
    """Number of `indices`, which ascend, from `first` to `last`, both included."""
    if isinstance(first, jax.Array) or isinstance(last, jax.Array):
        table = np.asarray(indices, np.int32)
        return jax.numpy.searchsorted(table, last.astype(np.int32), side="right") - jax.numpy.searchsorted(
            table, first.astype(np.int32)
        )
    table = np.asarray(indices, np.int64)
    return np.searchsorted(table, last, side="right") - np.searchsorted(table, first)


@dataclasses.dataclass(frozen=True)
class Sinks(Mask):
    """j < count: the first keys are seen by all (Xiao et al. 2023, "StreamingLLM")."""

    count: int

    def __post_init__(self) -> None:
        _whole(self, count=0)

    def at(self, q: Any, k: Any) -> Any:
        return (k < self.count) & (q == q)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return k0 < self.count, k1 < self.count

    def lookback(self) -> Lookback:
        return Lookback(self.count, -math.inf)

    def key_indices(self, length: int) -> Sequence[int]:
        return range(min(self.count, length))


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """i < count and j < count: the first tokens see each other (Raffel et al. 2020, "T5", fig. 3, with `| Causal()`)."""

    count: int

    def __post_init__(self) -> None:
        _whole(self, count=0)

    def at(self, q: Any, k: Any) -> Any:
        return (q < self.count) & (k < self.count)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return (q0 < self.count) & (k0 < self.count), (q1 < self.count) & (k1 < self.count)

    def lookback(self) -> Lookback:
        return Lookback(self.count, -math.inf)


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Mask):
    """Each block of queries sees `count` distinct blocks of keys, drawn by a hash of (seed, number of the block).

    From the first `among` blocks, or from the blocks 0 to i // block where `among` is None, which goes with Causal; where
    there are fewer than `count`, all of them (Zaheer et al. 2020, "BigBird", sec. 2).
    """

    block: int
    count: int
    seed: int = 0
    among: int | None = None

    def __post_init__(self) -> None:
        _whole(self, block=1, count=0, seed=0)
        if self.among is not None:
            _whole(self, among=0)

    def at(self, q: Any, k: Any) -> Any:
        found = (q != q) | (k != k)
        for drawn in drawn_blocks(self.seed, q // self.block, self.count, self.among):
            found = found | (drawn == k // self.block) & (k >= 0)
        return found

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        q0, q1, k0, k1 = (x // self.block for x in (q0, q1, k0, k1))
        if any(isinstance(x, jax.Array) for x in (q0, q1, k0, k1)) or np.max(q1 - q0) > 8:
            # How many rows there are is not known, or too many to go through.
            may = (k0 <= q1) if self.among is None else (k0 < self.among)
            return may & (self.count > 0), may & False
        some, every = False, True
        for row in range(int(np.max(q1 - q0)) + 1):
            inside = 0
            row = np.asarray(np.minimum(q0 + row, q1))
            for drawn in drawn_blocks(self.seed, row, self.count, self.among):
                inside = inside + ((k0 <= drawn) & (drawn <= k1) & (drawn >= 0))
            some, every = some | (inside > 0), every & (inside == k1 - k0 + 1)
        return some, every

    def lookback(self) -> Lookback:
        if self.among is None and self.count:
            return super().lookback()
        return Lookback((self.among or 0) * self.block, -math.inf)


@dataclasses.dataclass(frozen=True)
class Where(Mask):
    """`function(i, j) -> bool`, elementwise on index arrays of numpy or jax, with broadcasting.

    Write it with operators, or with jax.numpy. The live blocks are found by asking for every pair, in slices; a class with
    a `tile` of its own spares that. Calls with another function object compile anew, so define it once.
    """

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.function):
            raise InputError(f"Where({self.function!r}): expected a function of query and key")

    def __repr__(self) -> str:
        return f"Where({getattr(self.function, '__qualname__', self.function)})"

    def at(self, q: Any, k: Any) -> Any:
        shape = np.broadcast_shapes(np.shape(q), np.shape(k))
        traced = isinstance(q, jax.Array) or isinstance(k, jax.Array)
        library: Any = jax.numpy if traced else np
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            try:
                see = library.asarray(self.function(q, k))
                found = library.broadcast_to(see, shape)
            except Exception as error:  # whatever a function may raise
                if isinstance(error, jax.errors.TracerArrayConversionError) and not traced:
                    raise InputError(
                        f"{self!r} reads an array that is traced: a mask is fixed while tracing. What is known at run time is "
                        "an operand of the call: dense_mask, segment_ids, positions, kv_lengths or global_tokens"
                    ) from error
                reason = str(error).partition("\n")[0]
                raise InputError(
                    f"{self!r} failed ({reason:.200}): it is asked for arrays of queries i and keys j that broadcast, so write "
                    "function(i, j) with & | ~, where and abs, not `and`, `or`, `if` or i < j < k"
                ) from error
        if see.dtype != bool:
            raise InputError(f"{self!r} gave {see.dtype}: expected bool, True where the query may see the key")
        return found
