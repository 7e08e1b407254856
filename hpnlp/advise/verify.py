"""A row of a report, measured again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from hpnlp.advise.candidate import Candidate
from hpnlp.advise.report import FILES, read_candidate
from hpnlp.advise.search import CONFIRM_SECONDS
from hpnlp.advise.trial import Trial, read_ratio, wall_ratio
from hpnlp.advise.trials import Trials, saved_weights
from hpnlp.advise.workload import Workload
from hpnlp.cost.paired_times import LOOKS, described
from hpnlp.training.config_file import load_config
from hpnlp.types import InputError


def verify(
    run: str | Path,
    name: str,
    directory: str | Path | None = None,
    *,
    trials: Trials | None = None,
    log: Callable[[str], None] = print,
) -> str:
    """Measures a row of a report again, in a new process.

    Args:
      run: Directory of the run.
      name: Name of the row.
      directory: Directory of the report, RUN/advise by default.
      trials: Runs processes; by default as subprocesses.
      log: Called with lines on the progress.

    Returns:
      A sentence with both ratios, and whether the new one lies in the interval of the report.

    Raises:
      InputError: There is no report or no such row, or the row has no time.
    """
    directory = Path(directory or Path(run) / "advise")
    candidate, finding = read_candidate(directory, name)
    report = json.loads((directory / FILES[1]).read_text("utf-8"))
    if finding["ratio"] is None or report["settings"]["goal"] in ("memory", "disk"):
        raise InputError(
            f"--verify={name!r}: the report has no time of it: name a row with a time, of a report on latency, throughput or "
            "training"
        )
    workload = Workload.from_values(report["workload"])
    log(f"measuring {name} again: {workload.describe()}")
    trial = Trial(
        run=str(run),
        step=saved_weights(Path(run), load_config(run))[0],
        changes=report["settings"]["changes"],
        workload=workload,
        baseline=Candidate(),
        candidates=(candidate,),
        rounds=LOOKS[-1],
        seconds=CONFIRM_SECONDS,
        has_data=report.get("has_data", True),
        attempt=time.time_ns(),
    )
    result = (trials or Trials(directory / "trials")).run(trial)
    model, now = result.models[1], wall_ratio(result, 0)
    if model.error or now is None:
        raise InputError(f"{name} cannot be measured: {model.error}")
    before = read_ratio(finding["ratio"])
    place = "inside" if before.low <= now.median <= before.high else "outside"
    cpu = model.times.cpu if model.times else now
    return (
        f"{name}: {described(now, cpu)}. {now.median:.3f} of the time, {place} the interval of the report, "
        f"{before.low:.3f} to {before.high:.3f}."
    )
