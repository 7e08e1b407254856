"""Exported models: StableHLO in another process, ONNX in onnxruntime."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.export import onnx_file, stablehlo
from hpnlp.models.export.functions import ExportedFunction, logits_function
from hpnlp.models.export.onnx_experts import with_dense_experts
from hpnlp.models.export.onnx_weights import for_runtimes
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.shared.decoder import Decoder, DecoderConfig
from hpnlp.types import InputError
from tests.messages import raises
from tests.models.huggingface.test_compressed import BERT, GPT2, GROUPED, LLAMA, compressed

LENGTH = 12
LOADER = """
import sys
import jax
import numpy as np
function = jax.export.deserialize(open(sys.argv[1], "rb").read())
np.save(sys.argv[3], function.call(*np.load(sys.argv[2])))
assert "hpnlp" not in sys.modules
"""


def make(config, recipe, length=LENGTH):
    """(exported function, inputs) of a model with random weights after a recipe."""
    config, weights = compressed(config, recipe)
    model = Encoder(config) if isinstance(config, EncoderConfig) else LM(config)
    function = logits_function(model, weights, length)
    draw = np.random.default_rng(1)
    inputs = [jnp.asarray(draw.integers(0, config.vocab, (3, LENGTH)).astype(jnp.int32))]
    if "segment_ids" in function.inputs:
        inputs.append(jnp.asarray(np.arange(LENGTH) < np.array([[12], [7], [1]]), jnp.int32))
    if "token_types" in function.inputs:
        inputs.append(jnp.asarray(draw.integers(0, 2, (3, LENGTH)).astype(jnp.int32)))
    return function, inputs


@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        pytest.param(LLAMA, "layers(2),heads(0.5,by=magnitude)", marks=pytest.mark.slow),
        pytest.param(BERT, "int8", marks=pytest.mark.slow),
    ],
    ids=["lm", "encoder"],
)
def test_stablehlo_files_are_called_without_hpnlp_and_agree_exactly(config, recipe, tmp_path):
    function, inputs = make(config, recipe)
    path = tmp_path / "model.stablehlo"
    stablehlo.write(function, path)
    np.save(tmp_path / "inputs.npy", np.stack(inputs))
    arguments = [path, tmp_path / "inputs.npy", tmp_path / "logits.npy"]
    subprocess.run([sys.executable, "-c", LOADER, *map(str, arguments)], check=True, timeout=200)
    logits = np.load(tmp_path / "logits.npy")
    np.testing.assert_array_equal(logits, jax.jit(function.call)(*inputs))
    again = jax.export.deserialize(bytearray(path.read_bytes()))
    assert again.call(*(x[:2] for x in inputs)).shape == (2, *logits.shape[1:])  # any number of sequences


def test_invalid_exports_raise(tmp_path):
    function, _ = make(GPT2, "layers(1)")
    raises("platform 'gpu': expected one of cpu, cuda", stablehlo.write, function, tmp_path / "x", platforms=["gpu"])
    raises(r"cannot write .*nowhere/x", stablehlo.write, function, tmp_path / "nowhere" / "x", batch=1)
    config, weights = compressed(GPT2, "layers(1)")
    raises("length 17: expected 1 to 16", lambda: logits_function(LM(config), weights, 17))
    with pytest.raises(InputError, match="a Decoder has no logits of token ids"):
        logits_function(Decoder(DecoderConfig(dim=32, heads=4, layers=1, vocab=40, memory_dim=8)), weights, 4)


@pytest.mark.usefixtures("symbolic_sizes")
def test_only_errors_of_a_symbolic_batch_are_reported_as_such(tmp_path):
    def by_size(tokens):
        return tokens.astype(jnp.float32) * (1 if tokens.shape[0] > 3 else 2)

    with pytest.raises(InputError, match=r"cannot be exported for sequences of any number \(.*\): pass batch=N"):
        stablehlo.write(ExportedFunction(by_size, ("tokens",), 4), tmp_path / "x")
    stablehlo.write(ExportedFunction(by_size, ("tokens",), 4), tmp_path / "x", batch=2)

    def wrong(tokens):
        return jnp.dot(tokens, jnp.ones(3, jnp.int32))  # 4 tokens

    with pytest.raises(TypeError, match="contracting dimensions"):
        stablehlo.write(ExportedFunction(wrong, ("tokens",), 4), tmp_path / "x")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "recipe", "tolerance"),
    [
        (BERT, "layers(2)", 1e-5),
        (BERT, "int8", 2e-3),
        (LLAMA, "layers(2)", 1e-5),
        (dataclasses.replace(LLAMA, dtype="bfloat16"), "layers(2)", 2e-2),
        (GROUPED, "heads(0.5,by=magnitude),factorize(rank=4,by=weights)", 1e-5),
        (GPT2, "ternary(packed=False)", 2e-3),
        (GPT2, "ternary", 2e-3),  # rows of the table are unpacked by shifts
        (GPT2, "bf16", 2e-3),
        (LLAMA, "int4(group=8)", 2e-3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_onnxruntime_computes_the_same_logits(config, recipe, tolerance, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    function, inputs = make(config, recipe)
    onnx_file.write(function, tmp_path / "model.onnx", batch=3)
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = dict(zip(function.inputs, map(np.asarray, inputs), strict=True))
    (logits,) = session.run(["logits"], feeds)
    expected = np.asarray(jax.jit(function.call)(*inputs))
    np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@pytest.mark.oracle
@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize(
    ("config", "recipe", "tolerance"),
    [
        (BERT, "layers(2)", 1e-5),
        (BERT, "int8", 2e-3),
        (BERT, "binary(inputs=True)", 1e-4),
        (BERT, "layers(1),balanced(0.25)", 1e-5),
        (LLAMA, "layers(2)", 1e-5),
        (dataclasses.replace(BERT, mixer="window(2,2),full", pooling="none", classes=3, tied=False), "layers(2)", 1e-5),
        (GROUPED, "int8", 2e-3),
        (dataclasses.replace(LLAMA, mlp="top_k(4,2,gates='softmax',shared=1)"), "layers(2)", 1e-5),
        (
            dataclasses.replace(LLAMA, mlp="top_k(6,2)", form="block,block(mlp='swiglu'),block"),
            "experts(0.5,by=magnitude)",
            1e-5,
        ),
    ],
    ids=[
        "encoder",
        "encoder_int8",
        "encoder_binary",
        "encoder_balanced",
        "lm",
        "windows_of_a_tagger",
        "grouped_int8",
        "experts",
        "some_experts",
    ],
)
def test_files_take_any_batch_and_length(config, recipe, tolerance, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    config, weights = compressed(config, recipe)
    model = Encoder(config) if isinstance(config, EncoderConfig) else LM(config)
    function = logits_function(model, for_runtimes(weights), 0)
    onnx_file.write(logits_function(with_dense_experts(model), for_runtimes(weights), 0), tmp_path / "model.onnx")
    stablehlo.write(function, tmp_path / "model.stablehlo")
    called = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes())).call
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    for batch, length in ((1, 1), (2, 5), (3, 16)):
        tokens = draw.integers(0, config.vocab, (batch, length)).astype(np.int32)
        text = (np.arange(length) < draw.integers(1, length + 1, (batch, 1))).astype(np.int32)
        types = text * (np.arange(length) > 2).astype(np.int32)
        feeds = {"tokens": tokens, "segment_ids": text, "token_types": types}
        feeds = {name: feeds[name] for name in function.inputs}
        expected = np.asarray(function.call(*feeds.values()))
        (logits,) = session.run(["logits"], feeds)
        np.testing.assert_allclose(logits, expected, atol=tolerance * np.abs(expected).max(), rtol=0)
        np.testing.assert_allclose(called(*feeds.values()), expected, atol=tolerance * np.abs(expected).max(), rtol=0)


@pytest.mark.usefixtures("symbolic_sizes")
@pytest.mark.parametrize(
    ("mlp", "recipe"), [("top_k(4,2)", "bf16"), pytest.param("switch(4)", "balanced(0.5)", marks=pytest.mark.slow)]
)
def test_stablehlo_files_with_experts_take_any_batch_and_length(mlp, recipe, tmp_path):
    function, _ = make(dataclasses.replace(LLAMA, layers=1, mlp=mlp), recipe, length=0)
    stablehlo.write(function, tmp_path / "model.stablehlo")
    called = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes())).call
    for batch, length in ((1, 1), (2, 5), (4, 60)):
        tokens = np.random.default_rng(0).integers(0, LLAMA.vocab, (batch, length)).astype(np.int32)
        np.testing.assert_allclose(called(tokens), function.call(tokens), atol=1e-5)


@pytest.mark.oracle
@pytest.mark.usefixtures("symbolic_sizes")
def test_products_of_integers_are_those_of_the_runtime(tmp_path):
    """One node of each kind that onnxruntime fuses, for every matrix, and no other rounding."""
    onnx = pytest.importorskip("onnx")
    config, weights = compressed(BERT, "int8")
    onnx_file.write(logits_function(Encoder(config), for_runtimes(weights), 0), tmp_path / "model.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert kinds.count("DynamicQuantizeLinear") == kinds.count("MatMulInteger") >= 6 * config.layers
    assert "Round" not in kinds


@pytest.mark.oracle
def test_operations_without_a_counterpart_in_onnx_raise(tmp_path):
    pytest.importorskip("onnx")
    function, _ = make(GPT2, "pow2")  # rows of the table are unpacked by shifts to the left
    raises("shift_left for the recipe of hpnlp compress", onnx_file.write, function, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_operations_of_a_mixer_without_a_counterpart_in_onnx_name_it(tmp_path):
    pytest.importorskip("onnx")
    model = LM(LMConfig(dim=8, heads=2, layers=1, mlp_dim=8, vocab=16, max_len=8, mixer="sinkhorn(4)"))
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32), method="logits")["params"]
    )
    weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    with pytest.raises(
        InputError, match=r"computes cumlogsumexp for model.mixer \(hpnlp/nn/mixers/sinkhorn.py\), which is"
    ):
        onnx_file.write(logits_function(model, weights, 8), tmp_path / "model.onnx", batch=1)
