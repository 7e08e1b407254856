"""Measures the steps lost by `kill -9`, and whether resumed runs equal an uninterrupted run bit for bit.

    python experiments/bench/resume.py [--kills=20] [--steps=150] [--path=stdlib] [--model=memory]

A small run of resume_config.py, whose model has buffers, is killed at random moments, during its first compilation and while it
saves, and restarted with the same command. A run that finishes is compared with an uninterrupted one, and the next run begins,
until the number of kills is reached. Steps logged after the newest complete checkpoint are lost and computed again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]
INTERVAL = 10  # of the checkpoints of resume_config.py
# Name in --model -> further fields. "memory" carries hidden states from batch to batch, over text in stream order; the routers
# of "experts" have a bias that moves after each step.
MODELS = {
    "buffers": {},
    "experts": {"model.mlp": "bias_balanced(8,2,balance=0.001)"},
    "memory": {"model.mixer": "segment_memory(100),centered", "data.order": "stream", "train.eval_stride": 0},
}

FLAGS = flags.FLAGS


def lines_of(workdir: Path) -> list[bytes]:
    """The complete lines of metrics.jsonl."""
    path = workdir / "metrics.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def saved_step(workdir: Path) -> int:
    """The step of the newest complete checkpoint, or 0."""
    names = [path.name for path in workdir.glob("checkpoints/*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


def is_saving(workdir: Path) -> bool:
    return any("tmp" in path.name for path in workdir.glob("checkpoints/*"))


class Runs:
    """Starts the same training run in directories under `root`."""

    def __init__(self, root: Path, path: str, steps: int, model: str) -> None:
        self.root = root
        overrides = {**MODELS[model], "train.steps": steps, "data.path": path, "data.cache": root / "data"}
        command = [sys.executable, "-m", "hpnlp", "train", "--config=experiments/bench/resume_config.py"]
        self.command = command + [f"--{name}={value}" for name, value in overrides.items()]
        self.cache_numbers = itertools.count()

    def start(self, workdir: Path, cold: bool = False) -> subprocess.Popen[bytes]:
        """Starts or resumes a run. cold: with an empty compilation cache."""
        programs = self.root / (f"xla{next(self.cache_numbers)}" if cold else "xla")
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        return subprocess.Popen(
            [*self.command, f"--workdir={workdir}"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        )

    def finish(self, workdir: Path) -> tuple[float, float]:
        """Runs to the end. Returns the seconds until the first line of metrics, and in total."""
        begun = time.perf_counter()
        process, first = self.start(workdir), 0.0
        while process.poll() is None:
            if not first and lines_of(workdir):
                first = time.perf_counter() - begun
            time.sleep(0.01)
        if process.returncode:
            raise RuntimeError(f"{workdir} ended with exit code {process.returncode}")
        return first, time.perf_counter() - begun


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
    """Kills the process as soon as `ready` holds. Returns False if the process ended before."""
    while not ready():
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    process.kill()
    return process.wait() == -signal.SIGKILL


def main(_: Any) -> None:
    draw = random.Random(FLAGS.seed)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        runs = Runs(root, FLAGS.path, FLAGS.steps, FLAGS.model)
        cold_seconds, _ = runs.finish(root / "undisturbed")
        expected = lines_of(root / "undisturbed")
        _, total_seconds = runs.finish(root / "again")

        def differing(workdir: Path) -> int:
            pairs = itertools.zip_longest(lines_of(workdir), expected)
            return sum(actual != line for actual, line in pairs)

        rows, differ, compared, number = [], differing(root / "again"), 1, 0
        while len(rows) < FLAGS.kills:
            workdir, kind = root / f"run{number}", KINDS[len(rows) % len(KINDS)]
            process, begun = runs.start(workdir, cold=kind == "compiling"), time.perf_counter()
            after = draw.uniform(0.3, 1.0) * cold_seconds if kind == "compiling" else draw.uniform(0.0, total_seconds)
            saves = draw.randrange(3)  # completed before the kill
            saved_steps = {saved_step(workdir)}

            def ready() -> bool:
                if kind != "saving":  # noqa: B023  (called only in this iteration)
                    return time.perf_counter() - begun > after  # noqa: B023
                saved_steps.add(saved_step(workdir))  # noqa: B023
                return len(saved_steps) > saves and is_saving(workdir)  # noqa: B023

            if not kill_when(process, ready):
                if process.returncode:
                    raise RuntimeError(f"{workdir} ended with exit code {process.returncode}")
                differ, compared, number = differ + differing(workdir), compared + 1, number + 1
                continue
            lines, saved = lines_of(workdir), saved_step(workdir)
            shown = json.loads(lines[-1])["step"] if lines else 0
            rows.append(
                {
                    "kind": kind,
                    "seconds": time.perf_counter() - begun,
                    "shown": shown,
                    "saved": saved,
                    "lost": max(0, shown - saved),
                    "beyond_interval": max(0, shown - saved - INTERVAL),
                }
            )
            print(rows[-1], flush=True)
        runs.finish(root / f"run{number}")
        differ, compared = differ + differing(root / f"run{number}"), compared + 1
    summary = {
        "model": FLAGS.model,
        "kills": len(rows),
        "interval": INTERVAL,
        "steps_lost_beyond_interval": sum(row["beyond_interval"] for row in rows),
        "most_steps_lost": max((row["lost"] for row in rows), default=0),
        "lines_that_differ": differ,
        "runs_compared": compared,
        "lines_of_each": len(expected),
    }
    print(summary)
    print(
        measure.write_result(
            "resume" if FLAGS.model == "buffers" else f"resume-{FLAGS.model}", [summary, *rows], FLAGS.out
        )
    )


KINDS = ("any moment", "saving", "compiling", "any moment")

if __name__ == "__main__":
    flags.DEFINE_integer("kills", 20, "Number of kills.")
    flags.DEFINE_integer("steps", 150, "Steps of each run.")
    flags.DEFINE_integer("seed", 0, "Seed of the moments of the kills.")
    flags.DEFINE_enum("model", "buffers", MODELS, "What the runs train.")
    flags.DEFINE_string("path", "stdlib", "The text, as data.path.")
    flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
    app.run(main)
