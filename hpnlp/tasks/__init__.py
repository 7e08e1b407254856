"""Tasks: what is learned from which data, and how it is scored and reported.

A task is an instance of `task.Task`. The training loop, the reports, sweeps and the planner read it from TASKS by the config
field `task`.
"""

from hpnlp.spec import lookup
from hpnlp.tasks.classification import Classification
from hpnlp.tasks.dual_encoder import DualEncoding
from hpnlp.tasks.image_classification import ImageClassification
from hpnlp.tasks.lm import LanguageModel
from hpnlp.tasks.masked_lm import MaskedLanguageModel
from hpnlp.tasks.seq2seq import SequenceToSequence
from hpnlp.tasks.tagging import Tagging
from hpnlp.tasks.task import Task

TASKS: dict[str, Task] = {
    "lm": LanguageModel(),
    "classification": Classification(),
    "image_classification": ImageClassification(),
    "tagging": Tagging(),
    "masked_lm": MaskedLanguageModel(),
    "seq2seq": SequenceToSequence(),
    "dual_encoder": DualEncoding(),
}


def find(name: str) -> Task:
    """The task of a name.

    Args:
      name: Value of the config field `task`.

    Returns:
      The entry of TASKS.

    Raises:
      InputError: Unknown name.
    """
    return lookup(TASKS, name, "task")


__all__ = ["TASKS", "Task", "find"]
