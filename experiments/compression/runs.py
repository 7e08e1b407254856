"""Runs the commands of `steps.py`, and makes the table of their results."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from steps import Settings, Step

from hpnlp.cli import members
from hpnlp.spec import did_you_mean
from hpnlp.types import InputError

ROOT = Path(__file__).parents[2]
METRIC = "accuracy"  # of all tasks


def is_finished(step: Step, workdir: Path) -> bool:
    return all((workdir / step.name / name).exists() for name in (step.result, "config.json"))


def check_packages() -> None:
    """Checks that the packages of the tokenizer and of Hugging Face checkpoints are installed, which all steps need.

    Raises:
      InputError: One is missing.
    """
    if missing := [name for name in ("safetensors", "tokenizers") if importlib.util.find_spec(name) is None]:
        raise InputError(f"not installed: {', '.join(missing)}: pip install '.[hf]' in the repository")


def check_settings(settings: Settings) -> None:
    """Compares the settings with those of the results in the directory, which a table must not mix, and writes them to it.

    Args:
      settings: The settings.

    Raises:
      InputError: The directory cannot be made, or holds results of other settings.
    """
    path = settings.workdir / "settings.json"
    new = {"budget": settings.budget, "trial": settings.trial}
    try:
        settings.workdir.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text("utf-8")) if path.exists() else new
        if old == new:
            path.write_text(json.dumps(new) + "\n", "utf-8")
    except OSError as error:
        raise InputError(f"cannot write to --workdir={settings.workdir} ({error.strerror}): choose another") from error
    if old != new:
        begun = f"--budget={old['budget']}{' --trial' if old['trial'] else ''}"
        raise InputError(
            f"{settings.workdir} holds results of {begun}, which would be mixed with others: choose another --workdir, or "
            f"pass {begun}"
        )


def choose(steps: Sequence[Step], beginnings: Sequence[str]) -> list[Step]:
    """The steps whose names have one of some beginnings.

    Args:
      steps: All steps.
      beginnings: Beginnings of names; all steps are chosen if there are none.

    Returns:
      The steps, in their order.

    Raises:
      InputError: No step has a name with one of the beginnings.
    """
    for beginning in beginnings:
        if not any(step.name.startswith(beginning) for step in steps):
            raise InputError(
                f"--only: no step has a name that begins with {beginning!r}: {did_you_mean(beginning, [s.name for s in steps])}"
            )
    return [step for step in steps if not beginnings or step.name.startswith(tuple(beginnings))]


def run(step: Step, workdir: Path) -> str:
    """Does a step.

    Args:
      step: The step.
      workdir: Directory of all results.

    Returns:
      The last lines that the command printed if it failed; "" if it did not. A signal is passed on to the command, which saves
      a checkpoint if it trains, and then ends this process.
    """
    if step.arguments[0] == "convert":  # the other commands resume
        shutil.rmtree(workdir / step.name, ignore_errors=True)
    log = workdir / "logs" / f"{step.name.replace('/', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:  # a step that resumes continues its log
        code = members.run(step.arguments, step.name, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if code == 0 and is_finished(step, workdir):
        return ""
    return "\n".join([*log.read_text().splitlines()[-5:], f"exit code {code}"])


def run_all(steps: Sequence[Step], chosen: Sequence[Step], workdir: Path) -> list[str]:
    """Does the chosen steps that are not finished, and prints the time that remains.

    Args:
      steps: All steps, of which the table is made.
      chosen: Those to do.
      workdir: Directory of all results.

    Returns:
      Names of the steps that failed, or whose inputs are not finished.
    """
    by_name = {step.name: step for step in steps}
    failed, spent, expected = [], 0.0, 0.0
    for index, step in enumerate(chosen, 1):
        if is_finished(step, workdir):
            continue
        if missing := [name for name in step.inputs if not is_finished(by_name[name], workdir)]:
            failed.append(step.name)
            print(
                f"[{index}/{len(chosen)}] {step.name} is left out: {', '.join(dict.fromkeys(missing))} not finished",
                flush=True,
            )
            continue
        remaining = sum(other.work for other in chosen[index - 1 :] if not is_finished(other, workdir))
        remaining *= spent / expected if expected else 1.0
        print(f"[{index}/{len(chosen)}] {step.name}; about {max(remaining / 60, 1):.0f} min remain", flush=True)
        start = time.perf_counter()
        error = run(step, workdir)
        spent, expected = spent + time.perf_counter() - start, expected + step.work
        if error:
            failed.append(step.name)
            print(f"{step.name} failed:\n{error}", flush=True)
        elif step.row:
            print(f"  {time.perf_counter() - start:.0f} s, {METRIC} {score_of(step, workdir):.4f}", flush=True)
        write_table(steps, workdir)
    return failed


def score_of(step: Step, workdir: Path) -> float:
    """Held-out score of a finished step."""
    content = json.loads((workdir / step.name / step.result).read_text())
    return content["rows"][-1]["scores"][METRIC] if "rows" in content else content[f"heldout_{METRIC}"]


def table(steps: Sequence[Step], workdir: Path) -> list[dict[str, Any]]:
    """The rows of all finished steps; runs with several seeds have one row.

    Args:
      steps: The steps.
      workdir: Directory of all results.

    Returns:
      Rows with task, technique, recipe, metric, the mean score, the scores by seed, the score of the task's teacher, and, where
      they are measured, parameters, disk_bytes, memory_bytes, `seconds` by batch size, and the same of the original.
    """
    by_name = {step.name: step for step in steps}
    grouped: dict[tuple[str, str], list[Step]] = {}
    for step in steps:
        if step.row and is_finished(step, workdir):
            grouped.setdefault((step.row["task"], step.row["technique"]), []).append(step)
    teachers = {task: of_row[0] for (task, technique), of_row in grouped.items() if technique == "teacher"}
    rows = []
    for (task, technique), of_row in grouped.items():
        first, scores = of_row[0], [score_of(step, workdir) for step in of_row]
        row = {"task": task, "technique": technique, "recipe": first.row["recipe"], "metric": METRIC}
        row |= {"score": float(np.mean(scores)), "scores": scores, "seeds": len(scores)}
        if teacher := teachers.get(task):
            row["teacher_score"] = score_of(teacher, workdir)
        needed = [by_name[first.row[key]] for key in ("like", "after") if key in first.row]
        if all(is_finished(step, workdir) for step in needed):
            measured = by_name[first.row["like"]] if "like" in first.row else first
            row |= sizes_of(measured, workdir, original=first.row.get("is_original", False))
        if "original" in first.row and is_finished(by_name[first.row["original"]], workdir):
            # A run whose weights are zeros or shared is smaller already.
            whole = sizes_of(by_name[first.row["original"]], workdir, original=True)
            row |= {
                name: whole[name] for name in ("original_disk_bytes", "original_memory_bytes", "original_parameters")
            }
        if "after" in first.row and "seconds" in row:
            before = sizes_of(by_name[first.row["after"]], workdir, original=False)
            factors = {n: before["original_seconds"][n] / before["seconds"][n] for n in before["seconds"]}
            seconds = {n: factors[n] * value for n, value in row["original_seconds"].items()}
            row |= {name: value for name, value in before.items() if name.startswith("original_")}
            row["original_seconds"] = seconds
        rows.append(row)
    return rows


def sizes_of(step: Step, workdir: Path, original: bool) -> Mapping[str, Any]:
    """Bytes and times of the result of a compression; or, for models of the same shapes, of the original or of its floats."""
    stages = json.loads((workdir / step.name / step.result).read_text())["rows"]
    first, last = stages[0], stages[0] if original else stages[-1]
    names = ("parameters", "disk_bytes", "memory_bytes", "seconds")
    return {name: last[name] for name in names} | {f"original_{name}": first[name] for name in names}


def write_table(steps: Sequence[Step], workdir: Path) -> None:
    """Writes table.json. No device is occupied, since the commands need it."""
    (workdir / "table.json").write_text(json.dumps({"rows": table(steps, workdir)}, indent=1, allow_nan=False) + "\n")
