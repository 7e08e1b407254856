"""Runs the steps of `recipe_steps.py`, and makes the rows of their results."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import small_runs
from recipe_steps import TEACHER, Comparison, OfRun, Step, seeds_of
from recipe_tasks import TINY_DATA, config_of

from hpnlp import measure, tasks
from hpnlp.compress.matrices import is_table
from hpnlp.compress.stages.moments import listed_matrices
from hpnlp.jobs.compression.compress_run import CompressionSettings, compress_run
from hpnlp.ops.weight import is_weight, parameter_count
from hpnlp.training import gradients, run_directory

METRIC = "accuracy"  # of all tasks


def value_of(value: Any, workdir: Path) -> Any:
    """A value of a config, a recipe or a flag, with what it reads of a run."""
    if not isinstance(value, OfRun):
        return value
    return value.text.format(path=workdir / value.run, share=small_runs.read(workdir / value.run)["share"])


def run_step(step: Step, workdir: Path, tiny: bool) -> float:
    """Does a step. Returns its held-out score, or exits if a signal stopped it."""
    fields = {name: value_of(value, workdir) for name, value in step.fields.items()}
    target, start = workdir / step.name, time.process_time()
    with (workdir / "log.txt").open("a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        score = (compressed if step.recipe else trained)(step, fields, workdir, tiny)
    params = run_directory.load(target).params
    result = {"score": score, "parameters": parameter_count(params), "share": share_of(params)}
    small_runs.write(target, {**result, "cpu_seconds": time.process_time() - start})
    return score


def trained(step: Step, fields: Mapping[str, Any], workdir: Path, tiny: bool) -> float:
    """The held-out score after a training."""
    if step.task != "digits" and step.name != TEACHER:
        fields = {**fields, "data.tokenizer": str(workdir / TEACHER / "tokenizer.json")}
    config = config_of(step.task, {**fields, "train.steps": step.steps}, workdir / TINY_DATA if tiny else None)
    return small_runs.train(config, workdir / step.name).heldout[METRIC]


def compressed(step: Step, fields: Mapping[str, Any], workdir: Path, tiny: bool) -> float:
    """The held-out score after a compression."""
    if (
        workdir / step.name / "config.json"
    ).exists():  # stopped after the last file of the model, and before the result
        shutil.rmtree(workdir / step.name)
    settings = CompressionSettings(
        finetune=step.steps,
        rewind=value_of(step.rewind, workdir),
        iterations=step.iterations,
        calibration_batches=1 if tiny else 8,
        batch_sizes=(1,),
        rounds=1,
        changes=fields,
    )
    rows = compress_run(workdir / step.source, workdir / step.name, value_of(step.recipe, workdir), settings)
    return rows[-1].scores[METRIC]


def share_of(params: Any) -> float:
    """The share of the weights of a model's kernels that are not 0; 1 where kernels are no arrays."""
    kernels = [np.asarray(w) for path, w in listed_matrices(params) if not is_table(path) and not is_weight(w)]
    return sum(int((w != 0).sum()) for w in kernels) / max(1, sum(w.size for w in kernels)) if kernels else 1.0


def run_all(steps: Sequence[Step], workdir: Path, tiny: bool) -> None:
    """Does all steps that are not finished, and prints the time that remains."""
    left = [step for step in steps if not small_runs.is_finished(workdir / step.name)]
    progress = small_runs.Progress(sum(step.work for step in left))
    for number, step in enumerate(left, 1 + len(steps) - len(left)):
        progress.begin(f"[{number}/{len(steps)}] {step.name}")
        score = run_step(step, workdir, tiny)
        progress.end(step.work, f"{METRIC} {score:.4f}")
        jax.clear_caches()


def row_of(group: str, comparison: Comparison, workdir: Path, tiny: bool) -> dict[str, Any] | None:
    """A row of the result; None unless all of its runs are finished."""
    runs = comparison.technique, comparison.control
    ours, theirs = ([workdir / f"{run}-{seed}" for seed in seeds_of(tiny)] for run in runs)
    if not all(map(small_runs.is_finished, [*ours, *theirs])):
        return None
    scores = [small_runs.scores(path) for path in ours]
    row: dict[str, Any] = {"table": "comparisons", "group": group, "what": comparison.text}
    row |= {"technique": comparison.technique, "control": comparison.control, "seeds": len(ours)}
    row |= {"heldout_examples": len(scores[0].identity)}
    for part, paths in (("technique", ours), ("control", theirs)):
        results = [small_runs.read(path) for path in paths]
        row[f"{part}_score"] = statistics.mean(result["score"] for result in results)
        row[f"{part}_scores"] = [result["score"] for result in results]
        row[f"{part}_share"] = statistics.mean(result["share"] for result in results)
        row[f"{part}_parameters"] = results[0]["parameters"]
    row |= small_runs.paired(scores, [small_runs.scores(path) for path in theirs], METRIC)
    if comparison.teacher:
        teacher = small_runs.read(workdir / comparison.teacher)
        row |= {"teacher_score": teacher["score"], "teacher_parameters": teacher["parameters"]}
    return row


def time_rows(names: Mapping[str, str], workdir: Path, rounds: int) -> list[dict[str, Any]]:
    """The time of the loss of classifiers, interleaved.

    Args:
      names: Description -> name of a step of the task "functions"; the others are compared with the first one.
      workdir: Directory of all results.
      rounds: Measurements of each time.

    Returns:
      Rows with parameters, and for 1 and 8 sequences the seconds and the time relative to the first model.
    """
    runs = {text: run_directory.load(workdir / name) for text, name in names.items()}
    first = next(iter(runs))
    config = runs[first].config
    dataset: Any = tasks.find(config.task).dataset(config.data, runs[first].vocabulary)
    batch = next(iter(dataset.train(seed=0)))
    rows: list[dict[str, Any]] = [
        {"table": "models", "what": text, "parameters": parameter_count(run.params)} for text, run in runs.items()
    ]
    for count in (1, 8):
        calls = {text: _loss(run, batch, count) for text, run in runs.items()}
        times = measure.timeit(calls, rounds=rounds, min_seconds=0.05)
        for row in rows:
            timing = times[row["what"]]
            row[f"seconds_{count}"], row[f"over_first_{count}"] = timing.median, timing.over(times[first])
    return rows


def _loss(run: run_directory.Run, batch: Mapping[str, Any], count: int) -> Any:
    """A call of the loss of some sequences."""
    arrays = {n: jnp.asarray(np.resize(batch[n], (count, *batch[n].shape[1:]))) for n in run.model.batch_axes()}
    forward = jax.jit(lambda params, arrays: gradients.loss(run.model, params, arrays, None).sum)
    return lambda: forward(run.params, arrays)
