"""Where metrics go: metrics.jsonl, further writers, and the progress line; and the clock of a run's phases."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpnlp.spec import build, checked, parse
from hpnlp.types import InputError, Writer


class JsonlWriter:
    """One JSON object a line, flushed as it is written; on opening, lines after `last_step` are cut off.

    A run that is cut off has lines that its last checkpoint knows nothing of, perhaps half a line: they are written
    again, so that every step has exactly one.
    """

    def __init__(self, workdir: Path, last_step: int = 0) -> None:
        path = workdir / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _step_of(line) <= last_step]
            fresh = path.with_suffix(".tmp")
            fresh.write_bytes(b"".join(kept))
            os.replace(fresh, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # repr of a float round-trips, and a float32 is exactly some float64: no digit is lost. JSON has no word for NaN.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Returns when the lines have reached the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


class TensorBoardWriter:
    """Event files under WORKDIR/tensorboard, through tensorboardX."""

    needs = "tensorboardX", "tensorboardX"  # the package, and what installs it

    def __init__(self, *, workdir: Path, last_step: int = 0) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, online or offline as its own variable WANDB_MODE says; its files lie under WORKDIR/wandb.

    What W&B holds follows metrics.jsonl. Its own process sends and writes late, and a kill takes both processes: the lines that
    W&B lacks are logged again from metrics.jsonl when the run goes on, and steps that it has are not logged twice. Offline
    nobody knows what it has: the newest directory holds the whole run, and is the one to sync. That takes about half a
    millisecond a line.

    Raises InputError where W&B does not start. Once it runs, its failures cost a line on stderr, and never the training.
    """

    needs = "wandb", "'.[wandb]' in the repository of hpnlp"

    def __init__(self, project: str = "", *, workdir: Path, last_step: int = 0) -> None:
        from wandb import Settings, init

        self._workdir = workdir
        # console: lines of the run are the display's. finish_timeout: a network that is gone must not hold a run that is done.
        settings = Settings(console="off", silent=True, finish_timeout=60, finish_timeout_raises=True)
        try:
            self._run = init(
                project=project or os.environ.get("WANDB_PROJECT", "hpnlp"),
                name=os.environ.get("WANDB_NAME", workdir.resolve().name),
                id=_wandb_id(workdir),
                resume="allow",
                dir=str(workdir),
                config=json.loads((workdir / "config.json").read_text("utf-8")),
                allow_val_change=True,
                settings=settings,
            )
        except Exception as error:  # of many types, not all of them W&B's own
            raise InputError(
                f"train.writers=wandb: W&B did not start ({_in_a_line(error)}): mend that, or set "
                "WANDB_MODE=offline and send the run later"
            ) from error
        self._begin = self._run.step  # the first step that W&B has not
        self._failed = False
        if self._run.offline:
            _stdout().print(
                f"W&B: offline; to send this run: wandb sync {workdir / 'wandb' / 'latest-run'}", markup=False
            )
        elif not self._run.disabled:
            _stdout().print(f"W&B: {self._run.url}", markup=False)
        if last_step and not self._run.disabled:
            for line in (workdir / "metrics.jsonl").read_text("utf-8").splitlines():
                values = json.loads(line)
                step = values.pop("step")
                self.write(step, {name: math.nan if value is None else value for name, value in values.items()})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._begin and not self._failed:
            with self._surviving():
                self._run.log(dict(values), step=step)

    def close(self) -> None:
        if not self._failed:
            with self._surviving():
                self._run.finish(exit_code=int(sys.exc_info()[0] is not None))

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            print(
                f"W&B failed ({_in_a_line(error)}) and gets no more of this run; metrics.jsonl has all, and "
                f"{self._workdir / 'wandb'} what W&B had",
                file=sys.stderr,
            )


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _wandb_id(workdir: Path) -> str:
    """By which W&B knows the run of this directory, also when it goes on."""
    path = workdir / "wandb_id"
    if not path.exists():
        fresh = path.with_suffix(".tmp")
        fresh.write_text(secrets.token_hex(4))
        os.replace(fresh, path)
    return path.read_text()


# name -> (arguments of the spec, workdir, last step that is kept) -> writer; train.writers names entries. When one is called,
# workdir holds config.json, and metrics.jsonl up to the last step.
WRITERS: dict[str, Callable[..., Writer]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}


def find_writers(names: str) -> list[Callable[..., Writer]]:
    """The entries of WRITERS that a spec names, to be called with `workdir` and `last_step`. Raises InputError where one does
    not take its arguments, or its package is not there."""
    specs = parse(names, "train.writers") if names.strip() else ()
    for spec in specs:
        if spec.repeat > 1:
            raise InputError(f"train.writers={names!r}: writers take no repeats: write {spec.name}")
        entry = checked(spec, WRITERS, "train.writers", ("workdir", "last_step"))
        package, installed_by = getattr(entry, "needs", ("sys", ""))
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            raise InputError(f"train.writers={spec.name} needs {package}: pip install {installed_by}")
    return [functools.partial(build, spec, WRITERS, "train.writers") for spec in specs]


class Clock:
    """Seconds spent in each phase of a run, added up over its restarts."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = {"setup": 0.0, "data": 0.0, "step": 0.0, "checkpoint": 0.0, "eval": 0.0, **(seconds or {})}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich goes quiet and ends the process where nobody reads on (`hpnlp train ... | head`): training goes on."""
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


# For processes that do not lead.
QUIET = Console(quiet=True)


def _stdout() -> Console:
    # FORCE_COLOR, as services set it whose logs are files, makes rich take any stream for a terminal.
    live = None if sys.stdout.isatty() else False
    return _Console(file=sys.stdout, highlight=False, soft_wrap=True, force_interactive=live)


def now_and_then(every: float = 5.0, console: Console | None = None) -> Callable[[str, int, int], None]:
    """A function for `prepare` to call as it reads, which prints a line every so many seconds: quick reading has none."""
    console, said = console or _stdout(), time.perf_counter()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal said
        if time.perf_counter() - said >= every:
            said = time.perf_counter()
            console.print(f"{what}: {done / 2**20:,.1f} of {total / 2**20:,.1f} MiB", markup=False)

    return progress


class Display:
    """A live line on a terminal that is not dumb, plain lines elsewhere: step, loss, tokens/s and the time that is left."""

    def __init__(self, first: int, last: int, tokens_a_step: int, console: Console | None = None) -> None:
        self._console = console or _stdout()
        self._last, self._tokens_a_step = last, tokens_a_step
        self._begun: tuple[int, float, float] | None = None
        self._bar = None
        if self._console.is_interactive:  # not where TERM=dumb
            columns = (
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("compiling", total=last, completed=first)
            self._bar.start()

    def step(self, step: int, loss: float, busy: float) -> None:
        """Shows training as it stands after `step`. busy: seconds spent on steps and their data so far."""
        text = f"loss {loss:.4f}"
        if self._begun is None or step == self._begun[0]:  # what came before the first report holds the compilation
            self._begun = step, busy, time.perf_counter()
        else:
            first, busy_then, then = self._begun
            left = round((time.perf_counter() - then) / (step - first) * (self._last - step))
            rate = (step - first) * self._tokens_a_step / max(1e-9, busy - busy_then)
            text += f", {rate:,.0f} tokens/s, {left // 60}:{left % 60:02d} left"
        if self._bar is None:
            self.say(f"step {step}/{self._last}: {text}")
        else:
            self._bar.update(self._task, completed=step, description=text)

    def doing(self, what: str) -> None:
        """Shows what takes time beside steps, on the live line only."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def say(self, line: str) -> None:
        """Prints a line, above the live one where there is one."""
        self._console.print(line, markup=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
