"""Tasks: what is learned from which data, and how it is scored and reported.

A task is an instance of `task.Task`. The training loop, the reports, sweeps and the planner read it from TASKS by the config
field `task`.
"""

import inspect
from collections.abc import Callable
from typing import Any

from hpnlp.errors import plural
from hpnlp.models.shared.model import BaseModel
from hpnlp.spec import lookup
from hpnlp.table import Table
from hpnlp.tasks.task import Task
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError, Model

TASKS: Table[Task] = Table(
    {
        "lm": "hpnlp.tasks.lm:LanguageModel",
        "rnn_lm": "hpnlp.tasks.rnn_lm:RecurrentLanguageModel",
        "classification": "hpnlp.tasks.classification:ClassificationTask",
        "rnn_classification": "hpnlp.tasks.labelled.rnn_classification:RecurrentClassification",
        "hashed_classification": "hpnlp.tasks.labelled.hashed_classification:HashedClassification",
        "image_classification": "hpnlp.tasks.labelled.image_classification:ImageClassification",
        "tree_classification": "hpnlp.tasks.labelled.tree_classification:TreeClassification",
        "tagging": "hpnlp.tasks.labelled.tagging:TaggingTask",
        "masked_lm": "hpnlp.tasks.masked_lm:MaskedLanguageModel",
        "realm": "hpnlp.tasks.realm:RetrievalLanguageModel",
        "seq2seq": "hpnlp.tasks.seq2seq:SequenceToSequence",
        "dual_encoder": "hpnlp.tasks.dual_encoder:DualEncoding",
        "word_embeddings": "hpnlp.tasks.word_embeddings:WordEmbeddings",
        "labelled_bags": "hpnlp.tasks.labelled.labelled_bags:LabelledBagsTask",
    },
    finish=lambda name, task: task(),
)

# Changes of models that most runs do not make.
_WRAPPERS: Table[Callable[..., Model]] = Table({"weights": "hpnlp.compress.weight_training:with_weight_training"})


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


# Members of the protocol and of the base class: the annotated attributes, and the properties and methods.
_MODEL_MEMBERS = dict.fromkeys(
    [*Model.__annotations__, *BaseModel.__annotations__, *(name for name in vars(Model) if not name.startswith("_"))]
)


def make_model(config: Any, sizes: Sizes) -> Model:
    """The model of a config, with the sizes that depend on the data filled in.

    Args:
      config: A `training.config.Config`.
      sizes: Sizes of the vocabulary.

    Returns:
      The model.

    Raises:
      InputError: See `Task.model`; or the task's model lacks members of `hpnlp.types.Model`.
    """
    model = find(config.task).model(config, sizes)
    absent = object()
    # Static, since properties of a Flax module may read submodules, which exist in its methods only.
    missing = [name for name in _MODEL_MEMBERS if inspect.getattr_static(model, name, absent) is absent]
    if missing:
        raise InputError(
            f"task={config.task!r} has a model of the class {type(model).__name__}, which lacks {', '.join(missing)}: add "
            f"the {plural(len(missing), 'member')}, as hpnlp.types.Model describes, or derive the class from "
            "hpnlp.models.shared.model.BaseModel, which has defaults"
        )
    return _WRAPPERS["weights"](model, config.train.weights, config.train.steps) if config.train.weights else model


__all__ = ["TASKS", "Task", "find", "make_model"]
