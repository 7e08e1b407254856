"""The files of a report: reading metrics.jsonl and report.json, which may be damaged, and writing text atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp import tasks
from hpnlp.atomic_file import replace_bytes
from hpnlp.data.reading.files import is_special
from hpnlp.spec import UnknownNameError
from hpnlp.tasks import Task
from hpnlp.training.files import evaluation_record
from hpnlp.training.files.contents import Contents, check_run, contents_of
from hpnlp.types import InputError

# Numbers and sections of report.json that a comparison of runs reads, beside those of the task.
_NUMBERS = ("tokens_per_second", "peak_memory_bytes", "seconds", "parameters")
_SECTIONS: dict[str, tuple[str, ...]] = {"phase_seconds": ("data", "step"), "config": ()}


def report_task(report: Mapping[str, Any]) -> Task:
    """The task of a run.

    Args:
      report: Content of report.json.

    Returns:
      The task; the language model for reports of early versions, which do not name one.

    Raises:
      InputError: The report names an unknown task.
    """
    return tasks.find(str(report["config"].get("task", "lm")))


def read_metrics(workdir: str | Path, steps: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Reads metrics.jsonl. Damaged lines are left out.

    Args:
      workdir: The run directory.
      steps: Number of steps that the run has done, each of which should have a line.

    Returns:
      The lines, in which a value that was not finite is None; and a sentence on what is absent from the file, or "".
    """
    path = Path(workdir) / "metrics.jsonl"
    try:
        parsed = [_metrics_line(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        reason = f"metrics.jsonl cannot be read ({error.strerror or error})"
        return [], f"{reason}: loss.png shows no training loss, and skipped steps are not counted."
    lines = [line for line in parsed if line is not None]
    faults = []
    if damaged := len(parsed) - len(lines):
        faults.append(f"{damaged} of its {len(parsed)} lines are damaged")
    if missing := max(0, steps - len({line["step"] for line in lines if "loss" in line})):
        faults.append(f"{missing} of {steps} steps have no line")
    if not faults:
        return lines, ""
    return (
        lines,
        f"metrics.jsonl is not complete, and neither are loss.png and the count of skipped steps: {'; '.join(faults)}.",
    )


def _metrics_line(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl: names with numbers or None, and the step; None if it is damaged."""
    try:
        line = json.loads(text)
        is_numeric = all(value is None or isinstance(value, int | float) for value in line.values())
        return line if is_numeric and line.get("step") is not None else None
    except (ValueError, AttributeError, RecursionError):
        return None


def read_report(workdir: str | Path) -> dict[str, Any]:
    """Reads report.json.

    Args:
      workdir: The run directory.

    Returns:
      The content of the file.

    Raises:
      InputError: There is no report.json, it cannot be read, or it lacks a field that comparisons need.
    """
    path = Path(workdir) / "report.json"
    return _read(path, _NUMBERS, _SECTIONS, "run the training command again")


def read_evaluation(workdir: str | Path) -> dict[str, Any]:
    """Reads evaluation.json, see `training.files.evaluation_record`.

    Args:
      workdir: The directory of a model without a training of its own.

    Returns:
      The content of the file.

    Raises:
      InputError: It cannot be read, or lacks a field that comparisons need.
    """
    path = Path(workdir) / evaluation_record.FILE
    return _read(path, ("parameters",), {"config": ()}, f"run hpnlp evaluate {workdir} again")


def _read(path: Path, numbers: Sequence[str], sections: Mapping[str, tuple[str, ...]], fix: str) -> dict[str, Any]:
    """Reads a report with these numbers and sections, beside those of its task; `fix` is the command that writes it."""
    workdir = path.parent
    if is_special(path):
        raise InputError(f"{path} is not a regular file: move it away, and {fix}")
    try:
        report = json.loads(path.read_text("utf-8"), parse_constant=lambda word: None)
        if fault := _fault(report, numbers, sections):
            raise ValueError(fault)
        return report
    except (FileNotFoundError, NotADirectoryError):
        check_run(workdir)
        if contents_of(workdir) is Contents.COMPRESSED:
            raise InputError(
                f"{workdir} holds a compressed model, which has no report.json: hpnlp evaluate {workdir} scores it, and its "
                "compress.md compares it with its run"
            ) from None
        raise InputError(
            f"{workdir} has no report.json: finish the run first, with the command that began it"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror or error}): correct or remove it") from error
    except UnknownNameError as error:
        raise InputError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a report ({error}): {fix} to write it anew") from error


def _fault(report: object, numbers: Sequence[str], sections: Mapping[str, tuple[str, ...]]) -> str:
    """The first reason why a report cannot be compared, for example because another version wrote it; "" if it can."""
    if not isinstance(report, dict):
        return f"it holds a {type(report).__name__}"
    config = report.get("config")
    task = report_task(report) if isinstance(config, dict) else tasks.TASKS["lm"]
    compared = {**task.report.compared(config if isinstance(config, dict) else {}), **dict.fromkeys(numbers, False)}
    absent = [name for name in (*compared, *sections) if name not in report]
    absent = absent or [
        f"{section}[{name}]"
        for section, names in sections.items()
        for name in names
        if not isinstance(report[section], dict) or name not in report[section]
    ]
    if absent:
        return f"it lacks {', '.join(absent)}"
    values = {name: report[name] for name in compared}
    values |= {f"{section}[{name}]": report[section][name] for section, names in sections.items() for name in names}
    for name, value in values.items():
        if not _is_number(value) and not (value is None and compared.get(name)):
            return f"{name} is {value!r:.40}"
    if report.get("skipped_steps") is not None and not _is_number(report["skipped_steps"]):
        return f"skipped_steps is {report['skipped_steps']!r:.40}"
    return task.report.fault(report)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def replace_text(path: Path, text: str) -> None:
    """Writes a text file atomically.

    Args:
      path: Path of the file.
      text: Content of the file. File names in it that are not UTF-8 are written as the bytes that they are.

    Raises:
      OSError: The file cannot be written.
    """
    replace_bytes(path, text.encode("utf-8", "surrogateescape"))
