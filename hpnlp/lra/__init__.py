"""Long Range Arena: tasks on long sequences, on which mixers are compared under one setting.

References: Tay et al. 2021, "Long Range Arena: a benchmark for efficient transformers".
"""

from hpnlp.lra.mixers import SPECS, all_specs, select_specs
from hpnlp.lra.tasks import EXCEPTIONS, TASKS, find_task, get_config

__all__ = [
    "EXCEPTIONS",
    "SPECS",
    "TASKS",
    "all_specs",
    "find_task",
    "get_config",
    "select_specs",
]
