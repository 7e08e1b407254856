"""Names of runs on the command line: runs, checkpoints of a run, and the best runs of a sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpnlp.types import InputError

_SUFFIX = re.compile(r"(.+)@(\d+|best\d+|last\d+)", re.DOTALL)


def expand(names: Sequence[str], step: int | None = None) -> list[tuple[str, int | None]]:
    """Checkpoints that names stand for.

    Args:
      names: Each a workdir `RUN` (its best checkpoint), `RUN@STEP` (the checkpoint of a step), `RUN@last3` (the newest three
        checkpoints) or `SWEEP@best3` (the three finished runs of a directory with the best held-out scores; in a directory of
        `hpnlp sweep --folds`, the runs of all folds of the three members with the best mean scores).
      step: Step of the checkpoint for names without one.

    Returns:
      `(workdir, step or None for the best checkpoint)` of each.

    Raises:
      InputError: A name is empty; `step` is given, and all names are of checkpoints; there are fewer runs or checkpoints than a
        name asks for; or runs of `SWEEP@best3` have different held-out examples.
    """
    if not all(names):
        raise InputError("the name of a run is empty: remove the comma before or after it, or name a run there")
    members: list[tuple[str, int | None]] = []
    for name in names:
        match = None if Path(name).exists() else _SUFFIX.fullmatch(name)
        if match is None:
            members.append((name, step))
        elif match[2].isdigit():
            members.append((match[1], int(match[2])))
        elif match[2].startswith("last"):
            members += [(match[1], number) for number in _newest(match[1], int(match[2].removeprefix("last")))]
        else:
            members += [(run, None) for run in _best(match[1], int(match[2].removeprefix("best")))]
    if step is not None and names and all(name not in names for name, _ in members):
        raise InputError(f"--step={step}: {', '.join(names)} name their checkpoints by themselves: leave out --step")
    return members


def expand_one(name: str, step: int | None = None) -> tuple[str, int | None]:
    """The one checkpoint that a name stands for.

    Args:
      name: As for `expand`.
      step: Step of the checkpoint for a name without one.

    Returns:
      `(workdir, step or None for the best checkpoint)`.

    Raises:
      InputError: As `expand`, or the name stands for several checkpoints.
    """
    members = expand([name], step)
    if len(members) > 1:
        raise InputError(f"{name} names {len(members)} checkpoints: name one, as RUN or RUN@STEP")
    return members[0]


def _newest(workdir: str, count: int) -> list[int]:
    """Steps of the newest checkpoints of a run, ascending."""
    steps = sorted(int(path.name) for path in (Path(workdir) / "checkpoints").glob("[0-9]*") if path.name.isdecimal())
    if not 1 <= count <= len(steps):
        raise InputError(
            f"{workdir}@last{count}: the run has {len(steps)} checkpoints: name at most these, and keep more of them by "
            "train.keep"
        )
    return steps[-count:]


def _best(directory: str, count: int) -> list[str]:
    """The finished runs of a directory with the best primary scores, best first; with folds, the runs of the best members."""
    from hpnlp import report, tasks
    from hpnlp.report import folds

    scores, digests, configs = {}, {}, {}
    for path in sorted(Path(directory).glob("*/report.json")):
        content = report.read_report(path.parent)
        fields = content["config"]
        metric, higher_is_better = tasks.find(str(fields.get("task", "lm"))).primary_metric(fields)
        score = content.get(f"heldout_{metric}")
        if score is not None:
            name = str(path.parent)
            configs[name], scores[name] = fields, -score if higher_is_better else score
            digests.setdefault(fields.get(folds.FOLD, 0), {}).setdefault(content.get("heldout_digest"), path.parent)
    folds_of_all = folds.fold_count(configs.values())
    groups = [list(group.values()) for group in folds.by_member(configs) if len(group) == max(1, folds_of_all)]
    if not 1 <= count <= len(groups):
        held = f"members with a score of each of {folds_of_all} folds" if folds_of_all else "finished runs with a score"
        raise InputError(f"{directory}@best{count}: the directory holds {len(groups)} {held}: name at most these")
    if different := next((list(of_fold.values()) for of_fold in digests.values() if len(of_fold) > 1), None):
        raise InputError(
            f"{directory}@best{count}: {different[0]} and {different[1]} have different held-out examples, so that their "
            "scores do not compare: name the runs themselves"
        )
    means = [(sum(scores[run] for run in runs) / len(runs), runs) for runs in groups]
    return [run for _, runs in sorted(means)[:count] for run in runs]
