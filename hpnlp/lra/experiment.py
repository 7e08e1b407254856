"""Experiment file of the Long Range Arena, `--config=FILE:TASK`, whose members are the mixers that the task can have."""

from __future__ import annotations

from typing import Any

from hpnlp.lra import all_specs
from hpnlp.lra.tasks import find_departure, find_task, get_config

__all__ = ["get_config", "get_sweep"]


def get_sweep(task: str = "listops_short") -> list[dict[str, Any]]:
    """The members of a sweep over mixers.

    Args:
      task: Name of the task.

    Returns:
      Config fields of each member.
    """
    members = []
    for spec in all_specs(causal=find_task(task).is_causal)[0]:
        departure = find_departure(spec, task)
        if departure is None or departure.fields is not None:
            members.append({"model.mixer": spec, **(departure.fields or {} if departure else {})})
    return members
