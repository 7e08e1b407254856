"""Writes the losses of a sweep of `bytes.py` as a result file: means over seeds, differences, and the time to the dense loss.

python experiments/moe/quality.py runs/moe [--out=DIR]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure, report

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "", "Directory of the result; that of the sweep by default.")

Runs = Sequence[
    tuple[Mapping[str, Any], list[Mapping[str, Any]]]
]  # report.json and the lines of metrics.jsonl of each seed


def step_seconds(report: Mapping[str, Any]) -> float:
    """Seconds of a step and its data."""
    return (report["phase_seconds"]["step"] + report["phase_seconds"]["data"]) / report["steps"]


def steps_to(loss: float, lines: Sequence[Mapping[str, Any]]) -> int | None:
    """The first step whose held-out loss is at most `loss`."""
    return next((line["step"] for line in lines if (line.get("heldout_loss") or float("inf")) <= loss), None)


def difference(runs: Runs, others: Runs) -> dict[str, Any] | None:
    """Mean difference of the held-out losses of runs of the same seeds, with its 95 % interval; None for one seed."""
    pairs = zip(runs, others, strict=True)
    changes = [ours["heldout_loss"] - theirs["heldout_loss"] for (ours, _), (theirs, _) in pairs]
    mean, half = measure.mean_interval(changes)
    return None if half is None else {"mean": mean, "low": mean - half, "high": mean + half}


def row_of(label: str, runs: Runs, dense: Runs, longer: Runs) -> dict[str, Any]:
    """A row of the result, relative to the dense model of equal active FLOPs, of equal steps and of equal time (`longer`)."""
    losses = [report["heldout_loss"] for report, _ in runs]
    speeds = [step_seconds(report) for report, _ in runs]
    dense_speed = statistics.median(step_seconds(report) for report, _ in dense)
    reached = []
    for (own, lines), (of_dense, dense_lines) in zip(runs, dense, strict=True):
        # Both are scored on the same few batches during the training.
        last = next(line["heldout_loss"] for line in reversed(dense_lines) if line.get("heldout_loss"))
        if step := steps_to(last, lines):
            reached.append(step * step_seconds(own) / (of_dense["steps"] * step_seconds(of_dense)))
    return {
        "what": label,
        "steps": runs[0][0]["steps"],
        "parameters": runs[0][0]["parameters"],
        "heldout_loss": statistics.mean(losses),
        "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "seeds": len(losses),
        "over_equal_steps": difference(runs, dense),
        "over_equal_time": difference(runs, longer),
        "seconds_per_step": statistics.median(speeds),
        "ratios": {"time of a step over dense": statistics.median(speeds) / dense_speed},
        "time_to_dense_loss": statistics.mean(reached) if len(reached) == len(runs) else None,
    }


def shown(change: Mapping[str, float] | None) -> str:
    """A difference with its interval, as text."""
    return "-" if change is None else f"{change['mean']:+.4f} ({change['low']:+.4f} to {change['high']:+.4f})"


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        sys.exit("usage: python experiments/moe/quality.py SWEEP, the directory of a finished sweep")
    groups: dict[tuple[str, int, int], list[Any]] = {}
    for path in sorted(Path(argv[1]).glob("*/report.json")):
        content = report.read_report(path.parent)
        config = content["config"]
        lines = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        key = config["model.mlp"], config["model.mlp_dim"], content["steps"]
        groups.setdefault(key, []).append((config["train.seed"], content, lines))
    groups = {key: sorted(runs, key=lambda run: run[0]) for key, runs in groups.items()}
    dense_keys = [key for key in groups if key[0] == "gelu"]
    if not dense_keys or len({len(runs) for runs in groups.values()}) > 1:
        sys.exit(f"{argv[1]} lacks finished runs, or the dense ones: let `hpnlp sweep` finish it")
    dense = [run[1:] for run in groups[min(dense_keys, key=lambda key: key[1:])]]
    longer = [run[1:] for run in groups[max(dense_keys, key=lambda key: (key[2], -key[1]))]]
    rows = []
    for (mlp, columns, steps), runs in sorted(groups.items()):
        label = f"{mlp}, {columns} columns, {steps} steps"
        rows.append(row_of(label, [run[1:] for run in runs], dense, longer))
        row = rows[-1]
        deviation = "" if row["deviation"] is None else f" (sd {row['deviation']:.4f})"
        reached = "-" if row["time_to_dense_loss"] is None else f"{row['time_to_dense_loss']:.2f}"
        print(
            f"{label:48} loss {row['heldout_loss']:.4f}{deviation}, over equal time {shown(row['over_equal_time'])}, "
            f"{1000 * row['seconds_per_step']:.0f} ms per step, time to the loss of the dense model over its time {reached}",
            flush=True,
        )
    print(measure.write_result("experts_quality", rows, FLAGS.out or argv[1]))


if __name__ == "__main__":
    app.run(main)
