"""Who may attend to whom: frozen, hashable values that are fixed at trace time.

A mask answers for elements (`at`) and for tiles (`tile`). What is known only at run time (segments, lengths, positions)
is an operand of the attention call, never a field here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Mask(Protocol):
    """A static attention pattern over query and key positions."""

    def at(self, q: Any, k: Any) -> Any:
        """Whether query position `q` may see key position `k`, elementwise with broadcasting.

        numpy arrays in give numpy out without touching jax (plans are built while tracing); jax in gives jax.
        """
        ...

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> tuple[bool, bool]:
        """(some, every) over the inclusive ranges `q0..q1` and `k0..k1`, in O(1).

        `some` is False only where no pair is allowed, `every` is True only where all are.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Full:
    """Every query sees every key."""

    def at(self, q: Any, k: Any) -> Any:
        return (q == q) & (k == k)

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> tuple[bool, bool]:
        return True, True


@dataclasses.dataclass(frozen=True)
class Causal:
    """A query sees the keys at its own position and before it."""

    def at(self, q: Any, k: Any) -> Any:
        return k <= q

    def tile(self, q0: int, q1: int, k0: int, k1: int) -> tuple[bool, bool]:
        return k0 <= q1, k1 <= q0
