"""Studies: sweeps over sizes and numbers of tokens, to which a scaling law is fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from hpnlp import tasks
from hpnlp.planner import Device, costs
from hpnlp.scaling_laws import recipe
from hpnlp.scaling_laws.flops import CONVENTIONS, DEFAULT, ModelSize, model_size
from hpnlp.spec import lookup
from hpnlp.training.config import Config, resolve
from hpnlp.types import InputError

Fields = Mapping[str, Any]
Rates = Callable[[ModelSize, float | int], float]  # learning rate of a size at a number of tokens


def _step_law(start: float | int, first: ModelSize, tokens: float | int) -> Rates:
    """Learning rates by parameters and tokens, as in the Step law."""
    factor = start / recipe.learning_rate(first.layers, tokens)
    return lambda size, tokens: factor * recipe.learning_rate(size.layers, tokens)


def _width(start: float | int, first: ModelSize, tokens: float | int) -> Rates:
    """Learning rates inversely proportional to the width, as of hidden matrices under muP (Yang et al. 2022, 2203.03466)."""
    return lambda size, tokens: start * first.head / size.head  # V x D, with the same V


TRANSFERS: dict[str, Callable[[float | int, ModelSize, float | int], Rates]] = {"step_law": _step_law, "width": _width}


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a study.

    Attributes:
      fields: Fields of its config, for `get_sweep()`.
      config: Its config.
      size: Its size.
      tokens: Training tokens D, a multiple of the batch.
      flops: Training FLOPs in the convention of the study.
    """

    fields: dict[str, Any]
    config: Config
    size: ModelSize
    tokens: int
    flops: float | int


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """Estimated costs of a run on one device."""

    seconds: float | int  #: lower bound of the time of all steps
    bytes: int  #: device memory
    fits: bool  #: whether the memory suffices


@dataclasses.dataclass(frozen=True)
class Study:
    """A sweep over sizes and numbers of training tokens.

    The batch is the nearest power of two of the Step law, and the warm-up at most 2 % of the steps and N tokens (`recipe`).
    Learning rates follow from `learning_rate`, that of the first size at the first number of tokens, by `transfer`.

    Attributes:
      budget: The most that all runs together may cost, as FLOPs ("1e15") or as a time on one device ("2h").
      sizes: Fields of each size, such as {"model.dim": 48, "model.layers": 2}.
      tokens: Training tokens D of each size; empty if `flops` is given.
      flops: Training FLOPs C of each size (isoFLOP curves); empty if `tokens` is given.
      held_out: (fields of a size, tokens) of runs with the most FLOPs, which are predicted and not fitted.
      repeats: (index of a size, tokens) of runs that are trained with a second seed too, from which the noise is measured.
      learning_rate: Learning rate of the first size at the first number of tokens; 0 for that of the Step law.
      transfer: An entry of TRANSFERS: "step_law", by parameters and tokens, or "width", inversely to the width.
      epochs: Most passes over the training text.
      convention: An entry of CONVENTIONS, in which C is counted.
    """

    budget: str | float
    sizes: Sequence[Fields]
    tokens: Sequence[int] = ()
    flops: Sequence[float] = ()
    held_out: Sequence[tuple[Fields, int]] = ()
    repeats: Sequence[tuple[int, int]] = ()
    learning_rate: float | int = 0.0
    transfer: str = "step_law"
    epochs: float | int = 1.0
    convention: str = DEFAULT

    def __post_init__(self) -> None:
        recipe.parse_budget(self.budget, "Study.budget")
        lookup(CONVENTIONS, self.convention, "Study.convention")
        lookup(TRANSFERS, self.transfer, "Study.transfer")
        if len(self.sizes) < 2:
            raise InputError(f"Study.sizes has {len(self.sizes)} entries: a law needs at least two sizes, better four")
        if bool(self.tokens) == bool(self.flops):
            raise InputError("Study: give either tokens=(...), or flops=(...) for isoFLOP curves")
        if not all(number > 0 for number in (*self.tokens, *self.flops, self.epochs)):
            raise InputError("Study: tokens, flops and epochs are numbers over 0")

    def runs(self, values: ConfigDict) -> list[PlannedRun]:
        """The runs of the study, those of `held_out` last.

        Args:
          values: The config that all runs share.

        Returns:
          The runs.

        Raises:
          InputError: A run has less than one step or more tokens than the text, or a field is invalid.
        """
        law = CONVENTIONS[self.convention]
        measured = [(fields, self._size(values, fields)) for fields in self.sizes]
        wanted = [
            (fields, size, tokens)
            for fields, size in measured
            for tokens in (*self.tokens, *(c / law.flops_per_token(size) for c in self.flops))
        ]
        _, first_size, first_tokens = wanted[0]
        start = self.learning_rate or recipe.learning_rate(first_size.layers, first_tokens)
        rates = TRANSFERS[self.transfer](start, first_size, first_tokens)
        runs = [self._run(values, fields, size, tokens, rates) for fields, size, tokens in wanted]
        for index, tokens in self.repeats:
            fields, size = measured[index]
            runs.append(
                self._run(values, {**fields, "train.seed": resolve(values).train.seed + 1}, size, tokens, rates)
            )
        for fields, tokens in self.held_out:
            runs.append(self._run(values, fields, self._size(values, fields), tokens, rates))
        self._check_text(values, runs)
        return runs

    def sweep(self, values: ConfigDict) -> list[dict[str, Any]]:
        """The result of `get_sweep()` of an experiment.

        Args:
          values: The config that all runs share.

        Returns:
          Fields of each run.

        Raises:
          InputError: As of `runs`.
        """
        return [run.fields for run in self.runs(values)]

    def _size(self, values: ConfigDict, fields: Fields) -> ModelSize:
        return model_size(_with_fields(values, fields))

    def _run(
        self, values: ConfigDict, fields: Fields, size: ModelSize, tokens: float | int, rates: Rates
    ) -> PlannedRun:
        length = resolve(values).data.seq_len
        batch = recipe.batch_size(tokens, length)
        per_token = CONVENTIONS[self.convention].flops_per_token(size)
        steps = recipe.steps(tokens, batch, length, per_token, _name(fields))
        changed = {
            **fields,
            "data.batch_size": batch,
            "train.steps": steps,
            "optimizer.learning_rate": float(f"{rates(size, tokens):.3g}"),
            "optimizer.warmup": recipe.warmup(size.layers, batch * length, steps),
        }
        total = steps * batch * length
        return PlannedRun(changed, _with_fields(values, changed), size, total, total * per_token)

    def _check_text(self, values: ConfigDict, runs: Sequence[PlannedRun]) -> None:
        """Raises InputError where a run takes more tokens than the training text has, for `epochs` passes."""
        config = resolve(values)
        dataset: Any = tasks.find(config.task).dataset(config.data, None)
        largest = max(runs, key=lambda run: run.tokens)
        if largest.tokens > self.epochs * dataset.train_tokens:
            raise InputError(
                f"{_name(largest.fields)}: {largest.tokens:,} tokens are {largest.tokens / dataset.train_tokens:.2f} passes "
                f"over the {dataset.train_tokens:,} training tokens of data.path={config.data.path!r}: add text, train on "
                "fewer tokens, or set Study(epochs=...), of which up to 4 are nearly as good as new text"
            )


def run_costs(run: PlannedRun, device: Device) -> RunCosts:
    """Estimates time and memory of a run on one device, by the planner.

    Returns:
      The costs. The time is a lower bound by the rates of the device.

    Cost: one trace of the step.
    """
    config = dataclasses.replace(run.config, plan=dataclasses.replace(run.config.plan, name="single"))
    estimated = costs(config, 1)
    seconds = run.config.train.steps * estimated.total_seconds(device)
    return RunCosts(seconds, estimated.bytes, estimated.fits(device))


def check_costs(study: Study, runs: Sequence[PlannedRun], estimated: Sequence[RunCosts]) -> None:
    """Checks the costs of a study against its budget and the memory of the device.

    Args:
      study: The study.
      runs: Its runs.
      estimated: Their costs.

    Raises:
      InputError: The study costs more than its budget, or a run does not fit into the memory.
    """
    for run, cost in zip(runs, estimated, strict=True):
        if not cost.fits:
            raise InputError(
                f"{_name(run.fields)} needs {cost.bytes / 1e9:.1f} GB of device memory, more than there is: lower model.dim, "
                "model.layers or data.seq_len, or set optimizer.accumulate"
            )
    budget = recipe.parse_budget(study.budget, "Study.budget")
    flops, seconds = sum(run.flops for run in runs), sum(cost.seconds for cost in estimated)
    if budget.flops and flops > budget.flops:
        raise InputError(
            f"the study takes {flops:.3g} FLOPs, more than Study.budget={study.budget!r}: leave out the largest sizes or "
            "numbers of tokens, or raise the budget"
        )
    if budget.seconds and seconds > budget.seconds:
        raise InputError(
            f"the study takes at least {duration(seconds)}, more than Study.budget={study.budget!r}: leave out the largest "
            "sizes or numbers of tokens, or raise the budget"
        )


def render(study: Study, runs: Sequence[PlannedRun], estimated: Sequence[RunCosts]) -> str:
    """Table of the runs of a study.

    Args:
      study: The study.
      runs: Its runs.
      estimated: Their costs.

    Returns:
      Lines of text.
    """
    law = CONVENTIONS[study.convention]
    lines = [
        f"{len(runs)} runs; convention {study.convention}: {law.description}",
        "",
        f"{'N':>14}{'D':>15}{'D/N':>8}{'C':>11}{'steps':>9}{'batch':>7}{'rate':>9}{'memory':>10}{'at least':>10}  run",
    ]
    for run, cost in zip(runs, estimated, strict=True):
        n, config = law.parameters(run.size), run.config
        lines.append(
            f"{n:14,}{run.tokens:15,}{run.tokens / n:8.1f}{run.flops:11.3g}{config.train.steps:9,}{config.data.batch_size:7}"
            f"{config.optimizer.learning_rate:9.3g}{cost.bytes / 1e6:7,.0f} MB{duration(cost.seconds):>10}  {_name(run.fields)}"
        )
    total, seconds = sum(run.flops for run in runs), sum(cost.seconds for cost in estimated)
    lines.append(f"\nAll runs: {total:.3g} FLOPs, at least {duration(seconds)}; the budget is {study.budget}.")
    return "\n".join(lines)


def duration(seconds: float | int) -> str:
    """A time as text.

    Args:
      seconds: The time.

    Returns:
      Such as "12.3 s", "4.5 min" or "2.1 h".
    """
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _name(fields: Fields) -> str:
    """Fields of a size, as text."""
    derived = ("data.batch_size", "train.steps", "optimizer.learning_rate", "optimizer.warmup")
    return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in fields.items() if name not in derived)


def _with_fields(values: ConfigDict, fields: Fields) -> Config:
    """The config with other values of some fields."""
    changed = ConfigDict(values.to_dict()).unlock() if values.is_locked else values.copy_and_resolve_references()
    changed.update_from_flattened_dict(dict(fields))
    return resolve(changed)
