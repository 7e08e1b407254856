"""The supervisor: attempts of a run until it has finished, with logs of each process and a record of events.

An attempt ends when a process ends or is stuck. The others are then stopped, since they would wait for it, and the next attempt
goes on from the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpnlp.errors import TRY_AGAIN, InputError, TemporaryError
from hpnlp.jobs.launch import devices, liveness, processes
from hpnlp.jobs.launch.liveness import Pace, Watch
from hpnlp.jobs.launch.policy import ABORTED, Action, AttemptOutcome, Decision, Policy, cause
from hpnlp.jobs.launch.processes import Child
from hpnlp.training.processes import attempts, signals
from hpnlp.training.processes.attempts import Attempt

SHOWN_LINES = 20  # last lines of a failed process's log that are printed
CHECK_SECONDS = 1.0  # between two looks at the file `attempt`
PAUSE_SECONDS = 2.0  # without reading the pipes, after which the times of lines show no durations and no silence
COPIED_BYTES = 1 << 20  # bytes of process 0's log that are printed at a time


@runtime_checkable
class Starts(Protocol):
    """Makes the command line of a process."""

    def __call__(self, process: int, processes: int, port: int) -> Sequence[str]: ...


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Settings of a supervisor; times are seconds.

    Attributes:
      counts: Numbers of processes that may be used, decreasing; the first is used until it fails.
      max_restarts: Restarts in a row that save no newer checkpoint.
      wait: Time that processes wait for each other.
      hang_seconds: Least time without progress in a step after which a process counts as stuck.
      settle: Time for the other processes to end after one has failed.
      save: Time for the other processes to end after one was interrupted.
      abort: Time for a stuck process to write its stacks.
      busy: Time for GPUs to be released.
      tick: Longest time between two looks at the processes.
      backoff: Factor of the delays before restarts.
    """

    counts: tuple[int, ...]
    max_restarts: int = 2
    wait: float | int = 300.0
    hang_seconds: float | int = 30.0
    settle: float | int = 0.5
    save: float | int = 600.0
    abort: float | int = 5.0
    busy: float | int = 60.0
    tick: float | int = 0.2
    backoff: float | int = 1.0


def newest_checkpoint(workdir: Path) -> int | None:
    """Step of the newest complete checkpoint of a run.

    Args:
      workdir: The run directory.

    Returns:
      The step; None without one.
    """
    names = (path.name for path in (workdir / "checkpoints").glob("[0-9]*"))
    return max((int(name) for name in names if name.isdecimal()), default=None)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes this process the supervisor of a run directory.

    Args:
      workdir: The run directory, which is created if it does not exist.

    Yields:
      None, while the directory is locked.

    Raises:
      InputError: The directory cannot be written.
      OSError: The disk is full.
      TemporaryError: Another supervisor runs, or a process of an earlier attempt still writes.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / attempts.SUPERVISOR_LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (held to the end)
    except OSError as error:
        raise InputError(f"cannot write to {workdir} ({error.strerror}): choose another --workdir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            name = lock.read(100).strip() or "another process"
            raise TemporaryError(
                f"{workdir} is supervised already, by {name}: wait for it, stop it, or choose another --workdir"
            ) from None
        if writer := attempts.holder(workdir / attempts.LOCK):
            raise TemporaryError(
                f"a process of an earlier attempt writes to {workdir}, {writer}: wait until it has ended, or end it"
            )
        lock.truncate(0)
        try:
            os.write(lock.fileno(), f"{attempts.process_name()}, boot {_boot_id()}\n".encode())
        except OSError as error:  # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, lock.name) from error
        try:
            yield
        finally:
            lock.truncate(0)


def _boot_id() -> str:
    """Id of this start of the machine, which tells its process ids from those before; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


class Supervisor:
    """Runs attempts until the run has finished, is stopped, or is given up."""

    def __init__(
        self,
        workdir: Path,
        start: Starts,
        options: LaunchOptions,
        *,
        environment: Mapping[str, str] = os.environ,
        show: Callable[[str], None] = print,
    ) -> None:
        """Prepares a supervisor.

        Args:
          workdir: Directory of the run.
          start: Makes the command line of a process.
          options: Settings.
          environment: Environment variables of the processes.
          show: Prints a line.
        """
        self.workdir, self._start, self.options = workdir, start, options
        self._environment, self._show = environment, show
        self._pace = Pace(options.wait, options.hang_seconds)
        self._policy = Policy(options.max_restarts, options.counts, newest_checkpoint(workdir))
        self._gpus = devices.visible_gpus(environment)
        self._attempt = attempts.newest(workdir) or Attempt(_last_logged(workdir), "none")
        self._children: list[Child] = []
        self._received: list[int] = []  # signals
        self._woken = threading.Event()
        self._noticed: float | None = None  # when the end of the last attempt was noticed
        self._shown = 0  # bytes of the log of process 0
        self._port = 0
        for count in options.counts:
            devices.share(self._gpus, 0, count)

    def run(self) -> int:
        """Runs attempts.

        Returns:
          The exit code: 0, 130 after a signal, or that of the process that failed last.
        """
        count = self.options.counts[0]
        with signals.reacting(self.stop):
            while True:
                outcome = self._run_attempt(count)
                decision = self._policy.decide(outcome, random.random())
                self._report(outcome, decision)
                if decision.action is not Action.RESTART:
                    return decision.code
                if self._woken.wait(decision.delay * self.options.backoff):
                    return self._stop_between(outcome)
                if decision.processes != count:
                    count, self._pace = decision.processes, Pace(self.options.wait, self.options.hang_seconds)
                self._check_supervises()

    def _stop_between(self, outcome: AttemptOutcome) -> int:
        """Records a signal that was received between two attempts. Returns the exit code."""
        name = signal.Signals(self._received[0]).name
        reason = f"{name}: stopped before the restart"
        self.event(
            Action.STOP.value, code=signals.INTERRUPTED, checkpoint=outcome.checkpoint, stopped=name, reason=reason
        )
        self._show(f"launch: {reason}, {_saved(outcome.checkpoint)}")
        return signals.INTERRUPTED

    def stop(self, number: int) -> None:
        """Passes a signal on: the processes save a checkpoint at the first one, and end at once at a later Ctrl-C.

        Args:
          number: The signal.
        """
        is_repeated = bool(self._received)
        self._received.append(number)
        self._woken.set()
        for child in list(self._children):
            child.send_to_process(signal.SIGINT if is_repeated and number == signal.SIGINT else signal.SIGTERM)
        if not is_repeated and self._children:
            name = signal.Signals(number).name
            self._show(f"launch: {name}: the processes save a checkpoint and end; Ctrl-C again ends them without one")

    def event(self, kind: str, **values: Any) -> None:
        """Appends a line to events.jsonl.

        Args:
          kind: Kind of event.
          **values: Further values.
        """
        line = {"time": time.time(), "monotonic": time.monotonic(), "attempt": self._attempt.number, "event": kind}
        with contextlib.suppress(OSError), open(self.workdir / attempts.EVENTS, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            is_cut = file.read() not in (b"", b"\n")  # a line that did not fit on a full disk
            file.write(b"\n" * is_cut + json.dumps(line | values).encode() + b"\n")

    def _check_supervises(self) -> None:
        """Raises TemporaryError if another supervisor has begun an attempt, or the directory was deleted."""
        other = attempts.newest(self.workdir)
        if other is None:
            raise TemporaryError(
                f"{self.workdir / attempts.FILE} is gone or damaged, as after {self.workdir} was deleted, moved or unmounted: "
                "this supervisor ends its processes; see to the directory, and run the same command again"
            )
        if other != self._attempt:
            raise TemporaryError(f"another supervisor has begun attempt {other} of {self.workdir}: this one ends")

    def _run_attempt(self, count: int) -> AttemptOutcome:
        """Starts all processes and watches them until the attempt has ended."""
        self._attempt = self._attempt.next()
        attempts.record(self.workdir, self._attempt)
        self._port, self._shown = _free_port(), 0
        logs = self.workdir / attempts.LOGS / f"attempt_{self._attempt.number}"
        begun = time.monotonic()
        children = self._children
        try:
            for process in range(count):
                self._start_process(process, count, logs, begun)
            pids = [child.popen.pid for child in children]
            saved = newest_checkpoint(self.workdir)
            self.event("attempt", processes=count, port=self._port, pids=pids, checkpoint=saved)
            self._show(f"launch: attempt {self._attempt.number} of {self.workdir}, logs in {logs}")
            if self._received:  # before there were processes to pass the signal on to
                self.stop(signal.SIGTERM)
            outcome = self._watch(begun)
        finally:
            self._end()
        last_step = max(child.watch.step for child in children)
        return dataclasses.replace(outcome, last_step=last_step, checkpoint=newest_checkpoint(self.workdir))

    def _start_process(self, process: int, count: int, logs: Path, begun: float) -> None:
        """Starts one of `count` processes."""
        environment = {
            **self._environment,
            **devices.share(self._gpus, process, count),
            attempts.VARIABLE: str(self._attempt),
            "PYTHONUNBUFFERED": "1",
        }
        command, log = self._start(process, count, self._port), logs / f"process_{process}.log"
        self._children.append(processes.start(process, command, environment, log, Watch(self._pace, begun)))

    def _watch(self, begun: float) -> AttemptOutcome:
        """Watches the processes until all have succeeded, one has ended otherwise, or one is stuck."""
        ends: list[tuple[int, int]] = []  # process and exit code
        deadline: float | None = None  # for the other processes, after an end
        straggler: int | None = None
        checked = now = begun
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.pipe, selectors.EVENT_READ, child)
            while True:
                self._read_pipes(selector, now)
                self._copy_log()
                now = time.monotonic()
                if now > checked + CHECK_SECONDS:
                    with contextlib.suppress(OSError):  # a network file system may fail for a while
                        self._check_supervises()
                    checked = now
                for child in processes.reap(self._children):
                    child.read(now)
                    ends.append((child.index, child.code or 0))
                    self.event(
                        "end", process=child.index, code=child.code, phase=child.watch.phase, step=child.watch.step
                    )
                    if not child.code:
                        continue  # the others may still write a report; limits of phases hold for them
                    is_early = child.code != signals.INTERRUPTED
                    if is_early and self._noticed is None:
                        self._noticed = now
                    limit = now + (self.options.settle if is_early else self.options.save)
                    deadline = limit if deadline is None else min(limit, deadline)
                self._note_first_step(begun, now)
                running = [child for child in self._children if child.code is None]
                if not running or (deadline is not None and now > deadline):
                    return self._outcome(ends, begun)
                if child := self._find_stuck(running, now):
                    return self._stuck(child, running, now)
                if straggler is None and (straggler := self._find_straggler()) is not None:
                    self.event("straggler", process=straggler)

    def _read_pipes(self, selector: selectors.BaseSelector, before: float) -> None:
        """Waits for lines of progress, at most a tick, and reads them. The pipes were last read at the time `before`."""
        ready = selector.select(self.options.tick)
        late = (
            time.monotonic() - before - self.options.tick
        )  # long after Ctrl-Z and fg, or after a pause of the container
        for child in self._children:
            child.watch.set_late(late if late > PAUSE_SECONDS else 0.0)
        for key, _ in ready:
            if not key.data.read(time.monotonic()):
                selector.unregister(key.fileobj)
                time.sleep(0.01)  # the process closes its pipe a little before it can be collected
        if not selector.get_map():
            time.sleep(self.options.tick / 10)

    def _note_first_step(self, begun: float, now: float) -> None:
        """Records the time from the notice of a failure until all processes have begun another step."""
        if (
            self._noticed is not None
            and self._noticed < begun
            and all(child.watch.has_stepped for child in self._children)
        ):
            self.event("resumed", seconds=now - self._noticed, step=max(child.watch.step for child in self._children))
            self._noticed = None

    def _find_straggler(self) -> int | None:
        """The process that delays the others, which is named in a line; None without one."""
        straggler = liveness.straggler([child.watch for child in self._children])
        if straggler is not None:
            self._show(
                f"launch: process {straggler} delays the others: its host takes 1.5 times as long before each step"
            )
        return straggler

    def _outcome(self, ends: Sequence[tuple[int, int]], begun: float) -> AttemptOutcome:
        """Outcome of an attempt in which processes have ended."""
        failures = [end for end in ends if end[1]]
        if not failures:
            process, _ = ends[-1]
            watch = self._children[process].watch
            return self._after(AttemptOutcome(0, process, watch.phase, watch.step))
        process, code = cause(failures)
        stopped = [child for child in self._children if child.code is None and processes.is_stopped(child.popen.pid)]
        if stopped and code in (TRY_AGAIN, ABORTED):  # JAX has missed the heartbeats of the stopped process
            watch = stopped[0].watch
            return self._after(AttemptOutcome(ABORTED, stopped[0].index, watch.phase, watch.step, is_stuck=True))
        watch = self._children[process].watch
        port_failed = (
            code == TRY_AGAIN and watch.phase in ("start", "join") and time.monotonic() - begun < self.options.wait
        )
        return self._after(AttemptOutcome(code, process, watch.phase, watch.step, port_failed=port_failed))

    def _find_stuck(self, running: Sequence[Child], now: float) -> Child | None:
        """A process that was stopped, or the one that holds up the others if it is overdue; they may be silent for longer."""
        for child in running:
            if child.watch.silent(now) > self.options.hang_seconds and processes.is_stopped(child.popen.pid):
                return child
        child = running[liveness.culprit([child.watch for child in running])]
        return child if child.watch.is_overdue(now) else None

    def _stuck(self, child: Child, running: Sequence[Child], now: float) -> AttemptOutcome:
        """Outcome of an attempt with a stuck process. All are aborted, so that they write their stacks to their logs."""
        silent = max(child.watch.silent(now) for child in running)
        self.event(
            "stuck", process=child.index, phase=child.watch.phase, step=child.watch.step, seconds_to_notice=silent
        )
        stopped = ", stopped by a signal such as SIGSTOP" if processes.is_stopped(child.popen.pid) else ""
        self._show(
            f"launch: process {child.index} is stuck at step {child.watch.step} ({child.watch.phase}), silent for "
            f"{silent:.0f} s{stopped}: its stacks are in {child.log}"
        )
        self._noticed = time.monotonic()
        for other in running:
            other.send_to_process(signal.SIGABRT)
            other.send_to_process(signal.SIGCONT)  # a stopped process handles the signal only then
        deadline = now + self.options.abort
        while any(other.code is None for other in running) and time.monotonic() < deadline:
            time.sleep(self.options.tick / 10)
            processes.reap(self._children)
        return self._after(AttemptOutcome(ABORTED, child.index, child.watch.phase, child.watch.step, is_stuck=True))

    def _after(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """The outcome, with the signal that has caused it."""
        if self._received and outcome.code:
            outcome = dataclasses.replace(outcome, stopped=signal.Signals(self._received[0]).name)
        return outcome

    def _end(self) -> None:
        """Ends all processes that are left, and waits until port and GPUs are free."""
        if self._noticed is None:
            self._noticed = time.monotonic()
        pids = {child.popen.pid for child in self._children}
        if remaining := processes.end_all(self._children):
            self.event("not_ended", pids=remaining)
            self._show(f"launch: processes {', '.join(map(str, remaining))} do not end")
        self._copy_log()
        self._children = []
        deadline = time.monotonic() + self.options.busy
        while self._gpus and pids & devices.gpu_processes():
            if time.monotonic() > deadline:
                self.event("device_busy", pids=sorted(pids))
                self._show("launch: device still busy: GPUs are held by processes that have ended")
                break
            time.sleep(1.0)

    def _copy_log(self) -> None:
        """Prints new lines of process 0."""
        if not self._children:
            return
        with contextlib.suppress(OSError), open(self._children[0].log, "rb") as file:
            file.seek(self._shown)
            while data := file.read(COPIED_BYTES):
                complete = data[: data.rfind(b"\n") + 1] or (data if len(data) == COPIED_BYTES else b"")
                self._shown = file.seek(self._shown + len(complete))
                for line in complete.decode("utf-8", "replace").splitlines():
                    self._show(line)
                if len(data) < COPIED_BYTES:
                    break

    def _report(self, outcome: AttemptOutcome, decision: Decision) -> None:
        """Prints and records the end of an attempt, and what follows."""
        lost = max(0, outcome.last_step - 1 - (outcome.checkpoint or 0))
        values = dataclasses.asdict(outcome) | {"steps_lost": lost if outcome.code else 0}
        self.event(decision.action.value, **values, reason=decision.reason, delay=decision.delay * self.options.backoff)
        if not outcome.code:
            return
        log = self.workdir / attempts.LOGS / f"attempt_{self._attempt.number}" / f"process_{outcome.process}.log"
        is_shown = not outcome.stopped and not outcome.port_failed and (outcome.process or outcome.is_stuck)
        if is_shown and (lines := processes.tail(log, SHOWN_LINES)):
            self._show(f"launch: last lines of {log}:")
            for line in lines:
                self._show(f"  {line}")
        end = "was stuck, and was aborted" if outcome.is_stuck else f"ended with {_describe(outcome.code)}"
        self._show(
            f"launch: process {outcome.process} {end} at step {outcome.step} ({outcome.phase}), "
            f"{_saved(outcome.checkpoint)}: {decision.reason}{self._batch(outcome, decision)}"
        )

    def _batch(self, outcome: AttemptOutcome, decision: Decision) -> str:
        """The examples of a step that fails every time; "" for other ends."""
        if decision.action is not Action.STOP or not decision.reason.endswith("fails every time"):
            return ""
        try:
            size = int(json.loads((self.workdir / "config.json").read_text("utf-8"))["data"]["batch_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        first = (outcome.step - 1) * size
        return f": it reads examples {first} to {first + size - 1} of the training order, numbered from 0"


def _last_logged(workdir: Path) -> int:
    """Number of the last attempt that has logs; 0 without one."""
    names = (path.name.removeprefix("attempt_") for path in (workdir / attempts.LOGS).glob("attempt_[0-9]*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _saved(checkpoint: int | None) -> str:
    """The newest checkpoint in words."""
    return "no checkpoint" if checkpoint is None else f"newest checkpoint {checkpoint}"


def _describe(code: int) -> str:
    """An exit code in words."""
    if code > 128 and code != signals.INTERRUPTED:
        with contextlib.suppress(ValueError):
            return signal.Signals(code - 128).name
    return f"exit code {code}"


def _free_port() -> int:
    """A port that is free at present."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]
