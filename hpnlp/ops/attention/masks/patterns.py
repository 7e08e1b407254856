"""The elementary patterns, from which masks are composed: `Causal() & (Window(256) | Global(16))`.

i is the query position and j the key position, both from 0. A new pattern is a frozen dataclass that derives from Mask and
defines `at` and, so that its active tiles need not be searched pair by pair, `tile`. With `Where`, a function is enough.
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

from hpnlp.ops.attention.masks.base import Mask, Places
from hpnlp.ops.attention.masks.lookback import ALL_KEYS, NO_KEYS, Lookback
from hpnlp.ops.attention.masks.selected_tokens import FirstQueries, KeysAt, QueriesAt, count_between
from hpnlp.ops.helpers.counter_rng import drawn_blocks
from hpnlp.types import REQUIRED, InputError, option

# Largest value of a field: positions are int32, and the sum of a position and a field must not overflow.
_MAX_FIELD = 1 << 30
# RandomBlocks.tile draws the key blocks of every query block of a tile if the last is at most this far from the first.
_MAX_DRAWN_SPAN = 8
# Largest RandomBlocks.count: drawing takes operations by its square. BigBird draws 3.
_MAX_DRAWN_BLOCKS = 64


def _count_option(help: str, least: int = 0, most: int = _MAX_FIELD) -> Any:
    return option(REQUIRED, help, least=least, most=most)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Keys up to the query: j <= i."""

    relative = True
    cheap = True

    def at(self, q: Places, k: Places) -> Any:
        return k <= q

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return k0 <= q1, k1 <= q0

    def complement_lookback(self) -> Lookback:
        return Lookback(-math.inf, -1)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return self, True

    def band(self) -> tuple[int | None, int | None]:
        return None, 0


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Keys near the query: i - left <= j <= i + right.

    References:
      Beltagy et al. 2020, "Longformer", section 3.1.
    """

    left: int = _count_option("Number of keys before the query.")
    right: int | None = option(None, "Number of keys after the query; None for `left`.", least=0, most=_MAX_FIELD)
    relative = True
    cheap = True

    def __post_init__(self) -> None:
        if self.right is None:
            object.__setattr__(self, "right", self.left)
        Mask.__post_init__(self)

    @property
    def _right(self) -> int:
        return self.left if self.right is None else self.right

    def at(self, q: Places, k: Places) -> Any:
        return (k - q >= -self.left) & (k - q <= self._right)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        low, high = k0 - q1, k1 - q0
        return (low <= self._right) & (high >= -self.left), (high <= self._right) & (low >= -self.left)

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.left)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return Window(self.left // stride, (self.right or 0) // stride), True

    def band(self) -> tuple[int | None, int | None]:
        return self.left, self.right


@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """Every dilation-th key near the query: |i - j| <= width * dilation and (i - j) % dilation == 0.

    References:
      Beltagy et al. 2020, "Longformer", section 3.1.
    """

    width: int = _count_option("Number of keys on each side of the query.")
    dilation: int = _count_option("Distance between the keys.", 1)
    relative = True

    def at(self, q: Places, k: Places) -> Any:
        reach = self.width * self.dilation
        return (k - q >= -reach) & (k - q <= reach) & ((k - q) % self.dilation == 0)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        some_near, every_near = Window(self.width * self.dilation).tile(q0, q1, k0, k1)
        some_residue, every_residue = Strided(self.dilation).tile(q0, q1, k0, k1)
        return some_near & some_residue, every_near & every_residue

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.width * self.dilation)

    def residue_period(self) -> int:
        return self.dilation

    def fold(self, stride: int) -> tuple[Mask, bool]:
        near = Window(self.width * self.dilation // stride)
        return near & Strided(self.dilation // math.gcd(self.dilation, stride)), True


@dataclasses.dataclass(frozen=True)
class Blockwise(Mask):
    """Keys in the block of the query: i // block == j // block.

    References:
      Qiu et al. 2020, "Blockwise self-attention for long document understanding" (BlockBERT).
    """

    block: int = _count_option("Tokens in a block.", 1)
    cheap = True

    def at(self, q: Places, k: Places) -> Any:
        return q // self.block == k // self.block

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        q0, q1, k0, k1 = (x // self.block for x in (q0, q1, k0, k1))
        return (q0 <= k1) & (k0 <= q1), (q0 == k1) & (k0 == q1)

    def lookback(self) -> Lookback:
        return Lookback(-math.inf, self.block - 1)

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return (Blockwise(self.block // stride), True) if self.block % stride == 0 else super().fold(stride)


@dataclasses.dataclass(frozen=True)
class Strided(Mask):
    """Every stride-th key, counted from the query: (i - j) % stride == 0.

    References:
      Child et al. 2019, "Generating long sequences with sparse transformers", section 4.3.
    """

    stride: int = _count_option("Distance between the keys.", 1)
    relative = True

    def at(self, q: Places, k: Places) -> Any:
        return (k - q) % self.stride == 0

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        low, high = k0 - q1, k1 - q0
        return high // self.stride * self.stride >= low, (low == high) & (low % self.stride == 0) | (self.stride == 1)

    def residue_period(self) -> int:
        return self.stride

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return Strided(self.stride // math.gcd(self.stride, stride)), True


@dataclasses.dataclass(frozen=True)
class Fixed(Mask):
    """The last keys of every block: j % block >= block - columns.

    References:
      Child et al. 2019, "Generating long sequences with sparse transformers", section 4.3.
    """

    block: int = _count_option("Tokens in a block.", 1)
    columns: int = _count_option("Number of visible keys at the end of each block, at most `block`.")

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        if self.columns > self.block:
            raise InputError(f"Fixed.columns={self.columns}: expected at most block={self.block}")

    def at(self, q: Places, k: Places) -> Any:
        return (k % self.block >= self.block - self.columns) & (q == q)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        first = self.block - self.columns
        start, length = k0 % self.block, k1 - k0
        some_column = (start + length >= first) & (self.columns > 0)
        return some_column, (start >= first) & (start + length < self.block) | (self.columns == self.block)

    def key_indices(self, length: int) -> Sequence[int] | None:
        if 2 * self.columns > self.block:  # not few
            return None
        return np.flatnonzero(self.at(np.zeros(1, int), np.arange(length))).tolist()


@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """Global tokens at the start, which see and are seen by all tokens: i < count or j < count.

    References:
      Beltagy et al. 2020, "Longformer", section 3.1.
    """

    count: int = _count_option("Number of global tokens.")

    def at(self, q: Places, k: Places) -> Any:
        return (q < self.count) | (k < self.count)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return (q0 < self.count) | (k0 < self.count), (q1 < self.count) | (k1 < self.count)

    def lookback(self) -> Lookback:
        # Keys from `count` on are seen by queries below `count` only, which are before them.
        return Lookback(self.count, -1)

    def union_terms(self) -> tuple[Mask, ...]:
        return FirstQueries(self.count), Sinks(self.count)


@dataclasses.dataclass(frozen=True)
class GlobalAt(Mask):
    """Global tokens at given positions, which see and are seen by all tokens: i in indices or j in indices.

    Attributes:
      indices: Positions, at least 0; stored without duplicates, ascending.
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        try:
            indices = tuple(sorted({operator.index(i) for i in self.indices}))
        except TypeError as error:
            raise InputError(f"GlobalAt.indices={self.indices!r}: expected whole numbers, as in (0, 7)") from error
        if indices and indices[0] < 0:
            raise InputError(f"GlobalAt.indices holds {indices[0]}: expected positions of at least 0")
        object.__setattr__(self, "indices", indices)

    def at(self, q: Places, k: Places) -> Any:
        return (count_between(self.indices, q, q) > 0) | (count_between(self.indices, k, k) > 0)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        q, k = count_between(self.indices, q0, q1), count_between(self.indices, k0, k1)
        return (q > 0) | (k > 0), (q == q1 - q0 + 1) | (k == k1 - k0 + 1)

    def lookback(self) -> Lookback:
        return Lookback(self.indices[-1] + 1, -1) if self.indices else NO_KEYS

    def union_terms(self) -> tuple[Mask, ...]:
        return QueriesAt(self.indices), KeysAt(self.indices)

    def check_length(self, length: int) -> None:
        if self.indices and self.indices[-1] >= length:
            raise InputError(
                f"GlobalAt.indices holds {self.indices[-1]}, but there are {length} tokens: expected positions below {length}; "
                "remove the others, or pass `positions`"
            )


@dataclasses.dataclass(frozen=True)
class Sinks(Mask):
    """Attention sinks, the first keys, which all queries see: j < count.

    References:
      Xiao et al. 2023, "Efficient streaming language models with attention sinks" (StreamingLLM).
    """

    count: int = _count_option("Number of keys.")

    def at(self, q: Places, k: Places) -> Any:
        return (k < self.count) & (q == q)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return k0 < self.count, k1 < self.count

    def lookback(self) -> Lookback:
        return Lookback(self.count, -math.inf)

    def key_indices(self, length: int) -> Sequence[int]:
        return range(min(self.count, length))


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """The tokens of a prefix, which see each other: i < count and j < count. A prefix LM is `Causal() | Prefix(count)`.

    References:
      Raffel et al. 2020, "Exploring the limits of transfer learning" (T5), figure 3.
    """

    count: int = _count_option("Number of tokens in the prefix.")

    def at(self, q: Places, k: Places) -> Any:
        return (q < self.count) & (k < self.count)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return (q0 < self.count) & (k0 < self.count), (q1 < self.count) & (k1 < self.count)

    def lookback(self) -> Lookback:
        return Lookback(self.count, -math.inf)


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Mask):
    """Random key blocks: each query block sees `count` distinct key blocks.

    The blocks are a hash of (seed, number of the query block), independent of the length of the sequence. If there are fewer
    than `count` blocks to draw from, a query block sees all of them.

    References:
      Zaheer et al. 2020, "Big Bird", section 2.
    """

    block: int = _count_option("Tokens in a block.", 1)
    count: int = _count_option("Number of key blocks of each query block.", most=_MAX_DRAWN_BLOCKS)
    seed: int = option(0, "Seed of the hash.", least=0)
    among: int | None = option(
        None,
        "The blocks are drawn from the first `among` blocks; None draws from the blocks up to the query's, for causal "
        "attention.",
        least=0,
        most=_MAX_FIELD,
    )

    def at(self, q: Places, k: Places) -> Any:
        allowed = (q != q) | (k != k)
        for drawn in drawn_blocks(self.seed, q // self.block, self.count, self.among):
            allowed = allowed | (drawn == k // self.block) & (k >= 0)
        return allowed

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        q0, q1, k0, k1 = (x // self.block for x in (q0, q1, k0, k1))
        traced = any(isinstance(x, jax.Array) for x in (q0, q1, k0, k1))
        if traced or np.max(q1 - q0) > _MAX_DRAWN_SPAN:
            # The number of query blocks in a tile is unknown, or too large to draw the key blocks of each.
            in_range = (k0 <= q1) if self.among is None else (k0 < self.among)
            return in_range & (self.count > 0), in_range & False
        some_pair, every_pair = False, True
        for offset in range(int(np.max(q1 - q0)) + 1):
            row = np.asarray(np.minimum(q0 + offset, q1))
            inside = 0
            for drawn in drawn_blocks(self.seed, row, self.count, self.among):
                inside = inside + ((k0 <= drawn) & (drawn <= k1) & (drawn >= 0))
            some_pair, every_pair = some_pair | (inside > 0), every_pair & (inside == k1 - k0 + 1)
        return some_pair, every_pair

    def lookback(self) -> Lookback:
        if self.among is None and self.count:
            return ALL_KEYS
        return Lookback((self.among or 0) * self.block, -math.inf)


@dataclasses.dataclass(frozen=True)
class Where(Mask):
    """The pairs for which a function returns True.

    Active tiles are found by evaluating the function for every pair. A pattern class with a `tile` method avoids this.

    Attributes:
      function: `function(i, j) -> bool`, elementwise on index arrays of numpy or jax that broadcast, written with operators or
        jax.numpy. Masks are equal if their functions are the same object, and another function object compiles anew: define
        the function once.
    """

    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        if not callable(self.function):
            raise InputError(f"Where.function={self.function!r}: expected a function of query and key positions")

    def __repr__(self) -> str:
        return f"Where({getattr(self.function, '__qualname__', self.function)})"

    def at(self, q: Places, k: Places) -> Any:
        traced = isinstance(q, jax.Array) or isinstance(k, jax.Array)
        library: Any = jax.numpy if traced else np
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            try:
                values = library.asarray(self.function(q, k))
                allowed = library.broadcast_to(values, np.broadcast_shapes(np.shape(q), np.shape(k)))
            except Exception as error:  # a function may raise anything
                raise self._explained(error, traced) from error
        if values.dtype != bool:
            raise InputError(f"{self!r} returned {values.dtype}: expected bool, True where the query may see the key")
        return allowed

    def _explained(self, error: Exception, traced: bool) -> InputError:
        """The error to raise in place of one that the function raised."""
        if isinstance(error, jax.errors.TracerArrayConversionError) and not traced:
            return InputError(
                f"{self!r} reads an array that is traced: expected values that are known while tracing. Pass arrays as an "
                "operand of the call: dense_mask, segment_ids, positions, kv_lengths or global_tokens"
            )
        reason = str(error).partition("\n")[0]
        return InputError(
            f"{self!r} failed ({reason:.200}): it is called with arrays i and j that broadcast, so write function(i, j) with "
            "& | ~, where and abs, not `and`, `or`, `if` or i < j < k"
        )
