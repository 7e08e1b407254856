"""Whether a layout changes what is computed: loss over 100 steps and the first gradients, against one device; and whether it
costs what was planned: bytes of state, and bytes sent in a step, against the arrays' and the compiled program's.

python experiments/bench/parity.py [--steps=100]

Eight CPU devices, unless there are eight others. The learning rate rises to 1e-3 and falls again: at a constant one, parameters
of one device that begin 6e-8 apart, one rounding, come to losses that are 4e-5 apart, and no layout could be told from that; so
they come to 4e-7. Rows differ in their numbers of target tokens; gradients are Adam's
first moment after one step, unclipped.
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
from hpnlp.training.step import make_trainer  # noqa: E402

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
    """`(losses, gradients of the first step, bytes of a device: of state, and sent in a step)`, as planned and as they are."""
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
        apart = [
            float(np.linalg.norm(found - other) / np.linalg.norm(other))
            for found, other in zip(gradients, expected_gradients, strict=True)
        ]
        rows.append(
            {
                "layout": name,
                "steps": len(losses),
                "first_loss": float(losses[0]),
                "last_loss": float(losses[-1]),
                "loss_relative": float(np.max(np.abs(losses - expected) / expected)),
                "gradient_relative": max(apart),
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
