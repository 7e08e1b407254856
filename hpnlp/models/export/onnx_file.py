"""ONNX: a model as a graph for onnxruntime and other runtimes, made from the jaxpr of the function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from hpnlp.atomic_file import replaced
from hpnlp.cost.flop_count import open_jaxpr
from hpnlp.models.export.functions import BATCH, LENGTH, ExportedFunction, traced
from hpnlp.models.export.onnx_graph import IR_VERSION, OPSET, OnnxGraph, import_onnx
from hpnlp.models.export.onnx_rules import CALLS, find_rule
from hpnlp.models.export.onnx_shapes import is_number
from hpnlp.types import Equation, InputError

if TYPE_CHECKING:
    from jax.extend.core import Literal, Var

_MAX_BYTES = 2**31 - 2**20  # a protocol buffer holds at most 2 GiB
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # parameters of primitives that call a jaxpr
# Primitives that do not call their jaxpr once with their inputs.
_NOT_CALLS = ("pallas_call", "reduce", "reduce_window", "scan", "shard_map")


def write(function: ExportedFunction, path: Path, *, batch: int = 0) -> bool:
    """Writes a function and its weights.

    Everything that does not depend on the inputs is computed here: masks, positions, and matrices of weights whose products
    are those of floating-point numbers. Products of 8-bit integers stay such products (MatMulInteger). Floats of fewer than
    32 bits become float32, and are rounded where the model converts numbers to them, but not after each operation on them.

    Args:
      function: The function.
      path: The file.
      batch: Sequences of a batch, B; 0 for any number.

    Returns:
      Whether inputs of products are rounded to 8 bits, over the range of the whole batch.

    Raises:
      InputError: The package onnx is missing, the model has an operation that is not written or too many iterations of loops,
        or the file would have over 2 GB.
    """
    onnx = import_onnx()
    graph = OnnxGraph({name: _size_of_input(function.inputs[0], axis) for axis, name in enumerate((BATCH, LENGTH))})
    closed = traced(function, batch)
    # Statistics of the layers, which the logits do not depend on, have operations that are not written.
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    (result,) = _run(graph, jaxpr, closed.consts, list(function.inputs))
    graph.nodes.append(onnx.helper.make_node("Identity", [_name(graph, result)], ["logits"], "logits"))
    nodes, constants = graph.reachable("logits")
    if sum(len(constant.raw_data) for constant in constants) + sum(node.ByteSize() for node in nodes) > _MAX_BYTES:
        raise InputError(
            "the file would have over 2 GB, which is the limit of the format: compress the model first, or export a shorter "
            "length, because ONNX files hold every iteration of loops"
        )
    integer, real = onnx.TensorProto.INT32, onnx.TensorProto.FLOAT
    named = zip(function.inputs, closed.in_avals, strict=True)
    inputs = [onnx.helper.make_tensor_value_info(name, integer, _stated(aval.shape)) for name, aval in named]
    outputs = [onnx.helper.make_tensor_value_info("logits", real, _stated(closed.out_avals[0].shape))]
    content = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "logits", inputs, outputs, constants),
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="hpnlp",
    ).SerializeToString()
    with replaced(path) as file:
        file.write(content)
    return any(node.op_type == "DynamicQuantizeLinear" for node in nodes)


def _size_of_input(name: str, axis: int) -> Callable[[Any], str]:
    """Makes a function that adds nodes for the size of an input's axis to a graph, and returns the name of the int64 scalar."""
    return lambda graph: graph.node("Gather", graph.node("Shape", name), graph.constant(np.int64(axis)), axis=0)


def _stated(shape: Sequence[Any]) -> list[Any]:
    """A shape with the names of its symbolic sizes."""
    return [int(size) if is_number(size) else str(size) for size in shape]


def _run(graph: OnnxGraph, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Adds the nodes of a jaxpr. Values are names of the graph, or arrays where they are known."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(
        zip(jaxpr.invars, args, strict=True)
    )

    def read(atom: Var | Literal) -> Any:
        is_literal = isinstance(atom, jax.extend.core.Literal)
        return np.asarray(atom.val, np.dtype(_aval(atom).dtype)) if is_literal else values[atom]

    for eqn in jaxpr.eqns:
        results = _equation(graph, eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _aval(atom: Var | Literal) -> Any:
    """Shape and dtype of an atom."""
    return atom.aval


def _equation(graph: OnnxGraph, eqn: Any, inputs: list[Any]) -> list[Any]:
    """Results of an equation."""
    name = eqn.primitive.name
    body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
    if (rule := CALLS.get(str(eqn.params.get("name")))) is not None:
        return [rule(graph, eqn, [_name(graph, value) for value in inputs])]
    if body is not None and name not in _NOT_CALLS:
        consts = body.consts if isinstance(body, jax.extend.core.ClosedJaxpr) else ()
        return _run(graph, open_jaxpr(body), consts, inputs)
    if name == "optimization_barrier":
        return inputs
    if not any(isinstance(value, str) for value in inputs) and _has_known_shapes(eqn):
        return _known(eqn, inputs)
    if name == "scan":
        return _scan(graph, eqn, inputs)
    if name == "top_k":
        return _top_k(graph, eqn, _name(graph, inputs[0]))
    if name == "split":
        return _split(graph, eqn, _name(graph, inputs[0]))
    return [find_rule(eqn)(graph, eqn, [_name(graph, value) for value in inputs])]


def _has_known_shapes(eqn: Equation) -> bool:
    """Whether no size of the results is a symbol."""
    has_sizes = all(is_number(size) for atom in eqn.outvars for size in _aval(atom).shape)
    return has_sizes and eqn.primitive.name != "dim_as_value"


def _known(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Computes an equation whose inputs are known arrays. Broadcasting makes views."""
    if eqn.primitive.name == "broadcast_in_dim":
        shape = eqn.params["shape"]
        sizes = [1] * len(shape)
        for axis, size in zip(eqn.params["broadcast_dimensions"], np.shape(inputs[0]), strict=True):
            sizes[axis] = size
        return [np.broadcast_to(np.asarray(inputs[0]).reshape(sizes), shape)]
    results = eqn.primitive.bind(*map(jnp.asarray, inputs), **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _scan(graph: OnnxGraph, eqn: Any, inputs: list[Any]) -> list[Any]:
    """A loop of a known number of iterations, which may be 0, one after the other."""
    count, carried, length = (eqn.params[key] for key in ("num_consts", "num_carry", "length"))
    body = eqn.params["jaxpr"]
    consts, carry, stacks = inputs[:count], inputs[count : count + carried], inputs[count + carried :]
    slices: list[list[Any]] = []
    for index in reversed(range(length)) if eqn.params["reverse"] else range(length):
        elements = [_at(graph, stack, index) for stack in stacks]
        results = _run(graph, body.jaxpr, body.consts, [*consts, *carry, *elements])
        carry = results[:carried]
        slices.append(results[carried:])
    if eqn.params["reverse"]:
        slices.reverse()
    if not slices:
        return [*carry, *(np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[carried:])]
    return [*carry, *(_stack(graph, elements) for elements in zip(*slices, strict=True))]


def _at(graph: OnnxGraph, stack: Any, index: int) -> Any:
    if not isinstance(stack, str):
        return np.asarray(stack)[index]
    return graph.node("Gather", stack, graph.constant(np.int64(index)), axis=0)


def _stack(graph: OnnxGraph, elements: Sequence[Any]) -> Any:
    if not any(isinstance(part, str) for part in elements):
        return np.stack([np.asarray(part) for part in elements])
    first = graph.integers(0)
    return graph.node("Concat", *(graph.node("Unsqueeze", _name(graph, part), first) for part in elements), axis=0)


def _split(graph: OnnxGraph, eqn: Any, x: str) -> list[str]:
    axis, ends = eqn.params["axis"], np.cumsum(eqn.params["sizes"])
    shape = eqn.invars[0].aval.shape
    results = []
    for size, end in zip(eqn.params["sizes"], ends, strict=True):
        starts, stops = [0] * len(shape), list(shape)
        starts[axis], stops[axis] = int(end) - size, int(end)
        results.append(graph.slice(x, starts, stops, [1] * len(shape)))
    return results


def _top_k(graph: OnnxGraph, eqn: Any, x: str) -> list[str]:
    """The k largest values and their places; of equal ones, the first."""
    count = graph.integers(eqn.params["k"])
    values, places = graph.node_outputs("TopK", 2, x, count, axis=eqn.params["axis"], largest=1, sorted=1)
    return [values, graph.cast(places, np.int32)]


def _name(graph: OnnxGraph, value: Any) -> str:
    """The name of a value, which becomes a constant where it is known."""
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    repeated = [size > 1 and stride == 0 for size, stride in zip(array.shape, array.strides, strict=True)]
    if not any(repeated):
        return graph.constant(array)
    narrow = array[tuple(slice(0, 1) if is_repeated else slice(None) for is_repeated in repeated)]
    return graph.expand(graph.constant(narrow), array.shape)
