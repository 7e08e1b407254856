"""Error types and words of messages. Only the standard library is imported here, so that code without JAX can raise them."""

from __future__ import annotations

import errno

TRY_AGAIN = 75  # exit code
# Parts of messages of a full disk. np.save raises an OSError without a number: "1000 requested and 96 written".
FULL_DISK = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota", " requested and ")


class InputError(ValueError):
    """The input is at fault, not the program. The message gives the value, what was expected, and the fix.

    The command line prints the message as one line and exits with `exit_code`.

    Attributes:
      exit_code: 2; see `hpnlp.__main__.main` for all exit codes.
    """

    exit_code = 2


class TemporaryError(InputError):
    """A condition of the machine that may pass, such as a lost process or a full disk: the same command may succeed later.

    Attributes:
      exit_code: 75, EX_TEMPFAIL of sysexits.h, by which schedulers and `hpnlp launch` decide to try again.
    """

    exit_code = TRY_AGAIN


class RangeError(InputError):
    """A field of an entry has a value that the entry does not allow.

    Attributes:
      problem: The field, its value and what was expected, without the entry.
    """

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"{entry}.{problem}")
        self._entry, self.problem = entry, problem

    def __reduce__(self) -> tuple[type[RangeError], tuple[str, str]]:  # for process pools
        return RangeError, (self._entry, self.problem)


def plural(count: int, noun: str) -> str:
    """The noun, with an "s" unless the count is 1."""
    return noun if count == 1 else f"{noun}s"


def is_full_disk(error: Exception) -> bool:
    """Whether an error means that a disk is full.

    Args:
      error: An error of writing, of Python or of a library that repeats the system's reason in its message.

    Returns:
      Whether it does.
    """
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or any(reason in str(error) for reason in FULL_DISK)


def is_temporary(error: Exception) -> bool:
    """Whether an error of reading or writing may pass: a full disk, or a stale handle of a network file system.

    Args:
      error: As for `is_full_disk`.

    Returns:
      True if the same command may succeed later.
    """
    is_stale = isinstance(error, OSError) and error.errno == errno.ESTALE
    return is_stale or "Stale file handle" in str(error) or is_full_disk(error)
