"""An ONNX graph under construction."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from hpnlp.models.export.onnx_shapes import SymbolicSizes
from hpnlp.types import Equation, InputError

OPSET = 18  # Reduce* and Split with axes and sizes as inputs
IR_VERSION = 10
# More nodes come from loops of many iterations. onnxruntime loads 12,290 nodes of a loop in 2 s and 49,154 in 27 s: with the
# square of their number, these take over 3 minutes.
MAX_NODES = 2**17


def import_onnx() -> Any:
    """Imports onnx, which is an extra, only where it is needed.

    Returns:
      The package.

    Raises:
      InputError: The package is missing.
    """
    try:
        return importlib.import_module("onnx")
    except ImportError as error:
        raise InputError("ONNX files need the package onnx: pip install onnx") from error


class OnnxGraph:
    """Nodes and constants; a value is the name of a node's output or of a constant."""

    def __init__(self, symbols: Mapping[str, Callable[[OnnxGraph], str]] = MappingProxyType({})) -> None:
        """Makes an empty graph.

        Args:
          symbols: Name of a symbolic size -> function that adds the node of its value, an int64 scalar, to the graph.
        """
        self.onnx = import_onnx()
        self.sizes = SymbolicSizes(self, symbols)
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._narrow: dict[str, str] = {}  # expanded value -> the value before

    def constant(self, value: str | ArrayLike) -> str:
        """The name of a constant.

        Args:
          value: An array; one of a float dtype other than float32 and float64 becomes float32, of int4 int8.

        Returns:
          The name; equal constants share it.
        """
        array = stored(np.asarray(value))
        key = (array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if key not in self._names:
            self._names[key] = f"c{len(self.constants)}"
            self.constants[self._names[key]] = self.onnx.numpy_helper.from_array(array, self._names[key])
            self._arrays[self._names[key]] = array
        return self._names[key]

    def integers(self, *values: int) -> str:
        """The name of a constant int64 vector, as shapes and axes are."""
        return self.constant(np.array(values, np.int64))

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Adds a node with one output.

        Args:
          kind: The operator.
          *inputs: Names of its inputs.
          **attributes: Its attributes.

        Returns:
          The name of the output.

        Raises:
          InputError: The graph has MAX_NODES nodes.
        """
        return self.node_outputs(kind, 1, *inputs, **attributes)[0]

    def node_outputs(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> list[str]:
        """Adds a node.

        Args:
          kind: The operator.
          outputs: Number of its outputs.
          *inputs: Names of its inputs.
          **attributes: Its attributes.

        Returns:
          The names of the outputs.

        Raises:
          InputError: The graph has MAX_NODES nodes.
        """
        if len(self.nodes) == MAX_NODES:
            raise InputError(
                f"the model has over {MAX_NODES:,} operations, because ONNX files hold every iteration of its loops: export a "
                "shorter length, or use the format stablehlo, which keeps loops"
            )
        name = f"n{len(self.nodes)}"
        names = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, names, name, **attributes))
        return names

    def reshape(self, x: str, shape: Sequence[Any]) -> str:
        """Another shape with as many elements; its sizes may be symbolic."""
        symbolic = [axis for axis, size in enumerate(shape) if not isinstance(size, int | np.integer)]
        if x in self._arrays and not symbolic:
            return self.constant(self._arrays[x].reshape(shape))
        if len(symbolic) == 1:  # the runtime computes one size
            shape = [-1 if axis == symbolic[0] else size for axis, size in enumerate(shape)]
        return self.node("Reshape", x, self.sizes.vector(shape))

    def unsqueeze(self, x: str, axes: Sequence[int]) -> str:
        """Axes of size 1, at these places of the result."""
        if not axes:
            return x
        if x in self._arrays:
            return self.constant(np.expand_dims(self._arrays[x], tuple(axes)))
        return self.node("Unsqueeze", x, self.integers(*axes))

    def squeeze(self, x: str, axes: Sequence[int]) -> str:
        """The array without these axes, which have size 1."""
        return self.node("Squeeze", x, self.integers(*axes)) if axes else x

    def transpose(self, x: str, order: Sequence[int]) -> str:
        """Axes in another order."""
        if list(order) == list(range(len(order))):
            return x
        if x in self._arrays:
            return self.constant(self._arrays[x].transpose(order))
        return self.node("Transpose", x, perm=list(order))

    def slice(self, x: str, starts: Sequence[Any], ends: Sequence[Any], steps: Sequence[int]) -> str:
        """A part of all axes."""
        axes = self.integers(*range(len(starts)))
        return self.node("Slice", x, self.sizes.vector(starts), self.sizes.vector(ends), axes, self.integers(*steps))

    def expand(self, x: str, shape: Sequence[Any]) -> str:
        """Axes of size 1 repeated to a shape. Operators that broadcast read x instead, see `broadcasting`."""
        name = self.node("Expand", x, self.sizes.vector(shape))
        self._narrow[name] = x
        return name

    def broadcasting(self, inputs: Sequence[str], eqn: Equation) -> list[str]:
        """Inputs of an operator that broadcasts, before they were expanded; one keeps the shape of the result.

        Args:
          inputs: Names of the inputs.
          eqn: The equation, whose inputs have the shape of the result, or are scalars.

        Returns:
          Names of the inputs.
        """
        narrow = [self._narrow.get(x, x) for x in inputs]
        complete = [i for i, v in enumerate(eqn.invars) if v.aval.shape == eqn.outvars[0].aval.shape]
        if complete and all(inputs[i] in self._narrow for i in complete):
            narrow[complete[0]] = inputs[complete[0]]
        return narrow

    def reachable(self, output: str) -> tuple[list[Any], list[Any]]:
        """The nodes and constants on which a value depends.

        Args:
          output: Name of the value.

        Returns:
          `(nodes in order, constants)`.
        """
        needed, nodes = {output}, []
        for node in reversed(self.nodes):
            if needed & set(node.output):
                nodes.append(node)
                needed |= set(node.input)
        return nodes[::-1], [constant for name, constant in self.constants.items() if name in needed]

    def cast(self, x: str, dtype: DTypeLike) -> str:
        """Converts to a dtype, with rounding to it where ONNX runtimes compute in a wider one."""
        types = self.onnx.TensorProto
        name = np.dtype(dtype).name
        if name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
            code = {"bfloat16": types.BFLOAT16, "float16": types.FLOAT16, "float8_e4m3fn": types.FLOAT8E4M3FN}
            x = self.node("Cast", x, to=code.get(name, types.FLOAT8E5M2))
        return self.node("Cast", x, to=self.onnx.helper.np_dtype_to_tensor_dtype(stored_dtype(dtype)))


def stored_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype that values of a dtype have in the graph.

    Args:
      dtype: A dtype of JAX.

    Returns:
      float32 for narrower floats, and int8 or uint8 for narrower integers.
    """
    name = np.dtype(dtype).name
    if name in ("bfloat16", "float16") or name.startswith("float8"):
        return np.dtype(np.float32)
    return np.dtype({"int4": "int8", "uint4": "uint8"}.get(name, name))


def stored(array: np.ndarray) -> np.ndarray:
    """An array in its `stored_dtype`, contiguous.

    Returns:
      The array.
    """
    return np.asarray(array, stored_dtype(array.dtype), order="C")
