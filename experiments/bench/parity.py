"""Compares each layout with one device, and its memory and traffic with the plan.

    python experiments/bench/parity.py [--steps=100]

Losses over 100 steps and the first gradients are compared with those of one device; planned bytes of state and planned bytes
sent in a step are compared with the arrays and the compiled program. Runs on eight simulated CPU devices, or on eight real
ones. The learning rate rises to 1e-3 and falls again: at a constant rate, initial parameters that differ by one rounding (6e-8)
lead to losses that differ by 4e-5 on one device, which would hide any error of a layout; with the schedule they differ by 4e-7.
Sequences have different numbers of target tokens; gradients are Adam's first moment after one step, unclipped.
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
from hpnlp.data.stream import DataConfig, prepare  # noqa: E402
from hpnlp.models.lm import LM, LMConfig  # noqa: E402
from hpnlp.parallel.plan import Plan  # noqa: E402
from hpnlp.planner import collectives, memory  # noqa: E402
from hpnlp.training.optim import OptimizerConfig  # noqa: E402
from hpnlp.training.trainer import make_trainer  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
LAYOUTS = {
    "one device": Plan("single"),
    **{name: Plan(name) for name in ("data", "zero1", "zero2", "zero3", "tensor", "pipeline", "sequence", "3d")},
    "sequence, by heads": Plan("sequence", exchange="heads"),
    "data 4 x tensor 2": Plan(tensor=2),
    "data 4 x pipeline 2": Plan(pipeline=2),
    "data 4 x sequence 2": Plan(sequence=2),
    "zero3 4 x tensor 2": Plan("zero3", tensor=2),
    "tensor 4 x pipeline 2": Plan("tensor", pipeline=2),
    "sequence 2 x tensor 2 x pipeline 2": Plan("single", sequence=2, tensor=2, pipeline=2),
    "zero3 2 x tensor 2 x pipeline 2": Plan("zero3", tensor=2, pipeline=2),
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup=50, clip_norm=0.0)


def train(plan: Plan, batches: list[Any], vocab: int) -> tuple[np.ndarray, list[np.ndarray], dict[str, float]]:
    """`(losses, gradients of the first step, bytes)`: bytes of a device's state and traffic, planned and actual."""
    length = batches[0]["tokens"].shape[1]
    model = LM(LMConfig(layers=8, dim=64, heads=8, vocab=vocab, max_len=length))
    trainer = make_trainer(model, OPTIMIZER, plan, steps=len(batches))
    key = jax.random.key(0)
    state, losses, gradients = trainer.init(key), [], []
    costs = {
        "state_bytes": sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state)),
        "state_bytes_planned": memory.held_bytes(trainer.state_shapes),
        "sent_bytes_planned": collectives.total(
            collectives.step_traffic(trainer, collectives.trace(trainer, *batches[0]["tokens"].shape).jaxpr)
        ),
    }
    for batch in batches:
        state, metrics = trainer.step(state, jax.device_put(batch, trainer.batch_sharding), key)
        losses.append(metrics["loss"])
        if not gradients:
            moments = jax.device_get(jax.tree.leaves(optax.tree.get(state.opt_state, "mu")))
            gradients = [moment / (1 - OPTIMIZER.b1) for moment in moments]
    lowered = trainer.step.jitted.lower(trainer.state_shapes, batches[0], jax.eval_shape(lambda: key))
    costs["sent_bytes"] = collectives.total(collectives.compiled_traffic(lowered.compile().as_text()))
    return np.array(jax.device_get(losses), np.float64), gradients, costs


def main(_: Any) -> None:
    corpus = prepare(DataConfig(seq_len=64, batch_size=16))
    stream = corpus.train(seed=0)
    batches = [next(stream) for _ in range(FLAGS.steps)]
    for batch in batches:
        rows, length = batch["weights"].shape
        batch["weights"] = batch["weights"] * (np.arange(length)[None] >= 3 * np.arange(rows)[:, None])
    rows, expected, expected_gradients = [], np.zeros(0), []
    for name, plan in LAYOUTS.items():
        losses, gradients, costs = train(plan, batches, corpus.tokenizer.vocab_size)
        if not rows:
            expected, expected_gradients = losses, gradients
        differences = [
            float(np.linalg.norm(actual - reference) / np.linalg.norm(reference))
            for actual, reference in zip(gradients, expected_gradients, strict=True)
        ]
        rows.append(
            {
                "layout": name,
                "steps": len(losses),
                "first_loss": float(losses[0]),
                "last_loss": float(losses[-1]),
                "loss_relative": float(np.max(np.abs(losses - expected) / expected)),
                "gradient_relative": max(differences),
                **costs,
            }
        )
        print(rows[-1], flush=True)
    print(measure.write_result("parity", rows, FLAGS.out))


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_integer("steps", 100, "Training steps.")
    flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
    app.run(main)
