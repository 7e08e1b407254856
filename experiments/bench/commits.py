"""Measures the benchmarks of another commit and of this tree, side by side, to find what a change made slower.

    python experiments/bench/commits.py --before=44dcb6f [--only=loss,decode] [--rounds=5]

Every round runs each benchmark script in both trees, each in a process of its own, and alternates which tree comes first,
since the speed of a machine drifts. "train" is no script, but 50 steps of `hpnlp train`, whose losses and peak memory are
compared; "tests" are an eighth of those of `make test`, by hashes of their names, and their collection, in CPU seconds. Both
trees run with the interpreter and packages of this process. About 40 minutes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]
Samples = Mapping[str, Sequence[float]]  # name of a measurement -> its seconds, or milliseconds

FLAGS = flags.FLAGS
flags.DEFINE_string("before", None, "The commit to compare with.", required=True)
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all but tests.")
flags.DEFINE_integer("rounds", 5, "Runs of each benchmark in each tree; the median of their ratios is reported.")
flags.DEFINE_string("name", "commits", "Name of the result.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


@dataclasses.dataclass(frozen=True)
class Script:
    """A benchmark script that both trees have.

    Attributes:
      name: Name of its result file without the device.
      arguments: Arguments of its command line.
      samples: Function from the rows of its result file to the times of hpnlp, without those of its peers.
    """

    name: str
    arguments: Sequence[str]
    samples: Callable[[Sequence[Mapping[str, Any]]], Samples]

    def run(self, tree: Path) -> Samples:
        """Runs the script of a source tree. Raises CalledProcessError if it fails."""
        with tempfile.TemporaryDirectory() as out:
            subprocess.run(
                [sys.executable, f"experiments/bench/{self.name}.py", *self.arguments, f"--out={out}"],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                stdout=subprocess.DEVNULL,
                check=True,
            )
            (path,) = Path(out).glob("*.json")
            return self.samples(json.loads(path.read_text("utf-8"))["rows"])


SCRIPTS = {
    "loss": Script(
        "softmax", ["--only=exact"], lambda rows: {f"loss, {row['what']}": row["all_s"]["ours"] for row in rows}
    ),
    "attention": Script(
        "attention", ["--only=short"], lambda rows: {f"attention, {row['what']}": row["all_ms"]["ours"] for row in rows}
    ),
    "step": Script(
        "train_step",
        ["--sizes=small,wide"],
        lambda rows: {f"training step, {row['size']}": row["all_ms"]["ours"] for row in rows},
    ),
    "loop": Script(
        "loop",
        ["--steps=60", "--rounds=1", "--imports=1"],
        lambda rows: {"60 steps of the training loop": rows[0]["loop_seconds"]},
    ),
    "decode": Script(
        "decode",
        ["--models=demo", "--rounds=5"],
        lambda rows: {
            f"{row['what']}, {row['batch']} prompt{'s' * (row['batch'] > 1)}": row["all_ms"][
                "prefill" if row["what"] == "prefill" else "ours"
            ]
            for row in rows
        },
    ),
}
# Arguments of `hpnlp`: a run whose losses and peak memory are compared.
TRAINING = [
    "train",
    "--config=experiments/lm/bytes.py",
    "--config.train.steps=50",
    "--config.train.log_every=1",
    "--config.train.eval_stride=0",
    "--config.train.sample=0",
    "--config.data.heldout_bytes=20000",
]


def export(commit: str, directory: Path) -> None:
    """Writes the files of a commit into a directory. Raises CalledProcessError if the repository has no such commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)


def compare(script: Script, before: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each measurement of a script: medians of each round in both trees, and the median of their ratios."""
    medians: dict[str, dict[str, list[float]]] = {}  # measurement -> tree -> median of each round
    for i in range(rounds):
        trees = {"before": before, "after": ROOT}
        for name in list(trees)[:: 1 if i % 2 == 0 else -1]:
            for what, times in script.run(trees[name]).items():
                medians.setdefault(what, {"before": [], "after": []})[name].append(statistics.median(times))
    rows = []
    for what, by_tree in medians.items():
        ratios = [after / first for after, first in zip(by_tree["after"], by_tree["before"], strict=True)]
        fastest = min(by_tree["after"]) / min(by_tree["before"])
        rows.append({"what": what, "over_before": statistics.median(ratios), "fastest_over_before": fastest, **by_tree})
        print(f"{what}: {rows[-1]['over_before']:.3f} ({', '.join(f'{x:.3f}' for x in sorted(ratios))})", flush=True)
    return rows


def trained(tree: Path) -> tuple[list[float], int]:
    """`(losses of each step, peak bytes of the process)` of a training run. Raises RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as workdir:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpnlp", *TRAINING, f"--workdir={workdir}"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"training in {tree} ended with status {status}")
        lines = map(json.loads, Path(workdir, "metrics.jsonl").read_text("utf-8").splitlines())
        return [line["loss"] for line in lines if "loss" in line], 1024 * usage.ru_maxrss


def compare_training(before: Path, rounds: int) -> list[dict[str, Any]]:
    """Rows for the peak memory of training, and for the largest difference of the losses of its steps."""
    losses: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {"before": [], "after": []}
    for _ in range(rounds):
        for name, tree in {"before": before, "after": ROOT}.items():
            losses[name], peak = trained(tree)
            peaks[name].append(peak)
    ratio = statistics.median(peaks["after"]) / statistics.median(peaks["before"])
    difference = max(abs(a / b - 1) for a, b in zip(losses["after"], losses["before"], strict=True))
    rows = [
        {"what": "peak memory of 50 training steps", "over_before": ratio, **peaks},
        {"what": "losses of 50 training steps", "largest_difference": difference},
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def tested(tree: Path) -> tuple[float, int]:
    """`(CPU seconds, number of tests)` of an eighth of the tests of a tree, in one process, and of what these start."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "every_eighth"]
    path = f"{tree}{os.pathsep}{Path(__file__).parent}"
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        lines = output.read().splitlines()
    if os.waitstatus_to_exitcode(status) not in (0, 1):  # 1: a test failed, which the last line says
        raise RuntimeError(f"the tests of {tree} ended with status {status}: {lines[-1:]}")
    print(f"{tree}: {lines[-1]}", flush=True)
    count = sum(int(number) for number in re.findall(r"(\d+) (?:passed|failed|error)", lines[-1]))
    return usage.ru_utime + usage.ru_stime, count


def compare_tests(before: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for the CPU seconds of tests."""
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    counts = {}
    for i in range(rounds):
        trees = {"before": before, "after": ROOT}
        for name in list(trees)[:: 1 if i % 2 == 0 else -1]:
            used, counts[name] = tested(trees[name])
            seconds[name].append(used)
    ratio = statistics.median(after / first for after, first in zip(seconds["after"], seconds["before"], strict=True))
    what = f"an eighth of the tests ({counts['after']}; before, {counts['before']}), CPU seconds"
    return [{"what": what, "over_before": ratio, **seconds}]


def main(_: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        export(FLAGS.before, Path(directory))
        names = FLAGS.only or [*SCRIPTS, "train"]
        rows = [
            row for name in names if name in SCRIPTS for row in compare(SCRIPTS[name], Path(directory), FLAGS.rounds)
        ]
        if "train" in names:
            rows += compare_training(Path(directory), FLAGS.rounds)
        if "tests" in names:
            rows += compare_tests(Path(directory), FLAGS.rounds)
    rows = [{"commit": FLAGS.before, **row} for row in rows]
    print(measure.write_result(FLAGS.name, rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
