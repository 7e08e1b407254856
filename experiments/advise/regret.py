"""The advice on a fixture beside the best of its exhaustive set: preparation of the model, a row of the result, its summary."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from exhaustive import Entry, ExhaustiveSet, describe, interval
from fixtures import Fixture

from hpnlp.advise import Advice, AdviseSettings, Goal, advise, report
from hpnlp.advise.estimates import HERE, estimate
from hpnlp.advise.trials import Runner, Trials, run_process
from hpnlp.atomic_file import replace_bytes
from hpnlp.compress.files import write_weights
from hpnlp.compress.stages import Calibration, Stage
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.cost.paired_times import GROUP, LOOKS, Verdict
from hpnlp.jobs.compression.compress_run import COMPANIONS
from hpnlp.jobs.compression.versions import ORIGINAL, Version, after
from hpnlp.training import loop, run_directory
from hpnlp.training.config import Config, resolve, with_changes
from hpnlp.training.config_file import write_config

ROW, SECONDS, TRAINED = "row.json", "seconds.json", "trained"

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Scale:
    """Amount of work for a fixture.

    Attributes:
      changes: Fields of the config that are set.
      seconds: Time of the search; None for that of the fixture.
      batches: Held-out batches of a score; None for all.
      rounds: Paired rounds of the exhaustive set.
      techniques: Most techniques of the exhaustive set; None for all.
    """

    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    batches: int | None = None
    rounds: int = LOOKS[2]
    techniques: int | None = None


TRIAL = Scale({"train.steps": 2}, seconds=60.0, batches=2, rounds=LOOKS[0], techniques=GROUP)


def prepare(fixture: Fixture, directory: Path, scale: Scale) -> Path:
    """The run of a fixture, trained once.

    Args:
      fixture: The fixture.
      directory: Directory of the fixture.
      scale: Amount of work.

    Returns:
      Directory of the run.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / ("data.txt" if fixture.task in ("lm", "rnn_lm") else "data.jsonl")
    if not data.exists():
        fixture.write_data(data)
    config = with_changes(resolve(fixture.make_config(data)), scale.changes)
    trained = directory / "run"
    _train(config, trained)
    return trained if fixture.grow is None else _grown(trained, directory, fixture.grow)


def _train(config: Config, run: Path) -> None:
    if (run / TRAINED).exists():
        return
    if loop.train(config, run, score=False).interrupted:
        raise KeyboardInterrupt
    (run / TRAINED).touch()


def _grown(trained: Path, directory: Path, stage: Stage) -> Path:
    """A run with more units, as of a training whose only step has the learning rate 0."""
    start, run = directory / "start", directory / "grown"
    before = run_directory.load(trained)
    version = Version(ORIGINAL, before.config, before.model, before.params)
    version = after(version, stage, Calibration(lambda *_: None), before)
    start.mkdir(exist_ok=True)
    write_weights(start / WEIGHTS_FILE, version.params, {"step": before.step})
    write_config(start, version.config)
    for name in COMPANIONS:
        if (trained / name).exists():
            shutil.copyfile(trained / name, start / name)
    one_step = {"train.steps": 1, "train.init_from": str(start), "optimizer.learning_rate": 0.0}
    _train(with_changes(version.config, one_step), run)
    return run


def measured(fixture: Fixture, directory: Path, scale: Scale, runner: Runner = run_process) -> dict[str, Any]:
    """The row of a fixture, measured once.

    Args:
      fixture: The fixture.
      directory: Directory of the fixture.
      scale: Amount of work.
      runner: Runs the processes that measure.

    Returns:
      Plain values.
    """
    if (directory / ROW).exists():
        return json.loads((directory / ROW).read_text("utf-8"))
    run = prepare(fixture, directory, scale)
    settings = dataclasses.replace(fixture.settings, batches=scale.batches, table=fixture.techniques)
    if scale.seconds is not None:
        settings = dataclasses.replace(
            settings, seconds=scale.seconds, train_seconds=min(settings.train_seconds, scale.seconds)
        )
    trials = Trials(directory / "advise" / "trials", runner)
    advice = timed(directory, "advise", lambda: advise(run, settings, trials=trials))
    report.write(advice, directory / "advise")
    exhaustive = ExhaustiveSet(advice, Trials(directory / "exhaustive", runner), scale.rounds, scale.techniques)
    entries = timed(directory, "exhaustive", exhaustive.measure)
    row = row_of(fixture, advice, entries, json.loads((directory / SECONDS).read_text("utf-8")))
    if settings.goal is not Goal.DISK and not fixture.techniques:
        row["estimates"] = estimated(run, settings, entries)
    replace_bytes(directory / ROW, (json.dumps(row, indent=1) + "\n").encode())
    return row


def estimated(run: Path, settings: AdviseSettings, entries: Sequence[Entry]) -> dict[str, Any]:
    """Estimates for this machine beside the measured ratios of single techniques.

    Args:
      run: Directory of the run.
      settings: Settings of the search.
      entries: The exhaustive set.

    Returns:
      Share of the techniques whose estimate lies within 30 % of the measured ratio, rank correlation of both, and
      `[estimated, measured]` for each technique.
    """
    rows = {row.name: row.ratio for row in estimate(run, HERE, settings).rows}
    measured_ratios = {e.candidate.name: e.ratio.median for e in entries if e.ratio is not None}
    pairs = {name: [rows[name], ratio] for name, ratio in measured_ratios.items() if name in rows}
    if len(pairs) < 3:  # ranks of two say nothing
        return {"pairs": {}}
    first, second = np.array(list(pairs.values())).T
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    within = float((np.abs(first / second - 1) <= 0.3).mean())
    return {"within": within, "rank": float(np.corrcoef(*ranks)[0, 1]), "pairs": pairs}


def timed(directory: Path, name: str, function: Callable[[], Value]) -> Value:
    """Calls a function, and adds its seconds to those of earlier calls that were interrupted."""
    path, begun = directory / SECONDS, time.monotonic()
    before = json.loads(path.read_text("utf-8")) if path.exists() else {}
    try:
        return function()
    finally:
        seconds = before.get(name, 0.0) + time.monotonic() - begun
        replace_bytes(path, json.dumps({**before, name: seconds}).encode())


def row_of(fixture: Fixture, advice: Advice, entries: Sequence[Entry], seconds: dict[str, float]) -> dict[str, Any]:
    """The row of a fixture.

    Args:
      fixture: The fixture.
      advice: The advice.
      entries: The exhaustive set.
      seconds: Seconds of the advice and of the exhaustive set.

    Returns:
      Plain values. Without a recommended candidate, its gain is 1.
    """
    best, again = max((e for e in entries if e.is_good), key=lambda e: e.gain, default=None), None
    recommended = advice.recommended
    techniques = recommended.candidate.techniques if recommended else ()
    if recommended is not None:
        names = frozenset(techniques)
        again = next(e for e in entries if frozenset(e.candidate.techniques) == names)
    gain, best_gain = again.gain if again else 1.0, best.gain if best else 1.0
    traced, quality = advice.baseline.traced, recommended.quality if recommended else None
    confirmed = recommended.ratio if recommended else None
    is_covered = None
    if confirmed is not None and again is not None and again.ratio is not None:
        is_covered = confirmed.low <= again.ratio.median <= confirmed.high
    bounded = [entry for entry in entries if entry.bound is not None]
    return {
        "fixture": fixture.name,
        "why": fixture.why,
        "machine": {name: advice.baseline.environment[name] for name in ("cpu", "cores", "jax", "commit")},
        "goal": fixture.settings.goal,
        "workload": advice.workload.describe(),
        "baseline_seconds": advice.baseline.baseline_seconds,
        "winners": fixture.winners,
        "recommended": recommended.candidate.name if recommended else None,
        "ratio": interval(confirmed),
        "kept": [quality.retention, quality.low] if quality else None,
        "exhaustive_ratio": interval(again.ratio) if again else None,
        "best": best.candidate.name if best else None,
        "best_ratio": interval(best.ratio) if best else None,
        "regret": 1 - gain / best_gain,
        "is_winner": not set(fixture.winners).isdisjoint(techniques) if fixture.winners else not techniques,
        "decoys": [name for name in techniques if name in fixture.decoys],
        "is_covered": is_covered,
        "is_slower": again is not None and again.ratio is not None and again.ratio.verdict is Verdict.SLOWER,
        "equal": interval(advice.baseline.equal),
        "advise_seconds": seconds["advise"],
        "exhaustive_seconds": seconds["exhaustive"],
        "not_attributed": traced.idle / traced.total if traced else None,
        "bounds": len(bounded),
        "bounds_exceeded": [entry.candidate.name for entry in bounded if entry.exceeds_bound],
        "errors": {entry.candidate.name: entry.error for entry in entries if entry.error},
        "entries": [describe(entry) for entry in entries],
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A table of rows, with the regret and whether the answer is the planted one."""
    header = ("fixture", "recommended", "time", "again", "best", "time", "regret", "planted", "advise", "all")
    table: list[tuple[str, ...]] = [header]
    for row in rows:
        planted = f"decoy {', '.join(row['decoys'])}" if row["decoys"] else "yes" if row["is_winner"] else "no"
        times = [_median(row[name]) for name in ("ratio", "exhaustive_ratio", "best_ratio")]
        minutes = [f"{row[name] / 60:.1f} min" for name in ("advise_seconds", "exhaustive_seconds")]
        recommended, best = row["recommended"] or "nothing", row["best"] or "nothing"
        regret = f"{row['regret']:.2f}"
        table.append((row["fixture"], recommended, *times[:2], best, times[2], regret, planted, *minutes))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(f"{cell:{n}}" for cell, n in zip(line, widths, strict=True)).rstrip() for line in table)


def _median(ratio: Sequence[float] | None) -> str:
    return f"{ratio[0]:.2f}" if ratio else ""
