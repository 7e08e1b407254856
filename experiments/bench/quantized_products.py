"""Measures products with all kinds of weights, and compressed encoders, against float32 and onnxruntime, interleaved.

    python experiments/bench/quantized_products.py [--rows=1,8,16,128,1024] [--parts=encoders,decoding,products,bits]

Products are those of the matrices of an encoder of width 384, through `linear` within jit. The encoder has BERT's layers, six
of width 384; its outputs are first compared with those of onnxruntime in float32. Ratios with onnxruntime are reported where
onnx and onnxruntime are installed. "decoding" is the generation of tokens by a language model of the same width, one sequence
at a time. "bits" are products of a square matrix of width 1024 whose weights and inputs have one bit, beside those of int8, and
of powers of two by shifts. A time is the minimum of the rounds. About five minutes on two quiet cores.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import measure
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.decode import GREEDY, Generation
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.ops import weights
from hpnlp.ops.linear import linear

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = ((384, 384), (384, 1536), (1536, 384))
KINDS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda w: w,
    "bfloat16": lambda w: weights.to_floats(w, "bfloat16"),
    "int8": weights.quantize,
    "int8, fixed range of x": lambda w: weights.quantize(w, x_limit=4.0),
    "int4, groups of 32": lambda w: weights.quantize(w, 4, group=32),
    "int4 packed, groups of 32": lambda w: weights.pack(weights.quantize(w, 4, group=32), "int4"),
    "e4m3": weights.to_floats,
    "e4m3 of both": lambda w: weights.to_floats(w, round_inputs=True),
    "ternary packed": weights.ternarize,
    "binary packed": weights.binarize,
    "powers packed": weights.round_to_powers,
    "16 shared values": weights.cluster,
    "two of four": weights.keep_two_of_four,
    "a quarter of the blocks": lambda w: weights.keep_blocks(w, 0.25, 64),
    "low rank, half of the parameters": lambda w: weights.factorize(w, w.size // (2 * sum(w.shape))),
}
ONE_BIT = {
    **{name: KINDS[name] for name in ("float32", "int8", "binary packed")},
    "binary": lambda w: weights.binarize(w, packed=False),
    "binary of both": weights.binarize_products,
    "powers": lambda w: weights.round_to_powers(w, packed=False),
}
ONE_BIT_WIDTH, ONE_BIT_ROWS = 1024, (1, 16, 256, 1024)
SHIFTED_ROWS = 16  # most rows for which shifts are measured: more take seconds
ENCODERS = {
    "int8": "int8",
    "bfloat16": "bf16",
    "ternary packed": "ternary",
    "half of heads and columns": "heads(0.5, by=magnitude),mlp(0.5, by=magnitude)",
    "low rank, half of the parameters": "factorize(parameters=0.5, by=weights)",
    "half of layers, heads and columns, int8": "layers(3),heads(0.5, by=magnitude),mlp(0.5, by=magnitude),int8",
}
DECODERS = {"int8": "int8", "int8 weights only": "int8(integer_products=False)", "bfloat16": "bf16"}
VOCAB, CLASSES, HEADS, EPSILON = 8192, 32, 6, 1e-5
PROMPT, NEW_TOKENS = 4, 64
PARTS = {
    "encoders": "encoder of",
    "decoding": "decoding by",
    "products": "x [",
    "bits": "bits: ",
}  # part -> beginning of its rows' names

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", list(PARTS), "Parts to measure; rows of the others are kept.")
flags.DEFINE_list("rows", ["1", "8", "16", "128", "1024"], "Numbers of rows of x.")
flags.DEFINE_list("batches", ["1", "8"], "Numbers of sequences of 128 tokens that the encoder reads.")
flags.DEFINE_integer("layers", 6, "Layers of the encoder.")
flags.DEFINE_integer("dim", 384, "Width of the encoder.")
flags.DEFINE_integer("rounds", 15, "Measurements of each time; the least counts.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def graphs_of_onnxruntime() -> Any:
    """The module of onnxruntime's graphs, or None where onnx or onnxruntime is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")):
        return None
    import onnx_graphs

    return onnx_graphs


def timed(what: str, calls: Mapping[str, Callable[[], Any]], errors: Mapping[str, float]) -> dict[str, Any]:
    """A row of times relative to float32, and of int8 relative to onnxruntime's."""
    times = measure.timeit(calls, rounds=FLAGS.rounds, min_seconds=0.02)
    seconds = {name: time.min for name, time in times.items()}
    ratios = {f"{name}: time over float32": seconds[name] / seconds["float32"] for name in calls if name != "float32"}
    if "onnxruntime int8" in seconds:
        ratios["int8: time over onnxruntime int8"] = seconds["int8"] / seconds["onnxruntime int8"]
    print(
        what,
        f"{1e3 * seconds['float32']:.3f} ms",
        {name: round(value, 2) for name, value in ratios.items()},
        flush=True,
    )
    return {
        "what": what,
        "ratios": ratios,
        "errors": dict(errors),
        "seconds": {n: list(t.all) for n, t in times.items()},
    }


def product_row(d: int, f: int, rows: int, kinds: Mapping[str, Callable[[Any], Any]], begin: str) -> dict[str, Any]:
    """Times of x w for x [rows, D] and w [D, F]."""
    draw = np.random.default_rng(0)
    w = draw.normal(0, d**-0.5, (d, f)).astype(np.float32)
    x = draw.normal(size=(rows, d)).astype(np.float32)
    calls: dict[str, Callable[[], Any]] = {}
    errors, product = {}, jax.jit(linear)
    for name, make in kinds.items():
        weight, inputs = jax.device_put(jax.jit(make)(w)), jnp.asarray(x)
        calls[name] = lambda weight=weight, inputs=inputs: product(inputs, weight)
        errors[name] = relative_error(calls[name](), x @ w)
    if "powers" in kinds and rows <= SHIFTED_ROWS:
        weight = weights.round_to_powers(w, packed=False)
        calls["powers by shifts"] = lambda: shifted_product(x, weight)
        errors["powers by shifts"] = relative_error(calls["powers by shifts"](), x @ w)
    if kinds is KINDS and (graphs := graphs_of_onnxruntime()):
        for name, call in graphs.products(w, x).items():
            calls[f"onnxruntime {name}"] = call
            errors[f"onnxruntime {name}"] = relative_error(call(), x @ w)
    return timed(f"{begin}x [{rows}, {d}] times w [{d}, {f}]", calls, errors)


@jax.jit
def shifted_product(x: Any, w: weights.IntegerWeight) -> Any:
    """x w for powers of two: integers of x are shifted by the exponents of the codes, and added."""
    steps = jnp.abs(x).max(axis=1, keepdims=True) / 127
    rounded = jnp.round(x / steps).astype(jnp.int32)
    codes = w.codes.astype(jnp.int32)
    exponents = jax.lax.population_count(jnp.maximum(jnp.abs(codes), 1) - 1)
    shifted = jnp.sign(codes)[None] * (rounded[:, :, None] << exponents[None])
    return shifted.sum(axis=1).astype(jnp.float32) * steps * w.scales


def encoder_row(batch: int) -> dict[str, Any]:
    """Times of the logits of an encoder for sequences of 128 tokens."""
    config = EncoderConfig(
        dim=FLAGS.dim,
        heads=HEADS,
        layers=FLAGS.layers,
        vocab=VOCAB,
        max_len=128,
        mlp="gelu_exact",
        norm="layer",
        norm_eps=EPSILON,
        norm_placement="post",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        pooling="mean",
        classes=CLASSES,
    )
    model = Encoder(config)
    inputs = model.example_batch(batch, 128)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, 128)).astype(np.int32)
    inputs |= {"tokens": jnp.asarray(tokens), "positions": jnp.tile(jnp.arange(128, dtype=jnp.int32)[None], (batch, 1))}
    params = nn.meta.unbox(model.init(jax.random.key(0), inputs)["params"])

    def call_of(config: EncoderConfig, params: Any) -> Callable[[], Any]:
        logits = jax.jit(lambda params: Encoder(config).apply({"params": params}, inputs, method="logits"))
        return lambda: logits(params)

    calls: dict[str, Callable[[], Any]] = {"float32": call_of(config, params)}
    for name, recipe in ENCODERS.items():
        *_, (_, small, weights_of_small) = compress(config, params, parse_recipe(recipe))
        calls[name] = call_of(small, weights_of_small)
    if graphs := graphs_of_onnxruntime():
        calls |= {f"onnxruntime {n}": c for n, c in graphs.encoder(params, HEADS, tokens, EPSILON).items()}
    expected = np.asarray(calls["float32"]())
    errors = {name: relative_error(call(), expected) for name, call in calls.items()}
    if errors.get("onnxruntime float32", 0.0) > 1e-3:
        sys.exit(
            f"onnxruntime computes another function, error {errors['onnxruntime float32']:.2g}: nothing is reported"
        )
    row = timed(f"encoder of {FLAGS.layers} layers, D {FLAGS.dim}, B {batch}, T 128", calls, errors)
    row["ratios"] |= {f"{name}: error of the logits": errors[name] for name in errors if "int8" in name or "bf" in name}
    return row


def decoding_row() -> dict[str, Any]:
    """Times of the generation of NEW_TOKENS tokens after a prompt of PROMPT."""
    config = LMConfig(
        dim=FLAGS.dim, heads=HEADS, layers=FLAGS.layers, vocab=VOCAB, max_len=PROMPT + NEW_TOKENS, mlp="gelu"
    )
    params = nn.meta.unbox(LM(config).init(jax.random.key(0), example_batch(1, 8))["params"])
    prompt = np.arange(PROMPT)

    def call_of(config: LMConfig, params: Any) -> Callable[[], Any]:
        return lambda: list(Generation(LM(config), params, [prompt], tokens=NEW_TOKENS, sampling=GREEDY))

    calls: dict[str, Callable[[], Any]] = {"float32": call_of(config, params)}
    for name, recipe in DECODERS.items():
        *_, (_, small, weights_of_small) = compress(config, params, parse_recipe(recipe))
        calls[name] = call_of(small, weights_of_small)
    return timed(f"decoding by {FLAGS.layers} layers, D {FLAGS.dim}, V {VOCAB}, 1 sequence", calls, {})


def relative_error(found: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected))


def kept_rows() -> list[dict[str, Any]]:
    """Rows of an earlier result of the parts that are not measured."""
    path = Path(FLAGS.out) / f"quantized_products-{jax.default_backend()}.json"
    beginnings = tuple(beginning for part, beginning in PARTS.items() if part not in FLAGS.parts)
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row["what"].startswith(beginnings)]


def main(_: Any) -> None:
    if unknown := set(FLAGS.parts) - set(PARTS):
        sys.exit(f"--parts: no part {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    rows = kept_rows()
    if "encoders" in FLAGS.parts:
        rows += [encoder_row(int(batch)) for batch in FLAGS.batches]
    if "decoding" in FLAGS.parts:
        rows.append(decoding_row())
    if "products" in FLAGS.parts:
        rows += [product_row(d, f, int(count), KINDS, "") for d, f in SHAPES for count in FLAGS.rows]
    if "bits" in FLAGS.parts:
        rows += [product_row(ONE_BIT_WIDTH, ONE_BIT_WIDTH, m, ONE_BIT, PARTS["bits"]) for m in ONE_BIT_ROWS]
    rows.sort(key=lambda row: next(i for i, start in enumerate(PARTS.values()) if row["what"].startswith(start)))
    print(measure.write_result("quantized_products", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
