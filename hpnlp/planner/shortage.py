"""Out-of-memory errors of training, answered with the smallest change that makes a step fit."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import jax

from hpnlp import measure
from hpnlp.planner import search
from hpnlp.planner.devices import DEVICES, USABLE
from hpnlp.planner.estimate import costs
from hpnlp.training.config import Config
from hpnlp.types import InputError

SEARCHED = 60.0  # seconds, after which no further change is tried
LESS = 0.9  # of the planned bytes, where the plan said that the step would fit
FIELDS = "lower data.batch_size, data.seq_len or model.dim, set plan.remat=full, or take more devices"


@contextlib.contextmanager
def explained(config: Config) -> Iterator[None]:
    """Turns an out-of-memory error of training into an InputError that names what a step needs and what makes it fit."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not measure.is_out_of_memory(error):
            raise
        reason = (str(error).strip().splitlines() or ["MemoryError"])[0]
        raise InputError(f"out of memory ({reason:.200}): {advice(config)}") from error


def advice(config: Config) -> str:
    """The memory that a step of a config is planned to take on the devices of this process, and the smallest change that fits.

    Returns fields to change where no plan can be made, or the search takes more than `SEARCHED` seconds. Cost: a trace of the
    step for each change that is tried.
    """
    begun = time.monotonic()

    def within_time(done: int, total: int) -> None:
        if time.monotonic() - begun > SEARCHED:
            raise TimeoutError

    try:
        planned, memory = costs(config, jax.device_count()), measure.memory_bytes()
    except Exception:  # the advice must not hide the error that it is about
        return FIELDS
    told = f"a step is planned to take {planned.bytes / 1e9:,.2f} GB of a device's {memory / 1e9:,.2f} GB"
    try:
        # Speeds do not matter here: changes are tried in a fixed order.
        limit = min(memory, LESS * planned.bytes / USABLE)
        found = search.mended(planned, dataclasses.replace(DEVICES["h100"], memory=limit), within_time)
    except Exception:
        found = None
    if found is None:
        return f"{told}: {FIELDS}"
    return f"{told}, and {found[1].bytes / 1e9:,.2f} GB with {found[0]}: add that, or {FIELDS}"
