"""Errors of the machine that a command runs on, in one line."""

from __future__ import annotations

import errno
import os
import traceback
from pathlib import Path

# Errors of files that do not name one.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE)


def explained(error: Exception) -> str:
    """The line for an error whose cause lies outside of hpnlp, with the fix; "" for any other, which is a defect of hpnlp."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if _is_out_of_memory(error):
        return f"out of memory ({reason}): make the model, the batch or the length smaller, or take a larger machine"
    # JAX raises errors of many types, assertions among them, where it does not find a backend.
    frames = traceback.extract_tb(error.__traceback__)
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked and frames and Path(frames[-1].filename).name == "xla_bridge.py":
        told = "" if isinstance(error, AssertionError) else f" ({reason})"
        return f"JAX_PLATFORMS={asked} names a device that is not here{told}: unset it, or set JAX_PLATFORMS=cpu"
    if isinstance(error, OSError) and (error.filename or error.errno in _OF_DISKS):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"cannot write {error.filename or 'a file'} ({error.strerror}): free some space"
        return f"cannot read or write {error.filename or 'a file'} ({error.strerror}): name another, or mend this one"
    return ""


def _is_out_of_memory(error: Exception) -> bool:
    from hpnlp.measure import is_out_of_memory  # which imports JAX

    return is_out_of_memory(error)
