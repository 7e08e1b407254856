"""Masks that differ between heads, and the check of mask arguments."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hpnlp.ops.attention.masks.base import NO_TRUTH_VALUE, Mask
from hpnlp.ops.attention.masks.lookback import NO_KEYS, Lookback
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class PerHead:
    """A mask for each query head, to be passed in place of a mask.

    `&`, `|`, `~` and `shift` apply to the mask of every head. A PerHead is not a Mask and cannot be inside another mask. Its
    methods are those of Mask: `lookback` and `relative` hold for all heads, and `to_dense` returns bool `[N, T, S]`.

    Attributes:
      masks: The mask of each head, N masks.
    """

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "masks", tuple(self.masks))
        wrong = [mask for mask in self.masks if not isinstance(mask, Mask)]
        if wrong or not self.masks:
            raise InputError(f"PerHead.masks={tuple(wrong[:1])}: expected a tuple of at least one Mask")

    @property
    def relative(self) -> bool:
        return all(mask.relative for mask in self.masks)

    @property
    def heads(self) -> int:
        return len(self.masks)

    def __bool__(self) -> bool:
        raise InputError(NO_TRUTH_VALUE)

    def __and__(self, other: object) -> Any:
        return self._combined(other, operator.and_)

    def __or__(self, other: object) -> Any:
        return self._combined(other, operator.or_)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> PerHead:
        return PerHead(tuple(~mask for mask in self.masks))

    def shift(self, n: int) -> PerHead:
        return PerHead(tuple(mask.shift(n) for mask in self.masks))

    def _combined(self, other: object, combine: Callable[[Mask, Mask], Mask]) -> Any:
        if isinstance(other, Mask):
            other = PerHead((other,) * len(self.masks))
        if not isinstance(other, PerHead):
            return NotImplemented
        if len(other.masks) != len(self.masks):
            raise InputError(
                f"cannot combine PerHead of {len(self.masks)} masks with PerHead of {len(other.masks)}: expected as many"
            )
        return PerHead(tuple(combine(a, b) for a, b in zip(self.masks, other.masks, strict=True)))

    def lookback(self) -> Lookback:
        bound = NO_KEYS
        for mask in self.masks:
            bound = bound.union(mask.lookback())
        return bound

    def band(self) -> None:
        return None

    def check_length(self, length: int) -> None:
        for mask in self.masks:
            mask.check_length(length)

    def by_head(self, heads: int) -> dict[Mask, tuple[int, ...]]:
        if len(self.masks) != heads:
            raise InputError(f"PerHead of {len(self.masks)} masks for {heads} query heads: expected one mask per head")
        return {mask: tuple(i for i, other in enumerate(self.masks) if other == mask) for mask in self.masks}

    def to_dense(self, length: int, keys: int | None = None) -> np.ndarray:
        return np.stack([mask.to_dense(length, keys) for mask in self.masks])


AnyMask = Mask | PerHead


def check_mask(mask: object) -> None:
    """Checks that a value can be used as a mask.

    Args:
      mask: Any value.

    Raises:
      InputError: `mask` is not a Mask or PerHead, or one of its classes is not a frozen dataclass, or it is not hashable.
    """
    if not isinstance(mask, Mask | PerHead):
        value = f"an array of {mask.dtype}" if isinstance(mask, jax.Array | np.ndarray | np.generic) else repr(mask)
        raise InputError(f"mask is {value}: expected a Mask such as Causal(); pass an array of bool as dense_mask")
    for head_mask in mask.masks if isinstance(mask, PerHead) else (mask,):
        _check_dataclass(head_mask)


def _check_dataclass(mask: Mask) -> None:
    # `dataclasses` has no function that tells whether a dataclass is frozen.
    if not dataclasses.is_dataclass(mask) or not mask.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError(
            f"{type(mask).__name__} is not a frozen dataclass: write @dataclasses.dataclass(frozen=True) above the class, so "
            "that masks with equal fields are equal"
        )
    for child in mask.children():
        _check_dataclass(child)
    try:
        hash(mask)
    except TypeError as error:
        raise InputError(
            f"{type(mask).__name__} cannot be a key of the cache of schedules ({error}): use hashable fields, such as tuples "
            "in place of lists"
        ) from error
