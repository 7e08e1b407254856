"""Advice for a step of training that runs out of memory: its planned memory, and the smallest change that makes it fit."""

from __future__ import annotations

import dataclasses
import time

import jax

from hpnlp import measure
from hpnlp.planner import search
from hpnlp.planner.devices import DEVICES, USABLE
from hpnlp.planner.estimate import costs
from hpnlp.training.config import Config

SEARCH_SECONDS = 60.0  # time after which no more changes are tried
# The step was planned to fit and did not: a change has to need less than this share of the planned bytes.
REDUCTION = 0.9
GENERAL_ADVICE = "lower data.batch_size, data.seq_len or model.dim, set plan.remat=full, or use more devices"


def advice(config: Config) -> str:
    """The planned memory of a step on the devices of this process, and the smallest change that makes the step fit.

    Args:
      config: Config of the run.

    Returns:
      A sentence; general advice where the step cannot be planned, or no change is found within `SEARCH_SECONDS`.

    Cost: one trace of the step for each change that is tried.
    """
    deadline = time.monotonic() + SEARCH_SECONDS

    def stop_at_deadline(done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        planned, memory = costs(config, jax.device_count()), measure.memory_bytes()
    except Exception:  # an error of the planner must not hide the out-of-memory error
        return GENERAL_ADVICE
    need = f"a step is planned to take {planned.bytes / 1e9:,.2f} GB of a device's {memory / 1e9:,.2f} GB"
    try:
        # The order of the changes does not depend on the speed of the device.
        limit = min(memory, REDUCTION * planned.bytes / USABLE)
        change = search.smallest_change(planned, dataclasses.replace(DEVICES["h100"], memory=limit), stop_at_deadline)
    except Exception:
        change = None
    if change is None:
        return f"{need}: {GENERAL_ADVICE}"
    flags, estimate = change
    return f"{need}, and {estimate.bytes / 1e9:,.2f} GB with {flags}: add these flags, or {GENERAL_ADVICE}"
