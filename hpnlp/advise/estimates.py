"""Estimated times of techniques on a device that need not be here, relative to the model as it is.

The operations of each changed program are counted without weights or data, and take the time of their products or of their
memory traffic by the device's data sheet, whichever is longer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hpnlp import planner, tasks
from hpnlp.advise.advice import AdviseSettings
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.technique import PROGRAMS, Goal, Needs
from hpnlp.advise.techniques import wanted
from hpnlp.advise.workload import Program, Workload, default_workload
from hpnlp.compress.files import read_outline
from hpnlp.compress.recipe import parse_recipe
from hpnlp.compress.sizes import planned_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE, has_weights
from hpnlp.models import variables
from hpnlp.planner import Device, devices
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.planner.roofline import ProgramCost
from hpnlp.report.files import replace_text
from hpnlp.spec import lookup
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import gradients, run_directory
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.training.config_file import load_config
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

HERE = "cpu"  # name of this machine, whose rates are measured
SHARE = 0.9  # of the techniques, whose measured ratios lie within the stated interval of their estimates
FEWEST = 5  # measured techniques, of which an error is stated


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated cost of a technique.

    Attributes:
      name: Its name.
      needs: Work before its quality can be judged.
      ratio: Time, or memory where that is the goal, over that of the model as it is.
      flops: FLOPs over those of the model as it is.
      bytes: Bytes read and written over those of the model as it is.
    """

    name: str
    needs: Needs
    ratio: float
    flops: float
    bytes: float


@dataclasses.dataclass(frozen=True)
class Estimates:
    """Estimates of the techniques for a goal.

    Attributes:
      device: Name of the device.
      settings: Settings of the search.
      workload: The call.
      seconds: Lower bound of the time of the model as it is; bytes where memory is the goal.
      rows: The techniques, the largest gain first.
      refused: Name of a technique that cannot be estimated -> reason.
      error: Factor within which measured ratios on this machine lie of their estimates, for 9 of 10 techniques; None where too
        few were measured.
      measured: Number of measured techniques.
    """

    device: str
    settings: AdviseSettings
    workload: Workload
    seconds: float
    rows: Sequence[Estimate]
    refused: Mapping[str, str]
    error: float | None = None
    measured: int = 0


def estimate(
    source: str | Path | Config,
    device: str,
    settings: AdviseSettings = AdviseSettings(),  # noqa: B008  (frozen)
    *,
    directory: str | Path | None = None,
    log: Callable[[str], None] = print,
) -> Estimates:
    """Estimates the techniques for a goal on a device, by its data sheet.

    Args:
      source: Directory of a run, or the resolved config of an experiment, whose vocabulary is taken to reach its largest size.
      device: An entry of `planner.DEVICES`, or "cpu" for this machine, whose rates are measured.
      settings: Settings of a search, of which the time and what concerns quality have no effect.
      directory: Directory of the report of a search on this machine, whose measured ratios give the error of the estimates;
        RUN/advise by default.
      log: Called with lines on the progress.

    Returns:
      The estimates.

    Raises:
      InputError: There is no such device, or the goal does not depend on it.

    Cost: a trace of each changed program, 0.1 to 1 s each.
    """
    if settings.goal is Goal.DISK:
        raise InputError("bytes on disk do not depend on the device: leave out --device")
    found = lookup({**planner.DEVICES, HERE: None}, device, "device") or devices.this_cpu(1)
    estimator = _Estimator.of(source, settings)
    result = estimator.estimates(device, found, log)
    folder = directory or (None if isinstance(source, Config) else Path(source) / "advise")
    measured = _measured_ratios(Path(folder), estimator.workload) if folder else {}
    if len(measured) < FEWEST:
        return result
    here = result if device == HERE else estimator.estimates(HERE, devices.this_cpu(1), log)
    errors = sorted(abs(math.log(row.ratio / measured[row.name])) for row in here.rows if row.name in measured)
    if len(errors) < FEWEST:
        return result
    error = math.exp(errors[math.ceil(SHARE * len(errors)) - 1])
    return dataclasses.replace(result, error=error, measured=len(errors))


@dataclasses.dataclass(frozen=True)
class _Estimator:
    """What is estimated: a model without weights, and the call."""

    config: Config
    sizes: Sizes
    stored: Any  # shapes of the weights of a compressed run; None for those of a new model
    settings: AdviseSettings
    workload: Workload

    @classmethod
    def of(cls, source: str | Path | Config, settings: AdviseSettings) -> _Estimator:
        stored = None
        if isinstance(source, Config):
            config, sizes = source, tasks.find(source.task).planned_sizes(source)
        else:
            config = load_config(source)
            sizes = run_directory.load_vocabulary(source, config).sizes
            stored = read_outline(Path(source) / WEIGHTS_FILE) if has_weights(source) else None
        config = with_changes(config, {**settings.changes, "plan.name": "single"})
        trains = PROGRAMS.get(settings.goal) == "training" or settings.goal is Goal.MEMORY
        size = settings.batch_size or (1 if settings.goal is Goal.LATENCY else 0)
        if trains and size:
            config = with_changes(config, {"data.batch_size": size})
        return cls(config, sizes, stored, settings, default_workload(config, trains, size))

    def estimates(self, name: str, device: Device, log: Callable[[str], None]) -> Estimates:
        """The estimates for a device."""
        original = self._cost(Candidate())
        before = self._quantity(original, device)
        layers = flat(self.config).get("model.layers", 4)
        listed = [t for t in wanted(self.settings, layers) if not self._is_present(t.changes)]
        rows, refused = [], {}
        for number, technique in enumerate(listed, 1):
            if number % 20 == 0:
                log(f"{name}: {number} of {len(listed)} techniques")
            try:
                cost = self._cost(Candidate().plus(technique))
            except (InputError, NotImplementedError) as error:
                refused[technique.name] = str(error)
                continue
            ratios = (self._quantity(cost, device) / before, cost.flops / original.flops, cost.bytes / original.bytes)
            rows.append(Estimate(technique.name, technique.needs, *ratios))
        rows.sort(key=lambda row: row.ratio)
        return Estimates(name, self.settings, self.workload, before, rows, refused)

    def _is_present(self, changes: Mapping[str, Any]) -> bool:
        """Whether a config has the changes; False for a technique without changes of the config."""
        return bool(changes) and changes.items() <= flat(self.config).items()

    def _quantity(self, cost: ProgramCost, device: Device) -> float:
        if self.settings.goal is Goal.MEMORY:
            return float(cost.peak)
        return cost.seconds(device.flops, device.memory_bandwidth, device.fuses_attention)

    def _cost(self, candidate: Candidate) -> ProgramCost:
        """Operations of the call of a changed model."""
        config = with_changes(self.config, candidate.changes)
        model = tasks.make_model(config, self.sizes)
        optimizer, size = config.optimizer.for_batch(config.data.batch_size), config.data.batch_size
        trainer = make_trainer(model, optimizer, config.plan, steps=config.train.steps, batch_size=size)
        length = config.data.seq_len
        if self.workload.program is Program.TRAINING:
            if candidate.recipe:
                raise InputError("it changes the weights of a trained model, and not a training step")
            batch = jax.eval_shape(lambda: trainer.example_batch(size, length))
            key = jax.eval_shape(lambda: jax.random.key(0))
            step = trainer.step.jitted.trace(trainer.state_shapes, batch, key, *trainer.step.frozen)
            return program_cost(step.jaxpr, donated=True)
        shapes = variables.join(trainer.state_shapes.params, trainer.state_shapes.buffers)
        if self.stored is not None:
            if candidate.recipe:
                raise InputError("the run is compressed already: name the run that it was made of")
            shapes = self.stored
        for stage in parse_recipe(candidate.recipe) if candidate.recipe else ():
            changed, shapes = planned_weights(model.config, shapes, stage)
            model = model.clone(config=changed)
        tokens = 1 if self.workload.program is Program.GENERATE else length  # a new token reads all weights
        batch = jax.eval_shape(lambda: trainer.example_batch(self.workload.batch_size, tokens))
        loss = jax.jit(lambda params, batch: gradients.loss(model, params, batch, None).sum)
        return program_cost(loss.trace(shapes, batch).jaxpr)


def _measured_ratios(directory: Path, workload: Workload) -> dict[str, float]:
    """Name of a technique -> ratio that a report has measured for the same call."""
    try:
        report = json.loads((directory / "advise.json").read_text("utf-8"))
        if Workload.from_values(report["workload"]) != workload:
            return {}
        findings = [f for f in report["findings"] if f["ratio"] and len(f["candidate"]["techniques"]) == 1]
        return {f["name"]: f["ratio"]["median"] for f in findings}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def render(estimates: Estimates, rows: int | None = 10) -> str:
    """The estimates as Markdown.

    Args:
      estimates: The estimates.
      rows: Most techniques in the table; None for all.

    Returns:
      Markdown.
    """
    is_memory = estimates.settings.goal is Goal.MEMORY
    amount = f"{three_digits(estimates.seconds / 1e6)} MB" if is_memory else f"at least {_time(estimates.seconds)}"
    unit = "memory" if is_memory else "time"
    lines = [
        f"Estimates for one {estimates.device}, which are no measurements: {estimates.settings.quantity(estimates.workload)}, "
        f"{amount} for the model as it is.",
        _error(estimates),
        "",
        f"| technique | {unit} (unchanged: 1) | FLOPs | bytes moved | needs |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in estimates.rows[:rows]:
        lines.append(
            f"| {row.name} | {_interval(row.ratio, estimates.error)} | {row.flops:.2f} | {row.bytes:.2f} | {row.needs} |"
        )
    if rows is not None and len(estimates.rows) > rows:
        lines += ["", f"{len(estimates.rows) - rows} more gain less."]
    if estimates.refused:
        lines += ["", f"{len(estimates.refused)} cannot be estimated"]
        if rows is None:
            lines[-1:] = [f"- {name}: {reason}" for name, reason in estimates.refused.items()]
    return "\n".join(lines) + "\n"


def _error(estimates: Estimates) -> str:
    if estimates.error is None:
        return (
            "Their error is not known, since fewer than 5 techniques have been measured for this call: hpnlp advise without "
            "--device measures them on this machine."
        )
    return (
        f"Of the {estimates.measured} techniques that were measured on this machine, 9 of 10 lie within a factor of "
        f"{estimates.error:.2f} of their estimates for it; the intervals have this factor."
    )


def _interval(ratio: float, error: float | None) -> str:
    if error is None:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} ({ratio / error:.2f} to {ratio * error:.2f})"


def _time(seconds: float) -> str:
    unit, factor = ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{three_digits(factor * seconds)} {unit}"


def write(estimates: Estimates, directory: Path) -> list[Path]:
    """Writes the estimates as Markdown and JSON.

    Args:
      estimates: The estimates.
      directory: The directory.

    Returns:
      The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    markdown, content = (directory / f"estimates-{estimates.device}.{ending}" for ending in ("md", "json"))
    replace_text(markdown, f"# Estimates for {estimates.device}\n\n{render(estimates, None)}")
    values = dataclasses.asdict(dataclasses.replace(estimates, settings=AdviseSettings()))
    values["settings"] = {"goal": estimates.settings.goal, "changes": dict(estimates.settings.changes)}
    replace_text(content, json.dumps(values, indent=1, default=str) + "\n")
    return [markdown, content]
