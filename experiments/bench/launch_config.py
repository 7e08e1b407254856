"""The language model of resume_config.py under a plan for several devices, with faults that launch.py asks for.

A process sleeps for ever before a step if the run's directory has a file sleep_I with its index. With LAUNCH_POISON=N in the
environment, the last process fails before step N, every time.
"""

from __future__ import annotations

import os
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from experiments.bench import resume_config
from hpnlp.training import loop

_train_step = loop._Run.train_step


def train_step(run: Any) -> None:
    if (run.workdir / f"sleep_{jax.process_index()}").exists():
        time.sleep(1e6)
    is_last = jax.process_index() == jax.process_count() - 1
    if is_last and os.environ.get("LAUNCH_POISON") == str(run.step + 1):
        raise RuntimeError("a step that fails every time")
    _train_step(run)


loop._Run.train_step = train_step


def get_config() -> ConfigDict:
    config = resume_config.get_config()
    config.plan.name = "data"
    config.train.log_every = 1
    config.train.baselines = False
    return config
