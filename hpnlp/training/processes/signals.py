"""Signals that stop a run.

While there is nothing to save, such a signal ends the process at once. In the training loop, a reaction (see `reacting`)
saves the run first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Ctrl-C, kill, a closed terminal, and the two that batch systems such as SLURM can be configured to send.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A process group gets a signal again from a parent process that passes it on. People repeat Ctrl-C later than that.
REPEAT_SECONDS = 2.0

INTERRUPTED = 130  # exit code
ORPHAN_SECONDS = 600.0  # for the last checkpoint of a process whose supervisor has ended
PARENT = "HPNLP_SWEEP"  # environment variable by which a sweep gives a member its process id, for `follow`

Reaction = Callable[[int], None]
_reactions: list[Reaction] = []  # the last one is in effect
_watching = False


def not_ignored(numbers: Sequence[int] = NUMBERS) -> list[int]:
    """Signals that the process does not ignore. After `nohup`, for example, SIGHUP is and stays ignored.

    Args:
      numbers: Signals.

    Returns:
      Those that are not ignored.
    """
    return [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends the process with exit code 130 and a message at a signal that stops a run, unless a `reacting` block handles it.

    Signals are handled in a separate thread. Python calls handlers only in the main thread and between two of its
    instructions, and compilation keeps that thread in C++ code for minutes.

    Yields:
      None.
    """
    global _watching
    if _watching or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {number: signal.signal(number, _receive) for number in not_ignored()}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    _watching = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, previous)  # a sweep starts its members with the signals blocked
    try:
        yield
    finally:
        _watching = False
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writer)


def _watch(reader: int) -> None:
    """Body of the thread: reads the numbers of received signals from a pipe, to which Python's C handler writes them."""
    with open(reader, "rb", buffering=0) as file:
        while number := file.read(1):
            if number[0] in NUMBERS:
                try:
                    _react(number[0])
                except Exception:  # if a reaction fails, later signals must still end the process
                    end(number[0])


def _receive(number: int, frame: Any) -> None:
    """Python's handler, which runs in the main thread. Inside `watched`, the thread of `_watch` reacts instead."""
    if not _watching:
        _react(number)


def _react(number: int) -> None:
    """Calls the current reaction, or ends the process."""
    if number == signal.SIGHUP:
        _detach()
    (_reactions[-1] if _reactions else end)(number)


@contextlib.contextmanager
def reacting(reaction: Reaction, numbers: Sequence[int] = NUMBERS) -> Iterator[None]:
    """Calls a function for each signal that stops a run, instead of ending the process.

    Args:
      reaction: Function of the signal's number. It runs in the thread of `watched`; outside of `watched`, for example in a
        notebook, in the main thread.
      numbers: Signals to react to outside of `watched`.

    Yields:
      None.
    """
    previous = {}
    _reactions.append(reaction)
    try:
        if not _watching:
            with contextlib.suppress(ValueError):  # a notebook may train in another thread, which cannot set handlers
                for number in not_ignored(numbers):
                    previous[number] = signal.signal(number, _receive)
        yield
    finally:
        _reactions.remove(reaction)
        for number, handler in previous.items():
            signal.signal(number, handler)


def take_over(number: int) -> Callable[[int], Any] | None:
    """Replaces a handler that C code has installed by the one of `watched`.

    Args:
      number: The signal.

    Returns:
      The replaced handler as a function; None outside of `watched`, for ignored signals, and if there was no handler.
    """
    if not _watching or number not in not_ignored():
        return None
    install = ctypes.CDLL(None).signal
    install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    address = install(number, None)
    signal.signal(number, _receive)
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address) if address else None


def end(number: int) -> None:
    """Ends the process at once, with exit code 130 and a message. Saved checkpoints stay, as after `kill -9`.

    Args:
      number: The signal, for the message.

    Raises:
      KeyboardInterrupt: Outside of `watched`, where the process belongs to other code.
    """
    if not _watching:
        raise KeyboardInterrupt
    flush = threading.Thread(target=_flush, daemon=True)  # a thread, since flushing blocks while nobody reads the pipe
    flush.start()
    flush.join(1.0)
    name = signal.Signals(number).name
    write_line(f"hpnlp: {name}: ended at once; what was saved before stays, and the same command goes on from there")
    os._exit(INTERRUPTED)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")  # the live progress line has hidden the cursor
        sys.stdout.flush()


def write_line(line: str) -> None:
    """Writes a line to standard error within a second, or not at all.

    Bypasses Python's buffers, whose lock the main thread may hold. Writing blocks if standard error is a full pipe that nobody
    reads, and the thread that handles signals must not wait for it.

    Args:
      line: The line, without a line end.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)


def _detach() -> None:
    """Redirects output to a closed terminal to os.devnull: writing to the terminal would raise, and end the run."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                devnull = os.open(os.devnull, os.O_WRONLY)
                os.dup2(devnull, fd)
                os.close(devnull)


def follow(parent: int) -> None:
    """Makes this process react as to SIGTERM when its parent has ended, so that a killed sweep stops its running member.

    A process with a session of its own, as `hpnlp launch` starts it, ends with its process group if it has not done so after
    ORPHAN_SECONDS, for example because it is stuck.

    Args:
      parent: Process id of the parent.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        _react(signal.SIGTERM)
        if os.getsid(0) == os.getpid():
            time.sleep(ORPHAN_SECONDS)
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
