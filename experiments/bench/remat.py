"""Measures memory and time of each policy of `plan.remat` for a model of 110M parameters, and the error of the plan.

    python experiments/bench/remat.py [--rows=8] [--timed_rows=2] [--measurements=3]

A step of 12 layers, D 768, T 512, V 30,528, AdamW, on one device. Bytes are the temporary memory of the compiled program,
gradients included, and are compared with the plan made from the trace. Time is of steps with fewer sequences, the policies
interleaved. A policy that takes no less memory than `none` is an error. Takes 15 minutes on two cores, and 16 GiB.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from hpnlp import cli, measure, planner
from hpnlp.models.lm import LMConfig, example_batch
from hpnlp.parallel.plan import Plan
from hpnlp.planner.estimate import planned_trainer
from hpnlp.planner.search import changed
from hpnlp.training.config import Config, default, resolve

RESULTS = Path(__file__).parents[1] / "results"
POLICIES = ["none", "dots", "names(projected,mixed,hidden)", "names(mixed,hidden)", "names", "full"]
MODEL = LMConfig(layers=12, dim=768, heads=12, vocab=30_528, max_len=512, mlp="gelu")

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 8, "Sequences of the step whose memory is measured.")
flags.DEFINE_integer("timed_rows", 2, "Sequences of the step that is timed; 0 for no timing.")
flags.DEFINE_integer("measurements", 3, "Measurements of each step; the median is reported.")
flags.DEFINE_spaceseplist("policies", POLICIES, "Values of plan.remat.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def config_of(remat: str, rows: int) -> Config:
    overrides = {
        "model": MODEL,
        "plan": Plan("single", remat=remat),
        "data.seq_len": MODEL.max_len,
        "data.batch_size": rows,
    }
    return changed(resolve(default()), overrides)


def bench(remat: str, rows: int) -> dict[str, Any]:
    config = config_of(remat, rows)
    costs, trainer = planner.costs(config, 1), planned_trainer(config, jax.devices()[:1])
    batch, key = (
        jax.eval_shape(make) for make in (lambda: example_batch(rows, MODEL.max_len), lambda: jax.random.key(0))
    )
    program = measure.compile(trainer.step.jitted, trainer.state_shapes, batch, key)
    gradients = costs.memory["gradients"]
    row = {
        "remat": remat, "rows": rows, "length": MODEL.max_len, "layers": MODEL.layers, "dim": MODEL.dim,
        "parameters": costs.parameters, "temp_bytes": program.memory.temp, "temp_bytes_planned": costs.program.peak,
        "activation_bytes": program.memory.temp - gradients, "activation_bytes_planned": costs.memory["activations"],
        "matmul_gflops": program.flops / 1e9,
    }  # fmt: skip
    print(row, flush=True)
    return row


def step_of(remat: str, rows: int) -> Any:
    """A function that takes one training step after another with a state of its own."""
    trainer = planned_trainer(config_of(remat, rows), jax.devices()[:1])
    key = jax.random.key(0)
    batch = jax.device_put(jax.jit(example_batch, static_argnums=(0, 1))(rows, MODEL.max_len), trainer.batch_sharding)
    held = [trainer.init(key)]

    def step() -> Any:
        held[0], metrics = trainer.step(held[0], batch, key)
        return metrics

    return step


def main(_: Any) -> None:
    cli.prepare_jax()
    rows = [bench(remat, FLAGS.rows) for remat in FLAGS.policies]
    for row in rows[1:]:
        if row["temp_bytes"] >= rows[0]["temp_bytes"]:
            sys.exit(f"{row['remat']} takes no less memory than {rows[0]['remat']}: nothing is reported")
    if FLAGS.timed_rows:
        steps = {remat: step_of(remat, FLAGS.timed_rows) for remat in FLAGS.policies}
        timed = measure.timeit(steps, rounds=FLAGS.measurements)
        for row, timing in zip(rows, timed.values(), strict=True):
            row |= {
                "timed_rows": FLAGS.timed_rows, "ms": 1e3 * timing.median,
                "time_over_first": timing.over(timed[FLAGS.policies[0]]), "all_ms": [1e3 * s for s in timing.all],
            }  # fmt: skip
            print(row["remat"], row["ms"], row["time_over_first"])
    print(measure.write_result("remat", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
