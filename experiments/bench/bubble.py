"""Measures the idle fraction of pipelines against the formula, and memory, traffic and time of their schedules.

python experiments/bench/bubble.py [--stages=4] [--measurements=5]

Simulated devices share the cores of one machine, so that an idle stage takes time that it would not take on real devices.
Idle work is therefore counted: the matrix products of a step's layers, loops multiplied out, relative to those of the model.
Times are of the same batch in ever smaller microbatches, with all stages on the same cores. Memory is the compiler's temporary
memory of a device.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")  # of hpnlp.__main__.spare_threads

import jax  # noqa: E402
from absl import app, flags  # noqa: E402

from hpnlp import measure  # noqa: E402
from hpnlp.models.lm import LM, LMConfig, example_batch  # noqa: E402
from hpnlp.parallel import pipeline  # noqa: E402
from hpnlp.parallel.plan import Plan  # noqa: E402
from hpnlp.planner import collectives  # noqa: E402
from hpnlp.training.optim import OptimizerConfig  # noqa: E402
from hpnlp.training.trainer import Trainer, make_trainer  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
LENGTH = 32
# (rounds, activations stored for the backward pass), each measured with several numbers of microbatches.
KINDS = [(1, "all"), (2, "all"), (4, "all"), (1, "layers"), (1, "stages"), (4, "stages")]


def trainer_of(plan: Plan, layers: int) -> Trainer:
    config = LMConfig(layers=layers, dim=64, heads=4, vocab=256, max_len=LENGTH, unroll=1)
    devices = jax.devices()[: plan.pipeline or 1]
    return make_trainer(LM(config), OptimizerConfig(), plan, steps=100, devices=devices)


def layer_flops(plan: Plan, layers: int, rows: int) -> int:
    """Floating-point operations of `layers` layers in one step on all devices together, idle ticks included."""
    batch, key = jax.eval_shape(lambda: example_batch(rows, LENGTH)), jax.eval_shape(lambda: jax.random.key(0))
    trainers = [trainer_of(plan, count) for count in (layers, 2 * layers)]
    single, double = (
        measure.count_flops(trainer.step.jitted, trainer.state_shapes, batch, key) for trainer in trainers
    )
    return double - single  # embedding, output layer and optimizer cancel


def main(_: Any) -> None:
    stages = FLAGS.stages
    layers, rows = 4 * stages, 8 * stages
    useful = layer_flops(Plan("single"), layers, rows)
    results, steps = [], {}
    for rounds, kept in KINDS:
        for count in (stages, 2 * stages, 4 * stages, 8 * stages):
            plan = Plan(
                "pipeline",
                pipeline=stages,
                microbatches=count,
                rounds=rounds,
                recompute_stages=kept == "stages",
                remat="full" if kept == "layers" else "none",
            )
            trainer = trainer_of(plan, layers)
            batch = jax.device_put(jax.jit(example_batch, static_argnums=(0, 1))(rows, LENGTH), trainer.batch_sharding)
            key = jax.random.key(0)
            with jax.set_mesh(trainer.layout.mesh):
                compiled = trainer.step.jitted.lower(trainer.state_shapes, batch, key).compile()
            row = {
                "stages": stages,
                "rounds": rounds,
                "microbatches": count,
                "kept": kept,
                "ticks": pipeline.ticks(stages, count, rounds),
                "idle_formula": (stages - 1) / (rounds * count + stages - 1),
                "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "sent_bytes": collectives.total(collectives.compiled_traffic(compiled.as_text())),
                "sent_bytes_planned": collectives.total(
                    collectives.step_traffic(trainer, collectives.trace(trainer, rows, LENGTH).jaxpr)
                ),
            }
            if kept == "all":  # otherwise recomputed products would be counted as well
                row["idle_counted"] = 1 - useful / layer_flops(plan, layers, rows)
            results.append(row)
            steps[rounds, kept, count] = step_of(compiled, trainer, batch, key)
            print(row, flush=True)
    timed = measure.timeit({str(name): step for name, step in steps.items()}, rounds=FLAGS.measurements)
    for row, timing in zip(results, timed.values(), strict=True):
        row["seconds"] = timing.median
        print([row[name] for name in ("rounds", "kept", "microbatches", "seconds")])
    print(measure.write_result("bubble", results, FLAGS.out))


def step_of(compiled: Any, trainer: Trainer, batch: Any, key: jax.Array) -> Any:
    """A function that takes one training step after another with a state of its own."""
    held = [trainer.init(key)]

    def step() -> Any:
        held[0], metrics = compiled(held[0], batch, key)
        return metrics

    return step


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_integer("stages", 4, "Stages of the pipeline, up to eight.")
    flags.DEFINE_integer("measurements", 5, "Measurements of each step.")
    flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
    app.run(main)
