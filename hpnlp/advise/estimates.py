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

from hpnlp import measure, planner, tasks
from hpnlp.advise.advice import AdviseSettings
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.technique import PROGRAMS, Goal, Needs, Technique
from hpnlp.advise.techniques import wanted
from hpnlp.advise.workload import Program, Workload, default_workload
from hpnlp.compress.distilling.distill_config import DistillConfig
from hpnlp.compress.files import read_outline
from hpnlp.compress.recipe import parse_recipe
from hpnlp.compress.sizes import planned_weights
from hpnlp.compress.weights_file import WEIGHTS_FILE, has_weights
from hpnlp.models import variables
from hpnlp.ops.weight import dense_tree
from hpnlp.parallel.plan import Plan
from hpnlp.planner import Device, devices
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.planner.memory import held_bytes
from hpnlp.planner.roofline import ProgramCost
from hpnlp.report.files import replace_text
from hpnlp.spec import lookup
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import gradients, run_directory
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checksum import first_difference, shape_text
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError

HERE = "cpu"  # name of this machine, whose rates are measured
SHARE = 0.9  # Share of the techniques whose measured ratios lie within the stated interval of their estimates
FEWEST = 5  # measured techniques, of which an error is stated


@dataclasses.dataclass(frozen=True)
class TechniqueEstimate:
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
      tokens: Tokens of a sequence in the program that is counted: those of the data, or 1 where text is generated.
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
    tokens: int
    seconds: float
    rows: Sequence[TechniqueEstimate]
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
      InputError: There is no such device, the goal does not depend on it, or a setting or the source is invalid.

    Cost: a trace of each changed program, 0.1 to 1 s each.
    """
    if settings.goal is Goal.DISK:
        raise InputError("bytes on disk do not depend on the device: leave out --device")
    settings.check()
    found = lookup({**planner.DEVICES, HERE: None}, device, "device") or devices.this_cpu(1)
    estimator = _Estimator.of(source, settings)
    costs = estimator.costs(log)
    result = estimator.estimates(device, found, costs)
    folder = directory or (None if isinstance(source, Config) else Path(source) / "advise")
    measured = _measured_ratios(Path(folder), estimator) if folder else {}
    if len(measured) < FEWEST:
        return result
    here = result if device == HERE else estimator.estimates(HERE, devices.this_cpu(1), costs)
    errors = sorted(abs(math.log(row.ratio / measured[row.name])) for row in here.rows if row.name in measured)
    if len(errors) < FEWEST:
        return result
    error = math.exp(errors[math.ceil(SHARE * len(errors)) - 1])
    return dataclasses.replace(result, error=error, measured=len(errors))


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Operations of the model as it is and of the changed ones."""

    original: ProgramCost
    changed: Sequence[tuple[Technique, ProgramCost]]
    refused: Mapping[str, str]  # name of a technique -> reason


@dataclasses.dataclass(frozen=True)
class _Estimator:
    """A model without weights, and the call whose cost is estimated."""

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
        config = with_changes(config, settings.changes)
        # Without a teacher or rounded weights, and on one device, as a search measures the run.
        config = dataclasses.replace(
            config,
            plan=Plan("single", remat=config.plan.remat),
            distill=DistillConfig(),
            train=dataclasses.replace(config.train, weights=""),
        )
        trains = PROGRAMS.get(settings.goal) == "training" or settings.goal is Goal.MEMORY
        size = settings.batch_size or (1 if settings.goal is Goal.LATENCY else 0)
        if trains and size:
            config = with_changes(config, {"data.batch_size": size})
        return cls(config, sizes, stored, settings, default_workload(config, trains, size))

    @property
    def is_memory(self) -> bool:
        """Whether the goal is memory, and not a time."""
        return self.settings.goal is Goal.MEMORY

    def costs(self, log: Callable[[str], None]) -> _Costs:
        """Traces the model as it is and with each technique."""
        present = flat(self.config)
        listed = wanted(self.settings, present.get("model.layers", 4))
        original = self._cost(Candidate())
        changed, refused = [], {}
        for number, technique in enumerate(listed, 1):
            if number % 20 == 0:
                log(f"{number} of {len(listed)} techniques")
            if technique.changes and technique.changes.items() <= present.items():
                continue
            try:
                if reason := self._refusal(technique):
                    raise InputError(reason)
                changed.append((technique, self._cost(Candidate().plus(technique))))
            except (InputError, NotImplementedError) as error:
                refused[technique.name] = str(error)
        return _Costs(original, changed, refused)

    def estimates(self, name: str, device: Device, costs: _Costs) -> Estimates:
        """The estimates for a device."""
        original, before = costs.original, self._quantity(costs.original, device)
        rows = [
            TechniqueEstimate(
                technique.name,
                technique.needs,
                _over(self._quantity(cost, device), before),
                _over(cost.flops, original.flops),
                _over(cost.bytes, original.bytes),
            )
            for technique, cost in costs.changed
        ]
        rows.sort(key=lambda row: row.ratio)
        return Estimates(name, self.settings, self.workload, self._tokens(self.config), before, rows, costs.refused)

    def _refusal(self, technique: Technique) -> str:
        """The reason why a technique cannot be estimated, "" if none is known before the changed program is traced."""
        if not technique.is_recipe:
            reads_data = any(name.startswith("data.") for name in technique.changes)
            unknown = "its gain depends on the lengths of the examples, which are not read" if reads_data else ""
            return technique.refusal(None, self.config) or unknown
        if self.workload.program is Program.TRAINING:
            return "it changes the weights of a trained model, and not a training step"
        return "" if self.stored is None else "the run is compressed already: name the run that it was made of"

    def _quantity(self, cost: ProgramCost, device: Device) -> float:
        if self.is_memory:
            return float(cost.peak)
        return cost.seconds(device.flops, device.memory_bandwidth, device.fuses_attention)

    def _tokens(self, config: Config) -> int:
        """Tokens of a sequence; a generated token reads all weights, as one token does."""
        return 1 if self.workload.program is Program.GENERATE else config.data.seq_len

    def _cost(self, candidate: Candidate) -> ProgramCost:
        """Operations of the call of a changed model, and the peak memory of a training step with its arguments."""
        config = with_changes(self.config, candidate.changes)
        model = tasks.make_model(config, self.sizes)
        optimizer, size = config.optimizer.for_batch(config.data.batch_size), config.data.batch_size
        trainer = make_trainer(model, optimizer, config.plan, steps=config.train.steps, batch_size=size)
        tokens = self._tokens(config)
        if self.workload.program is Program.TRAINING:
            batch = jax.eval_shape(lambda: trainer.example_batch(size, tokens))
            key = jax.eval_shape(lambda: jax.random.key(0))
            step = trainer.step.jitted.trace(trainer.state_shapes, batch, key, *trainer.step.frozen)
            cost = program_cost(step.jaxpr, donated=True)
            arguments = held_bytes((trainer.state_shapes, trainer.step.frozen))
            arguments += sum(x.size * x.dtype.itemsize for x in batch.values())
            return dataclasses.replace(cost, peak=cost.peak + arguments)
        shapes = variables.join(trainer.state_shapes.params, trainer.state_shapes.buffers)
        if self.stored is not None:  # weights that do not fit a changed model are new ones, as in `Candidate.applied`
            dense = jax.eval_shape(dense_tree, self.stored)
            if not candidate.changes or first_difference(shapes, dense, shape_text) is None:
                shapes = self.stored
        for stage in parse_recipe(candidate.recipe) if candidate.recipe else ():
            changed, shapes = planned_weights(model.config, shapes, stage)
            model = model.clone(config=changed)
        batch = jax.eval_shape(lambda: trainer.example_batch(self.workload.batch_size, tokens))
        loss = jax.jit(lambda params, batch: gradients.loss(model, params, batch, None).sum)
        return program_cost(loss.trace(shapes, batch).jaxpr)


def _over(value: float, original: float) -> float:
    """The quotient; 1 for two zeros, as of the FLOPs of models without products."""
    return value / original if original else 1.0 if not value else math.inf


def _measured_ratios(directory: Path, estimator: _Estimator) -> dict[str, float]:
    """Name of a technique -> ratio that a report has measured for the same call and quantity on this machine's processor."""
    environment = measure.environment()
    try:
        report = json.loads((directory / "advise.json").read_text("utf-8"))
        settings, machine = report["settings"], report["machine"]
        if (
            Workload.from_values(report["workload"]) != estimator.workload
            or (settings["goal"] == Goal.MEMORY) != estimator.is_memory
            or settings["goal"] == Goal.DISK
            or _program_changes(settings["changes"]) != _program_changes(estimator.settings.changes)
            or machine["backend"] != "cpu"
            or any(machine[name] != environment[name] for name in ("cpu", "cores"))
        ):
            return {}
        findings = [f for f in report["findings"] if f["ratio"] and len(f["candidate"]["techniques"]) == 1]
        return {f["name"]: f["ratio"]["median"] for f in findings}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _program_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of a config that change the program of a call of a given batch size."""
    return {k: v for k, v in changes.items() if not k.startswith(("data.", "train.")) or k == "data.seq_len"}


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
        f"Estimates for one {estimates.device}, which are no measurements: {estimates.settings.quantity(estimates.workload)}"
        f"{_counted(estimates)}; {amount} for the model as it is.",
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


def _counted(estimates: Estimates) -> str:
    """The program that is counted, where it is not the whole call."""
    match estimates.workload.program:
        case Program.GENERATE:
            return ", of which one is counted, without the keys and values of those before it"
        case Program.PREDICT | Program.ENCODE:
            return f", counted as the loss of sequences of {estimates.tokens:,} tokens"
    return ""


def _error(estimates: Estimates) -> str:
    if estimates.error is None:
        return (
            f"Their error is not known, since fewer than {FEWEST} techniques have been measured for this call on this machine: "
            "hpnlp advise without --device measures them."
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
    markdown, content = (
        directory / f"estimates-{estimates.device}-{estimates.settings.goal}.{ending}" for ending in ("md", "json")
    )
    replace_text(markdown, f"# Estimates for {estimates.device}\n\n{render(estimates, None)}")
    values = dataclasses.asdict(dataclasses.replace(estimates, settings=AdviseSettings()))
    values["settings"] = {"goal": estimates.settings.goal, "changes": dict(estimates.settings.changes)}
    replace_text(content, json.dumps(values, indent=1, default=str) + "\n")
    return [markdown, content]
