"""Measures the training loop against bare jitted steps, and the time of `import hpnlp` after `import jax`.

    python experiments/bench/loop.py [--steps=300] [--rounds=3]

The loop runs with data, logging and checkpoints every 100 steps, without evaluation; the bare steps run the same compiled
function on one batch that stays on the device. Both are timed after the first step, which compiles.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

RESULTS = Path(__file__).parents[1] / "results"

FLAGS = flags.FLAGS
flags.DEFINE_integer("steps", 300, "Steps of each measurement.")
flags.DEFINE_integer("rounds", 3, "Interleaved measurements of both; the median of the ratios is reported.")
flags.DEFINE_integer("imports", 7, "Measurements of the import.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def loop_seconds(config: configs.Config) -> float:
    """Wall time of the loop's steps, without the set-up before the first and the evaluation after the last."""
    with tempfile.TemporaryDirectory() as workdir, contextlib.redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        result = loop.train(config, workdir)
        wall = time.perf_counter() - start
    return wall - result.seconds["setup"] - result.seconds["eval"]


def bare_seconds(config: configs.Config) -> float:
    """Wall time of the same number of jitted steps on one batch."""
    from hpnlp.data.stream import prepare

    corpus = prepare(config.data)
    model = make_model(config, Vocabulary(corpus.tokenizer))
    trainer = make_trainer(model, config.optimizer, config.plan, steps=config.train.steps)
    key = jax.random.key(0)
    state = trainer.init(key)
    batch = jax.device_put(next(corpus.train(seed=0)), trainer.batch_sharding)
    state, metrics = jax.block_until_ready(trainer.step(state, batch, key))
    start = time.perf_counter()
    for _ in range(config.train.steps - 1):
        state, metrics = trainer.step(state, batch, key)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - start


def import_seconds(module: str) -> float:
    command = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    if module == "hpnlp":
        command = f"import jax, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout)


def main(_: Any) -> None:
    cli.prepare_jax()
    values = configs.default()
    values.model.update(layers=4, dim=192, heads=6, mlp="gelu")
    values.data.update(batch_size=8, heldout_bytes=20_000)
    values.train.update(steps=FLAGS.steps, checkpoint_every=100, log_every=10)
    config = configs.resolve(values)
    pairs = [(loop_seconds(config), bare_seconds(config)) for _ in range(FLAGS.rounds)]
    ratio = statistics.median(loop_time / bare for loop_time, bare in pairs)
    imports = statistics.median(import_seconds("hpnlp") for _ in range(FLAGS.imports))
    print(f"loop / bare steps {ratio:.3f} ({pairs}); import hpnlp beyond import jax {1e3 * imports:.1f} ms")
    row = {
        "steps": FLAGS.steps,
        "loop_over_bare": ratio,
        "loop_seconds": [loop_time for loop_time, _ in pairs],
        "bare_seconds": [bare for _, bare in pairs],
        "import_seconds": imports,
    }
    print(measure.write_result("loop", [row], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
