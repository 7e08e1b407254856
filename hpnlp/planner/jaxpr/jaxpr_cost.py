"""Cost of a program on one device, from its jaxpr: peak memory of its temporary buffers, and its operations.

`program_cost` walks the equations of a jaxpr in order. HANDLERS maps a primitive to the function that accounts for it; a
primitive that is not in the table is a call, whose body is walked in its place, or an elementwise operation.

The compiler is modelled as one that fuses whatever it can. An array has a buffer where a product, a loop, a collective or
another kernel reads or writes it; elementwise operations between those are fused into their readers and take no memory. A
buffer is freed after its last reader (`liveness.peak_memory`). Inside `shard_map` shapes are those of one device; outside, an
array is divided over as many devices as the operands that it is computed from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jax.sharding import NamedSharding

from hpnlp.cost.flop_count import PRODUCTS, iteration_count
from hpnlp.planner.jaxpr.jaxprs import (
    LoopBody,
    called_jaxpr,
    device_bytes,
    is_on_host,
    open_jaxpr,
    scan_body,
    while_body,
)
from hpnlp.planner.jaxpr.liveness import Step, Value, peak_memory
from hpnlp.planner.jaxpr.walker import Handler, Walker
from hpnlp.planner.roofline import ProgramCost
from hpnlp.types import Equation

if TYPE_CHECKING:
    from jax.core import AbstractValue
    from jax.extend.core import ClosedJaxpr, Jaxpr

# Arrays of at most this number of bytes are scalars (counters, random keys), which no layout divides.
SCALAR_BYTES = 8


def program_cost(
    jaxpr: Jaxpr | ClosedJaxpr, shards: Mapping[int, int] | None = None, *, donated: bool = False
) -> ProgramCost:
    """Peak memory and operations of a program on one device.

    A `cond` counts as its most expensive branch, a `while` loop as one iteration, or as many as
    `flop_count.expected_iterations` states.

    Args:
      jaxpr: As `jax.jit(f).trace(...).jaxpr` returns it.
      shards: Number of devices that each argument is divided over, by the index of the argument; 1 where it is missing.
      donated: Whether results are written to the buffers of the arguments.

    Returns:
      The cost, without the memory of arguments and constants.

    Cost: one walk over the equations, and another over the body of a loop for each time that its carry turns out to be
    divided over more devices than its initial value.
    """
    return _walk_program(jaxpr, shards or {}, donated=donated)[0]


def _walk_program(
    jaxpr: Jaxpr | ClosedJaxpr,
    shards: Mapping[int, int],
    per_device: bool = False,
    *,
    donated: bool = False,
    temporaries: int = 0,
    slices: int = 0,
) -> tuple[ProgramCost, list[int]]:
    """Cost of a program or of a loop's body, and the number of shards of each result.

    per_device: whether shapes are those of one device. temporaries: how many of the first arguments are temporary buffers,
    which may be written over. slices: how many of the last arguments a loop slices out of stacked operands.
    """
    jaxpr = open_jaxpr(jaxpr)
    walker = Walker(_handle, per_device)
    arguments = [
        walker.buffer(var.aval, shards.get(index, 1), external=index >= temporaries)
        for index, var in enumerate(jaxpr.invars)
    ]
    first_slice = len(arguments) - slices
    arguments[first_slice:] = [
        Value(0, stack.shards, frozenset((stack,)), sliced=True) for stack in arguments[first_slice:]
    ]
    walker.steps.append(Step((), arguments[:temporaries]))
    values = walker.walk(jaxpr, arguments)
    results = [walker.materialize(value, atom.aval) for value, atom in zip(values, jaxpr.outvars, strict=True)]
    cost = ProgramCost(peak_memory(walker.steps, results, donated), tuple(walker.operations))
    return cost, [result.shards for result in results]


def _handle(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Accounts for an equation, and returns the values of its results."""
    return HANDLERS.get(equation.primitive.name, _call_or_elementwise)(walker, equation, operands)


def _sources(operands: Sequence[Value]) -> frozenset[Value]:
    return frozenset(source for operand in operands for source in operand.sources)


def _elementwise(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Fuses the results into their readers."""
    sources, shards = _sources(operands), walker.shards(operands)
    return [Value(0, shards if device_bytes(var.aval) > SCALAR_BYTES else 1, sources) for var in equation.outvars]


def _expensive(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Fuses the result into a single reader, and stores it for several, which would compute it twice."""
    single = walker.scope.uses[equation.outvars[0]] <= 1
    return (_elementwise if single else _reduction)(walker, equation, operands)


def _reduction(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Stores the result: a reduction reads more than it writes, so that no reader repeats it."""
    value = Value(0, walker.shards(operands), _sources(operands))
    return [walker.materialize(value, equation.outvars[0].aval)]


def _view(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Returns the operands, divided as a sharding constraint states."""
    sharding, aval = equation.params.get("sharding"), equation.outvars[0].aval
    # Inside `shard_map` all mesh axes are manual, and constraints are without effect.
    if not isinstance(sharding, NamedSharding) or not any(sharding.spec):
        return list(operands)
    shards = math.prod(aval.shape) // max(1, math.prod(sharding.shard_shape(aval.shape)))
    return [value if value.shards == shards else Value(0, shards, value.sources) for value in operands]


def _convert(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Converts on the fly; the result of a product was written in the dtype of its only reader."""
    handler = _view if equation.invars[0] in walker.scope.rounded else _elementwise
    return handler(walker, equation, operands)


def _kernel(walker: Walker, equation: Equation, operands: Sequence[Value], in_place: bool = False) -> list[Value]:
    """Stores operands and results, as one operation; with `in_place`, the first result may take the first operand's buffer."""
    reads = walker.materialize_operands(equation, operands)
    shards = walker.shards(reads)
    writes = [walker.buffer(var.aval, shards) for var in equation.outvars]
    aliases = [(reads[0], writes[0])] if in_place else ()
    on_host = any(is_on_host(atom.aval) for atom in (*equation.invars, *equation.outvars))
    walker.record(reads, writes, aliases=aliases, on_host=on_host)
    return writes


def _update(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Writes over the first operand where it is not read again."""
    return _kernel(walker, equation, operands, in_place=True)


def _product(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """A matrix product or convolution: each device computes its share of the FLOPs.

    The result counts as undivided until a constraint divides it, since the contracted axis may be the one that is divided.
    """
    reads = walker.materialize_operands(equation, operands)
    writes = [walker.buffer(walker.scope.rounded.get(var, var.aval)) for var in equation.outvars]
    flops = PRODUCTS[equation.primitive.name](equation) / walker.shards(reads)
    on_host = any(is_on_host(atom.aval) for atom in (*equation.invars, *equation.outvars))
    dtype = equation.invars[0].aval.dtype.name if flops else "float32"
    walker.record(reads, writes, flops, on_host=on_host, dtype=dtype)
    return writes


def _call_or_elementwise(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Walks the body of an equation that only calls it (jit, checkpoint, custom derivatives) in place of the equation."""
    body = called_jaxpr(equation)
    if body is not None:
        return walker.walk(body, operands)
    return _elementwise(walker, equation, operands)


def _shard_map(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Walks the body, whose shapes are those of one device, in place of the equation, as compilers inline it."""
    body, outer = open_jaxpr(equation.params["jaxpr"]), walker.per_device
    walker.per_device = True
    values = walker.walk(body, operands)
    walker.per_device = outer
    results = []
    for var, atom, value in zip(equation.outvars, body.outvars, values, strict=True):
        # A fused value is copied, because its other readers in the body are not divided over more devices.
        result = value if value.has_buffer else dataclasses.replace(value)
        result.shards = max(1, device_bytes(var.aval) // max(device_bytes(atom.aval), 1))  # 0 // 0 on the host
        results.append(result)
    return results


def _cond(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Counts the branch with the most FLOPs, of equal ones that with the most bytes."""
    reads = walker.materialize_operands(equation, operands)
    shards = {index: read.shards for index, read in enumerate(reads[1:])}  # the first is the index of the branch
    branches = [_walk_program(branch, shards, walker.per_device) for branch in equation.params["branches"]]
    body, result_shards = max(branches, key=lambda branch: (branch[0].flops, branch[0].bytes))
    writes = [walker.buffer(var.aval, count) for var, count in zip(equation.outvars, result_shards, strict=True)]
    walker.record_body(reads, writes, body, scratch=body.peak - sum(write.size for write in writes))
    return writes


def _scan(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Walks each iteration of a fully unrolled loop, and one iteration of any other."""
    length = equation.params["length"]
    if 0 < length <= equation.params.get("unroll", 1):
        return _unrolled(walker, equation, operands)
    return _record_loop(walker, equation, operands, scan_body(equation), length)


def _while(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Counts as many iterations as the loop's scope states, and one without such a scope.

    Loops with a scope work on one slice of their operands after another, so that all iterations together read them once.
    """
    stated, reads = iteration_count(equation), walker.materialize_operands(equation, operands)
    runs, first = 1 if stated is None else stated, len(walker.operations)
    results = _record_loop(walker, equation, reads, while_body(equation), runs)
    walker.operations[first:] = [
        dataclasses.replace(operation, bytes=operation.bytes / max(runs, 1)) for operation in walker.operations[first:]
    ]
    return results


HANDLERS: dict[str, Handler] = {
    "convert_element_type": _convert,
    "shard_map": _shard_map,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    **dict.fromkeys(PRODUCTS, _product),
    # The result is another view of the same bytes.
    **dict.fromkeys(
        (
            "copy", "expand_dims", "mesh_cast", "name", "optimization_barrier", "pcast", "pvary", "reshape", "reshard",
            "sharding_constraint", "squeeze", "stop_gradient",
        ),
        _view,
    ),
    **dict.fromkeys(("dynamic_update_slice", "scatter", "scatter-add"), _update),
    **dict.fromkeys(
        (
            "all_gather", "all_gather_invariant", "all_to_all", "cumlogsumexp", "cummax", "cumsum", "device_put", "ffi_call",
            "gather", "pallas_call", "ppermute", "psum", "psum_invariant", "reduce_scatter", "sort", "top_k",
        ),
        _kernel,
    ),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"), _reduction
    ),
    **dict.fromkeys(("cos", "div", "erf", "exp", "log", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"), _expensive),
}  # fmt: skip


def _record_loop(
    walker: Walker, equation: Equation, operands: Sequence[Value], body: LoopBody, runs: int
) -> list[Value]:
    reads = walker.materialize_operands(equation, operands)
    cost, shards = _walk_iteration(walker, body, reads)
    writes = [walker.buffer(var.aval, count) for var, count in zip(equation.outvars, shards, strict=True)]
    scratch = cost.peak - sum(write.size for write in writes[: body.carries])
    aliases = list(zip(reads[body.first_carry :], writes[: body.carries], strict=False))
    walker.record_body(reads, writes, cost, scratch, aliases, runs)
    return writes


def _walk_iteration(walker: Walker, body: LoopBody, reads: Sequence[Value]) -> tuple[ProgramCost, list[int]]:
    """Cost of one iteration, and the number of shards of each result.

    The carry is divided as an iteration leaves it: compilers lay out its initial value (as zeros) alike. External buffers
    count as undivided in the body.
    """
    carry = reads[body.first_carry : body.first_carry + body.carries]
    constants = len(body.jaxpr.invars) - body.slices - body.carries
    arguments = [*carry, *reads[body.first_carry - constants : body.first_carry], *reads[len(reads) - body.slices :]]
    while True:
        shards = {index: 1 if read.external else read.shards for index, read in enumerate(arguments)}
        cost, result_shards = _walk_program(
            body.jaxpr, shards, walker.per_device, temporaries=body.carries, slices=body.slices
        )
        further = [
            (value, count)
            for value, count in zip(carry, result_shards, strict=False)
            if count > value.shards and not value.external
        ]
        if not further:
            return cost, result_shards
        for value, count in further:
            value.size, value.shards = value.size * value.shards // count, count


def _unrolled(walker: Walker, equation: Equation, operands: Sequence[Value]) -> list[Value]:
    """Walks all iterations of a fully unrolled loop: compilers fuse what one leaves for the next, and make no stacks."""
    body = scan_body(equation)
    first_stack = body.first_carry + body.carries
    constants, carry = operands[: body.first_carry], operands[body.first_carry : first_stack]
    sliced = body.jaxpr.invars[first_stack:]
    length, order = equation.params["length"], -1 if equation.params["reverse"] else 1
    outputs = []
    for index in range(length)[::order]:
        slices = [
            _slice(walker, stack, index, var.aval) for stack, var in zip(operands[first_stack:], sliced, strict=True)
        ]
        values = walker.walk(body.jaxpr, [*carry, *constants, *slices])
        carry = [
            walker.materialize(value, atom.aval)
            for value, atom in zip(values, body.jaxpr.outvars[: body.carries], strict=False)
        ]
        outputs.append(values[body.carries :])
    stacked = [
        Value(0, max(value.shards for value in iterations), _sources(iterations), iterations=iterations)
        for iterations in zip(*outputs[::order], strict=True)
    ]
    return [*carry, *stacked]


def _slice(walker: Walker, stack: Value, index: int, aval: AbstractValue) -> Value:
    """The slice of a stacked operand that an iteration reads, copied once for all loops."""
    if stack.iterations:
        return stack.iterations[index]
    if not stack.has_buffer:
        return Value(0, stack.shards, stack.sources)
    if (stack, index) not in walker.slices:
        value = Value(0, stack.shards, frozenset((stack,)), sliced=True)
        walker.slices[stack, index] = walker.materialize(value, aval)
    return walker.slices[stack, index]
