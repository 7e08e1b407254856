"""Trains forms of a model with equal steps and in equal time, and compares their held-out scores with those of a plain form.

The learning rate is constant after a warm-up, so that a run of more steps contains the shorter one: each form is trained once
for each seed, with the larger of two budgets, `--steps` steps and the steps that it does in the time of as many steps of the
plain form. A budget's score is the best of its evaluations. Steps of the forms of a group are timed in turn, on one batch;
compilation and evaluations do not count. The difference to the plain form is paired by seed, which decides the parameters and
the order of the data; its interval is that of Student's t over the seeds, for 95 %.

Finished runs stay in --workdir and are not trained again, nor are steps timed again. With --limit, no run begins after that
many seconds; the same command goes on. The result holds all groups whose runs are finished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from form_scores import best_score, compared, over

from hpnlp import cli, measure, tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.training.config import Config, flat
from hpnlp.training.evaluation import evaluate, on_devices
from hpnlp.training.processes.allocator import keep_freed_memory
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import Trainer, make_trainer

BUDGETS = ("steps", "time")

FLAGS = flags.FLAGS
flags.DEFINE_list("groups", [], "Groups to train; all by default. Finished runs of the others are kept in the result.")
flags.DEFINE_integer("steps", 1200, "Steps of the plain form.", lower_bound=1)
flags.DEFINE_integer("seeds", 3, "Runs of each form, with the seeds 0, 1, ...", lower_bound=1)
flags.DEFINE_integer("evaluations", 10, "Evaluations of the plain form, at equal distances.", lower_bound=1)
flags.DEFINE_integer("rounds", 9, "Measurements of each form's step.", lower_bound=1)
flags.DEFINE_float("limit", 0.0, "Seconds after which no further run begins, 0 for none.")
flags.DEFINE_bool("tiny", False, "Few steps of small models, to try the program; the result goes to --workdir.")
flags.DEFINE_string("workdir", "", 'Directory of the runs; "" for runs/NAME.')
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of a model. The first one of a group is the plain one."""

    name: str
    config: Config
    paper: str = ""
    claim: str = ""  # result that the paper reports
    metric: str = "loss"  # held-out score; losses are better if lower, others if higher


Groups = Mapping[str, Sequence[Form]]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Data and compiled functions of a form, which all of its runs share."""

    trainer: Trainer
    dataset: Any
    parameters: int


class Comparison:
    """The runs of a benchmark."""

    def __init__(self, root: Path, groups: Groups) -> None:
        self.root, self.groups = root, groups
        self.steps = 4 if FLAGS.tiny else FLAGS.steps
        self.seeds = 2 if FLAGS.tiny else FLAGS.seeds
        self.datasets: dict[Any, Any] = {}
        self.prepared: dict[str, Prepared] = {}

    def prepare(self, form: Form) -> Prepared:
        """Data and trainer of a form."""
        key = digest(form.config)
        if key not in self.prepared:
            config = form.config
            task = tasks.find(config.task)
            if config.data not in self.datasets:
                self.datasets[config.data] = task.dataset(config.data, None)
            dataset = self.datasets[config.data]
            trainer = make_trainer(
                make_model(config, task.vocabulary(dataset)),
                config.optimizer.for_batch(config.data.batch_size),
                config.plan,
                steps=self.steps,
                batch_size=config.data.batch_size,
            )
            shapes = jax.tree.leaves(trainer.state_shapes.params)
            self.prepared[key] = Prepared(trainer, dataset, sum(math.prod(leaf.shape) for leaf in shapes))
        return self.prepared[key]

    def seconds(self, group: str) -> dict[str, list[float]]:
        """Seconds of a step of each form of a group in each round; measured once."""
        forms = self.groups[group]
        path = self.root / f"times-{file_name(group)}.json"
        key = digest([flat(form.config) for form in forms])
        if path.exists() and (stored := json.loads(path.read_text()))["digest"] == key:
            return stored["seconds"]
        print(f"{group}: timing the steps of {len(forms)} forms", flush=True)
        steps = {form.name: self._stepper(form) for form in forms}
        times = measure.timeit(steps, rounds=2 if FLAGS.tiny else FLAGS.rounds)
        seconds = {name: list(timing.all) for name, timing in times.items()}
        replace_bytes(path, json.dumps({"digest": key, "seconds": seconds}).encode())
        return seconds

    def _stepper(self, form: Form) -> Callable[[], Any]:
        """A function that does one step, always with the same batch."""
        ready, key = self.prepare(form), jax.random.key(0)
        batches = ready.dataset.train(seed=0)
        batch = on_devices(ready.trainer, next(batches), form.config)
        batches.close()
        held = [ready.trainer.init(key)]

        def step() -> Any:
            held[0], metrics = ready.trainer.step(held[0], batch, key)
            return metrics["loss"]

        return step

    def budgets(self, group: str) -> dict[str, dict[str, int]]:
        """Form -> budget -> number of steps."""
        seconds, plain = self.seconds(group), self.groups[group][0].name
        return {name: {"steps": self.steps, "time": max(1, round(self.steps / over(times, seconds[plain])))}
                for name, times in seconds.items()}  # fmt: skip

    def path(self, group: str, form: Form, seed: int) -> Path:
        return self.root / f"{file_name(group)}-{file_name(form.name)}-{seed}.json"

    def finished(self, group: str, form: Form, seed: int) -> dict[str, Any] | None:
        """The stored figures of a run, None if it has to be trained."""
        path = self.path(group, form, seed)
        stored = json.loads(path.read_text()) if path.exists() else {}
        return stored if stored.get("digest") == self._run_digest(group, form) else None

    def _run_digest(self, group: str, form: Form) -> str:
        return digest([flat(form.config), self._points(group, form)])

    def _points(self, group: str, form: Form) -> list[int]:
        """Steps after which a run is evaluated."""
        budgets = self.budgets(group)[form.name]
        distance = max(1, self.steps // FLAGS.evaluations)
        return sorted({*range(distance, max(budgets.values()) + 1, distance), *budgets.values()})

    def train(self, group: str, form: Form, seed: int, progress: Progress) -> None:
        """Trains a run, and stores its scores by step."""
        ready, key, points = self.prepare(form), jax.random.key(seed), self._points(group, form)
        state, batches = ready.trainer.init(key), ready.dataset.train(seed=seed)
        scores: dict[int, float] = {}
        for step in range(1, points[-1] + 1):
            batch = on_devices(ready.trainer, next(batches), form.config)
            state, _ = ready.trainer.step(state, batch, key)
            if step in points:
                limit = 4 if FLAGS.tiny else None
                evaluation = evaluate(ready.trainer, state.best_params, ready.dataset, form.config, limit)
                scores[step] = evaluation.scores[form.metric]
                progress.report(group, form, seed, step, points[-1], scores[step])
        batches.close()
        if not all(map(math.isfinite, scores.values())):
            raise SystemExit(
                f"{group}, {form.name}, seed {seed}: a score is not finite ({scores}): lower the learning rate"
            )
        data = form.config.data
        figures = {
            "digest": self._run_digest(group, form),
            "parameters": ready.parameters,
            "flops": ready.trainer.flops(data.batch_size, data.seq_len),
            "scores": list(scores.items()),
        }
        replace_bytes(self.path(group, form, seed), json.dumps(figures).encode())

    def rows(self) -> list[dict[str, Any]]:
        """Rows of all groups whose runs are finished."""
        rows = []
        for group, forms in self.groups.items():
            if not (self.root / f"times-{file_name(group)}.json").exists():
                continue
            runs = {form.name: [self.finished(group, form, seed) for seed in range(self.seeds)] for form in forms}
            if all(all(of_form) for of_form in runs.values()):
                rows += [self._row(group, form, runs) for form in forms]
        return rows

    def _row(self, group: str, form: Form, runs: Mapping[str, Any]) -> dict[str, Any]:
        plain, seconds = self.groups[group][0].name, self.seconds(group)
        flops, plain_flops = (runs[name][0]["flops"] for name in (form.name, plain))
        row: dict[str, Any] = {
            "group": group,
            "form": form.name,
            "plain": plain,
            "metric": form.metric,
            "paper": form.paper,
            "claim": form.claim,
            "parameters": runs[form.name][0]["parameters"],
            "flops": flops,  # None where they depend on the batch
            "flops_over_plain": flops / plain_flops if flops and plain_flops else None,
            "step_seconds": statistics.median(seconds[form.name]),
            "step_time_over_plain": over(seconds[form.name], seconds[plain]),
            "tokens_per_step": form.config.data.batch_size * form.config.data.seq_len,
        }
        budgets = self.budgets(group)
        for budget in BUDGETS:
            scores, plain_scores = (
                [best_score(run["scores"], budgets[name][budget], form.metric) for run in runs[name]]
                for name in (form.name, plain)
            )
            row[budget] = {"steps": budgets[form.name][budget], **compared(scores, plain_scores)}
        row["scores"] = {seed: run["scores"] for seed, run in enumerate(runs[form.name])}
        return row


class Progress:
    """Prints evaluations, with an estimate of the time that is left."""

    def __init__(self, comparison: Comparison, missing: Sequence[tuple[str, Form, int]]) -> None:
        self.works = []  # estimated seconds of each run
        for group, form, _ in missing:
            seconds, budgets = comparison.seconds(group), comparison.budgets(group)
            self.works.append(max(budgets[form.name].values()) * statistics.median(seconds[form.name]))
        self.start, self.done = time.monotonic(), 0

    def report(self, group: str, form: Form, seed: int, step: int, steps: int, score: float) -> None:
        finished = sum(self.works[: self.done]) + self.works[self.done] * step / steps
        elapsed = time.monotonic() - self.start
        left = elapsed / finished * (sum(self.works) - finished)
        print(
            f"[{self.done + 1}/{len(self.works)}] {group}, {form.name}, seed {seed}: step {step} of {steps}, held-out "
            f"{form.metric} {score:.4f}; {elapsed / 60:.1f} min, about {left / 60:.0f} min left",
            flush=True,
        )


def digest(content: Any) -> str:
    """A key of a config, or of what JSON can hold."""
    content = flat(content) if isinstance(content, Config) else content
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def run(name: str, groups: Groups, further_rows: Callable[[Path], Sequence[dict[str, Any]]] | None = None) -> None:
    """Trains the runs that are missing, and writes the result.

    Args:
      name: Name of the benchmark.
      groups: The forms to train.
      further_rows: Function of the workdir that measures rows beside those of the groups, after the trainings.

    Raises:
      SystemExit: `--groups` names none of the groups, or a score is not finite.
    """
    cli.prepare_jax()
    keep_freed_memory()
    if unknown := set(FLAGS.groups) - set(groups):
        raise SystemExit(f"--groups: unknown {', '.join(sorted(unknown))}; there are {', '.join(groups)}")
    root = Path(FLAGS.workdir or f"runs/{name}{'_tiny' * FLAGS.tiny}")
    root.mkdir(parents=True, exist_ok=True)
    comparison, end = Comparison(root, groups), time.monotonic() + (FLAGS.limit or math.inf)
    missing = [
        (group, form, seed)
        for group in FLAGS.groups or groups
        for form in groups[group]
        for seed in range(comparison.seeds)
        if comparison.finished(group, form, seed) is None
    ]
    progress = Progress(comparison, missing)
    for group, form, seed in missing:
        if time.monotonic() > end:
            print(
                f"--limit is over after {progress.done} of {len(missing)} runs: run the same command again", flush=True
            )
            break
        comparison.train(group, form, seed, progress)
        progress.done += 1
    rows = [*comparison.rows(), *(further_rows(root) if further_rows else ())]
    for row in rows:
        print({key: value for key, value in row.items() if key != "scores"}, flush=True)
    if rows:
        print(measure.write_result(name, rows, root if FLAGS.tiny else FLAGS.out))
