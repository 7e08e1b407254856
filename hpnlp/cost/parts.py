"""Parts of a model and of its training step, by which FLOPs, memory traffic and time are divided.

Code that computes a part runs under `part(name)`, a scope of JAX's name stack. Scopes do not change what is computed. Equations
of a jaxpr and operations of a compiled program carry the stack, also those of gradients, of rematerialised layers and of the
bodies of loops, so that `operation_part` finds the part that each belongs to. Of nested scopes, the innermost one counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import jax

from hpnlp.errors import InputError

# Name of a part -> its name in tables.
PARTS: dict[str, str] = {
    "embedding": "embedding",
    "projections": "mixer projections",
    "mixing": "mixing (attention scores)",
    "feed_forward": "feed-forward",
    "norms": "norms",
    "output": "output layer",
    "optimizer": "optimizer",
}
OTHER = "other"  # operations outside of all parts

_SCOPE = "part_"
_SCOPES = re.compile(rf"\b{_SCOPE}({'|'.join(PARTS)})\b")


def part(name: str):  # the type of JAX's scopes has no public name
    """A scope for the operations of a part; also a decorator of functions.

    Args:
      name: Entry of PARTS. "projections" are those of what a mixer reads and returns, and "mixing" all that a mixer computes
        with these: scores and sums of values in attention, and the recurrence or convolution of other mixers.

    Returns:
      A context manager, under which the operations are traced.

    Raises:
      InputError: Unknown name.
    """
    if name not in PARTS:
        raise InputError(f"part {name!r}: expected one of {', '.join(PARTS)}")
    return jax.named_scope(f"{_SCOPE}{name}")


def operation_part(stack: object) -> str:
    """The part that an operation belongs to.

    Args:
      stack: Name stack of an equation (`equation.source_info.name_stack`), or the name of an operation of a compiled program.

    Returns:
      Entry of PARTS; "" outside of all parts.
    """
    names = _SCOPES.findall(str(stack))
    return names[-1] if names else ""


def shares(amounts: Mapping[str, float]) -> dict[str, float]:
    """Shares of parts, all of which are listed.

    Args:
      amounts: Amounts of FLOPs, bytes or seconds by part; those of "" belong to OTHER.

    Returns:
      Share by part, in the order of PARTS and with OTHER at the end. They sum to 1, or are 0 if all amounts are.
    """
    total = math.fsum(amounts.values())
    by_part = {**dict.fromkeys(PARTS, 0.0), OTHER: amounts.get("", 0.0) + amounts.get(OTHER, 0.0)}
    by_part |= {name: amounts[name] for name in PARTS if name in amounts}
    return {name: amount / total if total else 0.0 for name, amount in by_part.items()}


def percentages(by_part: Mapping[str, float], digits: int = 1) -> dict[str, float]:
    """Shares in per cent, rounded so that they still sum to 100.

    Args:
      by_part: Result of `shares`.
      digits: Decimals.

    Returns:
      Percentage by part. The parts with the largest remainders are rounded up.
    """
    scaled = {name: share * 100 * 10**digits for name, share in by_part.items()}
    floors = {name: math.floor(value + 1e-9) for name, value in scaled.items()}
    missing = round(sum(scaled.values())) - sum(floors.values())
    for name in sorted(scaled, key=lambda name: floors[name] - scaled[name])[: max(0, missing)]:
        floors[name] += 1
    return {name: value / 10**digits for name, value in floors.items()}


def label(name: str) -> str:
    """The name of a part in tables.

    Args:
      name: Entry of PARTS, or OTHER.

    Returns:
      The words.
    """
    return PARTS.get(name, OTHER)
