"""Graphs of matrix products and of an encoder for onnxruntime, in float32 and with dynamic 8-bit integers.

Needs `pip install onnx onnxruntime`, which no extra of hpnlp installs.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

OPSET = 20  # the first with Gelu


class Graph:
    """A graph under construction: each method adds a node and returns the name of its output."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, value: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def linear(self, x: str, layer: Any) -> str:
        product = self.node("MatMul", x, self.constant(np.asarray(layer["kernel"])))
        return self.node("Add", product, self.constant(np.asarray(layer["bias"])))

    def norm(self, x: str, layer: Any, epsilon: float) -> str:
        scale, bias = (self.constant(np.asarray(layer[name])) for name in ("scale", "bias"))
        return self.node("LayerNormalization", x, scale, bias, epsilon=epsilon)

    def sessions(self, x: Any, output: str, shape: list[int]) -> dict[str, Any]:
        """onnxruntime sessions of the graph: "float32", and "int8" with signed weights and a scale for each column."""
        result = helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, "graph", [x], [result], self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = os.cpu_count() or 1
        options.log_severity_level = 3
        with tempfile.TemporaryDirectory() as directory:
            plain, small = Path(directory, "plain.onnx"), Path(directory, "int8.onnx")
            onnx.save(model, plain)
            logging.disable(logging.WARNING)  # a line for each node that is not quantized
            quantize_dynamic(
                plain, small, per_channel=True, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"]
            )
            logging.disable(logging.NOTSET)
            return {
                name: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
                for name, path in (("float32", plain), ("int8", small))
            }


def products(w: np.ndarray, x: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    """The product x w: name of the dtype -> function."""
    graph = Graph()
    output = graph.node("MatMul", "x", graph.constant(w))
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(x.shape))
    sessions = graph.sessions(info, output, [x.shape[0], w.shape[1]])
    return {name: lambda s=session: s.run(None, {"x": x})[0] for name, session in sessions.items()}


def encoder(params: Any, heads: int, tokens: np.ndarray, epsilon: float) -> dict[str, Callable[[], np.ndarray]]:
    """Logits of `hpnlp.models.encoder.Encoder` with BERT's layers and mean pooling: name of the dtype -> function.

    Args:
      params: The parameters, float32, with the layers stacked.
      heads: Attention heads.
      tokens: [B, T] int32, without padding.
      epsilon: Of the norms.
    """
    graph, (batch, length) = Graph(), tokens.shape
    x = graph.node("Gather", graph.constant(np.asarray(params["embed"]["table"])), "tokens")
    x = graph.node("Add", x, graph.constant(np.asarray(params["positions"]["table"])[:length]))
    layers, dim = np.asarray(params["layers"]["mix_norm"]["scale"]).shape
    split = graph.constant(np.array([batch, length, heads, dim // heads]))
    merged = graph.constant(np.array([batch, length, dim]))
    factor = graph.constant(np.float32((dim // heads) ** -0.5))

    def by_head(x: str, layer: Any, order: list[int]) -> str:
        return graph.node("Transpose", graph.node("Reshape", graph.linear(x, layer), split), perm=order)

    for i in range(layers):
        layer = _layer(params["layers"], i)
        attention, mlp = layer["attention"], layer["mlp"]
        q, k, v = (
            by_head(x, attention[name], order)
            for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        )
        scores = graph.node("Mul", graph.node("MatMul", q, k), factor)
        o = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        o = graph.node("Reshape", graph.node("Transpose", o, perm=[0, 2, 1, 3]), merged)
        x = graph.norm(graph.node("Add", x, graph.linear(o, attention["out"])), layer["mix_norm"], epsilon)
        h = graph.linear(graph.node("Gelu", graph.linear(x, mlp["up"])), mlp["down"])
        x = graph.norm(graph.node("Add", x, h), layer["feed_norm"], epsilon)
    pooled = graph.node("ReduceMean", x, graph.constant(np.array([1])), keepdims=0)
    head = np.asarray(params["head"])
    output = graph.linear(pooled, {"kernel": head.T, "bias": params["output"]["bias"]})
    info = helper.make_tensor_value_info("tokens", TensorProto.INT32, list(tokens.shape))
    sessions = graph.sessions(info, output, [batch, head.shape[0]])
    return {name: lambda s=session: s.run(None, {"tokens": tokens})[0] for name, session in sessions.items()}


def _layer(tree: Any, i: int) -> Any:
    return {name: _layer(child, i) if isinstance(child, dict) else np.asarray(child[i]) for name, child in tree.items()}
