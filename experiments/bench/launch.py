"""Measures `hpnlp launch`: two processes of four CPU devices each, of which one dies, stops, sleeps, or is killed in a save.

    python experiments/bench/launch.py [--moments=10] [--forced=100] [--only=kill] [--path=stdlib]

A small run of launch_config.py is disturbed at random moments and goes on under launch. For each moment: steps that are lost
beyond one interval of checkpoints, seconds until launch notices, and seconds from the notice to the next step. The lines of
metrics.jsonl are compared with those of an undisturbed run: bit for bit with the same number of processes, and within rounding
where one process goes on alone. Forced ends of launch itself must leave no processes, ports and zombies. Faults that cannot be
cured must end after few attempts, and others who write must be refused by name. About an hour on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import app, flags

from hpnlp import measure

ROOT = Path(__file__).parents[2]
INTERVAL = 10  # of the checkpoints of launch_config.py
DEVICES = 4  # of a process

FLAGS = flags.FLAGS


@dataclasses.dataclass
class Launched:
    """A run under launch."""

    process: subprocess.Popen[str]
    workdir: Path

    def events(self) -> list[dict[str, Any]]:
        path = self.workdir / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def pids(self) -> list[int]:
        """Ids of the processes of the newest attempt."""
        return next((event["pids"] for event in reversed(self.events()) if event["event"] == "attempt"), [])

    def lines(self) -> list[dict[str, Any]]:
        path = self.workdir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def saved(self) -> int:
        names = [path.name for path in self.workdir.glob("checkpoints/*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def is_saving(self) -> bool:
        return any("tmp" in path.name for path in self.workdir.glob("checkpoints/*"))

    def wait_for(self, ready: Callable[[], bool], seconds: float = 300.0) -> bool:
        """Waits until `ready` holds. Returns False if launch ended before."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.workdir}: nothing happened in {seconds} s: {self.events()[-3:]}")
            time.sleep(0.01)
        return True

    def finish(self, seconds: float = 600.0) -> tuple[int, str]:
        """Exit code and output."""
        output = self.process.communicate(timeout=seconds)[0]
        return self.process.returncode, output


class Runs:
    """Starts the same training in directories under `root`."""

    def __init__(self, root: Path, path: str, steps: int) -> None:
        self.root, self.steps = root, steps
        self.fields = [f"--data.path={path}", f"--data.cache={root / 'data'}", f"--train.steps={steps}"]
        count = f"--xla_force_host_platform_device_count={DEVICES}"
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}".strip(),
            "JAX_COMPILATION_CACHE_DIR": str(root / "xla"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def train(self, name: str, *more: str) -> list[str]:
        config = "--config=experiments/bench/launch_config.py"
        return ["train", config, f"--workdir={self.root / name}", *self.fields, *more]

    def start(self, command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hpnlp", *command],
            cwd=ROOT,
            env={**self.environment, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def launch(self, name: str, *more: str, options: tuple[str, ...] = (), **environment: str) -> Launched:
        command = ["launch", "--processes=2", *options, "--", *self.train(name, *more)]
        output = open(self.root / f"{name}.txt", "a")  # noqa: SIM115  (a pipe that nobody reads would fill up)
        process = subprocess.Popen(
            [sys.executable, "-m", "hpnlp", *command],
            cwd=ROOT,
            env={**self.environment, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output.close()
        return Launched(process, self.root / name)

    def output(self, name: str) -> str:
        return (self.root / f"{name}.txt").read_text()


def disturb(run: Launched, kind: str, draw: random.Random) -> dict[str, Any] | None:
    """Disturbs one process at a random moment. Returns what follows, or None if the run finished before."""
    restarts = [event["checkpoint"] or 0 for event in run.events() if event["event"] == "restart"]
    if not run.wait_for(
        lambda: run.saved() > max(restarts, default=-1)
    ):  # three in a row without a checkpoint end a run
        return None
    first = run.saved()
    wanted = first + draw.randrange(6, 2 * INTERVAL)  # a hang is noticed after five steps

    def ready() -> bool:
        if kind == "save":
            return run.saved() > first and run.is_saving()
        return run.step() >= wanted

    if not run.wait_for(ready):
        return None
    victim, before = draw.randrange(2), len(run.events())
    begun, shown = time.time(), run.step()
    flag = run.workdir / f"sleep_{victim}"
    if kind == "sleep":
        flag.touch()
    else:
        os.kill(run.pids()[victim], signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def has_restarted() -> bool:
        return any(event["event"] == "attempt" for event in run.events()[before:])

    if not run.wait_for(has_restarted):
        return None
    flag.unlink(missing_ok=True)
    events = run.events()[before:]
    notice = next(event for event in events if event["event"] in ("end", "stuck"))
    restart = next(event for event in events if event["event"] == "restart")
    if not run.wait_for(lambda: any(event["event"] == "resumed" for event in run.events()[before:])):
        return None
    resumed = next(event for event in run.events()[before:] if event["event"] == "resumed")
    saved = restart["checkpoint"] or 0
    return {
        "kind": kind,
        "shown": max(shown, restart["last_step"] - 1),
        "saved": saved,
        "beyond_interval": max(0, restart["last_step"] - 1 - saved - INTERVAL),
        "seconds_to_notice": notice["time"] - begun,
        "seconds_to_next_step": resumed["seconds"],
        "is_named": restart["process"] == victim,
    }


def differing(run: Launched, expected: Launched) -> int:
    """Number of lines of metrics that differ."""
    lines, others = run.lines(), expected.lines()
    return sum(a != b for a, b in zip(lines, others, strict=False)) + abs(len(lines) - len(others))


def moments(runs: Runs, undisturbed: Launched, kind: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Rows of `count` moments, in as many runs as they need."""
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < count:
        run = runs.launch(f"{kind}{number}")
        number += 1
        while len(rows) < count and (row := disturb(run, kind, draw)) is not None:
            rows.append(row)
            print(row, flush=True)
        code, _ = run.finish()
        difference = differing(run, undisturbed)
        print(f"{run.workdir.name}: exit code {code}, {difference} lines differ", flush=True)
        rows[-1] |= {"code": code, "lines_that_differ": difference}
    return rows


def half(runs: Runs, undisturbed: Launched) -> dict[str, Any]:
    """A kill after a checkpoint and two before the next one, after which one process goes on."""
    run = runs.launch("half", options=("--min_processes=1",))
    for attempt in (1, 2, 3):
        run.wait_for(lambda: sum(event["event"] == "attempt" for event in run.events()) == attempt)  # noqa: B023
        run.wait_for(lambda: len(run.pids()) == 2 and (run.saved() >= INTERVAL or attempt > 1))  # noqa: B023
        os.kill(run.pids()[1], signal.SIGKILL)
    code, _ = run.finish()
    losses, others = (
        {line["step"]: line["loss"] for line in of.lines() if "loss" in line} for of in (run, undisturbed)
    )
    worst = max(abs(losses[step] / others[step] - 1.0) for step in others if step in losses)
    counts = [event["processes"] for event in run.events() if event["event"] == "attempt"]
    return {"kind": "half", "code": code, "processes": counts, "worst_relative_difference": worst, "steps": len(losses)}


def is_left(pid: int) -> bool:
    """True for a process that runs or is a zombie."""
    return Path(f"/proc/{pid}").exists()


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def forced(runs: Runs, count: int, draw: random.Random) -> dict[str, Any]:
    """Kills launch, or one of its processes and then launch, at random moments, and looks for what is left."""
    totals = {"kind": "forced", "ends": 0, "orphans": 0, "open_ports": 0, "most_seconds": 0.0}
    for number in range(count):
        run = runs.launch(f"forced{number}")
        run.wait_for(lambda: bool(run.pids()))  # noqa: B023
        time.sleep(draw.uniform(0.0, 12.0))
        pids, ports = run.pids(), [event["port"] for event in run.events() if event["event"] == "attempt"]
        if number % 3 == 1:
            os.kill(pids[draw.randrange(2)], signal.SIGSTOP)
        if number % 3 == 2:
            run.process.terminate()
        else:
            run.process.kill()
        begun = time.monotonic()
        run.finish()
        while any(map(is_left, pids)) and time.monotonic() < begun + 60.0:
            time.sleep(0.05)
        totals["ends"] += 1
        totals["orphans"] += sum(map(is_left, pids))
        totals["open_ports"] += sum(map(is_open, ports))
        totals["most_seconds"] = max(totals["most_seconds"], time.monotonic() - begun)
        shutil.rmtree(run.workdir, ignore_errors=True)
    return totals


def incurable(runs: Runs) -> list[dict[str, Any]]:
    """Faults that restarts do not cure."""
    rows = []
    for kind, more, variables in (
        ("poison step", (), {"LAUNCH_POISON": "13"}),
        ("config error", ("--model.heads=3",), {}),
    ):
        run = runs.launch(kind.replace(" ", "_"), *more, **variables)
        code, _ = run.finish()
        attempts = sum(event["event"] == "attempt" for event in run.events())
        last = runs.output(run.workdir.name).splitlines()[-1]
        rows.append({"kind": kind, "code": code, "attempts": attempts, "line": last.replace(str(runs.root), "")})
        print(rows[-1], flush=True)
    return rows


def refused(runs: Runs) -> list[dict[str, Any]]:
    """Others that write: a second supervisor, a process beside it, a stale process at the handshake, an old writer."""
    rows = []

    def add(kind: str, code: int, output: str, pattern: str) -> None:
        line = next((line for line in output.splitlines() if re.search(pattern, line)), "")
        rows.append({"kind": kind, "code": code, "is_named": bool(line), "line": line.replace(str(runs.root), "")})
        print(rows[-1], flush=True)

    run = runs.launch("first")
    run.wait_for(lambda: run.step() > 2)
    second = Launched(runs.start(["launch", "--processes=2", "--", *runs.train("first")]), run.workdir)
    add("second supervisor", *second.finish(), f"process {run.process.pid} on ")
    beside = Launched(runs.start(runs.train("first"), {"HPNLP_ATTEMPT": "1:old"}), run.workdir)
    add("process beside a supervisor", *beside.finish(), rf"process ({run.process.pid}|{run.pids()[0]}) on ")
    run.process.terminate()
    run.finish()

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    place = [f"--coordinator=127.0.0.1:{port}", "--processes=2", "--wait=20"]
    process = Launched(runs.start(runs.train("stale", *place, "--process=0"), {"HPNLP_ATTEMPT": "2:new"}), run.workdir)
    stale = Launched(runs.start(runs.train("stale", *place, "--process=1"), {"HPNLP_ATTEMPT": "1:old"}), run.workdir)
    add("stale process", *stale.finish(), "process 1, .*, belongs to attempt 1:old, and this is attempt 2:new")
    add("process 0 of a stale process", *process.finish(), "process 1, .*, belongs to attempt 1:old")

    old = Launched(runs.start(runs.train("old"), {"HPNLP_ATTEMPT": "1:old"}), runs.root / "old")
    old.wait_for(lambda: old.step() > INTERVAL + 1)
    saved = old.saved()
    (old.workdir / "attempt").write_text("2:new\n")
    add("old checkpoint writer", *old.finish(), "belongs to attempt 1:old of .*, and the newest is 2:new")
    rows[-1] |= {"checkpoints_after": old.saved() - saved}
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures to compare with the bars."""
    deaths = [row for row in rows if row["kind"] in ("kill", "save")]
    hangs = [row for row in rows if row["kind"] in ("stop", "sleep")]
    disturbed = deaths + hangs
    return {
        "processes": 2,
        "devices": 2 * DEVICES,
        "interval": INTERVAL,
        "moments": len(disturbed),
        "steps_lost_beyond_interval": sum(row["beyond_interval"] for row in disturbed),
        "seconds_to_notice_a_death": max((row["seconds_to_notice"] for row in deaths), default=None),
        "seconds_to_notice_a_hang": max((row["seconds_to_notice"] for row in hangs), default=None),
        "seconds_to_next_step": max((row["seconds_to_next_step"] for row in disturbed), default=None),
        "named": sum(row["is_named"] for row in disturbed),
        "lines_that_differ": sum(row.get("lines_that_differ", 0) for row in disturbed),
    }


def main(_: Any) -> None:
    draw, rows = random.Random(FLAGS.seed), []
    chosen = [kind for kind in KINDS if not FLAGS.only or kind in FLAGS.only]
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(Path(directory), FLAGS.path, FLAGS.steps)
        undisturbed = runs.launch("undisturbed")
        code, _ = undisturbed.finish(1200.0)
        if code:
            raise RuntimeError(f"the undisturbed run ended with exit code {code}: {runs.output('undisturbed')[-2000:]}")
        for kind in chosen:
            if kind in ("kill", "stop", "sleep", "save"):
                rows += moments(runs, undisturbed, kind, FLAGS.moments, draw)
            elif kind in ("half", "forced"):
                rows.append(half(runs, undisturbed) if kind == "half" else forced(runs, FLAGS.forced, draw))
                print(rows[-1], flush=True)
            else:
                rows += incurable(runs) if kind == "incurable" else refused(runs)
    rows.insert(0, summary(rows))
    print(rows[0])
    print(measure.write_result("launch", rows, FLAGS.out))


KINDS = ("kill", "save", "stop", "sleep", "half", "forced", "incurable", "refused")

if __name__ == "__main__":
    flags.DEFINE_integer("moments", 10, "Moments of each kind.", lower_bound=1)
    flags.DEFINE_integer("forced", 100, "Forced ends.", lower_bound=1)
    flags.DEFINE_integer("steps", 150, "Steps of each run.")
    flags.DEFINE_integer("seed", 0, "Seed of the moments.")
    flags.DEFINE_multi_enum(
        "only", [], KINDS, "Kinds of faults to measure; may be given more than once; all by default."
    )
    flags.DEFINE_string("path", "stdlib", "The text, as data.path.")
    flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")
    app.run(main)
