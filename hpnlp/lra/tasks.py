"""Tasks of the Long Range Arena, and the one setting of model, optimizer and budget that all mixers have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from hpnlp.spec import lookup, parse
from hpnlp.training.config import default
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class LraTask:
    """Data of one task.

    Attributes:
      path: Generated examples, an entry of `data.examples.generated.GENERATED`. Some are read from a directory.
      tokenizer: Value of data.tokenizer.
      seq_len: Tokens of a sequence.
      batch_size: Sequences of a step.
      help: The task in a few words.
      stand_in: For tasks that are read from a directory, the task of the same kind that every machine has.
      is_pair: Whether an example is a pair of texts, which stand in one sequence.
      heldout: Fraction of the examples that are held out, where the data have no test set.
      is_causal: A language model, whose steps are measured, for mixers that see earlier tokens only.
    """

    path: str
    tokenizer: str
    seq_len: int
    batch_size: int
    help: str
    stand_in: str = ""
    is_pair: bool = False
    heldout: float = 0.1
    is_causal: bool = False


_WORDS = "words(32, by=whitespace)"

# Numbers of tasks with different names do not compare: only `listops`, `text`, `retrieval` and `image` are published data.
TASKS: dict[str, LraTask] = {
    "listops": LraTask("list_ops", _WORDS, 2048, 16, "results of nested operations, 501 to 1999 tokens", heldout=0.02),
    "listops_short": LraTask("list_ops_short", _WORDS, 256, 32, "the same, 65 to 249 tokens", heldout=0.04),
    "text": LraTask("imdb", "bytes", 4096, 8, "sentiment of IMDB reviews, bytes", stand_in="text_stdlib"),
    "text_stdlib": LraTask("stdlib_passages", "bytes", 2048, 16, "package of passages of code, bytes"),
    "retrieval": LraTask(
        "aan", "bytes", 8192, 4, "citations between AAN papers, bytes", stand_in="retrieval_stdlib", is_pair=True
    ),
    "retrieval_stdlib": LraTask(
        "stdlib_same_file", "bytes", 4096, 8, "whether passages are of one file, bytes", is_pair=True
    ),
    "image": LraTask("cifar10", "pixels", 1024, 32, "classes of CIFAR-10 images, pixels", stand_in="image_digits"),
    "image_digits": LraTask("drawn_digits", "pixels", 1024, 32, "digits of drawn images, pixels"),
    "pathfinder": LraTask("pathfinder", "pixels", 1024, 32, "whether a dashed curve joins two discs, 32 x 32 pixels"),
    "path_x": LraTask("path_x", "pixels", 16384, 2, "the same, 128 x 128 pixels"),
    "language_model": LraTask("stdlib", "bytes", 2048, 4, "bytes of code, for --efficiency only", is_causal=True),
}


@dataclasses.dataclass(frozen=True)
class Departure:
    """A departure from the common setting.

    Attributes:
      reason: The reason, which the command prints.
      fields: Config field -> value for the mixer; None leaves the mixer out.
      tasks: Tasks that the exception holds for; () for all.
    """

    reason: str
    fields: dict[str, Any] | None
    tasks: tuple[str, ...] = ()


_LARGE_MATRICES = Departure("a parameter [heads, T, T] of 2^30 entries per layer", None, ("path_x",))

# Name of an entry of MIXERS -> its exception. All other mixers have the setting of `get_config`.
EXCEPTIONS: dict[str, Departure] = {
    "synthesizer_random": _LARGE_MATRICES,
    "synthesizer_dense": _LARGE_MATRICES,
    "mixture": _LARGE_MATRICES,
}


def find_departure(spec: str, task: str) -> Departure | None:
    """The departure of a mixer from the common setting.

    Args:
      spec: Value of model.mixer.
      task: Name of the task.

    Returns:
      The first exception of an entry that the spec names; None without one.
    """
    for entry in parse(spec, "model.mixer"):
        departure = EXCEPTIONS.get(entry.name)
        if departure is not None and (not departure.tasks or task in departure.tasks):
            return departure
    return None


def find_task(name: str) -> LraTask:
    """Looks up a task.

    Args:
      name: Name of the task.

    Returns:
      The task.

    Raises:
      InputError: There is no such task.
    """
    return lookup(TASKS, name, "task of the Long Range Arena")


def get_config(name: str = "listops_short") -> ConfigDict:
    """The config of a task, with dense attention. Tasks that are read from a directory lack it in data.path.

    Args:
      name: Name of the task.

    Returns:
      The config.

    Raises:
      InputError: There is no such task.
    """
    task = find_task(name)
    config: Any = default("lm" if task.is_causal else "classification")
    config.data.path = task.path
    config.data.tokenizer = task.tokenizer
    config.data.seq_len = task.seq_len
    config.data.batch_size = task.batch_size
    config.model.layers = 2
    config.model.dim = 128
    config.model.heads = 4
    config.model.mlp = "gelu"
    config.model.mlp_dim = 256
    config.model.mixer = "full"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup = 100
    config.train.steps = 1000
    config.train.eval_batches = 0
    if task.is_causal:
        config.data.order = "stream"  # for mixers that carry state
        config.train.sample = 0  # not all of them generate text
        return config
    config.data.heldout = task.heldout
    config.data.pair_field = "pair" if task.is_pair else ""
    config.data.linear_baselines = False  # fitted again for each mixer, they take longer than training
    # Mixers without queries and keys would not see rotary positions.
    config.model.position = "learned"
    config.model.pooling = "mean"
    config.model.token_types = 2 if task.is_pair else 0
    return config


def data_flags(name: str, directories: dict[str, str]) -> list[str]:
    """Flags that add the directory of published data to the config of a task.

    Args:
      name: Name of the task.
      directories: Generated examples that are read from a directory, such as "imdb" -> the directory.

    Returns:
      The flags; [] for tasks that need none.

    Raises:
      InputError: The directory is missing.
    """
    task = find_task(name)
    if not task.stand_in:
        return []
    if task.path not in directories:
        raise InputError(
            f"task {name} reads published data: add --data={task.path}:DIRECTORY, or use --tasks={task.stand_in}, which every "
            "machine has"
        )
    return [f"--data.path={task.path}:{directories[task.path]}"]
