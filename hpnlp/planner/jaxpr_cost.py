"""What a program asks of one device, from its jaxpr: bytes of temporaries, and operations with their FLOPs and bytes.

The jaxpr is read as a compiler would lay it out that fuses what it can: arrays have a place of their own where a product, a
loop or a collective makes or reads them, and what lies between is computed on the way. A place is free again after its last
reader.
Inside a `shard_map` shapes are a device's own; outside, an array is as divided as what it is computed from.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from hpnlp.measure import PRODUCTS
from hpnlp.ops.attention.block_sparse.flash import SCOPE
from hpnlp.planner.collectives import live
from hpnlp.planner.liveness import Step, Value, is_hosted, peak, size_of

# Primitives whose result is another view of the same bytes.
VIEWS = {
    "copy", "expand_dims", "mesh_cast", "name", "optimization_barrier", "pcast", "pvary", "reshape", "reshard",
    "sharding_constraint", "squeeze", "stop_gradient",
}  # fmt: skip
# Those whose operands and results have places of their own.
PLACED = {
    *PRODUCTS, "all_gather", "all_gather_invariant", "all_to_all", "cumlogsumexp", "cummax", "cumsum", "device_put",
    "dynamic_update_slice", "ffi_call", "gather", "pallas_call", "ppermute", "psum", "psum_invariant", "reduce_scatter",
    "scatter", "scatter-add", "sort", "top_k",
}  # fmt: skip
# Those that may write over their first operand.
WRITES = {"dynamic_update_slice", "scatter", "scatter-add"}
# Those that are not computed twice where two readers want them.
DEAR = {"cos", "div", "erf", "exp", "log", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"}
# Those that read more than they write, and are done once.
SUMS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}
LOOPS = {"cond", "scan", "shard_map", "while"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """A kernel. flops: of its products, of operands of this dtype. bytes: read and written. times: how often it runs.

    fused: part of attention, of which accelerators make one kernel that reads and writes no scores. hosted: its bytes come from
    the host's memory, or go there.
    """

    flops: float
    bytes: float
    fused: bool = False
    hosted: bool = False
    times: int = 1
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Program:
    """peak: the most bytes of temporaries that are live at once."""

    peak: int
    operations: tuple[Operation, ...]

    @property
    def flops(self) -> float:
        return sum((one.flops * one.times for one in self.operations), 0.0)

    @property
    def flops_by_dtype(self) -> dict[str, float]:
        """From the most."""
        found: dict[str, float] = {}
        for one in self.operations:
            found[one.dtype] = found.get(one.dtype, 0.0) + one.flops * one.times
        return {dtype: found[dtype] for dtype in sorted(found, key=lambda dtype: -found[dtype]) if found[dtype]}

    @property
    def bytes(self) -> float:
        return sum((one.bytes * one.times for one in self.operations), 0.0)

    @property
    def hosted(self) -> float:
        """Bytes from and to the host's memory."""
        return sum((one.bytes * one.times for one in self.operations if one.hosted), 0.0)

    def seconds(self, flops: Mapping[str, float], rate: float, fuses: bool) -> float:
        """At least what it takes, with so many FLOP/s by dtype (float32's for one that is not named), and bytes a second to and
        from memory (Williams et al. 2009). fuses: whether attention is one kernel."""
        each = (
            one.times
            * max(one.flops / flops.get(one.dtype, flops["float32"]), 0.0 if fuses and one.fused else one.bytes / rate)
            for one in self.operations
            if not one.hosted
        )
        return sum(each, 0.0)


def read(
    jaxpr: Any, parts: Mapping[int, int] | None = None, *, donated: bool = False, carried: int = 0, cut: int = 0
) -> Program:
    """What a program asks of one device.

    jaxpr: as `jax.jit(f).trace(...).jaxpr` has it. parts: of how many devices each argument is shared out over, by its number;
    1 where it is not named. donated: what the program returns takes the place of its arguments. carried: how many of the first
    arguments are temporaries, which it may write over. cut: how many of the last ones a loop cuts out of stacks: into
    a place of their own where a product or several operations read them.
    A `cond` counts with its dearest branch, a loop of unknown length as one turn. Cost: a walk through the equations.
    """
    return _read(jaxpr, parts or {}, donated=donated, carried=carried, cut=cut)[0]


def _read(
    jaxpr: Any, parts: Mapping[int, int], own: bool = False, *, donated: bool = False, carried: int = 0, cut: int = 0
) -> tuple[Program, list[int]]:
    """As `read`, and of how many devices each result is shared out over. own: whether shapes are those of a device's part."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    reader = _Reader(own)
    arguments = [reader.array(var.aval, parts.get(at, 1), given=at >= carried) for at, var in enumerate(jaxpr.invars)]
    whole = len(arguments) - cut
    arguments[whole:] = [Value(0, one.parts, frozenset((one,)), cut=True) for one in arguments[whole:]]
    reader.steps.append(Step((), arguments[:carried], 0))
    found = reader.run(jaxpr, arguments)
    results = [reader.placed(value, atom.aval) for value, atom in zip(found, jaxpr.outvars, strict=True)]
    return Program(peak(reader.steps, results, donated), tuple(reader.operations)), [one.parts for one in results]


class _Reader:
    def __init__(self, own: bool) -> None:
        self.steps: list[Step] = []
        self.operations: list[Operation] = []
        self.slices: dict[tuple[Value, int], Value] = {}
        self.fused = False
        self.own = own

    def parts(self, operands: Sequence[Value]) -> int:
        return 1 if self.own else max((operand.parts for operand in operands), default=1)

    def array(self, aval: Any, parts: int = 1, *, given: bool = False) -> Value:
        parts = 1 if self.own else parts
        array = Value(size_of(aval) // parts, parts, frozenset(), given)
        array.roots = frozenset((array,))
        return array

    def placed(self, value: Value, aval: Any) -> Value:
        """The value in a place of its own."""
        if value in value.roots:
            return value
        array = self.array(aval, value.parts)
        roots = list(value.roots)
        if value.cut:  # and read from there: accelerators make no copy, and it takes no time
            self.steps.append(Step(roots, [array], 0))
        else:
            self.step(roots, [array], over=[(root, array) for root in roots])
        return array

    def step(
        self, reads: Sequence[Value], makes: Sequence[Value], flops: float = 0.0, over: Any = (), **of_it: Any
    ) -> None:
        self.steps.append(Step(reads, makes, 0, over))
        self.operations.append(Operation(flops, float(sum(a.size for a in (*reads, *makes))), self.fused, **of_it))

    def run(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """What is returned, calls written out."""
        outer = self.fused
        env: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        env.update((var, self.array(var.aval, given=True)) for var in jaxpr.constvars)

        equations = live(jaxpr)
        reads = [*(atom for equation in equations for atom in equation.invars), *jaxpr.outvars]
        uses = collections.Counter(atom for atom in reads if not isinstance(atom, core.Literal))
        # A product that is rounded at once is written as rounded.
        rounded = {
            equation.invars[0]: equation.outvars[0].aval
            for equation in equations
            if equation.primitive.name == "convert_element_type" and uses[equation.invars[0]] == 1
        }
        written: set[Any] = set()

        def value(atom: Any) -> Value:
            return self.array(atom.aval, given=True) if isinstance(atom, core.Literal) else env[atom]

        env.update((var, self.placed(env[var], var.aval)) for var in jaxpr.invars if env[var].cut and uses[var] > 1)
        for equation in equations:
            name, outs = equation.primitive.name, equation.outvars
            operands = [value(atom) for atom in equation.invars]
            self.fused = outer or SCOPE in str(equation.source_info.name_stack)
            body = _called(equation)
            if name in PRODUCTS and outs[0] in rounded:
                written.add(outs[0])
            if name in VIEWS or (name == "convert_element_type" and equation.invars[0] in written):
                made = [_constrained(equation, operand) for operand in operands]
            elif body is not None:
                made = self.run(body, operands)
            elif name == "shard_map":
                made = self._of_device(equation, operands)
            elif name == "scan" and 0 < equation.params["length"] <= equation.params.get("unroll", 1):
                made = self._unrolled(equation, operands)
            elif name in PLACED or name in LOOPS:
                reads = [self.placed(one, atom.aval) for one, atom in zip(operands, equation.invars, strict=True)]
                env.update(
                    (a, r) for a, r in zip(equation.invars, reads, strict=True) if not isinstance(a, core.Literal)
                )
                made = self._loop(equation, reads) if name in LOOPS else self._kernel(equation, reads, rounded)
            elif name in SUMS or (name in DEAR and uses[outs[0]] > 1):
                roots = frozenset(root for operand in operands for root in operand.roots)
                made = [self.placed(Value(0, self.parts(operands), roots), outs[0].aval)]
            else:
                roots = frozenset(root for operand in operands for root in operand.roots)
                parts = self.parts(operands)
                made = [Value(0, parts if size_of(var.aval) > 8 else 1, roots) for var in outs]
            env.update(zip(outs, made, strict=True))
        self.fused = outer
        return [value(atom) for atom in jaxpr.outvars]

    def _of_device(self, equation: Any, operands: Sequence[Value]) -> list[Value]:
        """A `shard_map`, written out as a compiler does."""
        body, outer = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"]), self.own
        self.own = True
        found = self.run(body, operands)
        self.own, made = outer, []
        for var, atom, one in zip(equation.outvars, body.outvars, found, strict=True):
            one = one if one in one.roots else dataclasses.replace(one)
            one.parts = max(1, size_of(var.aval) // max(size_of(atom.aval), 1))  # on the host, either is 0
            made.append(one)
        return made

    def _unrolled(self, equation: Any, operands: Sequence[Value]) -> list[Value]:
        """A loop whose turns all stand side by side: compilers fuse what one leaves for another, and make no stacks."""
        body, consts, carried = _body(equation)
        const, carry, stacks = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
        length, made = equation.params["length"], []
        for turn in range(length)[:: -1 if equation.params["reverse"] else 1]:
            slices = [
                one.turns[turn] if one.turns else self._slice(one, turn, atom.aval)
                for one, atom in zip(stacks, body.invars[carried + consts :], strict=True)
            ]
            found = self.run(body, [*carry, *const, *slices])
            carry = [self.placed(one, atom.aval) for one, atom in zip(found, body.outvars[:carried], strict=False)]
            made.append(found[carried:])
        made = made[:: -1 if equation.params["reverse"] else 1]
        stacked = [
            Value(0, max(one.parts for one in each), frozenset().union(*(one.roots for one in each)), turns=each)
            for each in zip(*made, strict=True)
        ]
        return [*carry, *stacked]

    def _slice(self, stack: Value, turn: int, aval: Any) -> Value:
        """A turn's part of a stack, cut out once for all loops."""
        if stack not in stack.roots:
            return Value(0, stack.parts, stack.roots)
        if (stack, turn) not in self.slices:
            self.slices[stack, turn] = self.placed(Value(0, stack.parts, frozenset((stack,)), cut=True), aval)
        return self.slices[stack, turn]

    def _kernel(self, equation: Any, reads: Sequence[Value], rounded: Mapping[Any, Any]) -> list[Value]:
        name = equation.primitive.name
        parts = 1 if name in PRODUCTS else self.parts(reads)
        made = [
            self.array(rounded.get(var, var.aval) if name in PRODUCTS else var.aval, parts) for var in equation.outvars
        ]
        shared = self.parts(reads)
        over = [(reads[0], made[0])] if name in WRITES else ()
        hosted = any(is_hosted(atom.aval) for atom in (*equation.invars, *equation.outvars))
        flops = PRODUCTS[name](equation) / shared if name in PRODUCTS else 0.0
        self.step(
            reads, made, flops, over, hosted=hosted, dtype=equation.invars[0].aval.dtype.name if flops else "float32"
        )
        return made

    def _loop(self, equation: Any, reads: Sequence[Value]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        over: Any = ()
        if name == "cond":
            given = {at: one.parts for at, one in enumerate(reads[1:])}
            branches = [_read(branch, given, self.own) for branch in params["branches"]]
            inner, parts = max(branches, key=lambda one: (one[0].flops, one[0].bytes))
            made = [self.array(var.aval, n) for var, n in zip(equation.outvars, parts, strict=True)]
            inside = inner.peak - sum(array.size for array in made)
        else:
            body, consts, carried = _body(equation)
            inner, parts = self._turn(equation, body, reads, consts, carried)
            made = [self.array(var.aval, n) for var, n in zip(equation.outvars, parts, strict=True)]
            inside = inner.peak - sum(array.size for array in made[:carried])
            over = list(zip(reads[consts:], made[:carried], strict=False))
        self.steps.append(Step(reads, made, max(0, inside), over))
        times = params["length"] if name == "scan" else 1
        self.operations += [
            dataclasses.replace(one, times=one.times * times, fused=one.fused or self.fused) for one in inner.operations
        ]
        return made

    def _turn(
        self, equation: Any, body: Any, reads: Sequence[Value], consts: int, carried: int
    ) -> tuple[Program, list[int]]:
        """A turn of a loop, and of how many devices each result is shared out over.

        What the loop carries is as divided as a turn leaves it: compilers lay out so what it begins with, as zeros. What is
        given to the program counts as whole within.
        """
        cut = len(body.invars) - consts - carried if equation.primitive.name == "scan" else 0
        first, rest = reads[consts : consts + carried], len(body.invars) - cut - carried
        of_body = [*first, *reads[consts - rest : consts], *reads[len(reads) - cut :]]
        while True:
            given = {at: 1 if one.given else one.parts for at, one in enumerate(of_body)}
            found, parts = _read(body, given, self.own, carried=carried, cut=cut)
            apart = [(one, n) for one, n in zip(first, parts, strict=False) if n > one.parts and not one.given]
            if not apart:
                return found, parts
            for one, n in apart:
                one.size, one.parts = one.size * one.parts // n, n


def _body(equation: Any) -> tuple[Any, int, int]:
    """The body of a loop, what it carries first; how many of the loop's operands come before these; how many they are."""
    params = equation.params
    closed = params["body_jaxpr" if equation.primitive.name == "while" else "jaxpr"]
    body = getattr(closed, "jaxpr", closed)
    if equation.primitive.name == "while":
        carried, consts = len(equation.outvars), params["body_nconsts"]
        before = params["cond_nconsts"] + consts
    else:  # what is stacked has an axis more outside; the names of other counts change between versions of jax
        carried = sum(map(_alike, zip(equation.outvars, body.outvars, strict=True)))
        consts = before = sum(map(_alike, zip(equation.invars, body.invars, strict=True))) - carried
    first = [*body.invars[consts : consts + carried], *body.invars[:consts], *body.invars[consts + carried :]]
    return body.replace(invars=first), before, carried


def _alike(pair: tuple[Any, Any]) -> bool:
    return len({len(getattr(atom.aval, "shape", ())) for atom in pair}) == 1


def _called(equation: Any) -> Any:
    """The jaxpr of an equation that only calls it."""
    name, inner = equation.primitive.name, list(core.jaxprs_in_params(equation.params))
    if not inner or name in LOOPS or name in PLACED:
        return None
    body = getattr(inner[0], "jaxpr", inner[0])
    return body if len(body.invars) == len(equation.invars) and len(body.outvars) == len(equation.outvars) else None


def _constrained(equation: Any, value: Value) -> Value:
    """The value, as divided as the equation says."""
    sharding, aval = equation.params.get("sharding"), equation.outvars[0].aval
    # Within a `shard_map` the mesh is taken, and a constraint says nothing.
    if not hasattr(sharding, "spec") or not any(sharding.spec):
        return value
    parts = math.prod(aval.shape) // max(1, math.prod(sharding.shard_shape(aval.shape)))
    return value if parts == value.parts else Value(0, parts, value.roots)
