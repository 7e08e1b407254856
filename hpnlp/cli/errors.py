"""One-line messages for invalid input, and for errors of the machine that a command runs on."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

# Errors of file systems and descriptors, which may not name a file.
_WITHOUT_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE)


def exit_with_message(error: Exception) -> NoReturn:
    """Prints one line and exits with 2 or 75 for errors of the input and the machine; raises all other errors again.

    Args:
      error: The error that a command raised.
    """
    from hpnlp.errors import TRY_AGAIN, InputError, is_temporary

    if isinstance(error, InputError):
        message, code = str(error), error.exit_code
    else:
        may_pass = isinstance(error, OSError) and is_temporary(error)
        message, code = machine_error_message(error), TRY_AGAIN if may_pass else InputError.exit_code
    if not message:
        raise error
    if "--debug" in sys.argv:
        traceback.print_exception(error)
    print(f"hpnlp: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


# Process 0 ends last: JAX aborts the others when it ends, and they may be about to report the same error.
LEAD_SECONDS = 2.0


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Ends this process at an error in the block at once, with the codes of `exit_with_message` or 1, if it is one of several.

    JAX would let it wait for the others before it ends, and they wait for it.

    Yields:
      None.
    """
    try:
        yield
    except Exception as error:
        import jax

        if jax.process_count() == 1:
            raise
        code = 1
        try:
            exit_with_message(error)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if jax.process_index() == 0:
            time.sleep(LEAD_SECONDS)
        os._exit(code)


def run_script(main: Callable[[list[str]], Any]) -> NoReturn:
    """Runs a script of experiments/, whose errors are those of a command.

    Args:
      main: The function to run after flags are parsed, with the positional arguments after the name of the script.
    """
    from absl import app, logging

    def guarded(argv: list[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # JAX reports each kind of device that the machine lacks
        try:
            main(argv)
        except KeyboardInterrupt:
            print("hpnlp: interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            exit_with_message(error)

    app.run(guarded)
    raise AssertionError("app.run exits the process")


def machine_error_message(error: Exception) -> str:
    """Explains an error whose cause lies outside of hpnlp: memory, devices or files.

    Args:
      error: The error that a command raised.

    Returns:
      One line with the fix; "" for all other errors, which are defects of hpnlp.
    """
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if _is_out_of_memory(error):
        return f"out of memory ({reason}): use a smaller model, batch or length, or a larger machine"
    # Where JAX finds no backend it raises errors of many types, AssertionError among them.
    frames = traceback.extract_tb(error.__traceback__)
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and frames and Path(frames[-1].filename).name == "xla_bridge.py":
        details = "" if isinstance(error, AssertionError) else f" ({reason})"
        return (
            f"JAX_PLATFORMS={platforms}: this machine has no such device{details}: unset it, or set JAX_PLATFORMS=cpu"
        )
    if isinstance(error, OSError) and (error.filename or error.errno in _WITHOUT_FILE):
        file = error.filename or "a file"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"cannot write {file} ({error.strerror}): free some space"
        if error.errno == errno.ESTALE:
            return f"cannot use {file} ({error.strerror}): run the same command again"
        return f"cannot read or write {file} ({error.strerror}): use another file, or repair this one"
    return ""


def _is_out_of_memory(error: Exception) -> bool:
    from hpnlp.measure import is_out_of_memory  # imports JAX

    return is_out_of_memory(error)
