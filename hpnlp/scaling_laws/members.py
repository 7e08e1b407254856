"""Finished runs of a study, read from the directory of its sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp import report
from hpnlp.scaling_laws.flops import CONVENTIONS, ModelSize, model_size
from hpnlp.scaling_laws.points import Points
from hpnlp.tasks.reports.reporting import Report
from hpnlp.training.config import Config
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import Contents, contents_of
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class TrainedMember:
    """A finished run.

    Attributes:
      name: Name of its directory.
      size: Size of its model.
      tokens: Training tokens D.
      loss: Held-out loss in nats per token.
      error: Standard error of the loss over the held-out examples; None if it is unknown.
      seconds: Seconds of training steps and their data.
      seed: Seed of the run.
    """

    name: str
    size: ModelSize
    tokens: int
    loss: float | int
    error: float | None
    seconds: float | int
    seed: int


def read_members(directory: str | Path) -> tuple[list[TrainedMember], list[str]]:
    """Reads the finished runs in a directory.

    Args:
      directory: Directory of the runs' directories.

    Returns:
      The runs, in order of names; and the names of runs that are not finished, which are left out.

    Raises:
      InputError: There is no finished run; a run is not of a language model with logits of all words, stopped before the end of
        its schedule, or began from another run; or runs have different held-out texts.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InputError(f"there is no directory {directory}: name the --workdir of hpnlp sweep")
    runs, unfinished, texts = [], [], {}
    sizes: dict[tuple[Any, ...], ModelSize] = {}  # each is traced once
    for run in sorted(child for child in path.iterdir() if child.is_dir()):
        if not (run / "report.json").exists():
            unfinished += [run.name] * (contents_of(run) is Contents.RUN)
            continue
        config = load_config(run)
        if config.task != "lm":
            raise InputError(f"{run} is of task={config.task!r}, and scaling laws are of task='lm': move it away")
        numbers = report.read_report(run)
        _check_run(run, config, numbers)
        texts.setdefault(numbers.get("heldout_digest"), run.name)
        examples = ExampleScores.read(run)
        model = (config.task, config.model, config.data.tokenizer, config.data.seq_len)
        if model not in sizes:
            sizes[model] = _size(run, config)
        runs.append(
            TrainedMember(
                run.name,
                sizes[model],
                numbers["tokens"],
                numbers["heldout_loss"],
                None if examples is None else examples.standard_error("loss"),
                numbers["phase_seconds"]["data"] + numbers["phase_seconds"]["step"],
                config.train.seed,
            )
        )
    if not runs:
        others = f" and {len(unfinished)} unfinished ones" if unfinished else ""
        raise InputError(
            f"{directory} holds no finished run{others}: finish them with hpnlp sweep --config=FILE --workdir=DIR first"
        )
    if len(texts) > 1:
        raise InputError(
            f"{' and '.join(list(texts.values())[:2])} in {directory} have different held-out texts, whose losses do not "
            "compare: fit runs of one study"
        )
    experts = {bool(member.size.idle): member.name for member in runs}
    if len(experts) > 1:
        raise InputError(
            f"{experts[True]} in {directory} has experts and {experts[False]} has none: one law of active parameters does not "
            "hold for both: move one kind away, and fit each by itself"
        )
    return runs, unfinished


def _check_run(run: Path, config: Config, numbers: Report) -> None:
    """Raises InputError for a run whose loss does not belong to its tokens."""
    if numbers["steps"] < config.train.steps:
        raise InputError(
            f"{run} stopped at step {numbers['steps']} of {config.train.steps}: its learning rate did not reach the end of "
            "its schedule, so that its loss does not compare: train it again with train.patience=0, or move it away"
        )
    if config.train.init_from:
        raise InputError(
            f"{run} began from train.init_from={config.train.init_from!r}, whose training its tokens leave out: move it away"
        )
    if numbers["heldout_loss"] is None:
        raise InputError(f"{run} has no finite held-out loss: train it with a lower learning rate, or move it away")


def _size(run: Path, config: Config) -> ModelSize:
    """Size of the model of a run."""
    try:
        return model_size(config)
    except InputError as error:
        raise InputError(f"{run}: {error}, or move it away") from error


def to_points(members: Sequence[TrainedMember], convention: str) -> Points:
    """The points of runs.

    Args:
      members: The runs.
      convention: An entry of CONVENTIONS.

    Returns:
      Their N, D, C and losses.
    """
    law = CONVENTIONS[convention]
    tokens = np.array([float(m.tokens) for m in members])
    return Points(
        np.array([float(law.parameters(m.size)) for m in members]),
        tokens,
        np.array([m.loss for m in members]),
        tokens * np.array([law.flops_per_token(m.size) for m in members]),
    )


def split(members: Sequence[TrainedMember], held_out: int) -> tuple[list[TrainedMember], list[TrainedMember]]:
    """Separates the runs with the most FLOPs, which are predicted.

    Args:
      members: The runs.
      held_out: Number of runs that are not fitted.

    Returns:
      `(fitted, held out)`.

    Raises:
      InputError: No run would be left.
    """
    if not 0 <= held_out < len(members):
        raise InputError(f"--held_out={held_out}: expected at least 0 and less than the {len(members)} finished runs")
    order = sorted(members, key=lambda m: m.tokens * CONVENTIONS["porian"].flops_per_token(m.size))
    return order[: len(order) - held_out], order[len(order) - held_out :]
