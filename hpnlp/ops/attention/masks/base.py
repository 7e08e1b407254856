"""The mask algebra: `Mask`, its combinations `&`, `|`, `~` and `shift`, and `PerHead`.

A mask is a frozen, hashable value, fixed at trace time. It is defined by its elements (`at`) and described for ranges of
positions (`tile`). Everything else that the executor, the caches and the kernels use is a method with a safe default that a
pattern may override: no code outside this package asks for the class of a mask. Facts that are known only at run time
(segments, lengths, positions, a dense array) are operands of the attention call, never fields of a mask.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from hpnlp.ops.attention.masks.lookback import ALL_KEYS, NO_KEYS, Lookback
from hpnlp.types import InputError

_TRUTH = "a mask is neither true nor false: write & | ~ between masks, not `and`, `or`, `not`"
# An intersection of unions is expanded into at most this many terms.
_MAX_TERMS = 16


class Mask:
    """A static attention pattern over query and key positions.

    A pattern is a frozen dataclass that derives from `Mask` and defines `at`. With `tile` as well, its active tiles are
    found without evaluating every pair. The other methods are hints: each has a default that is correct for every mask, and
    an override makes caches smaller or the executor faster. A class that derives from another pattern and redefines `at`
    loses the hints of that pattern, because they describe another mask; it may define its own.
    """

    # True if `at` depends on i - j alone, so that it is the same over places in a row and positions in a document.
    relative: ClassVar[bool] = False
    # True if `at` is a few comparisons a pair, which a kernel may compute instead of loading stored tiles.
    cheap: ClassVar[bool] = False
    # Number of heads that the mask is made for; None for any number. Only PerHead has a number.
    heads: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "at" in cls.__dict__ and cls.at is not Mask.at and any("at" in base.__dict__ for base in cls.__mro__[1:-2]):
            for name in _HINTS:
                if name not in cls.__dict__:
                    setattr(cls, name, Mask.__dict__[name])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if getattr(value, "ndim", 0) or isinstance(value, jax.Array):
                raise InputError(
                    f"{type(self).__name__}.{field.name} is an array: a mask is fixed while tracing. What is known at run "
                    "time is an operand of the call: dense_mask, segment_ids, positions, kv_lengths or global_tokens"
                )

    def at(self, q: Any, k: Any) -> Any:
        """Whether query position `q` may see key position `k`.

        Args:
          q: Query positions, an array of int.
          k: Key positions, an array of int that broadcasts with `q`.

        Returns:
          bool, in the broadcast shape. numpy in gives numpy, without touching jax (schedules are made while tracing); jax in
          gives jax.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `at`, which defines which query sees which key")

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        """Whether some pair, and whether every pair, of a tile is allowed.

        Args:
          q0: First query position of each tile. The bounds may be arrays that broadcast, so write `&` and `|`.
          q1: Last query position, included.
          k0: First key position.
          k1: Last key position, included.

        Returns:
          `(some, every)`: `some` is False only where no pair is allowed, `every` is True only where all are. The default
          `(True, False)` claims nothing, and the active tiles are then found by calling `at` for every pair.
        """
        return True, False

    def lookback(self) -> Lookback:
        """Bound on how far back queries see: decides what a cache keeps. The default has no bound."""
        return ALL_KEYS

    def complement_lookback(self) -> Lookback:
        """`lookback` of `~self`. The default has no bound."""
        return ALL_KEYS

    def union_terms(self) -> tuple[Mask, ...]:
        """Masks whose union is this mask. The executor may run them apart and merge them. The default is the mask itself."""
        return (self,)

    def factors(self) -> tuple[Mask, ...]:
        """Masks whose intersection is this mask. The default is the mask itself."""
        return (self,)

    def residue_period(self) -> int:
        """A period p such that only pairs with `q % p == k % p` are allowed; 1, the default, claims nothing."""
        return 1

    def fold(self, stride: int) -> tuple[Mask, bool]:
        """The mask within one residue class of the positions modulo `stride`.

        Args:
          stride: Number of residue classes, over 1.

        Returns:
          `(mask, same)`. Where `same` is True, `mask.at(a, b) == self.at(r + stride * a, r + stride * b)` for every residue r.
          Otherwise `mask.tile` is sound for all residues at once and `mask.at` is undefined.
        """
        return _Folded(self, stride), False

    def query_indices(self, length: int) -> Sequence[int] | None:
        """The only queries below `length` that see anything, ascending, where they are few; None, the default, for any."""
        return None

    def key_indices(self, length: int) -> Sequence[int] | None:
        """The only keys below `length` that are seen, ascending, where they are few; None, the default, for any."""
        return None

    def band(self) -> tuple[int | None, int | None] | None:
        """`(left, right)` where the mask is exactly `-left <= k - q <= right`; None in the pair is no bound.

        The default, None in place of the pair, is for masks that are no band.
        """
        return None

    def check_length(self, length: int) -> None:
        """Raises InputError where the mask names tokens that a sequence of `length` tokens does not have."""
        for part in self.parts():
            part.check_length(length)

    def parts(self) -> Iterator[Mask]:
        """The masks among the fields."""
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            if isinstance(value := getattr(self, field.name), Mask):
                yield value

    def needs_search(self) -> bool:
        """True if `tile` claims nothing for a part of the mask, whose active tiles must be found by calling `at`."""
        if type(self).at is Mask.at:
            return False
        return type(self).tile is Mask.tile or any(part.needs_search() for part in self.parts())

    def by_head(self, heads: int) -> dict[Mask, tuple[int, ...]]:
        """Each distinct mask and the heads that have it, of `heads` heads."""
        return {self: tuple(range(heads))}

    def __bool__(self) -> bool:
        raise InputError(_TRUTH)

    def __and__(self, other: Any) -> Any:
        if not isinstance(other, Mask):
            return NotImplemented
        return self if isinstance(other, Full) else And(self, other)

    def __or__(self, other: Any) -> Any:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def shift(self, n: int) -> Mask:
        """The mask with its keys moved: `m.shift(n).at(i, j) = m.at(i, j - n)`."""
        return Shift(self, n)

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        """bool `[T, S]`, with S = T where `keys` is None."""
        shape = (length, length if keys is None else keys)
        return self.at(np.arange(shape[0])[:, None], np.arange(shape[1])[None, :])


_HINTS = (
    "relative", "cheap", "tile", "lookback", "complement_lookback", "union_terms", "factors", "residue_period", "fold",
    "query_indices", "key_indices", "band", "check_length", "needs_search", "__and__",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    relative = True

    def at(self, q: Any, k: Any) -> Any:
        return (q == q) & (k == k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return True, True

    def complement_lookback(self) -> Lookback:
        return NO_KEYS

    def fold(self, stride: int) -> tuple[Mask, bool]:
        return self, True

    def band(self) -> tuple[int | None, int | None]:
        return None, None

    def __and__(self, other: Any) -> Any:
        return other if isinstance(other, Mask) else NotImplemented


class _Pair(Mask):
    """Two masks."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left.relative and self.right.relative

    @property
    def cheap(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left.cheap and self.right.cheap

    def fold(self, stride: int) -> tuple[Mask, bool]:
        (left, same), (right, also) = self.left.fold(stride), self.right.fold(stride)
        return type(self)(left, right), same and also  # pyright: ignore[reportCallIssue]


@dataclasses.dataclass(frozen=True)
class And(_Pair):
    """The pairs that both masks allow."""

    left: Mask
    right: Mask

    def at(self, q: Any, k: Any) -> Any:
        return self.left.at(q, k) & self.right.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        (some, every), (also, all_of) = self.left.tile(q0, q1, k0, k1), self.right.tile(q0, q1, k0, k1)
        return some & also, every & all_of

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
        return _least(a[0], b[0]), _least(a[1], b[1])


@dataclasses.dataclass(frozen=True)
class Or(_Pair):
    """The pairs that one mask or both allow."""

    left: Mask
    right: Mask

    def at(self, q: Any, k: Any) -> Any:
        return self.left.at(q, k) | self.right.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        (some, every), (also, all_of) = self.left.tile(q0, q1, k0, k1), self.right.tile(q0, q1, k0, k1)
        return some | also, every | all_of

    def lookback(self) -> Lookback:
        return self.left.lookback().union(self.right.lookback())

    def complement_lookback(self) -> Lookback:
        return self.left.complement_lookback().intersection(self.right.complement_lookback())

    def union_terms(self) -> tuple[Mask, ...]:
        return *self.left.union_terms(), *self.right.union_terms()


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """The pairs that the mask forbids."""

    mask: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.relative

    def at(self, q: Any, k: Any) -> Any:
        return ~self.mask.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        some, every = self.mask.tile(q0, q1, k0, k1)
        return np.True_ ^ every, np.True_ ^ some

    def lookback(self) -> Lookback:
        return self.mask.complement_lookback()

    def complement_lookback(self) -> Lookback:
        return self.mask.lookback()

    def fold(self, stride: int) -> tuple[Mask, bool]:
        mask, same = self.mask.fold(stride)
        return Not(mask), same


@dataclasses.dataclass(frozen=True)
class Shift(Mask):
    """`at(i, j) = mask.at(i, j - keys)`."""

    mask: Mask
    keys: int

    def __post_init__(self) -> None:
        Mask.__post_init__(self)
        try:
            object.__setattr__(self, "keys", operator.index(self.keys))
        except TypeError as error:
            raise InputError(f"shift({self.keys!r}): expected a whole number of keys") from error

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.relative

    @property
    def cheap(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.cheap

    def at(self, q: Any, k: Any) -> Any:
        return self.mask.at(q, k - self.keys)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
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
        """The keys of the inner mask have moved, so that its positions are not those of the sequence."""


@dataclasses.dataclass(frozen=True)
class _Folded(Mask):
    """The tiles of a mask over positions divided by `stride`, sound for every residue class at once. It has no `at`."""

    mask: Mask
    stride: int

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        last = self.stride - 1
        return self.mask.tile(q0 * self.stride, q1 * self.stride + last, k0 * self.stride, k1 * self.stride + last)


@dataclasses.dataclass(frozen=True)
class PerHead:
    """A mask for each query head. It combines with masks, and stands inside no other mask."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        wrong = [mask for mask in self.masks if not isinstance(mask, Mask)]
        if wrong or not self.masks:
            raise InputError(f"PerHead({wrong[:1] or ''}): expected a tuple of one mask or more")

    @property
    def relative(self) -> bool:
        """True if every mask depends on i - j alone."""
        return all(mask.relative for mask in self.masks)

    @property
    def heads(self) -> int:
        """Number of heads that the mask is made for."""
        return len(self.masks)

    def __bool__(self) -> bool:
        raise InputError(_TRUTH)

    def __and__(self, other: Any) -> Any:
        return self._with(other, operator.and_)

    def __or__(self, other: Any) -> Any:
        return self._with(other, operator.or_)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> PerHead:
        return PerHead(tuple(~mask for mask in self.masks))

    def shift(self, n: int) -> PerHead:
        """Each mask with its keys moved."""
        return PerHead(tuple(mask.shift(n) for mask in self.masks))

    def _with(self, other: Any, combine: Any) -> Any:
        if isinstance(other, Mask):
            other = PerHead((other,) * len(self.masks))
        if not isinstance(other, PerHead):
            return NotImplemented
        if len(other.masks) != len(self.masks):
            raise InputError(f"PerHead of {len(self.masks)} masks with one of {len(other.masks)}: expected as many")
        return PerHead(tuple(combine(a, b) for a, b in zip(self.masks, other.masks, strict=True)))

    def lookback(self) -> Lookback:
        """The bound that holds for every head."""
        bound = NO_KEYS
        for mask in self.masks:
            bound = bound.union(mask.lookback())
        return bound

    def band(self) -> None:
        """None: heads differ."""

    def check_length(self, length: int) -> None:
        """Raises InputError where a mask names tokens that a sequence of `length` tokens does not have."""
        for mask in self.masks:
            mask.check_length(length)

    def by_head(self, heads: int) -> dict[Mask, tuple[int, ...]]:
        """Each distinct mask and the heads that have it.

        Raises:
          InputError: The number of masks is not `heads`.
        """
        if len(self.masks) != heads:
            raise InputError(f"PerHead of {len(self.masks)} masks for {heads} query heads: expected one mask a head")
        return {mask: tuple(i for i, other in enumerate(self.masks) if other == mask) for mask in self.masks}

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        """bool `[N, T, S]`, with S = T where `keys` is None."""
        return np.stack([mask.to_dense(length, keys) for mask in self.masks])


def check(mask: Any) -> None:
    """Raises InputError unless `mask` is a Mask or PerHead, and it and the masks within it are frozen and hashable."""
    if not isinstance(mask, Mask | PerHead):
        kind = f"an array of {mask.dtype}" if hasattr(mask, "dtype") else repr(mask)
        raise InputError(f"mask is {kind}: expected a Mask such as Causal(); an array of bool goes to dense_mask")
    if isinstance(mask, PerHead):
        for each in mask.masks:
            check(each)
        return
    parameters = getattr(type(mask), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise InputError(
            f"{type(mask).__name__} is not a frozen dataclass: write @dataclasses.dataclass(frozen=True) above the class, so "
            "that masks with the same fields are the same mask"
        )
    for part in mask.parts():
        check(part)
    try:
        hash(mask)
    except TypeError as error:
        raise InputError(
            f"{type(mask).__name__} cannot be a key of the schedules that are cached for it ({error}): give it fields that are "
            "hashable, as tuples in place of lists"
        ) from error


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)
