"""Row of an encoder whose products are of 8 bits, over bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows.rows import Calls, Case, Context, Record, Row, Target, Work, compare
from hpnlp import measure
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.models.encoder import Encoder, EncoderConfig

RECIPES = {"int8": "int8", "fp8": "fp8(round_inputs=True)"}
CLASSES, VOCAB = 32, 30528
LARGEST_ERROR = 0.1  # of the logits, relative to those of bfloat16


def bert(context: Context) -> EncoderConfig:
    """An encoder of BERT's shape with a classifier."""
    layers, dim, heads, length = (1, 32, 2, 16) if context.rehearse else (12, 768, 12, 128)
    return EncoderConfig(
        dim=dim,
        heads=heads,
        layers=layers,
        vocab=VOCAB,
        max_len=length,
        mlp="gelu_exact",
        norm="layer",
        norm_placement="post",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        pooling="mean",
        classes=CLASSES,
        dtype="bfloat16",
        unroll=1,
    )


def run_encoder(context: Context) -> list[Record]:
    """Logits of a batch by weights of bfloat16, int8 and e4m3."""
    config, batch = bert(context), 2 if context.rehearse else 32
    length = config.max_len
    inputs = Encoder(config).example_batch(batch, length)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, length)).astype(np.int32)
    inputs |= {
        "tokens": jnp.asarray(tokens),
        "positions": jnp.tile(jnp.arange(length, dtype=jnp.int32)[None], (batch, 1)),
    }
    params = nn.meta.unbox(jax.jit(Encoder(config).init)(jax.random.key(0), inputs)["params"])

    def call_of(recipe: str) -> Callable[[], Any]:
        *_, (_, small, weights) = compress(config, params, parse_recipe(recipe))

        def logits(weights: Any) -> Any:
            return Encoder(small).apply({"params": weights}, inputs, method="logits")

        program = measure.compile(logits, weights)
        return lambda: program(weights)

    calls, peer, errors = Calls(), "bfloat16", {}
    expected = calls.add(peer, lambda: call_of("bf16"))
    for name, recipe in RECIPES.items():
        label = f"ours, {name}"
        if f"products, {name}" in context.differing:
            calls.failed[label] = "differs in the parity check"
            continue
        result = calls.add(label, lambda recipe=recipe: call_of(recipe))
        if result is not None and expected is not None:
            a, b = (np.asarray(x, np.float32) for x in (result, expected))
            errors[label] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
            if not errors[label] < LARGEST_ERROR:
                calls.failed[label] = f"logits differ by {errors[label]:.2g}"
                del calls.running[label]
    dim, flops = config.dim, 2 * batch * length * config.layers * 12 * config.dim**2
    weight_bytes = config.layers * 12 * dim**2
    works = {f"ours, {name}": Work(flops, {"fp8": "e4m3"}.get(name, name), weight_bytes) for name in RECIPES}
    record = compare(
        context,
        f"{config.layers} x {dim}, B {batch}, T {length}",
        calls,
        works | {peer: Work(flops, bytes=2 * weight_bytes)},
    )
    return [record | {"errors": {name: error for name, error in errors.items() if np.isfinite(error)}}]


ENCODER = Row(
    "encoder",
    "logits of an encoder of 12 x 768, B 32, T 128, by int8 and fp8 products",
    "bfloat16",
    {f"{name}: time over bfloat16": Target(1 / 1.3, 1 / 1.7) for name in RECIPES},
    [Case("12 x 768", 45, run_encoder)],
    checks=("products",),
)
