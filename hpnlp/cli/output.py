"""Standard output and error of a command, which may be closed, full, or unable to show every character."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpnlp.types import InputError

# Commands whose only product is their output: they stop where it cannot be written. Others make files, and finish these.
PRINTS_ONLY = ("generate", "plan")
HELP = ("help", "--help", "-h", "-help", "--helpfull", "--version")


class Output:
    """A text stream that is replaced with the null device when it fails.

    Attributes:
        failure: Reason why the stream could not be written, or "" while it can.
        escaped: Whether a character that the stream's encoding lacks was written as a backslash escape.
    """

    def __init__(self, stream: Any, stops: bool) -> None:
        """Wraps a stream.

        Args:
            stream: Text stream, or None where the process was started without it.
            stops: Whether writing raises InputError after a failure, which is otherwise only recorded.
        """
        self.failure, self.escaped = "" if stream else "it is closed", False
        self._stops = stops
        self._stream: Any = stream or io.StringIO()
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Writes text. Raises BrokenPipeError, and InputError on another failure, where the command is to stop."""
        try:
            text.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:
            self.escaped = True
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered. Raises as `write`."""
        self._attempt(self._stream.flush)

    def _attempt(self, function: Callable[[], object]) -> None:
        if self.failure and self._stops:
            raise InputError(self.message)
        try:
            function()
        except BrokenPipeError:
            self._discard()
            if self._stops:
                raise
        except OSError as error:
            self._discard()
            self.failure = error.strerror or str(error)
            if self._stops:
                raise InputError(self.message) from error

    def _discard(self) -> None:
        """Sends what is buffered, and all that follows, to the null device: Python flushes once more when it ends."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    @property
    def message(self) -> str:
        """The line that describes the failure."""
        return f"stdout cannot be written ({self.failure}): send it elsewhere, as > out.txt or > /dev/null"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded(argv: Sequence[str]) -> Iterator[Output]:
    """Replaces sys.stdout and sys.stderr with an `Output` each, and yields that of stdout.

    A command that makes files goes on where stdout fails; failures of stderr are ignored.

    Args:
        argv: The arguments of `hpnlp`: the command, and its flags.
    """
    stops = argv[0] in PRINTS_ONLY or any(arg in HELP for arg in argv)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Output(streams[0], stops), Output(streams[1], False)
    try:
        yield sys.stdout
    finally:
        sys.stdout, sys.stderr = streams
