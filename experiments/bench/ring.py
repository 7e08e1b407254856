"""Measures activation memory of a device when eight share a long sequence, and the work that a window saves a ring.

    python experiments/bench/ring.py [--length=16384]

Temporary memory of the compiled step of a model of 4 layers, D 256, on one device and under `plan.sequence`. Activation memory
is temporary memory without the gradients, which every device stores in full. Nothing is run: tests and parity.py check that
both compute the same. For each mask: the pairs of token chunks that the ring computes out of all pairs, the rounds it takes out
of all rounds, and the fraction of token pairs that the mask allows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("NPROC", "32")  # of hpnlp.__main__.spare_threads

import jax  # noqa: E402
from absl import app, flags  # noqa: E402

from hpnlp import measure  # noqa: E402
from hpnlp.models.lm import LM, LMConfig, example_batch  # noqa: E402
from hpnlp.ops.attention.block_sparse.block_mask import density  # noqa: E402
from hpnlp.parallel.context_parallel import assign_chunks, make_schedule  # noqa: E402
from hpnlp.parallel.plan import Plan  # noqa: E402
from hpnlp.planner.memory import held_bytes  # noqa: E402
from hpnlp.training.optim import OptimizerConfig  # noqa: E402
from hpnlp.training.trainer import make_trainer  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
MIXERS = ["full", "window(2047,0)", "window(511,0)"]
PLANS = {"one device": Plan("single"), "ring": Plan("sequence"), "heads": Plan("sequence", exchange="heads")}

FLAGS = flags.FLAGS
flags.DEFINE_integer("length", 16_384, "Tokens of the sequence.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def bench(mixer: str, length: int) -> list[dict[str, Any]]:
    model = LM(LMConfig(layers=4, dim=256, heads=8, vocab=264, max_len=length, mixer=mixer, unroll=1))
    batch, key = (jax.eval_shape(make) for make in (lambda: example_batch(1, length), lambda: jax.random.key(0)))
    rows: list[dict[str, Any]] = []
    for layout, plan in PLANS.items():
        trainer = make_trainer(model, OptimizerConfig(), plan, steps=100)
        with jax.set_mesh(trainer.layout.mesh):
            program = measure.compile(trainer.step.jitted, trainer.state_shapes, batch, key)
        gradients = held_bytes(trainer.state_shapes.params)
        row: dict[str, Any] = {
            "mixer": mixer, "layout": layout, "length": length, "devices": trainer.layout.mesh.size,
            "temp_bytes": program.memory.temp, "activation_bytes": program.memory.temp - gradients,
        }  # fmt: skip
        if rows:
            row["over_one"] = row["activation_bytes"] / rows[0]["activation_bytes"]
        if layout == "ring":
            (mask,) = set(model.config.masks())
            schedule = make_schedule(mask, length, assign_chunks([mask], length, DEVICES))
            computed, possible = schedule.pair_counts
            row |= {
                "pairs_done": computed, "pairs_possible": possible, "rounds_done": schedule.hop_count,
                "rounds_possible": DEVICES, "density": density(mask, length, length),
            }  # fmt: skip
        print(row, flush=True)
        rows.append(row)
    return rows


def main(_: Any) -> None:
    rows = [row for mixer in MIXERS for row in bench(mixer, FLAGS.length)]
    print(measure.write_result("ring", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
