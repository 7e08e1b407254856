"""Standard output and error of a command, which may be closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpnlp.errors import InputError

# Commands whose only result is their output stop where it cannot be written. All others finish the files that they write.
PRINTS_ONLY = ("check-data", "evaluate", "generate", "plan")
HELP = ("help", "--help", "-h", "-help", "--helpfull", "--version")


class Output:
    """A text stream that is replaced by the null device when writing fails.

    Attributes:
      failure: Reason why the stream could not be written; "" while it can.
      escaped: Whether a character that the stream's encoding lacks was written as a backslash escape.
    """

    def __init__(self, stream: Any, stops: bool) -> None:
        """Wraps a stream.

        Args:
          stream: Text stream, or None where the process was started without it.
          stops: Whether writing raises an error after a failure, which is otherwise only recorded.
        """
        self.failure, self.escaped = "" if stream else "it is closed", False
        self._stops = stops
        self._stream: Any = stream or io.StringIO()
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Writes text.

        Args:
          text: The text to write.

        Returns:
          The number of characters.

        Raises:
          BrokenPipeError: The reader has closed the pipe, and the command stops.
          InputError: The stream cannot be written, and the command stops.
        """
        try:
            text.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:
            self.escaped = True
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes the buffered text. Raises the errors of `write`."""
        self._attempt(self._stream.flush)

    def _attempt(self, function: Callable[[], object]) -> None:
        """Calls a function that writes; on an error, discards later output, and raises if the command stops."""
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
        """Redirects the stream to the null device, since Python flushes it once more at exit."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    @property
    def message(self) -> str:
        """One line that describes the failure."""
        return f"stdout cannot be written ({self.failure}): redirect it, for example with > out.txt or > /dev/null"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded(argv: Sequence[str]) -> Iterator[Output]:
    """Replaces `sys.stdout` and `sys.stderr` by an `Output` each while a command runs.

    A command that writes files continues where stdout fails; failures of stderr are ignored.

    Args:
      argv: The command and its arguments.

    Yields:
      The `Output` of stdout.
    """
    stops = argv[0] in PRINTS_ONLY or any(arg in HELP for arg in argv)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Output(streams[0], stops), Output(streams[1], False)
    try:
        yield sys.stdout
    finally:
        sys.stdout, sys.stderr = streams
