"""Measures the time per token of evaluating with a memory against sliding windows of the same context.

    python experiments/bench/memory_evaluation.py [--contexts=256,512] [--rounds=5]

Both have the same parameters, those of a Transformer-XL. With the memory, a batch of sequences of `context` tokens is read with
a memory of as many tokens, and every token is predicted. With sliding windows, as models without a memory are evaluated with a
full context, each window of `context` tokens predicts the token that follows it, and the logits of the other tokens are not
computed. The paper (Dai et al. 2019, arXiv 1901.02860, sec. 4.6) reports up to 1,874 times, for a context of 3,800 tokens on a
GPU.

Before, the loss of the last token of a sequence must be the same in both for a model of one layer, whose receptive field is
the window.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags

from hpnlp import measure
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import collections

RESULTS = Path(__file__).parents[1] / "results"
VOCAB, TOLERANCE = 264, 1e-4

FLAGS = flags.FLAGS
flags.DEFINE_list("contexts", ["256", "512"], "Numbers of tokens of the context.")
flags.DEFINE_integer("layers", 4, "Layers.")
flags.DEFINE_integer("dim", 192, "Model dimension.")
flags.DEFINE_integer("heads", 6, "Heads.")
flags.DEFINE_integer("batch", 8, "Sequences, and windows, of a batch.")
flags.DEFINE_integer("rounds", 5, "Measurements of each; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def model_of(context: int, layers: int) -> tuple[LM, Any]:
    config = LMConfig(
        layers=layers, dim=FLAGS.dim, heads=FLAGS.heads, mlp="gelu", vocab=VOCAB, mixer=f"transformer_xl({context})"
    )
    model = LM(config)
    return model, nn.unbox(jax.jit(model.init)(jax.random.key(0), example_batch(1, 8)))["params"]


def part(tokens: np.ndarray, start: int, length: int) -> dict[str, np.ndarray]:
    """Batch of the tokens from a position on."""
    positions = np.broadcast_to(np.arange(start, start + length, dtype=np.int32), (len(tokens), length))
    batch = {"tokens": tokens[:, start : start + length], "labels": tokens[:, start + 1 : start + length + 1]}
    return {
        **batch,
        "segment_ids": np.ones_like(positions),
        "positions": positions,
        "weights": np.ones(positions.shape, "f"),
    }


def with_memory(model: LM) -> Any:
    """`(params, batch, carry) -> (sum of the losses, carry)`."""

    def run(params: Any, batch: Any, carry: Any) -> Any:
        out: Any = model.apply(collections(params, carry), batch, method="loss")
        return out.sum, out.carry

    return run


def with_windows(model: LM) -> Any:
    """`(params, windows [B, L]) -> log-probabilities of the tokens that follow [B, V]`."""

    def run(params: Any, windows: jax.Array) -> Any:
        lengths = np.full(windows.shape[0], windows.shape[1], np.int32)
        h, _ = model.apply({"params": params}, windows, lengths, windows.shape[1], method="prefill")
        return jax.nn.log_softmax(model.apply({"params": params}, h, method="next_logits"))

    return run


def check(context: int) -> None:
    """Exits unless both give the last token of the second of two sequences the same loss, in one layer."""
    model, params = model_of(context, 1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2, 2 * context + 2)).astype(np.int32)
    run = jax.jit(with_memory(model))
    _, carry = run(params, part(tokens, 0, context), model.initial_carry(2))
    batch = part(tokens, context, context)
    batch["weights"][:, :-1] = 0.0
    ours, _ = run(params, batch, carry)
    windows = tokens[:, context - 1 : 2 * context]  # the last token and the `context` before it
    log_probs = np.asarray(jax.jit(with_windows(model))(params, windows))
    theirs = -log_probs[np.arange(2), batch["labels"][:, -1]].sum()
    if abs(float(ours) - theirs) > TOLERANCE * abs(theirs):
        sys.exit(f"context {context}: losses {float(ours)} with a memory and {theirs} with windows differ")


def bench(context: int) -> dict[str, Any]:
    check(context)
    model, params = model_of(context, FLAGS.layers)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (FLAGS.batch, 2 * context + 1)).astype(np.int32)
    carry = model.initial_carry(FLAGS.batch)
    memory = jax.jit(with_memory(model))
    _, carry = memory(params, part(tokens, 0, context), carry)
    batch, windows = jax.device_put(part(tokens, context, context)), jax.device_put(tokens[:, :context])
    sliding = jax.jit(with_windows(model))
    times = measure.timeit(
        {"memory": lambda: memory(params, batch, carry), "windows": lambda: sliding(params, windows)},
        rounds=FLAGS.rounds,
    )
    per_token = {"memory": FLAGS.batch * context, "windows": FLAGS.batch}
    return {
        "context": context,
        "batch": FLAGS.batch,
        "layers": FLAGS.layers,
        "dim": FLAGS.dim,
        "heads": FLAGS.heads,
        **{f"{name}_us_per_token": 1e6 * times[name].median / count for name, count in per_token.items()},
        "speedup": times["windows"].over(times["memory"]) * context,
        "all_ms": {name: [1e3 * seconds for seconds in timing.all] for name, timing in times.items()},
    }


def main(_: Any) -> None:
    rows = [bench(int(context)) for context in FLAGS.contexts]
    for row in rows:
        print(f"context {row['context']}: {row['speedup']:.0f} times")
    print(measure.write_result("memory_evaluation", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
