"""The models that a comparison lists: runs with a report, and compressed, converted and exported models beside them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.report.files import read_evaluation, read_report
from hpnlp.training.config import flat
from hpnlp.training.config_file import load_config
from hpnlp.training.files import evaluation_record
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.files.contents import EXPORT_FILE, Contents, contents_of
from hpnlp.training.files.example_scores import ExampleScores


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A model of a comparison.

    Attributes:
      report: Content of report.json; of evaluation.json for a model without a report; otherwise the section "config" alone.
      unscored: Reason why the model has no score; "" if it has.
      examples: Scores of the held-out examples; None if they are unknown.
      stored_bytes: Bytes of the stored weights; None if there are none.
      sequences_per_second: Sequences of which the loss is computed in a second, of compressed models.
    """

    report: Mapping[str, Any]
    unscored: str = ""
    examples: ExampleScores | None = None
    stored_bytes: int | None = None
    sequences_per_second: float | None = None

    @property
    def stored_mb(self) -> float | None:
        """Megabytes of the stored weights; None if there are none."""
        return None if self.stored_bytes is None else self.stored_bytes / 1e6

    @property
    def training_seconds(self) -> float | None:
        """Seconds that the training spent on steps and their data; None without a training."""
        seconds = self.report.get("phase_seconds")
        return None if seconds is None else seconds["data"] + seconds["step"]

    @property
    def peak_mib(self) -> float | None:
        """Peak memory of the training; None without a training."""
        peak = self.report.get("peak_memory_bytes")
        return None if peak is None else peak / 2**20


def read_entry(workdir: str | Path) -> ComparedRun:
    """Reads what a directory holds of a model for a comparison.

    Args:
      workdir: The directory.

    Returns:
      The entry.

    Raises:
      InputError: There is no such directory, its run is not finished, or a file of it cannot be read.
    """
    path = Path(workdir)
    if os.path.lexists(path / "report.json") or not is_untrained(path):
        report = read_report(path)
        stored = _checkpoint_bytes(path, report.get("scored_step"))
        return ComparedRun(report, "", ExampleScores.read(path), stored)
    if contents_of(path) is Contents.EXPORTED:
        stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and file.name != EXPORT_FILE)
        return ComparedRun(
            {"config": {}}, "not scored: it is an export, score the run that it was made of", None, stored
        )
    is_compressed = contents_of(path) is Contents.COMPRESSED
    is_scored = (path / evaluation_record.FILE).exists()
    report: dict[str, Any] = read_evaluation(path) if is_scored else {"config": flat(load_config(path))}
    step = report.get("scored_step", CONVERTED_STEP)
    stored = (path / WEIGHTS_FILE).stat().st_size if is_compressed else _checkpoint_bytes(path, step)
    speed = _sequences_per_second(path) if is_compressed else None
    unscored = "" if is_scored else f"not scored: run hpnlp evaluate {path}"
    return ComparedRun(report, unscored, ExampleScores.read(path) if is_scored else None, stored, speed)


def is_untrained(path: Path) -> bool:
    """Whether a directory holds a model that no training of its own can report on.

    Args:
      path: The directory.

    Returns:
      True for a compressed model, a converted model before any training, and an export.
    """
    steps = {checkpoint.name for checkpoint in (path / "checkpoints").glob("[0-9]*")}
    is_converted = steps == {str(CONVERTED_STEP)}
    held = contents_of(path)
    return held in (Contents.COMPRESSED, Contents.EXPORTED) or (held is Contents.RUN and is_converted)


def members(path: Path) -> list[Path]:
    """The directories of models that a path stands for.

    Args:
      path: The directory of a model, or a directory of runs and sweeps.

    Returns:
      The directory itself if it holds a model, or else those in it and in the sweeps in it; itself if there is none.
    """

    def holds_model(directory: Path) -> bool:
        return (directory / "report.json").exists() or is_untrained(directory)

    if holds_model(path):
        return [path]
    candidates = [file.parent for pattern in ("*/*.json", "*/*/*.json") for file in sorted(path.glob(pattern))]
    return [directory for directory in dict.fromkeys(candidates) if holds_model(directory)] or [path]


def _checkpoint_bytes(path: Path, step: int | None) -> int | None:
    """Bytes of the parameters in a checkpoint; None if it is not there. Early versions did not report the step."""
    steps = sorted(int(name) for name in _names(path / "checkpoints") if name.isdecimal())
    if not steps or (step is not None and step not in steps):
        return None
    params = path / "checkpoints" / str(steps[-1] if step is None else step) / "params"
    return sum(file.stat().st_size for file in params.rglob("*") if file.is_file())


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _sequences_per_second(path: Path) -> float | None:
    """Speed of a compressed model at the largest batch that was measured; None if compress.json has none."""
    try:
        seconds = json.loads((path / "compress.json").read_text("utf-8"))["rows"][-1]["seconds"]
        count = max(seconds, key=int)
        return int(count) / float(seconds[count])
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
        return None
