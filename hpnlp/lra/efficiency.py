"""Speed and memory of a training step, measured in a process of its own, and the file with the results of many."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp.report.files import replace_text
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.training.config import Config

# Fields of a row that decide whether two rows are of the same step.
KEYS = ("mixer", "task", "length", "batch_size", "config")


def measure_step(config: Config, task: str, rounds: int = 3) -> dict[str, Any]:
    """Measures a training step on random tokens, without data on disk.

    The peak memory is that of the device where it reports one, otherwise that of this process after its first step.

    Args:
      config: The resolved config.
      task: Name of the task, for the row.
      rounds: Number of measurements, of which the median is taken.

    Returns:
      A row: the fields of `step_key`, "steps_per_second", "peak_memory_bytes", and "environment".

    Raises:
      InputError: The config is invalid.
    """
    import jax
    import numpy as np

    from hpnlp import measure
    from hpnlp.planner.estimate import planned_trainer

    trainer: Any = planned_trainer(config, jax.devices()[:1])
    batch = {name: np.asarray(array) for name, array in trainer.example_batch(*_shape(config)).items()}
    draw = np.random.default_rng(0)
    batch["tokens"] = draw.integers(1, 9, batch["tokens"].shape).astype(np.int32)
    batch["positions"] = np.broadcast_to(np.arange(config.data.seq_len, dtype=np.int32), batch["tokens"].shape)
    data = jax.device_put(batch)
    state, key = trainer.init(jax.random.key(0)), jax.random.key(1)

    def step() -> Any:
        nonlocal state
        state, metrics = trainer.step(state, data, key)
        return metrics["loss"]

    jax.block_until_ready(step())
    _forget_peak()
    timing = measure.timeit({"step": step}, rounds=rounds, min_seconds=1.0)["step"]
    return {
        **step_key(config, task),
        "steps_per_second": 1 / timing.median,
        "seconds": list(timing.all),
        "peak_memory_bytes": measure.peak_memory_bytes(),
        "environment": measure.environment(),
    }


def _forget_peak() -> None:
    """Makes the peak memory of this process the present one, where the system can (Linux), so that compiling does not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "utf-8")


def _shape(config: Config) -> tuple[int, int]:
    return config.data.batch_size, config.data.seq_len


def step_key(config: Any, task: str) -> dict[str, Any]:
    """The fields of a row that identify the step.

    Args:
      config: The resolved config.
      task: Name of the task.

    Returns:
      Mixer, task, length, batch size, and all other fields of the model and the plan as text.
    """
    model = {name: value for name, value in vars(config.model).items() if name not in ("mixer", "traits")}
    shape = dict(zip(("batch_size", "length"), _shape(config), strict=True))
    described = json.dumps([model, vars(config.plan)], default=str, sort_keys=True)
    return {"mixer": config.model.mixer, "task": task, **shape, "config": described}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Reads rows that `write_rows` has written.

    Args:
      path: The file, which need not exist.

    Returns:
      The rows.

    Raises:
      InputError: The file is damaged.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text("utf-8"))["rows"]
        if not all(key in row for row in rows for key in (*KEYS, "steps_per_second", "peak_memory_bytes")):
            raise ValueError("a row lacks a field")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} holds no measurements ({error}): move it away, and measure again") from error
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows atomically.

    Args:
      path: The file.
      rows: The rows.
    """
    replace_text(path, json.dumps({"rows": rows}, indent=1, allow_nan=False) + "\n")
