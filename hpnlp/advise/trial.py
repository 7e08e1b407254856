"""A trial: a process that measures a few candidates beside a baseline, and may score them on held-out data.

Candidates are measured in a process of their own, so that no failure or lack of memory ends the search. The directory of a
trial holds `trial.json`, what is to be measured, and then `result.json`, with the scores of examples in a folder for each
model.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import measure, tasks
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.workload import Program, TimedCall, Workload, make_call, sample_texts, traced
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.files import encoding_of, stored_bytes, write_weights
from hpnlp.cost.paired_times import PairedTimes, Ratio, Usage, Verdict, compare_times, ratio
from hpnlp.cost.traced_time import TracedTime
from hpnlp.data.examples.kind import TEACHER_WEIGHTS
from hpnlp.jobs.dtypes import overflow_checked
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.predictions import LabelPrediction, TrainedModel, label_predictions
from hpnlp.training import gradients, run_directory
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.training.evaluation import evaluate
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.processes import signals
from hpnlp.training.run_directory import Run
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

SPEC, RESULT = "trial.json", "result.json"
LABELLED_BATCHES = 16  # most held-out batches whose predicted labels are compared


@dataclasses.dataclass(frozen=True)
class Trial:
    """Measurements that a process makes.

    Attributes:
      run: Directory of the run.
      step: Step of the checkpoint; None for the best.
      changes: Fields of the run's config that the user has set, such as data.path.
      workload: The call that is measured.
      baseline: What the candidates are compared with.
      candidates: At most four, see `paired_times.GROUP`.
      rounds: Most paired rounds; 0 to measure no times.
      seconds: Rounds end at the first look after so many seconds.
      scored: Whether the candidates are scored on held-out data; without candidates, the baseline.
      profiled: Whether the time of the baseline is divided by part.
      has_data: Whether there are data; otherwise texts are random, and nothing is scored.
      batches: Largest number of held-out batches; None for all.
      machine: Processor and versions, so that results of another machine are not taken for those of this one.
      saved: Time at which the weights were saved, so that results of other weights are not taken for those of these.
      attempt: Number that distinguishes trials of the same candidates.
    """

    run: str
    step: int | None
    changes: Mapping[str, Any]
    workload: Workload
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    rounds: int
    seconds: float | int
    scored: bool = False
    profiled: bool = False
    has_data: bool = True
    batches: int | None = None
    machine: str = ""
    saved: str = ""
    attempt: int = 0

    def digest(self) -> str:
        """A digest, equal for equal trials."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The trial as JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """The inverse of `to_json`.

        Args:
          text: JSON.

        Returns:
          The trial.
        """
        values = json.loads(text)
        values["workload"] = Workload.from_values(values["workload"])
        values["baseline"] = _candidate(values["baseline"])
        values["candidates"] = tuple(map(_candidate, values["candidates"]))
        return cls(**values)


def _candidate(values: Mapping[str, Any]) -> Candidate:
    return Candidate(tuple(values["techniques"]), values["recipe"], values["changes"])


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a candidate in a trial.

    Attributes:
      name: Its name.
      error: The first line of the error that it raised; "" for none.
      is_same: Whether its program is that of the baseline.
      times: Times in paired rounds with the baseline; None without.
      memory_bytes: Bytes of the weights in memory.
      disk_bytes: Bytes of the file of the weights; 0 where times are measured.
      peak_bytes: Memory that the compiled program needs; None where it is not known.
      difference: Difference of the loss of a batch to the baseline's, relative to it; 0 for a training from other weights.
      scores: Held-out scores.
      examples: Held-out scores of the examples; None without.
      labels: Labels that a classifier predicts for the examples of some held-out batches; () for other models.
    """

    name: str
    error: str = ""
    is_same: bool = False
    times: PairedTimes | None = None
    memory_bytes: int = 0
    disk_bytes: int = 0
    peak_bytes: int | None = None
    difference: float = 0.0
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    examples: ExampleScores | None = None
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial.

    Attributes:
      models: The baseline, and each candidate.
      seconds: Seconds of the process.
      baseline_seconds: Median time of a call of the baseline; 0 without times.
      equal: Ratio of two measurements of the baseline in each round; None without times.
      environment: Versions and machine.
      trivial: Score of a predictor that knows no inputs; None where the models are not scored, or there is none.
      traced: Time of the baseline by part; None where it is not profiled.
    """

    models: tuple[Measured, ...]
    seconds: float
    baseline_seconds: float
    equal: Ratio | None
    environment: Mapping[str, Any]
    trivial: float | None = None
    traced: TracedTime | None = None

    def write(self, directory: Path) -> None:
        """Writes the result to the directory of the trial.

        Args:
          directory: The directory.
        """
        models = []
        for number, model in enumerate(self.models):
            if model.examples is not None:
                (directory / str(number)).mkdir(exist_ok=True)
                model.examples.write(directory / str(number))
            values = {
                f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name not in ("times", "examples")
            }
            times = model.times
            models.append({**values, "times": None if times is None else dataclasses.asdict(times)})
        values = {"seconds": self.seconds, "baseline_seconds": self.baseline_seconds, "environment": self.environment}
        values |= {"trivial": self.trivial, "traced": None if self.traced is None else dataclasses.asdict(self.traced)}
        equal = None if self.equal is None else dataclasses.asdict(self.equal)
        text = json.dumps({**values, "equal": equal, "models": models}, indent=1, default=str)
        replace_bytes(directory / RESULT, text.encode())

    @classmethod
    def read(cls, directory: Path) -> TrialResult | None:
        """Reads the result of a trial.

        Args:
          directory: The directory of the trial.

        Returns:
          The result; None if the trial is not finished, or its file is damaged.
        """
        try:
            values = json.loads((directory / RESULT).read_text("utf-8"))
            models = tuple(
                Measured(
                    **{
                        **model,
                        "times": _times(model["times"]),
                        "labels": tuple(model["labels"]),
                        "examples": ExampleScores.read(directory / str(i)),
                    }
                )
                for i, model in enumerate(values["models"])
            )
            equal = read_ratio(values["equal"]) if values["equal"] else None
            traced = TracedTime(**values["traced"]) if values["traced"] else None
            return cls(
                models,
                values["seconds"],
                values["baseline_seconds"],
                equal,
                values["environment"],
                values["trivial"],
                traced,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def read_ratio(values: Mapping[str, Any]) -> Ratio:
    """A ratio from JSON.

    Args:
      values: Fields.

    Returns:
      The ratio.
    """
    return Ratio(**{**values, "verdict": Verdict(values["verdict"])})


def _times(values: Mapping[str, Any] | None) -> PairedTimes | None:
    if values is None:
        return None
    pairs = tuple((Usage(**first), Usage(**second)) for first, second in values["baseline"])
    return PairedTimes(tuple(Usage(**usage) for usage in values["program"]), pairs, values["amount"])


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model of a trial: the run with a candidate's changes, and its call."""

    candidate: Candidate
    run: Run
    call: TimedCall | None  # None where no times are measured
    loss: float
    dataset: Any  # as the candidate changes it; None without data


class _Process:
    """The process of a trial."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        run = run_directory.load(trial.run, trial.step)
        self.run = dataclasses.replace(run, config=with_changes(run.config, trial.changes))
        self.dataset: Any = self._dataset(self.run.config) if trial.has_data else None
        self.texts = sample_texts(trial.workload, self.run, self.dataset) if trial.rounds else []

    def _dataset(self, config: Config) -> Any:
        return tasks.find(config.task).dataset(config.data, self.run.vocabulary)

    def measure(self) -> TrialResult:
        """Measures the candidates; what one of them raises becomes its error."""
        begun, trial = time.monotonic(), self.trial
        baseline, errors, models = self._model(trial.baseline), {}, {}
        for number, candidate in enumerate(trial.candidates):
            try:
                models[str(number)] = self._model(candidate)
            except (InputError, MemoryError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                errors[str(number)] = first_line(error)
        different = {name: model for name, model in models.items() if not _is_same(model, baseline)}
        comparison = None
        if trial.rounds and baseline.call is not None:
            amounts = {name: m.call.amount / baseline.call.amount for name, m in different.items() if m.call}
            functions = {name: m.call.function for name, m in different.items() if m.call}
            comparison = compare_times(
                baseline.call.function, functions, rounds=trial.rounds, seconds=trial.seconds, amounts=amounts
            )
        measured = [self._measured(baseline, None, baseline)]
        for number, candidate in enumerate(trial.candidates):
            name = str(number)
            if name in errors:
                measured.append(Measured(candidate.name, errors[name]))
                continue
            times = comparison.programs.get(name) if comparison else None
            measured.append(self._measured(models[name], times, baseline))
        seconds = comparison.baseline if comparison else 0.0
        equal = comparison.equal if comparison else None
        trivial = (
            trivial_score(self.run.config, self.dataset, trial.batches, self.run.model.is_normalized)
            if trial.scored and trial.has_data
            else None
        )
        divided = traced(trial.workload, self.run, self.dataset, self.texts) if trial.profiled else None
        return TrialResult(
            tuple(measured), time.monotonic() - begun, seconds, equal, measure.environment(), trivial, divided
        )

    def _model(self, candidate: Candidate) -> _Model:
        """A changed run, with its compiled call and the loss of the first training batch."""
        trains = self.trial.workload.program is Program.TRAINING
        has_other_data = any(name.startswith("data.") for name in candidate.changes)
        run = candidate.applied(self.run, self.dataset)
        dataset = self._dataset(run.config) if has_other_data else self.dataset
        call = make_call(self.trial.workload, run, dataset, self.texts) if self.trial.rounds else None
        with overflow_checked(run):
            loss = 0.0 if trains or dataset is None else _mean_loss(run, dataset)
            if call is not None:
                jax.block_until_ready(call.function())
        return _Model(candidate, run, call, loss, dataset)

    def _measured(self, model: _Model, times: PairedTimes | None, baseline: _Model) -> Measured:
        trains = self.trial.workload.program is Program.TRAINING
        is_same = model is not baseline and _is_same(model, baseline)
        scores: Mapping[str, float] = {}
        examples, labels = None, ()
        is_wanted = model is not baseline or not self.trial.candidates
        if self.trial.scored and self.trial.has_data and is_wanted and not trains and not is_same:
            scores, examples = self._scores(model.run, model.dataset)
            labels = self._labels(model.run, model.dataset)
        return Measured(
            model.candidate.name,
            is_same=is_same,
            times=times,
            memory_bytes=stored_bytes(model.run.params),
            disk_bytes=0 if trains or self.trial.rounds else _file_bytes(model.run),
            peak_bytes=model.call.peak_bytes if model.call else None,
            difference=abs(model.loss - baseline.loss) / max(abs(baseline.loss), 1e-9),
            scores=scores,
            examples=examples,
            labels=labels,
        )

    def _scores(self, run: Run, dataset: Any) -> tuple[Mapping[str, float], ExampleScores | None]:
        """Held-out scores of a changed run, and those of each example."""
        config = run.config
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        trainer = make_trainer(run.model, optimizer, Plan("single"), steps=1, batch_size=config.data.batch_size)
        with overflow_checked(run):
            evaluation = evaluate(trainer, run.params, dataset, config, self.trial.batches)
        return evaluation.scores, evaluation.examples

    def _labels(self, run: Run, dataset: Any) -> tuple[str, ...]:
        """Predicted labels of held-out examples, by which models are compared; also of examples without a label."""
        task = tasks.find(run.config.task)
        if task.prediction is not LabelPrediction:
            return ()
        trained = TrainedModel(run.config, run.model, run.params, run.tokenizer, run.vocabulary.labels or ())
        labels = []
        for batch in task.heldout(run.config, dataset, limit=LABELLED_BATCHES):
            weights = batch.get(TEACHER_WEIGHTS, batch.get("weights"))
            if weights is None:  # a task of other batches, outside of the library
                return ()
            predictions = label_predictions(trained, batch, len(weights))
            labels += [p.label for p, weight in zip(predictions, weights, strict=True) if weight > 0]
        return tuple(labels)


def trivial_score(config: Config, dataset: Any, batches: int | None, is_normalized: bool) -> float | None:
    """The accuracy or the loss of a predictor that knows the frequencies of the held-out labels, and no inputs.

    Args:
      config: Config of a run.
      dataset: Its data.
      batches: Largest number of held-out batches; None for all.
      is_normalized: Whether the model's losses are those of probabilities.

    Returns:
      The share of the most frequent label where the primary score is an accuracy, and the entropy of the labels in nats
      otherwise; None for data without labels, such as pairs of texts, and for losses of other kinds.
    """
    metric = tasks.find(config.task).primary_metric(flat(config))[0]
    if trivial_name(metric) == "loss" and not is_normalized:
        return None
    counts: collections.Counter[int] = collections.Counter()
    for batch in tasks.find(config.task).heldout(config, dataset, limit=batches):
        labels = next((batch[name] for name in ("labels", "target_labels") if name in batch), None)
        weights = next((batch[name] for name in ("weights", "target_weights") if name in batch), None)
        if labels is None or weights is None or labels.shape != weights.shape:
            return None
        values, numbers = np.unique(labels[weights > 0], return_counts=True)
        counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
    shares = np.array(list(counts.values()), np.float64) / max(counts.total(), 1)
    if not len(shares):
        return None
    return float(shares.max()) if trivial_name(metric) == "accuracy" else float(-(shares * np.log(shares)).sum())


def trivial_name(metric: str) -> str:
    """Name of the score that `trivial_score` computes for a task with a primary metric."""
    return "accuracy" if metric == "accuracy" else "loss"


def _is_same(model: _Model, baseline: _Model) -> bool:
    """Whether two models have the same program, and the same loss and tokens of a batch."""
    if model.call is None or baseline.call is None:
        return False
    is_equal_call = (model.call.digest, model.call.amount) == (baseline.call.digest, baseline.call.amount)
    return is_equal_call and model.loss == baseline.loss


def _mean_loss(run: Run, dataset: Any) -> float:
    """Mean loss of the first training batch."""
    batch = next(iter(dataset.train(seed=0)))
    arrays = {name: jnp.asarray(np.asarray(batch[name])[:8]) for name in run.model.batch_axes() if name in batch}
    out = jax.jit(lambda params, batch: gradients.loss(run.model, params, batch, None))(run.params, arrays)
    return float(out.sum) / max(float(out.weight), 1.0)


def _file_bytes(run: Run) -> int:
    """Bytes of the file of the weights as `hpnlp compress` writes it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights"
        write_weights(path, run.params, {"step": run.step}, encoding_of)
        return path.stat().st_size


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, or the name of its class.

    Args:
      error: The error.

    Returns:
      At most 300 characters.
    """
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def wall_ratio(result: TrialResult, number: int) -> Ratio | None:
    """Ratio of the wall time of a candidate.

    Args:
      result: The result.
      number: Index of the candidate.

    Returns:
      The ratio; None without times. A program that is that of the baseline has the ratio of two equal programs.
    """
    model = result.models[number + 1]
    return model.times.wall if model.times is not None else (ratio([0.0] * 8) if model.is_same else None)


def main(directory: Path) -> None:
    """Measures the trial of a directory.

    Args:
      directory: The directory.
    """
    with signals.watched():  # without it, the process would outlive its parent
        if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
            signals.follow(int(parent))
        trial = Trial.from_json((directory / SPEC).read_text("utf-8"))
        try:
            _Process(trial).measure().write(directory)
        except InputError as error:
            sys.exit(f"error: {error}")
