"""Signals that stop a run: they end its process at once while there is nothing to lose, and have it saved first afterwards."""

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

# Ctrl-C, kill, a closed terminal, and the two others that batch systems such as SLURM are asked to send.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# A signal to a process group also comes from the parent, which passes it on; people are slower.
REPEAT_SECONDS = 2.0

INTERRUPTED = 130  # exit code
PARENT = "HPNLP_SWEEP"  # the variable that names a member's parent to it

Reaction = Callable[[int], None]
_reactions: list[Reaction] = []  # the last one counts
_watching = False


def heeded(numbers: Sequence[int] = NUMBERS) -> list[int]:
    """Those of the signals that are not ignored; after `nohup`, for one, SIGHUP stays ignored."""
    return [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends this process at a signal that stops it, with exit code 130 and a line, unless `reacting` says otherwise.

    A thread of its own reacts: Python calls handlers in the main thread and between two of its instructions only, and
    compilation keeps that thread in C++ code for minutes.
    """
    global _watching
    if _watching or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = {number: signal.signal(number, _receive) for number in heeded()}
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
    with open(reader, "rb", buffering=0) as file:
        while number := file.read(1):
            if number[0] in NUMBERS:
                try:
                    _react(number[0])
                except Exception:  # a reaction that fails must not leave the process deaf to signals
                    end(number[0])


def _receive(number: int, frame: Any) -> None:
    if not _watching:
        _react(number)


def _react(number: int) -> None:
    if number == signal.SIGHUP:
        _detach()
    (_reactions[-1] if _reactions else end)(number)


@contextlib.contextmanager
def reacting(reaction: Reaction, numbers: Sequence[int] = NUMBERS) -> Iterator[None]:
    """Has `reaction(number)` called for each signal that stops a run, instead of the process ended.

    Inside `watched`, in its thread; elsewhere, as in a notebook, in the main thread, for those of `numbers`.
    """
    previous = {}
    _reactions.append(reaction)
    try:
        if not _watching:
            with contextlib.suppress(ValueError):  # a notebook may train in another thread, which cannot set handlers
                for number in heeded(numbers):
                    previous[number] = signal.signal(number, _receive)
        yield
    finally:
        _reactions.remove(reaction)
        for number, handler in previous.items():
            signal.signal(number, handler)


def take_over(number: int) -> Callable[[int], Any] | None:
    """Replaces the handler that C code has installed for a signal, and returns it as a function; None outside `watched`."""
    if not _watching or number not in heeded():
        return None
    install = ctypes.CDLL(None).signal
    install.restype, install.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    address = install(number, None)
    signal.signal(number, _receive)
    return ctypes.CFUNCTYPE(None, ctypes.c_int)(address) if address else None


def end(number: int) -> None:
    """Ends this process at once, with exit code 130 and a line. What was saved stays, as after `kill -9`.

    Outside `watched`, where it is not hpnlp's to end, raises KeyboardInterrupt.
    """
    if not _watching:
        raise KeyboardInterrupt
    flush = threading.Thread(target=_flush, daemon=True)  # which waits where nobody reads
    flush.start()
    flush.join(1.0)
    name = signal.Signals(number).name
    say(f"hpnlp: {name}: ended at once; what was saved before stays, and the same command goes on from there")
    os._exit(INTERRUPTED)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")  # the live line has hidden the cursor
        sys.stdout.flush()


def say(line: str) -> None:
    """Writes a line to stderr, past Python's buffers, which the main thread may hold; gives up after a second.

    Writing blocks where stderr is a pipe that nobody reads, and the thread that reacts to signals must not wait for it.
    """

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{line}\n".encode())

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(1.0)


def _detach() -> None:
    """Sends what is still printed nowhere where the terminal was closed: writing to it raises, and would end the run."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)


def follow(parent: int) -> None:
    """Has this process stop as after SIGTERM once its parent is gone: a sweep that is killed takes its member with it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        _react(signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
