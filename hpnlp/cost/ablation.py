"""A program without the operations of one part of the model, by which the part's share of a trace is checked.

Operations of the part return zeros that the compiler does not know, so that it removes what only they need, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from hpnlp.cost.flop_count import called_jaxpr, open_jaxpr
from hpnlp.cost.parts import operation_part
from hpnlp.types import Equation


def without_part(jaxpr: core.Jaxpr | core.ClosedJaxpr, name: str) -> Callable[..., list[Any]]:
    """The function of a jaxpr in which the operations of a part return zeros.

    Scalars of the part are computed, and so are `while` loops of several parts, which may end by any of them.

    Args:
      jaxpr: The jaxpr of a function.
      name: Entry of `parts.PARTS`.

    Returns:
      A function of the jaxpr's arguments that returns the list of its results, some of them wrong.
    """
    return lambda *arguments: _evaluate(jaxpr, arguments, name, "")


def _evaluate(jaxpr: core.Jaxpr | core.ClosedJaxpr, arguments: Sequence[Any], name: str, outer: str) -> list[Any]:
    """Results of a jaxpr, whose equations outside of all parts belong to `outer`."""
    body = open_jaxpr(jaxpr)
    values = dict(zip(body.invars, arguments, strict=True))
    values |= dict(zip(body.constvars, jaxpr.consts if isinstance(jaxpr, core.ClosedJaxpr) else (), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in body.eqns:
        results = _results(equation, [read(atom) for atom in equation.invars], name, outer)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def _results(equation: Equation, operands: Sequence[Any], name: str, outer: str) -> Sequence[Any]:
    members = _member_parts(equation, outer)
    is_operation = not any(True for _ in core.jaxprs_in_params(equation.params))
    if name not in members or (is_operation and all(var.aval.shape == () for var in equation.outvars)):
        return _bound(equation, operands)
    if members == {name}:
        return [_zeros(var.aval) for var in equation.outvars]
    inner, params, primitive = _equation_part(equation, outer), equation.params, equation.primitive.name
    if primitive == "scan":
        return _bound(equation, operands, jaxpr=_changed(params["jaxpr"], name, inner))
    if primitive == "cond":
        return _bound(equation, operands, branches=tuple(_changed(b, name, inner) for b in params["branches"]))
    if primitive != "while" and called_jaxpr(equation) is not None:
        body = next(value for value in params.values() if isinstance(value, core.Jaxpr | core.ClosedJaxpr))
        return _evaluate(body, operands, name, inner)
    return _bound(equation, operands)


def _equation_part(equation: Equation, outer: str) -> str:
    return operation_part(equation.source_info.name_stack) or outer


def _member_parts(equation: Equation, outer: str) -> set[str]:
    """The parts of the operations of an equation, which may be a call or a loop."""
    part = _equation_part(equation, outer)
    equations = [e for body in core.jaxprs_in_params(equation.params) for e in open_jaxpr(body).eqns]
    return set().union(*(_member_parts(e, part) for e in equations)) or {part}


def _bound(equation: Equation, operands: Sequence[Any], **changes: Any) -> Sequence[Any]:
    """Results of an equation, with other parameters."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params({**equation.params, **changes}))
    return results if primitive.multiple_results else [results]


def _changed(jaxpr: core.Jaxpr | core.ClosedJaxpr, name: str, outer: str) -> core.ClosedJaxpr:
    """The body of a loop or a branch without the part."""
    avals: list[Any] = [var.aval for var in open_jaxpr(jaxpr).invars]
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    return jax.make_jaxpr(lambda *arguments: _evaluate(jaxpr, arguments, name, outer))(*arguments)


def _zeros(aval: Any) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0, impl=aval.dtype), aval.shape)
    return lax.optimization_barrier(jnp.zeros(aval.shape, aval.dtype))
