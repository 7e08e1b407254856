"""One-line messages for errors of the machine that a command runs on."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

# Errors of file systems and descriptors, which may not name a file.
_WITHOUT_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


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
        return f"cannot read or write {file} ({error.strerror}): use another file, or repair this one"
    return ""


def _is_out_of_memory(error: Exception) -> bool:
    from hpnlp.measure import is_out_of_memory  # imports JAX

    return is_out_of_memory(error)
