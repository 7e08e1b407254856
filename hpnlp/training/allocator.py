"""How the C library hands out memory to XLA's CPU backend."""

from __future__ import annotations

import contextlib
import ctypes
import functools

import jax


@functools.cache
def keep_freed_memory() -> None:
    """Tells glibc, on the CPU backend, to reuse large freed blocks in place of returning them to the system.

    XLA's CPU backend allocates its temporaries anew for every call. glibc maps and unmaps blocks of this size, so that
    each step pays a page fault for every 4 KiB that it touches: a fifth to a third of a training step of a few million
    parameters. For the whole process and for good; what it holds does not shrink from its peak.
    """
    if jax.default_backend() != "cpu":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        arena_max, mmap_max, trim_threshold = -8, -4, -1
        mallopt(arena_max, 1)  # other arenas map their memory
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)
