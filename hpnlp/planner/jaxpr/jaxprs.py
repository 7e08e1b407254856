"""Reading of jaxprs: their needed equations, the bodies of calls and loops, and the bytes of arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import AbstractValue, ShapedArray
from jax.extend import core

from hpnlp.cost.flop_count import called_jaxpr as called_jaxpr  # part of this module's interface
from hpnlp.cost.flop_count import open_jaxpr as open_jaxpr
from hpnlp.types import Equation


def needed_equations(jaxpr: core.Jaxpr) -> list[Any]:
    """Equations that the results depend on or that have side effects; compilers remove all others as dead code.

    Args:
      jaxpr: An open jaxpr.

    Returns:
      The equations, in order.
    """
    needed, equations = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}, []
    for equation in reversed(jaxpr.eqns):
        # A collective has its mesh axis as an effect, which does not keep the collective alive.
        has_effects = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        if has_effects or not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
    return equations[::-1]


@dataclasses.dataclass(frozen=True)
class LoopBody:
    """The body of a loop. Its arguments are the carry, the constants and the slices of stacked operands, in this order."""

    jaxpr: Any  #: open jaxpr of the body
    first_carry: int  #: index of the loop's first operand that is carried; the constants of the body precede it
    carries: int  #: number of carried arrays
    slices: int  #: number of slices


def scan_body(equation: Equation) -> LoopBody:
    """The body of a `scan`.

    Args:
      equation: The scan.

    Returns:
      The body.
    """
    # The names of the counts among the parameters differ between versions of JAX: count the operands without an added axis.
    body = open_jaxpr(equation.params["jaxpr"])
    carries = _count_same_rank(equation.outvars, body.outvars)
    constants = _count_same_rank(equation.invars, body.invars) - carries
    slices = body.invars[constants + carries :]
    invars = [*body.invars[constants : constants + carries], *body.invars[:constants], *slices]
    return LoopBody(body.replace(invars=invars), constants, carries, len(slices))


def while_body(equation: Equation) -> LoopBody:
    """The body of a `while` loop.

    Args:
      equation: The loop.

    Returns:
      The body, without slices.
    """
    params = equation.params
    body = open_jaxpr(params["body_jaxpr"])
    constants, carries = params["body_nconsts"], len(equation.outvars)
    jaxpr = body.replace(invars=[*body.invars[constants : constants + carries], *body.invars[:constants]])
    return LoopBody(jaxpr, params["cond_nconsts"] + constants, carries, 0)


def _count_same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """Number of variables of a loop that have as many axes as their counterparts in its body."""
    return sum(_rank(a) == _rank(b) for a, b in zip(outer, inner, strict=True))


def _rank(atom: core.Var | core.Literal) -> int:
    return len(atom.aval.shape) if isinstance(atom.aval, ShapedArray) else 0


def is_on_host(aval: AbstractValue) -> bool:
    """Whether an array rests in host memory.

    Args:
      aval: The abstract value of a jaxpr's variable.

    Returns:
      False for values without a memory space.
    """
    return isinstance(aval, ShapedArray) and aval.memory_space == jax.memory.Space.Host


def device_bytes(aval: AbstractValue) -> int:
    """Bytes of an array in device memory, undivided.

    Args:
      aval: The abstract value of a jaxpr's variable.

    Returns:
      0 for arrays in host memory and for values that are no arrays.
    """
    if is_on_host(aval):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize if isinstance(aval, ShapedArray) else 0
