"""Compares every task's training under several layouts with one device, and its planned memory with the compiled step.

    python experiments/bench/tasks.py [--tasks=lm,classification] [--steps=50] [--parts=layouts,plans]

Layouts: each task trains a small model on data of every machine, in float32, on one device and under each layout of eight
devices. Compared are the losses of all steps, and the first gradients, array by array: Adam's first moment after one step,
unclipped. The learning rate rises to 1e-3 and falls again, for the reason that parity.py gives. For comparison, one device also
trains from initial parameters that are each one rounding larger. A layout that does not fit a task's model is reported with its
error message.

Plans: the step of a model of 6 layers of 384 with T 256 and B 16 is compiled for one device, and its arguments and temporary
buffers are compared with those that `hpnlp plan` estimates, with rematerialisation too, and for one model whose layers differ.

Runs on eight simulated CPU devices, or on eight real ones. About 8 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "32")  # of hpnlp.__main__.spare_threads

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from absl import app, flags  # noqa: E402

from hpnlp import cli, measure, planner, tasks  # noqa: E402
from hpnlp.parallel.plan import Plan  # noqa: E402
from hpnlp.planner import compiled  # noqa: E402
from hpnlp.training import config as configs  # noqa: E402
from hpnlp.training.config import Config  # noqa: E402
from hpnlp.training.evaluation import on_devices  # noqa: E402
from hpnlp.training.run_directory import make_model  # noqa: E402
from hpnlp.training.trainer import make_trainer  # noqa: E402
from hpnlp.types import InputError  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
DATA: dict[str, dict[str, Any]] = {
    "lm": {"path": "stdlib", "tokenizer": "bytes"},
    "classification": {"path": "stdlib_functions", "tokenizer": "bpe(1024)"},
    "tagging": {"path": "stdlib_tokens", "tokenizer": "words(1000)"},
    "masked_lm": {"path": "stdlib", "tokenizer": "bytes"},
    "seq2seq": {"path": "number_words", "tokenizer": "bpe(400)"},
    "dual_encoder": {"path": "stdlib_docstrings", "tokenizer": "bpe(1024)"},
}
LAYOUTS = ("data", "zero3", "tensor", "pipeline", "3d")
SMALL = {"layers": 8, "dim": 64, "heads": 8, "unroll": 1}
OPTIMIZER = {"learning_rate": 1e-3, "warmup": 25, "clip_norm": 0.0}
BASE = {"layers": 6, "dim": 384, "heads": 6, "mlp": "gelu"}
REMAT = ("none", "full")
HYBRIDS = {"lm": "conv*2,full"}  # mixers of further planned steps, whose layers differ

FLAGS = flags.FLAGS
flags.DEFINE_list("tasks", list(DATA), "Tasks to measure, of those with tokens of text.")
flags.DEFINE_list("parts", ["layouts", "plans"], "Parts to measure: layouts, plans.")
flags.DEFINE_integer("steps", 50, "Training steps under each layout.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def make_config(task: str, model: Mapping[str, Any], length: int, steps: int = 1000) -> Config:
    """The config of a task with fields of its model, for sequences of a length and batches of 16."""
    values = configs.default(task)
    values.data.update(DATA[task], seq_len=length, batch_size=16)
    values.model.update(model)
    values.optimizer.update(OPTIMIZER)
    values.train.update(steps=steps, sample=0)
    return configs.resolve(values)


def train(
    config: Config, dataset: Any, plan: Plan, *, rounds_up: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """`(losses, gradients of the first step by path)`. Raises InputError if the plan does not fit the model.

    rounds_up: whether every initial parameter is replaced by the next larger float32.
    """
    model = make_model(config, tasks.find(config.task).vocabulary(dataset))
    trainer = make_trainer(model, config.optimizer, plan, steps=config.train.steps)
    key, batches = jax.random.key(0), dataset.train(seed=0)
    state, losses, gradients = trainer.init(key), [], {}
    if rounds_up:
        params = jax.tree.map(lambda x: np.nextafter(np.asarray(x), np.float32(np.inf)), state.params)
        state = dataclasses.replace(state, params=jax.tree.map(jax.device_put, params))
    for _ in range(config.train.steps):
        state, metrics = trainer.step(state, on_devices(trainer, next(batches), config), key)
        losses.append(float(metrics["loss"]))
        if not gradients:
            moments = jax.device_get(optax.tree.get(state.opt_state, "mu"))
            for path, moment in jax.tree_util.tree_leaves_with_path(moments):
                gradients[jax.tree_util.keystr(path)] = np.asarray(moment, np.float64)
    return np.array(losses), gradients


def layouts(task: str) -> Iterator[dict[str, Any]]:
    """A row for each layout of a task: its largest differences from one device, or the reason why it is refused."""
    config = make_config(task, SMALL, 32, FLAGS.steps)
    dataset = tasks.find(task).dataset(config.data, None)
    losses, gradients = train(config, dataset, Plan("single"))
    rounded_losses = train(config, dataset, Plan("single"), rounds_up=True)[0]
    of_rounding = float(np.max(np.abs(rounded_losses - losses) / losses))
    for name in LAYOUTS:
        row, start = {"task": task, "layout": name, "steps": FLAGS.steps}, time.perf_counter()
        try:
            others, other_gradients = train(config, dataset, Plan(name))
        except InputError as error:
            yield {**row, "refused": str(error)}
            continue
        differences = {
            path: float(np.linalg.norm(other_gradients[path] - gradient) / np.linalg.norm(gradient))
            for path, gradient in gradients.items()
        }
        worst = max(differences, key=lambda path: differences[path])
        yield {
            **row,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "loss_relative": float(np.max(np.abs(others - losses) / losses)),
            "gradient_relative": differences[worst],
            "gradient": worst,
            "loss_relative_of_rounding": of_rounding,
            "seconds": time.perf_counter() - start,
        }


def plans(task: str) -> Iterator[dict[str, Any]]:
    """A row for each planned step of a task: planned and compiled bytes of the state and of temporary buffers."""
    mixers = ["full", HYBRIDS[task]] if task in HYBRIDS else ["full"]
    for mixer, remat in itertools.product(mixers, REMAT):
        config = make_config(task, {**BASE, "mixer": mixer}, 256)
        costs = planner.costs(dataclasses.replace(config, plan=Plan("single", remat=remat)), 1)
        step = compiled.compile_step(costs, "compiled", "cpu")
        yield {
            "task": task,
            "mixer": mixer,
            "remat": remat,
            "state_bytes": step.arguments,
            "state_bytes_planned": costs.state_bytes,
            "temporaries_bytes": step.temporaries,
            "temporaries_bytes_planned": costs.temporary_bytes,
            "seconds": step.seconds,
        }


PARTS = {"layouts": layouts, "plans": plans}


def main(_: Any) -> None:
    cli.prepare_jax()
    rows = []
    for part in FLAGS.parts:
        for task in FLAGS.tasks:
            for row in PARTS[part](task):
                rows.append(row)
                print(row, flush=True)
    print(measure.write_result("tasks", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
