"""Compares auxiliary losses and buffers under several layouts with one device.

    python experiments/bench/auxiliary.py [--steps=10]

The model has a mixer with buffers and two auxiliary losses (the running average of keys of `tests/centered_keys.py`) and a
feed-forward network with a third loss. Compared are the losses of all steps, the buffers after the first and the last one, and
the first gradients, array by array: Adam's first moment after one step, unclipped. Sequences have different lengths. The
learning rate rises to 1e-3 and falls again, for the reason that parity.py gives.

Runs on eight simulated CPU devices, or on eight real ones. About a minute on two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")  # of hpnlp.__main__.spare_threads

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from absl import app, flags  # noqa: E402

from hpnlp import measure  # noqa: E402
from hpnlp.models.lm import LM, LMConfig  # noqa: E402
from hpnlp.nn.feed_forward import FEED_FORWARDS  # noqa: E402
from hpnlp.nn.mixers import MIXERS  # noqa: E402
from hpnlp.parallel.plan import Plan  # noqa: E402
from hpnlp.training.optim import OptimizerConfig  # noqa: E402
from hpnlp.training.trainer import make_trainer  # noqa: E402
from tests.centered_columns import centered_columns  # noqa: E402
from tests.centered_keys import centered_keys  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
BATCH, LENGTH, VOCAB = 16, 32, 256
# Name of a layout -> (plan, parts of gradient accumulation).
LAYOUTS = {
    "one device": (Plan("single"), 1),
    "accumulation of 4 parts": (Plan("single"), 4),
    "data": (Plan("data"), 1),
    "tensor": (Plan("tensor"), 1),
    "pipeline of 4 stages, 4 microbatches": (Plan("data", pipeline=4, microbatches=4), 1),
    "zero3 4 x tensor 2, accumulation of 2 parts": (Plan("zero3", tensor=2), 2),
}
FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 10, "Training steps.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Random sequences of different lengths; padding has weight 0."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    real = np.arange(LENGTH)[None] < draw.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    return {
        "tokens": tokens[:, :LENGTH],
        "labels": tokens[:, 1:],
        "segment_ids": real.astype(np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1)),
        "weights": real.astype(np.float32),
    }


def train(plan: Plan, parts: int) -> dict[str, list[np.ndarray]]:
    """Losses of each step, auxiliary ones included, buffers after the first and the last, and gradients of the first."""
    sizes = {"layers": 8, "dim": 64, "heads": 8, "mlp_dim": 128, "vocab": VOCAB, "max_len": LENGTH, "unroll": 1}
    model = LM(LMConfig(mixer="centered,full", mlp="columns", **sizes))
    optimizer = OptimizerConfig(
        learning_rate=1e-3,
        warmup=FLAGS.steps // 2,
        clip_norm=0.0,
        accumulate=parts,
        aux="keys_loss(3.0), hidden_loss(0.2), columns_loss(2.0)",
    )
    trainer = make_trainer(model, optimizer, plan, steps=FLAGS.steps)
    key = jax.random.key(0)
    state, losses, gradients, buffers = trainer.init(key), [], [], []
    for seed in range(FLAGS.steps):
        state, metrics = trainer.step(state, jax.device_put(batch_of(seed), trainer.batch_sharding), key)
        losses.append(np.array([float(metrics[name]) for name in sorted(metrics) if name.endswith("loss")]))
        if not gradients:
            buffers = jax.device_get(jax.tree.leaves(state.buffers))
            gradients = jax.device_get(jax.tree.leaves(optax.tree.get(state.opt_state, "mu")))
    return {
        "loss": [np.stack(losses)[:, i] for i in range(losses[0].size)],
        "first_buffers": buffers,
        "buffers": jax.device_get(jax.tree.leaves(state.buffers)),
        "gradient": gradients,
    }


def largest_difference(actual: list[np.ndarray], expected: list[np.ndarray], of_each: bool = False) -> float:
    """The largest relative difference of two lists of arrays, by norms, or `of_each` number."""
    pairs = zip(actual, expected, strict=True)
    if of_each:
        return max(float(np.max(np.abs(a - b) / np.abs(b))) for a, b in pairs)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def main(_: Any) -> None:
    MIXERS["centered"], FEED_FORWARDS["columns"] = centered_keys, centered_columns
    rows, expected = [], {}
    for name, (plan, parts) in LAYOUTS.items():
        results = train(plan, parts)
        if not rows:
            expected = results
        rows.append(
            {
                "layout": name,
                "steps": FLAGS.steps,
                "loss_relative": largest_difference(results["loss"], expected["loss"], of_each=True),
                "first_buffers_relative": largest_difference(results["first_buffers"], expected["first_buffers"]),
                "buffers_relative": largest_difference(results["buffers"], expected["buffers"]),
                "gradient_relative": largest_difference(results["gradient"], expected["gradient"]),
            }
        )
        print(rows[-1], flush=True)
    print(measure.write_result("auxiliary", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
