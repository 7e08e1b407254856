"""Measures a dual encoder's step whose batch is encoded in parts (GradCache) against the step that encodes the batch at once.

    python experiments/bench/grad_cache.py [--batch=1024] [--part=64] [--rounds=5]

Temporary memory of the compiled steps, which includes gradients, and their time, interleaved. Memory is also compared with
that of a step with a batch of one part. The first losses and gradient norms of the two steps must agree, or nothing is
reported. Takes some minutes on two cores, and 3 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import Trainer, make_trainer

RESULTS = Path(__file__).parents[1] / "results"
MODEL = DualEncoderConfig(layers=4, dim=128, heads=4, mlp_dim=512, mlp="gelu", vocab=8192, max_len=32, dropout=0.1)

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch", 1024, "Pairs of a step.")
flags.DEFINE_integer("part", 64, "Pairs that are encoded at once.")
flags.DEFINE_integer("rounds", 5, "Measurements of each step; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def trainer_of(accumulate: int) -> Trainer:
    optimizer = OptimizerConfig(accumulate=accumulate, learning_rate=1e-4)
    return make_trainer(DualEncoder(MODEL), optimizer, Plan("single"), steps=1000, devices=jax.devices()[:1])


def batch_of(pairs: int) -> dict[str, Any]:
    """Pairs of random texts."""
    draw, batch = np.random.default_rng(0), DualEncoder(MODEL).example_batch(pairs, MODEL.max_len)
    tokens = {f"{prefix}tokens": draw.integers(0, MODEL.vocab, (pairs, MODEL.max_len)) for prefix in ("", "pair_")}
    return jax.device_put(batch | {name: x.astype(np.int32) for name, x in tokens.items()})


def step_of(trainer: Trainer, batch: Any) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A function that takes one step after another, and the metrics of the first step."""
    key = jax.random.key(0)
    state, metrics = trainer.step(trainer.init(key), batch, key)
    held = [state]

    def step() -> Any:
        held[0], metrics = trainer.step(held[0], batch, key)
        return metrics

    return step, {name: float(metrics[name]) for name in ("loss", "grad_norm")}


def main(_: Any) -> None:
    cli.prepare_jax()
    batch, parts = batch_of(FLAGS.batch), FLAGS.batch // FLAGS.part
    cases = {"at once": (1, FLAGS.batch), "in parts": (parts, FLAGS.batch), "one part": (1, FLAGS.part)}
    programs, steps, first = {}, {}, {}
    for name, (accumulate, pairs) in cases.items():
        trainer = trainer_of(accumulate)
        arguments = trainer.state_shapes, batch_of(pairs), jax.random.key(0)
        programs[name] = measure.compile(trainer.step.jitted, *arguments)
        if pairs == FLAGS.batch:
            steps[name], first[name] = step_of(trainer, batch)
    for name, value in first["at once"].items():
        if abs(first["in parts"][name] / value - 1) > 1e-4:
            sys.exit(
                f"{name} of the first step is {first['in parts'][name]} in parts and {value} at once: nothing is reported"
            )
    timings = measure.timeit(steps, rounds=FLAGS.rounds)
    rows = []
    for name, (accumulate, pairs) in cases.items():
        row = {
            "step": name, "pairs": pairs, "parts": accumulate, "layers": MODEL.layers, "dim": MODEL.dim,
            "length": MODEL.max_len, "vectors_bytes": 2 * 4 * pairs * MODEL.dim,
            "temp_bytes": programs[name].memory.temp, "matmul_gflops": programs[name].flops / 1e9,
        }  # fmt: skip
        if name in timings:
            row |= {
                "ms": 1e3 * timings[name].median,
                "time_over_at_once": timings[name].over(timings["at once"]),
                "all_ms": [1e3 * seconds for seconds in timings[name].all],
            }
        print({key: value for key, value in row.items() if key != "all_ms"}, flush=True)
        rows.append(row)
    print(measure.write_result("grad_cache", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
