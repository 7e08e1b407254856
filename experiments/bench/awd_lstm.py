"""Measures the AWD-LSTM recipe: against a plain LSTM and a transformer at equal time, without each part, ensembles and a cache.

    python experiments/bench/awd_lstm.py [--tables=recipe,parts,transformer,ensembles,cache] [--limit=S]

"recipe": held-out perplexity of `experiments/lm/awd_lstm.py` over that of a plain LSTM of the same sizes at equal time.
Steps of both forms are timed in turn. The plain LSTM gets as many as the recipe's time allows, and stops when it overfits.
Compilation is not counted. "parts": the recipe with fewer steps, the last third of which is averaged because no evaluation
would start the average so early, and without each of its parts with equal steps. "transformer": the recipe over a
transformer of equal size at equal time. "ensembles": mean probabilities of three seeds, of the three best runs of "parts", and
of the last three checkpoints of one run, over the mean perplexity of the members. "cache": a continuous cache over none.

Perplexities are those of the best evaluation on all held-out text. Finished runs are kept in --workdir, and are not trained
again: with --limit, no run begins after that many seconds, and the same command goes on. About 20 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from hpnlp import cli, measure, tasks
from hpnlp.cli import experiment
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.training import loop
from hpnlp.training.config import Config, default, resolve
from hpnlp.training.evaluation import on_devices
from hpnlp.training.processes.allocator import keep_freed_memory
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

EXPERIMENT = str(Path(__file__).parents[1] / "lm" / "awd_lstm.py")
TABLES = ("recipe", "parts", "transformer", "ensembles", "cache")
CACHE = "continuous(size=500, theta=0.3, weight=0.1)"

FLAGS = flags.FLAGS
flags.DEFINE_list("tables", list(TABLES), "Tables to measure; rows of the others are kept.")
flags.DEFINE_integer("steps", 2100, "Steps of the recipe in the table of recipes.")
flags.DEFINE_integer("part_steps", 900, "Steps of the runs in the table of parts.")
flags.DEFINE_integer("rounds", 10, "Measurements of each step.")
flags.DEFINE_float("limit", 0.0, "Seconds after which no further run begins, 0 for none.")
flags.DEFINE_string("workdir", "runs/awd_lstm_bench", "Directory of the runs.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


class Stopped(Exception):
    """The time limit is over."""


class Runs:
    """The runs of the benchmark, each trained once."""

    def __init__(self, root: Path, end: float) -> None:
        self.root, self.end = root, end
        self.module = experiment.load(EXPERIMENT)

    def config(self, form: str, changes: dict[str, Any], steps: int) -> Config:
        """Config of a form of the experiment with changes."""
        values = transformer() if form == "transformer" else self.module.get_config(form)
        last = {"train.steps": steps, "train.checkpoint_every": max(1, steps // 4), "train.keep": 3}
        values.update_from_flattened_dict(changes | last)
        return resolve(values)

    def part_config(self, changes: dict[str, Any]) -> Config:
        """Config of the recipe with changes, with the steps of the table of parts."""
        average = {"optimizer.average": f"uniform(start={2 * FLAGS.part_steps // 3})"}
        return self.config("recipe", average | changes, FLAGS.part_steps)

    def train(self, name: str, config: Config) -> dict[str, Any]:
        """Trains a run, unless it is finished; returns its figures."""
        workdir = self.root / name
        done = workdir / "figures.json"
        if done.exists():
            figures = json.loads(done.read_text())
            if figures["steps"] == config.train.steps:
                return figures
        if time.monotonic() > self.end:
            raise Stopped
        shutil.rmtree(workdir, ignore_errors=True)
        result = loop.train(config, workdir)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        scores = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
        scores[result.step] = result.heldout["loss"]
        best = min(scores, key=lambda step: scores[step])
        figures = {
            "steps": config.train.steps,
            "steps_done": result.step,
            "best_step": best,
            "perplexity": math.exp(scores[best]),
            "seconds": result.seconds["step"] + result.seconds["data"],
            "parameters": result.parameters,
        }
        done.write_text(json.dumps(figures))
        print(name, figures, flush=True)
        return figures

    def seconds(self, name: str, configs: dict[str, Config]) -> dict[str, float]:
        """Median seconds of a step of each config, whose steps are timed in turn; measured once."""
        path = self.root / f"times_{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        if time.monotonic() > self.end:
            raise Stopped
        steps = {key: stepper(config) for key, config in configs.items()}
        result = {key: times.median for key, times in measure.timeit(steps, rounds=FLAGS.rounds).items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        print(f"seconds per step: {result}", flush=True)
        return result


def transformer() -> Any:
    """A transformer with the number of parameters of the LSTM, and as many tokens in a batch, of sequences twice as long."""
    words = experiment.load(EXPERIMENT).get_config()
    config = default("lm")
    for name in ("path", "tokenizer", "heldout", "heldout_bytes"):
        config.data[name] = words.data[name]
    config.data.seq_len, config.data.batch_size = 2 * words.data.seq_len, words.data.batch_size // 2
    config.model.update(layers=2, dim=256, heads=4, mlp_dim=344, dropout=0.3, unroll=2)
    config.optimizer.update(learning_rate=2e-3, warmup=100, weight_decay=0.1)
    config.train.update(
        steps=1, eval_every=words.train.eval_every, eval_batches=0, eval_stride=words.data.seq_len, sample=0
    )
    return config


def stepper(config: Config) -> Any:
    """A function that does one step, always with the same batch."""
    task = tasks.find(config.task)
    dataset = task.dataset(config.data, None)
    model = make_model(config, task.vocabulary(dataset))
    trainer = make_trainer(
        model, config.optimizer, config.plan, steps=config.train.steps, batch_size=config.data.batch_size
    )
    fixed = dataclasses.replace(dataset.config, **({"length_deviation": 0.0} if config.task == "rnn_lm" else {}))
    dataset.config = fixed
    batch = on_devices(trainer, next(dataset.train(seed=0)), config)
    key = jax.random.key(0)
    state = [trainer.init(key)]

    def step() -> Any:
        state[0], metrics = trainer.step(state[0], batch, key)
        return metrics["loss"]

    return step


def recipe(runs: Runs) -> list[dict[str, Any]]:
    """The recipe and the plain LSTM at equal time."""
    times = runs.seconds("recipe", {form: runs.config(form, {}, FLAGS.steps) for form in ("recipe", "plain")})
    steps = {"recipe": FLAGS.steps, "plain": round(FLAGS.steps * times["recipe"] / times["plain"])}
    rows = []
    for form, count in steps.items():
        rows.append({"table": "recipe", "form": form, "step_seconds": times[form]})
        rows[-1] |= runs.train(f"{form}_{count}", runs.config(form, {}, count))
    rows[0]["over_plain"] = rows[0]["perplexity"] / rows[1]["perplexity"]
    return rows


def parts(runs: Runs) -> list[dict[str, Any]]:
    """The recipe without each of its parts, at equal steps."""
    configs = {part: runs.part_config(off) for part, off in {"nothing": {}, **runs.module.PARTS}.items()}
    times, rows = runs.seconds("parts", configs), []
    for part, config in configs.items():
        rows.append({"table": "parts", "without": part, "step_seconds": times[part]})
        rows[-1] |= runs.train(directory_of(part), config)
    for row in rows:
        row["over_recipe"] = row["perplexity"] / rows[0]["perplexity"]
        row["time_over_recipe"] = row["step_seconds"] / rows[0]["step_seconds"]
    return rows


def directory_of(part: str) -> str:
    """Name of the directory of a run without a part."""
    return f"without_{part.replace(' ', '_').replace(',', '')}_{FLAGS.part_steps}"


def against_transformer(runs: Runs) -> list[dict[str, Any]]:
    """The recipe and a transformer of as many parameters at equal time."""
    times = runs.seconds(
        "transformer", {form: runs.config(form, {}, FLAGS.steps) for form in ("recipe", "transformer")}
    )
    count = round(FLAGS.steps * times["recipe"] / times["transformer"])
    lstm = runs.train(f"recipe_{FLAGS.steps}", runs.config("recipe", {}, FLAGS.steps))
    other = runs.train(f"transformer_{count}", runs.config("transformer", {}, count))
    row = {"table": "transformer", "lstm": lstm, "transformer": other}
    row["over_transformer"] = lstm["perplexity"] / other["perplexity"]
    return [row]


def ensembles(runs: Runs) -> list[dict[str, Any]]:
    """Mean probabilities of three members, of each kind."""
    first = directory_of("nothing")
    runs.train(first, runs.part_config({}))
    seeds = [first]
    for seed in (1, 2):
        seeds.append(f"seed_{seed}_{FLAGS.part_steps}")
        runs.train(seeds[-1], runs.part_config({"train.seed": seed}))
    finished = [directory_of(part) for part in ("nothing", *runs.module.PARTS)]
    scores = {
        name: json.loads((runs.root / name / "figures.json").read_text())
        for name in finished
        if (runs.root / name).exists()
    }
    best = sorted(scores, key=lambda name: scores[name]["perplexity"])[:3]
    newest = sorted(int(path.name) for path in (runs.root / first / "checkpoints").glob("[0-9]*"))[-3:]
    kinds = {
        "seeds": [(runs.root / name, None) for name in seeds],
        "best of a sweep": [(runs.root / name, None) for name in best],
        "checkpoints of one run": [(runs.root / first, step) for step in newest],
    }
    rows = []
    for kind, members in kinds.items():
        losses = [evaluate_run([member], {}).scores["loss"] for member in members]
        together = evaluate_run(members, {}).scores["loss"]
        mean = sum(map(math.exp, losses)) / len(losses)
        figures = {"perplexity": math.exp(together), "members": [math.exp(loss) for loss in losses]}
        rows.append({"table": "ensembles", "kind": kind, **figures, "over_mean_member": math.exp(together) / mean})
        print(rows[-1], flush=True)
    return rows


def cache(runs: Runs) -> list[dict[str, Any]]:
    """A continuous cache over none, of the recipe, with streams of four sequences."""
    name, config = f"recipe_{FLAGS.steps}", runs.config("recipe", {}, FLAGS.steps)
    runs.train(name, config)
    changes = {"data.batch_size": 4}
    losses = [evaluate_run(runs.root / name, changes, cache=spec).scores["loss"] for spec in ("", CACHE)]
    figures = {"cache": CACHE, "perplexity": math.exp(losses[1]), "over_none": math.exp(losses[1] - losses[0])}
    return [{"table": "cache", **figures}]


MEASURES = dict(zip(TABLES, (recipe, parts, against_transformer, ensembles, cache), strict=True))


def main(_: list[str]) -> None:
    cli.prepare_jax()
    keep_freed_memory()
    if unknown := set(FLAGS.tables) - set(TABLES):
        sys.exit(f"--tables: unknown {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    root = Path(FLAGS.workdir)
    root.mkdir(parents=True, exist_ok=True)
    runs = Runs(root, time.monotonic() + FLAGS.limit if FLAGS.limit else math.inf)
    stored = root / "rows.json"
    rows = json.loads(stored.read_text()) if stored.exists() else {}
    for table in FLAGS.tables:
        try:
            rows[table] = MEASURES[table](runs)
        except Stopped:
            print(f"--limit is over in the table {table}: run the same command again", flush=True)
            break
        stored.write_text(json.dumps(rows))
    flat = [row for table in TABLES for row in rows.get(table, [])]
    for row in flat:
        print(row, flush=True)
    print(measure.write_result("awd_lstm", flat, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
