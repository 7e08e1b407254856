"""ONNX nodes for the primitives of JAX that compute logits: one function for each kind of primitive, in RULES."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from hpnlp.models.export.onnx_graph import OnnxGraph, stored_dtype
from hpnlp.types import Equation, InputError

# (graph, equation, names of its inputs) -> name of its result.
Rule = Callable[[OnnxGraph, Any, Sequence[str]], str]

UNARY = {
    "abs": "Abs",
    "ceil": "Ceil",
    "cos": "Cos",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "logistic": "Sigmoid",
    "neg": "Neg",
    "sign": "Sign",
    "sin": "Sin",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
}
BINARY = {
    "add": "Add",
    "add_any": "Add",
    "div": "Div",
    "eq": "Equal",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "le": "LessOrEqual",
    "lt": "Less",
    "max": "Max",
    "min": "Min",
    "mul": "Mul",
    "pow": "Pow",
    "sub": "Sub",
}
LOGICAL = {"and": "And", "or": "Or", "xor": "Xor"}
REDUCTIONS = {
    "reduce_max": "ReduceMax",
    "reduce_min": "ReduceMin",
    "reduce_sum": "ReduceSum",
    "reduce_prod": "ReduceProd",
}
IDENTITIES = ("copy", "name", "pvary", "sharding_constraint", "stop_gradient")


def _unary(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node(UNARY[eqn.primitive.name], inputs[0])


def _binary(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node(BINARY[eqn.primitive.name], *graph.broadcasting(inputs, eqn))


def _logical(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    kind = LOGICAL[eqn.primitive.name]
    is_bool = eqn.outvars[0].aval.dtype == np.bool_
    return graph.node(kind if is_bool else f"Bitwise{kind}", *graph.broadcasting(inputs, eqn))


def _shift_right(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    """A shift of the bits of integers; runtimes shift unsigned ones."""
    dtype = eqn.outvars[0].aval.dtype
    unsigned = [
        graph.cast(x, np.dtype(f"u{np.dtype(dtype).name.removeprefix('u')}")) for x in graph.broadcasting(inputs, eqn)
    ]
    return graph.cast(graph.node("BitShift", *unsigned, direction="RIGHT"), dtype)


def _not_equal(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Not", graph.node("Equal", *graph.broadcasting(inputs, eqn)))


def _select(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    if len(inputs) != 3 or eqn.invars[0].aval.dtype != np.bool_:
        raise _unsupported(eqn, "of more than two cases")
    condition, otherwise, then = graph.broadcasting(inputs, eqn)
    return _where(graph, condition, then, otherwise, eqn.outvars[0].aval.dtype)


def _where(graph: OnnxGraph, condition: str, then: str, otherwise: str, dtype: DTypeLike) -> str:
    """Values by a condition; onnxruntime has no such operation for booleans."""
    if dtype != np.bool_:
        return graph.node("Where", condition, then, otherwise)
    chosen = graph.node("Where", condition, graph.cast(then, np.int32), graph.cast(otherwise, np.int32))
    return graph.cast(chosen, np.bool_)


def _convert(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.cast(inputs[0], eqn.params["new_dtype"])


def _integer_pow(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    if eqn.params["y"] == 2:
        return graph.node("Mul", inputs[0], inputs[0])
    dtype = stored_dtype(eqn.outvars[0].aval.dtype)
    return graph.node("Pow", inputs[0], graph.constant(np.array(eqn.params["y"], dtype)))


def _square(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Mul", inputs[0], inputs[0])


def _rsqrt(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Reciprocal", graph.node("Sqrt", inputs[0]))


def _erfc(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Sub", graph.constant(np.float32(1)), graph.node("Erf", inputs[0]))


def _log1p(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Log", graph.node("Add", graph.constant(np.float32(1)), inputs[0]))


def _remainder(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Mod", *graph.broadcasting(inputs, eqn), fmod=1)


def _round(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    if int(eqn.params["rounding_method"]) != 1:  # to the nearest even number
        raise _unsupported(eqn, "away from zero")
    return graph.node("Round", inputs[0])


def _reduce_precision(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    if eqn.params["exponent_bits"] < info.nexp or eqn.params["mantissa_bits"] < info.nmant:
        raise _unsupported(eqn, "to fewer bits")
    return inputs[0]


def _clamp(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    low, x, high = inputs
    return graph.node("Min", graph.node("Max", x, low), high)


def _is_finite(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Not", graph.node("Or", graph.node("IsNaN", inputs[0]), graph.node("IsInf", inputs[0])))


def _reshape(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.reshape(inputs[0], eqn.outvars[0].aval.shape)


def _transpose(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Transpose", inputs[0], perm=list(eqn.params["permutation"]))


def _broadcast(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    shape, old = eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape
    sizes: list[Any] = [1] * len(shape)
    for axis, size in zip(eqn.params["broadcast_dimensions"], old, strict=True):
        sizes[axis] = size
    new = [axis for axis in range(len(shape)) if axis not in eqn.params["broadcast_dimensions"]]
    narrow = graph.unsqueeze(inputs[0], new)
    return narrow if tuple(sizes) == tuple(shape) else graph.expand(narrow, shape)


def _iota(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    """Indices along an axis of symbolic size; indices of a known shape are constants."""
    shape, axis = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    zero, step = graph.constant(np.int64(0)), graph.constant(np.int64(1))
    indices = graph.cast(graph.node("Range", zero, graph.sizes.scalar(shape[axis]), step), eqn.params["dtype"])
    narrow = graph.unsqueeze(indices, [i for i in range(len(shape)) if i != axis])
    return narrow if len(shape) == 1 else graph.expand(narrow, shape)


def _size(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.cast(graph.sizes.scalar(eqn.params["dim"]), eqn.outvars[0].aval.dtype)


def _concatenate(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Concat", *inputs, axis=eqn.params["dimension"])


def _slice(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    starts, ends = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or (1,) * len(starts)
    return graph.slice(inputs[0], starts, ends, steps)


def _pad(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    low, high, interior = zip(*eqn.params["padding_config"], strict=True)
    if any(interior) or min(*low, *high) < 0:
        raise _unsupported(eqn, "by a negative number, or between elements")
    return graph.node("Pad", inputs[0], graph.integers(*low, *high), inputs[1])


def _reduce(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return _reduced(graph, REDUCTIONS[eqn.primitive.name], inputs[0], eqn.params["axes"])


def _reduced(graph: OnnxGraph, kind: str, x: str, axes: Sequence[int]) -> str:
    """Reduction over axes; ONNX would reduce all axes where a reduction of JAX has none."""
    return graph.node(kind, x, graph.integers(*axes), keepdims=0) if axes else x


def _reduce_logical(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    kind = "ReduceMin" if eqn.primitive.name == "reduce_and" else "ReduceMax"
    integers = graph.cast(inputs[0], np.int32)
    return graph.cast(_reduced(graph, kind, integers, eqn.params["axes"]), np.bool_)


def _argmax(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    (axis,) = eqn.params["axes"]
    kind = "ArgMax" if eqn.primitive.name == "argmax" else "ArgMin"
    return graph.cast(graph.node(kind, inputs[0], axis=axis, keepdims=0), eqn.params["index_dtype"])


def _cumsum(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    axis = graph.constant(np.int64(eqn.params["axis"]))
    return graph.node("CumSum", inputs[0], axis, reverse=int(eqn.params["reverse"]))


def _dot_general(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    (contracted_a, contracted_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    (a, b), out = (v.aval for v in eqn.invars), eqn.outvars[0].aval
    free_a = [i for i in range(a.ndim) if i not in (*contracted_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*contracted_b, *batch_b)]
    batch = [a.shape[i] for i in batch_a]
    rows, columns = (math.prod(v.shape[i] for i in free) for v, free in ((a, free_a), (b, free_b)))
    inner = math.prod(a.shape[i] for i in contracted_a)
    left = graph.transpose(inputs[0], (*batch_a, *free_a, *contracted_a))
    right = graph.transpose(inputs[1], (*batch_b, *contracted_b, *free_b))
    if len(contracted_a) != 1 or len(free_a) != 1:
        left = graph.reshape(left, (*batch, rows, inner))
    if len(contracted_a) != 1 or len(free_b) != 1:
        right = graph.reshape(right, (*batch, inner, columns))

    def shaped(product: str) -> str:
        return product if len(free_a) == len(free_b) == 1 else graph.reshape(product, out.shape)

    is_bool = np.bool_ in (a.dtype, b.dtype)
    if not is_bool and a.dtype.itemsize == b.dtype.itemsize == 1 and out.dtype == np.int32:
        return shaped(graph.node("MatMulInteger", left, right))
    if len({stored_dtype(v.dtype) for v in (a, b, out)}) > 1 or is_bool:
        dtype = np.int32 if out.dtype == np.bool_ else out.dtype
        left, right = graph.cast(left, dtype), graph.cast(right, dtype)
    product = shaped(graph.node("MatMul", left, right))
    return graph.cast(product, np.bool_) if out.dtype == np.bool_ else product


def _gather(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    numbers, operand, ids = eqn.params["dimension_numbers"], eqn.invars[0].aval, eqn.invars[1].aval
    axes = numbers.start_index_map
    if numbers.operand_batching_dims and ids.ndim == operand.ndim + 1:
        return _gather_elements(graph, eqn, inputs)
    if ids.ndim == 1 and len(numbers.offset_dims) + len(numbers.collapsed_slice_dims) == operand.ndim:
        return _dynamic_slice(graph, eqn, inputs)
    if len(axes) != 1 or numbers.collapsed_slice_dims != axes or numbers.operand_batching_dims:
        raise _unsupported(eqn, "of anything but rows")
    (axis,) = axes
    others = [i for i in range(operand.ndim) if i != axis]
    offsets = (*range(axis), *range(axis + ids.ndim - 1, operand.ndim + ids.ndim - 2))
    if numbers.offset_dims != offsets or any(eqn.params["slice_sizes"][i] != operand.shape[i] for i in others):
        raise _unsupported(eqn, "of parts of rows")
    rows, valid = _valid_ids(graph, eqn, inputs[1], axis)
    result = graph.node("Gather", inputs[0], valid, axis=axis)
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return result
    ndim = ids.ndim - 1
    within = graph.unsqueeze(graph.node("Equal", rows, valid), range(ndim, ndim + operand.ndim - 1 - axis))
    return _where(graph, within, result, graph.constant(_fill_value(eqn)), operand.dtype)


def _gather_elements(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    """A gather along one axis, as of `take_along_axis`."""
    numbers, operand, ids = eqn.params["dimension_numbers"], eqn.invars[0].aval, eqn.invars[1].aval
    axis = numbers.start_index_map[0]
    others = tuple(i for i in range(operand.ndim) if i != axis)
    if (numbers.operand_batching_dims, numbers.start_indices_batching_dims, ids.shape[-1]) != (others, others, 1):
        raise _unsupported(eqn, "of parts of rows")
    columns, valid = _valid_ids(graph, eqn, inputs[1], axis)
    result = graph.node("GatherElements", inputs[0], valid, axis=axis)
    if eqn.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return result
    within = graph.node("Equal", columns, valid)
    return _where(graph, within, result, graph.constant(_fill_value(eqn)), operand.dtype)


def _valid_ids(graph: OnnxGraph, eqn: Any, ids: str, axis: int) -> tuple[str, str]:
    """`(rows, clipped rows)`: ids without their last axis, of size 1, and the same ids clipped to the operand's axis."""
    last = np.array(eqn.invars[0].aval.shape[axis] - 1, eqn.invars[1].aval.dtype)
    rows = graph.squeeze(ids, [eqn.invars[1].aval.ndim - 1])
    lower = graph.node("Max", rows, graph.constant(np.zeros_like(last)))
    return rows, graph.node("Min", lower, graph.constant(last))


def _dynamic_slice(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    """A gather of one part of an array, as JAX writes slices of arrays of symbolic sizes."""
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval
    axes, sizes = numbers.start_index_map, eqn.params["slice_sizes"]
    if any(sizes[i] != operand.shape[i] for i in range(operand.ndim) if i not in axes):
        raise _unsupported(eqn, "of parts of rows")
    starts = graph.cast(inputs[1], np.int64)
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        last = graph.sizes.vector([operand.shape[axis] - sizes[axis] for axis in axes])
        starts = graph.node("Min", graph.node("Max", starts, graph.integers(*[0] * len(axes))), last)
    ends = graph.node("Add", starts, graph.sizes.vector([sizes[axis] for axis in axes]))
    part = graph.node("Slice", inputs[0], starts, ends, graph.integers(*axes))
    return graph.squeeze(part, numbers.collapsed_slice_dims)


def _fill_value(eqn: Equation) -> np.ndarray:
    """The result of a gather for indices that are out of bounds."""
    dtype, value = eqn.invars[0].aval.dtype, eqn.params["fill_value"]
    if value is None and dtype == np.bool_:
        value = True
    elif value is None and jnp.issubdtype(dtype, jnp.inexact):
        value = np.nan
    elif value is None:
        info = jnp.iinfo(dtype)
        value = info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max
    return np.asarray(value, dtype)


# Directory of the code that computes an operation -> the config field or the stage that chose it, and a choice without it.
_ORIGINS = {
    "hpnlp/nn/mixers/": ("model.mixer", "a run with another mixer, such as full"),
    "hpnlp/nn/feed_forward/": ("model.mlp", "a run with another network, such as swiglu"),
    "hpnlp/nn/output/": ("model.output", "a run with another output layer, such as full"),
    "hpnlp/ops/weights/": ("the recipe of hpnlp compress", "a recipe without packed tables (packed=False)"),
}


def _unsupported(eqn: Equation, detail: str = "") -> InputError:
    operation = " ".join(filter(None, (eqn.primitive.name, detail)))
    origin, choice = "", "a model without it"
    traceback = eqn.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        directory = next((part for part in _ORIGINS if part in frame.file_name), None)
        if directory is not None:
            field, choice = _ORIGINS[directory]
            origin = f" for {field} ({frame.file_name[frame.file_name.rindex(directory) :]})"
            break
    return InputError(
        f"the model computes {operation}{origin}, which is not written as ONNX: use the format stablehlo, or {choice}"
    )


def find_rule(eqn: Any) -> Rule:
    """The rule of a primitive.

    Args:
      eqn: An equation of a jaxpr.

    Returns:
      A function of the graph, the equation and the names of its inputs, which returns the name of its output.

    Raises:
      InputError: There is none.
    """
    if eqn.primitive.name not in RULES:
        raise _unsupported(eqn)
    return RULES[eqn.primitive.name]


def _same(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return inputs[0]


def _softmax(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    return graph.node("Softmax", inputs[0], axis=-1)


def _dynamic_integer_product(graph: OnnxGraph, eqn: Any, inputs: Sequence[str]) -> str:
    """The nodes that onnxruntime fuses into one kernel: DynamicQuantizeLinear, MatMulInteger, Cast and Mul."""
    x, codes, scales = inputs
    rounded, step, zero = graph.node_outputs("DynamicQuantizeLinear", 3, x)
    sums = graph.cast(graph.node("MatMulInteger", rounded, codes, zero), np.float32)
    return graph.node("Mul", sums, graph.node("Mul", step, scales))


# Name of a compiled function that ONNX has an operator for -> its rule.
CALLS: dict[str, Rule] = {"row_softmax": _softmax, "dynamic_integer_product": _dynamic_integer_product}
RULES: dict[str, Rule] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(LOGICAL, _logical),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(IDENTITIES, _same),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    **dict.fromkeys(("reduce_and", "reduce_or"), _reduce_logical),
    **dict.fromkeys(("argmax", "argmin"), _argmax),
    "broadcast_in_dim": _broadcast,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "cumsum": _cumsum,
    "dot_general": _dot_general,
    "erfc": _erfc,
    "gather": _gather,
    "dim_as_value": _size,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "is_finite": _is_finite,
    "log1p": _log1p,
    "ne": _not_equal,
    "not": lambda graph, eqn, inputs: graph.node("Not", inputs[0]),
    "pad": _pad,
    "reduce_precision": _reduce_precision,
    "rem": _remainder,
    "round": _round,
    "rsqrt": _rsqrt,
    "select_n": _select,
    "shift_right_logical": _shift_right,
    "slice": _slice,
    "square": _square,
    "transpose": _transpose,
}
