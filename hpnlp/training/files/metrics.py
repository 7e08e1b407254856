"""Outputs of a run in progress: metrics.jsonl, other metric writers, the progress display, and the clock of its phases."""

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
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hpnlp.atomic_file import replace_bytes
from hpnlp.spec import build, checked, parse
from hpnlp.training.processes.progress_pipe import PIPE
from hpnlp.types import InputError


@runtime_checkable
class Writer(Protocol):
    """A destination of metrics, called once per step with plain floats."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class NeedsPackage(Protocol):
    """An entry of WRITERS that imports an optional package.

    Attributes:
      needs: The package, and the argument of `pip install` for it.
    """

    needs: tuple[str, str]


class JsonlWriter:
    """Writes metrics.jsonl: one JSON object per line, flushed after each line.

    A run that was interrupted has written lines, the last one perhaps in part, for steps after its last checkpoint. These steps
    are done again when the run resumes. Their lines are removed on opening, so that every step has exactly one line.
    """

    def __init__(self, workdir: Path, last_step: int = 0) -> None:
        """Opens the file.

        Args:
          workdir: The run directory.
          last_step: Step that the run resumes from; lines of later steps are removed.
        """
        path = workdir / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_bytes().splitlines(keepends=True) if _line_step(line) <= last_step]
            replace_bytes(path, b"".join(kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (closed by close)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        # No digit is lost: the repr of a float round-trips, and every float32 is a float64. JSON has no NaN or infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until all lines are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _line_step(line: bytes) -> float:
    """Step of a line of metrics.jsonl; infinity for an incomplete or damaged line."""
    try:
        return float(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


class TensorBoardWriter:
    """Writes TensorBoard event files under WORKDIR/tensorboard, through tensorboardX."""

    needs = "tensorboardX", "tensorboardX"

    def __init__(self, *, workdir: Path, last_step: int = 0) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=last_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writes to Weights & Biases, online or offline as its environment variable WANDB_MODE says. Files lie under WORKDIR/wandb.

    The data at W&B follow metrics.jsonl. W&B sends and writes with a delay in a process of its own, and a kill ends both
    processes. When the run resumes, the lines of metrics.jsonl that W&B lacks are logged again, and steps that it has are not
    logged twice. Offline it is unknown which lines W&B has: the newest directory then holds the whole run, and is the one to
    sync; logging again takes about 0.5 ms per line.

    Errors of W&B after the start print one line on standard error, and do not stop the training.
    """

    needs = "wandb", "'.[wandb]' in the repository of hpnlp"

    def __init__(self, project: str = "", *, workdir: Path, last_step: int = 0) -> None:
        """Starts or resumes the W&B run of a directory.

        Args:
          project: Name of the project; by default that of the environment variable WANDB_PROJECT, or "hpnlp".
          workdir: The run directory.
          last_step: Step that the run resumes from.

        Raises:
          InputError: W&B does not start.
        """
        from wandb import Settings, init

        self._workdir = workdir
        # console: the output of the run is not uploaded. finish_timeout: without a network, a finished run must still end.
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
        except Exception as error:  # W&B raises many types, not all of them its own
            raise InputError(
                f"train.writers=wandb: W&B did not start ({_one_line(error)}): correct that, or set "
                "WANDB_MODE=offline and send the run later"
            ) from error
        self._first_step = self._run.step  # the first step that W&B lacks
        self._failed = False
        self._announce()
        if last_step and not self._run.disabled:
            self._log_again()

    def _announce(self) -> None:
        """Prints the address of the run, or the command that uploads it later."""
        if self._run.offline:
            text = f"W&B: offline; to send this run: wandb sync {self._workdir / 'wandb' / 'latest-run'}"
            _stdout().print(text, markup=False)
        elif not self._run.disabled:
            _stdout().print(f"W&B: {self._run.url}", markup=False)

    def _log_again(self) -> None:
        """Logs the lines of metrics.jsonl that W&B lacks."""
        for line in (self._workdir / "metrics.jsonl").read_text("utf-8").splitlines():
            values = json.loads(line)
            step = values.pop("step")
            self.write(step, {name: math.nan if value is None else value for name, value in values.items()})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self._first_step and not self._failed:
            with self._reporting_errors():
                self._run.log(dict(values), step=step)

    def close(self) -> None:
        if not self._failed:
            with self._reporting_errors():
                self._run.finish(exit_code=int(sys.exc_info()[0] is not None))

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        """Prints an error instead of raising it, and ends the writing to W&B."""
        try:
            yield
        except Exception as error:
            self._failed = True
            print(
                f"W&B failed ({_one_line(error)}) and gets no more of this run; metrics.jsonl has all metrics, and "
                f"{self._workdir / 'wandb'} those that W&B had",
                file=sys.stderr,
            )


def _one_line(error: Exception) -> str:
    """Type and message of an error, without line ends."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _wandb_id(workdir: Path) -> str:
    """Id of the directory's run at W&B, the same when the run resumes."""
    path = workdir / "wandb_id"
    if not path.exists():
        replace_bytes(path, secrets.token_hex(4).encode())
    return path.read_text()


# Writers that train.writers may name: name -> function of (*arguments of the spec, workdir, last_step). When the function is
# called, workdir holds config.json, and metrics.jsonl up to last_step.
WRITERS: dict[str, Callable[..., Writer]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}


def find_writers(names: str) -> list[Callable[..., Writer]]:
    """Further metric writers of a run.

    Args:
      names: Value of `train.writers`: entries of WRITERS with their arguments, as in "tensorboard,wandb(project)".

    Returns:
      Functions of `workdir` and `last_step` that make the writers.

    Raises:
      InputError: A name is unknown, its arguments do not fit, or its package is not installed.
    """
    specs = parse(names, "train.writers") if names.strip() else ()
    for spec in specs:
        if spec.repeat > 1:
            raise InputError(f"train.writers={names!r}: writers take no repeats: write {spec.name}")
        writer = checked(spec, WRITERS, "train.writers", ("workdir", "last_step"))
        package, requirement = writer.needs if isinstance(writer, NeedsPackage) else ("sys", "")
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            raise InputError(f"train.writers={spec.name} needs {package}: pip install {requirement}")
    return [functools.partial(build, spec, WRITERS, "train.writers") for spec in specs]


class Clock:
    """Seconds spent in each phase of a run, added up over its restarts: `with clock("step"): ...`.

    Attributes:
      seconds: Phase -> seconds; the phases are setup, data, step, checkpoint, eval and baselines.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        self.seconds = {"setup": 0.0, "data": 0.0, "step": 0.0, "checkpoint": 0.0, "eval": 0.0, "baselines": 0.0}
        self.seconds |= seconds or {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        PIPE.report(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start
            PIPE.report(PIPE.base)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Keeps the process running when nobody reads its output any longer (`hpnlp train ... | head`).

        rich goes quiet and raises SystemExit then; the training continues without output.
        """
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


# For processes other than process 0.
QUIET = Console(quiet=True)


def _stdout() -> Console:
    # With FORCE_COLOR, which services set whose logs are files, rich would treat any stream as a terminal.
    live = None if sys.stdout.isatty() else False
    return _Console(file=sys.stdout, highlight=False, soft_wrap=True, force_interactive=live)


class ProgressLines:
    """Prints lines on work in progress, such as "scoring held-out examples: 120 of 480 batches, 0:35 left".

    Work that takes less time than passes between two lines prints none.
    """

    def __init__(self, show: Callable[[str], None], unit: str = "MiB", every: float = 10.0) -> None:
        """Begins to count time.

        Args:
          show: Prints a line.
          unit: Name of the unit of amounts, in the plural; "MiB" for amounts in bytes.
          every: Seconds between lines.
        """
        self._show, self._unit, self._every = show, unit, every
        self._work, self._done = "", 0
        self._began = self._printed = time.perf_counter()

    def __call__(self, work: str, done: int, total: int) -> None:
        """Prints a line if one is due.

        Args:
          work: Name of the work.
          done: Amount that is done.
          total: Amount in total; 0 if it is unknown.
        """
        PIPE.report()
        now = time.perf_counter()
        if work != self._work or done < self._done or not self._done:  # the first amount may take a compilation
            self._work, self._began = work, now
            self._first = done
        self._done = done
        if now - self._printed >= self._every:
            self._printed = now
            of_total = f" of {self._amount(total)}" if total else ""
            self._show(f"{work}: {self._amount(done)}{of_total} {self._unit}{self._remaining(now, total)}")

    def _amount(self, value: int) -> str:
        return f"{value / 2**20:,.1f}" if self._unit == "MiB" else f"{value:,}"

    def _remaining(self, now: float, total: int) -> str:
        """Time that is left at the mean speed after the first amount; "" where it is unknown."""
        if not total or self._done <= self._first:
            return ""
        seconds = round((now - self._began) * max(0, total - self._done) / (self._done - self._first))
        return f", {seconds // 60}:{seconds % 60:02d} left"


def reading_progress(every: float = 5.0, console: Console | None = None) -> ProgressLines:
    """Makes the progress function of `data.stream.prepare`.

    Args:
      every: Seconds between lines; reading that takes less time prints none.
      console: Console to print to; standard output by default.

    Returns:
      A function of the name of the work, the bytes done, and the bytes in total.
    """
    console = console or _stdout()
    return ProgressLines(lambda line: console.print(line, markup=False), every=every)


class Display:
    """Shows step, loss, tokens per second and remaining time: as a live line on a terminal, as plain lines elsewhere."""

    def __init__(self, first: int, last: int, console: Console | None = None) -> None:
        """Starts the display.

        Args:
          first: Step that the run starts from.
          last: Last step of the run.
          console: Console to print to; standard output by default.
        """
        self._console = console or _stdout()
        self._last = last
        self._first_report: tuple[int, float, float, int] | None = None  # step, busy seconds, time, tokens
        self._bar = None
        if self._console.is_interactive:  # False for TERM=dumb
            columns = (
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("compiling", total=last, completed=first)
            self._bar.start()

    def step(self, step: int, loss: float, busy: float, tokens: int) -> None:
        """Shows the state of the training.

        Args:
          step: Number of steps done.
          loss: Loss of the last step.
          busy: Seconds spent on steps and their data so far.
          tokens: Tokens of the batches that took these seconds, without padding.
        """
        text = f"loss {loss:.4f}"
        if self._first_report is None or step == self._first_report[0]:
            # Speed is measured from here, after the compilation.
            self._first_report = (step, busy, time.perf_counter(), tokens)
        else:
            first_step, first_busy, start, first_tokens = self._first_report
            steps = step - first_step
            remaining = round((time.perf_counter() - start) / steps * (self._last - step))
            rate = (tokens - first_tokens) / max(1e-9, busy - first_busy)
            text += f", {rate:,.0f} tokens/s, {remaining // 60}:{remaining % 60:02d} left"
        if self._bar is None:
            self.print(f"step {step}/{self._last}: {text}")
        else:
            self._bar.update(self._task, completed=step, description=text)

    def status(self, text: str) -> None:
        """Shows work other than steps on the live line; plain output leaves it out.

        Args:
          text: Name of the work.
        """
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def progress(self, unit: str) -> ProgressLines:
        """Progress of work other than steps: on the live line if there is one, and otherwise in lines of their own.

        Args:
          unit: Name of the unit of amounts, in the plural.

        Returns:
          A function of the name of the work, the amount done, and the amount in total.
        """
        return ProgressLines(self.print, unit) if self._bar is None else ProgressLines(self.status, unit, every=0.5)

    def print(self, line: str) -> None:
        """Prints a line, above the live line if there is one."""
        self._console.print(line, markup=False)

    def close(self) -> None:
        """Removes the live line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
