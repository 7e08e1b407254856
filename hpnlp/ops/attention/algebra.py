"""Who may attend to whom: what every mask does, and how masks combine.

A mask is a frozen, hashable value, fixed at trace time. It answers for elements (`at`) and for tiles (`tile`). What is
known only at run time (segments, lengths, positions, a dense array) is an operand of the attention call, never a field.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import jax
import numpy as np

from hpnlp.types import InputError

_TRUTH = "a mask is neither true nor false: write & | ~ between masks, not `and`, `or`, `not`"
_PACKAGE = __name__.rpartition(".")[0] + "."


class Mask:
    """A static attention pattern over query and key positions."""

    # Whether it depends on i - j alone; then it says the same of places in a row and of positions in a document.
    relative: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        known = [base.__name__ for base in cls.__bases__ if base is not Mask and base.__module__.startswith(_PACKAGE)]
        if known:  # plans and caches know what a pattern does by its class
            raise InputError(
                f"class {cls.__name__}({known[0]}): derive from Mask, and combine patterns with & | ~ or ask them in `at` and "
                "`tile`"
            )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if getattr(value, "ndim", 0) or isinstance(value, jax.Array):
                raise InputError(
                    f"{type(self).__name__}.{field.name} is an array: a mask is fixed while tracing. What is known at run "
                    "time is an operand of the call: dense_mask, segment_ids, positions, kv_lengths or global_tokens"
                )

    def at(self, q: Any, k: Any) -> Any:
        """Whether query position `q` may see key position `k`, elementwise with broadcasting.

        numpy arrays in give numpy out without touching jax (plans are built while tracing); jax in gives jax.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `at`, which says who may see whom")

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        """(some, every) over the inclusive ranges `q0..q1` and `k0..k1`.

        `some` is False only where no pair is allowed, `every` is True only where all are. The bounds may be arrays of numpy
        or jax that broadcast, so write `&` and `|`, not `and` and `or`. Not sure of any tile as it stands here: the live
        ones are then found by asking `at` for every pair.
        """
        return True, False

    def __bool__(self) -> bool:
        raise InputError(_TRUTH)

    def __and__(self, other: Any) -> Any:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Any) -> Any:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def shift(self, n: int) -> Mask:
        """The mask with its keys moved: `m.shift(n).at(i, j) = m.at(i, j - n)`."""
        return Shift(self, n)

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        """bool [T, S]; S = T where `keys` is None."""
        shape = (length, length if keys is None else keys)
        return self.at(np.arange(shape[0])[:, None], np.arange(shape[1])[None, :])

    def density(self, length: int, keys: int | None = None) -> float:
        """The share of the T x S pairs that it allows; takes the time of the pairs in partly allowed blocks."""
        from hpnlp.ops.attention.blocks import pairs

        keys = length if keys is None else keys
        return pairs(self, length, keys) / max(length * keys, 1)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """What both allow."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.left.relative and self.right.relative)

    def at(self, q: Any, k: Any) -> Any:
        return self.left.at(q, k) & self.right.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        (some, every), (also, all_of) = self.left.tile(q0, q1, k0, k1), self.right.tile(q0, q1, k0, k1)
        return some & also, every & all_of


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """What one of them allows."""

    left: Mask
    right: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.left.relative and self.right.relative)

    def at(self, q: Any, k: Any) -> Any:
        return self.left.at(q, k) | self.right.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        (some, every), (also, all_of) = self.left.tile(q0, q1, k0, k1), self.right.tile(q0, q1, k0, k1)
        return some | also, every | all_of


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """What it forbids."""

    mask: Mask

    @property
    def relative(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.mask.relative)

    def at(self, q: Any, k: Any) -> Any:
        return ~self.mask.at(q, k)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        some, every = self.mask.tile(q0, q1, k0, k1)
        return np.True_ ^ every, np.True_ ^ some


@dataclasses.dataclass(frozen=True)
class Shift(Mask):
    """at(i, j) = mask.at(i, j - keys)."""

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
        return bool(self.mask.relative)

    def at(self, q: Any, k: Any) -> Any:
        return self.mask.at(q, k - self.keys)

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        return self.mask.tile(q0, q1, k0 - self.keys, k1 - self.keys)


@dataclasses.dataclass(frozen=True)
class PerHead:
    """A mask for each query head. It combines with masks, but stands inside none."""

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        wrong = [mask for mask in self.masks if not isinstance(mask, Mask)]
        if wrong or not self.masks:
            raise InputError(f"PerHead({wrong[:1] or ''}): expected a tuple of one mask or more")

    @property
    def relative(self) -> bool:
        return all(mask.relative for mask in self.masks)

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

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        """bool [N, T, S]."""
        return np.stack([mask.to_dense(length, keys) for mask in self.masks])

    def density(self, length: int, keys: int | None = None) -> float:
        """The mean over heads of the share of pairs that is allowed."""
        return sum(mask.density(length, keys) for mask in self.masks) / len(self.masks)


def check(mask: Mask | PerHead) -> None:
    """Raises InputError where a mask, or one that it is made of, is not a value."""
    if isinstance(mask, PerHead):
        for one in mask.masks:
            check(one)
        return
    parameters = getattr(type(mask), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise InputError(
            f"{type(mask).__name__} is not a frozen dataclass: write @dataclasses.dataclass(frozen=True) above the class, so "
            "that masks with the same fields are the same mask"
        )
    for field in dataclasses.fields(mask):  # pyright: ignore[reportArgumentType]
        if isinstance(part := getattr(mask, field.name), Mask):
            check(part)
    try:
        hash(mask)
    except TypeError as error:
        raise InputError(
            f"{type(mask).__name__} cannot be a key of what is planned for it ({error}): give it fields that are hashable, as "
            "tuples in place of lists"
        ) from error
