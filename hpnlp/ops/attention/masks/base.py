"""The mask algebra: `Mask`, its combinations `&`, `|`, `~` and `shift`.

A mask is a frozen, hashable value, fixed while tracing. It is defined pair by pair (`at`) and described for ranges of
positions (`tile`). Everything else that the executor, the caches and the kernels use is a method with a safe default that a
pattern may override: no code outside this package tests the class of a mask. Facts that are known only at run time (segments,
lengths, positions, a dense array) are operands of the attention call, never fields of a mask.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from hpnlp.ops.attention.masks.lookback import ALL_KEYS, NO_KEYS, Lookback
from hpnlp.types import InputError, check_options

# Positions of queries or keys: integers, or arrays of them that broadcast against each other.
Places = jax.Array | np.ndarray | np.integer | int

NO_TRUTH_VALUE = "a mask has no truth value: write & | ~ between masks, not `and`, `or`, `not`"
# An intersection of unions is expanded into at most this many terms; their number is the product of those of the unions.
_MAX_TERMS = 16
# Annotations of fields that hold whole numbers.
_INTEGERS = ("int", "<class 'int'>", "int | None")


class Mask:
    """A static attention pattern over query and key positions.

    A pattern is a frozen dataclass that derives from `Mask` and defines `at`. If it defines `tile` as well, its active tiles
    are found without evaluating every pair. The other methods and the class variables are hints: each has a default that is
    correct for every mask, and an override makes caches smaller or the executor faster. A class that derives from another
    pattern and redefines `at` is another mask: it gets the defaults in place of the inherited hints, and may define its own.
    """

    # Class variables of most masks. Masks that are made of other masks override `relative` and `cheap` by properties, for which
    # the type checker is silenced: both are read from instances only.

    # True if `at` depends on q - k alone, so that indices in a sequence and positions in a document give the same mask.
    relative: ClassVar[bool] = False
    # True if `at` is a few comparisons per pair, which a kernel may compute instead of loading stored tiles.
    cheap: ClassVar[bool] = False
    # True only if every pair is allowed, so that an intersection with the mask is the other mask.
    allows_all: ClassVar[bool] = False
    # Number of heads that the mask is made for; None for any number. Only PerHead has a number.
    heads: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "at" in cls.__dict__ and any("at" in base.__dict__ for base in cls.__mro__[1:] if base is not Mask):
            for name in _HINTS:
                if name not in cls.__dict__:
                    setattr(cls, name, Mask.__dict__[name])

    def __post_init__(self) -> None:
        # Subclasses are dataclasses, which the type Mask does not express.
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and value.ndim):
                raise InputError(
                    f"{type(self).__name__}.{field.name} is an array: expected a value that is known while tracing. Pass "
                    "arrays as an operand of the call: dense_mask, segment_ids, positions, kv_lengths or global_tokens"
                )
            if str(field.type) in _INTEGERS and not (value is None and field.default is None):
                object.__setattr__(self, field.name, self._whole_number(field.name))
        check_options(self)

    def _whole_number(self, name: str) -> int:
        """The value of a field as an int; InputError for a bool and for a number that need not be whole."""
        value = getattr(self, name)
        number: Any = None if isinstance(value, bool | np.bool_) else value
        try:
            return operator.index(number)
        except TypeError as error:
            raise InputError(f"{type(self).__name__}.{name}={value!r}: expected a whole number") from error

    def at(self, q: Places, k: Places) -> Any:
        """Whether queries may attend to keys.

        Args:
          q: Query positions, an array of int.
          k: Key positions, an array of int that broadcasts with `q`.

        Returns:
          bool, in the broadcast shape: numpy for numpy arrays, since schedules are made on the host while tracing, and jax for
          jax arrays.

        Raises:
          NotImplementedError: The class does not define `at`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `at`, the pairs that it allows")

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        """Whether tiles allow a pair, and whether they allow every pair.

        Args:
          q0: First query position of each tile. All bounds may be arrays that broadcast, so write `&` and `|`.
          q1: Last query position, included.
          k0: First key position.
          k1: Last key position, included.

        Returns:
          `(some, every)`: `some` is False only if the tile allows no pair, and `every` is True only if it allows all. With the
          default `(True, False)`, which is sound for every mask, active tiles are found by evaluating `at` for every pair.
        """
        return True, False

    def lookback(self) -> Lookback:
        """Bound on the keys that queries see, which decides the size of caches.

        Returns:
          The bound. The default has none.
        """
        return ALL_KEYS

    def complement_lookback(self) -> Lookback:
        """`lookback` of `~self`.

        Returns:
          The bound. The default has none.
        """
        return ALL_KEYS

    def union_terms(self) -> tuple[Mask, ...]:
        """Masks whose union is this mask. The executor may compute them apart and merge the results.

        Returns:
          The masks; by default the mask itself.
        """
        return (self,)

    def factors(self) -> tuple[Mask, ...]:
        """Masks whose intersection is this mask.

        Returns:
          The masks; by default the mask itself.
        """
        return (self,)

    def residue_period(self) -> int:
        """A period p such that only pairs with `q % p == k % p` are allowed.

        Returns:
          The period; 1, the default, for any mask.
        """
        return 1

    def fold(self, stride: int) -> tuple[Mask, bool]:
        """The mask within one residue class of the positions modulo `stride`.

        Args:
          stride: Number of residue classes, over 1.

        Returns:
          `(mask, exact)`. If `exact`, then `mask.at(a, b) == self.at(r + stride * a, r + stride * b)` for every residue r.
          Otherwise `mask.tile` is sound for all residues at once, and `mask.at` is undefined.
        """
        return _FoldedTiles(self, stride), False

    def query_indices(self, length: int) -> Sequence[int] | None:
        """The only queries that see a key, if they are few.

        Args:
          length: Number of queries, T.

        Returns:
          Positions below `length`, ascending; None, the default, for any queries.
        """
        return None

    def key_indices(self, length: int) -> Sequence[int] | None:
        """The only keys that a query sees, if they are few.

        Args:
          length: Number of keys, S.

        Returns:
          Positions below `length`, ascending; None, the default, for any keys.
        """
        return None

    def band(self) -> tuple[int | None, int | None] | None:
        """The mask as a band around the diagonal.

        Returns:
          `(left, right)` if exactly the pairs with `-left <= k - q <= right` are allowed, where None in the pair is no bound;
          None, the default, for other masks.
        """
        return None

    def check_length(self, length: int) -> None:
        """Checks that a sequence has all tokens that the mask names.

        Args:
          length: Number of tokens of the sequence.

        Raises:
          InputError: The mask names a position from `length` on.
        """
        for child in self.children():
            child.check_length(length)

    def children(self) -> Iterator[Mask]:
        """The masks among the fields.

        Yields:
          Each mask, in the order of the fields.
        """
        # Subclasses are dataclasses, which the type Mask does not express.
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            if isinstance(value := getattr(self, field.name), Mask):
                yield value

    def needs_search(self) -> bool:
        """Whether active tiles must be found by evaluating `at`, because `tile` bounds nothing for a part of the mask.

        Returns:
          True if the mask or one of its children has the default `tile`.
        """
        if type(self).at is Mask.at:  # only tiles are defined
            return False
        return type(self).tile is Mask.tile or any(child.needs_search() for child in self.children())

    def by_head(self, heads: int) -> dict[Mask, tuple[int, ...]]:
        """The distinct masks of the heads.

        Args:
          heads: Number of query heads, N.

        Returns:
          Each distinct mask with its heads, ascending; here the mask itself with all heads.
        """
        return {self: tuple(range(heads))}

    def __bool__(self) -> bool:
        raise InputError(NO_TRUTH_VALUE)

    def __and__(self, other: object) -> Any:
        if not isinstance(other, Mask):
            return NotImplemented
        if self.allows_all:
            return other
        return self if other.allows_all else And(self, other)

    def __or__(self, other: object) -> Any:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def shift(self, n: int) -> Mask:
        """The mask with its keys moved by `n` positions to the right.

        Args:
          n: Number of positions, which may be negative.

        Returns:
          A mask with `at(q, k) = self.at(q, k - n)`.

        Raises:
          InputError: `n` is not a whole number.
        """
        return Shift(self, n)

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        """The mask as an array.

        Args:
          length: Number of queries, T.
          keys: Number of keys, S; None, the default, for T.

        Returns:
          bool `[T, S]`.
        """
        shape = (length, length if keys is None else keys)
        return self.at(np.arange(shape[0])[:, None], np.arange(shape[1])[None, :])


# The class variables and methods that describe one definition of `at` and hold for no other.
_HINTS = (
    "relative", "cheap", "allows_all", "tile", "lookback", "complement_lookback", "union_terms", "factors", "residue_period",
    "fold", "query_indices", "key_indices", "band", "check_length", "needs_search",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    relative = True
    allows_all = True

    def at(self, q: Places, k: Places) -> Any:
        return (q == q) & (k == k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return True, True

    def complement_lookback(self) -> Lookback:
        return NO_KEYS

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return self, True

    def band(self) -> tuple[int | None, int | None]:
        return None, None


class _Pair(Mask):
    """Base of masks that combine two masks pair by pair."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left.relative and self.right.relative

    @property
    def cheap(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left.cheap and self.right.cheap

    def fold(self, stride: int) -> tuple[Mask, bool]:
        (left, left_exact), (right, right_exact) = self.left.fold(stride), self.right.fold(stride)
        # The subclasses And and Or are dataclasses of two masks.
        return type(self)(left, right), left_exact and right_exact  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True)
class And(_Pair):
    """The intersection of two masks: the pairs that both allow."""

    left: Mask
    right: Mask

    def at(self, q: Places, k: Places) -> Any:
        return self.left.at(q, k) & self.right.at(q, k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        (left_some, left_every), (right_some, right_every) = (m.tile(q0, q1, k0, k1) for m in (self.left, self.right))
        return left_some & right_some, left_every & right_every

    def lookback(self) -> Lookback:
        return self.left.lookback().intersection(self.right.lookback())

    def complement_lookback(self) -> Lookback:
        return self.left.complement_lookback().union(self.right.complement_lookback())

    def union_terms(self) -> tuple[Mask, ...]:
        products = tuple(And(a, b) for a in self.left.union_terms() for b in self.right.union_terms())
        return products if len(products) <= _MAX_TERMS else (self,)

    def factors(self) -> tuple[Mask, ...]:
        return *self.left.factors(), *self.right.factors()

    def band(self) -> tuple[int | None, int | None] | None:
        a, b = self.left.band(), self.right.band()
        if a is None or b is None:
            return None
        return _tighter(a[0], b[0]), _tighter(a[1], b[1])


@dataclasses.dataclass(frozen=True)
class Or(_Pair):
    """The union of two masks: the pairs that at least one allows."""

    left: Mask
    right: Mask

    def at(self, q: Places, k: Places) -> Any:
        return self.left.at(q, k) | self.right.at(q, k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        (left_some, left_every), (right_some, right_every) = (m.tile(q0, q1, k0, k1) for m in (self.left, self.right))
        return left_some | right_some, left_every | right_every

    def lookback(self) -> Lookback:
        return self.left.lookback().union(self.right.lookback())

    def complement_lookback(self) -> Lookback:
        return self.left.complement_lookback().intersection(self.right.complement_lookback())

    def union_terms(self) -> tuple[Mask, ...]:
        return *self.left.union_terms(), *self.right.union_terms()


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The complement of a mask: the pairs that it does not allow."""

    mask: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.relative

    def at(self, q: Places, k: Places) -> Any:
        return ~self.mask.at(q, k)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        some_pair, every_pair = self.mask.tile(q0, q1, k0, k1)
        return np.True_ ^ every_pair, np.True_ ^ some_pair

    def lookback(self) -> Lookback:
        return self.mask.complement_lookback()

    def complement_lookback(self) -> Lookback:
        return self.mask.lookback()

    def fold(self, stride: int) -> tuple[Mask, bool]:
        mask, exact = self.mask.fold(stride)
        return Not(mask), exact


@dataclasses.dataclass(frozen=True)
class Shift(Mask):
    """A mask with its keys moved by `keys` positions to the right."""

    mask: Mask
    keys: int

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.relative

    @property
    def cheap(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.cheap

    def at(self, q: Places, k: Places) -> Any:
        return self.mask.at(q, k - self.keys)

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        return self.mask.tile(q0, q1, k0 - self.keys, k1 - self.keys)

    def lookback(self) -> Lookback:
        return self.mask.lookback().shifted(self.keys)

    def complement_lookback(self) -> Lookback:
        return self.mask.complement_lookback().shifted(self.keys)

    def band(self) -> tuple[int | None, int | None] | None:
        if (band := self.mask.band()) is None:
            return None
        left, right = band
        return None if left is None else left - self.keys, None if right is None else right + self.keys

    def check_length(self, length: int) -> None:
        pass  # the positions that the inner mask names are not those of the sequence


@dataclasses.dataclass(frozen=True)
class _FoldedTiles(Mask):
    """Tiles of a mask over positions divided by `stride`, sound for every residue class at once. `at` is undefined."""

    mask: Mask
    stride: int

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        last = self.stride - 1
        return self.mask.tile(q0 * self.stride, q1 * self.stride + last, k0 * self.stride, k1 * self.stride + last)


def _tighter(a: int | None, b: int | None) -> int | None:
    """The smaller bound, where None is no bound."""
    return min((bound for bound in (a, b) if bound is not None), default=None)
