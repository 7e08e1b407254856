"""Evaluation on held-out data, and the placement of batches on devices."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from hpnlp import tasks
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.tasks.task import Dataset
from hpnlp.training.config import Config
from hpnlp.training.files.example_scores import Collector, ExampleScores
from hpnlp.training.gradients import Batch
from hpnlp.training.processes import distributed
from hpnlp.training.trainer import Trainer
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
      scores: Scores by name, see `tasks.task.Task.scores`.
      sums: Loss, metrics and auxiliary losses of the model by name: float64 `(sum, weight)` over all batches.
      examples: Scores of each example; None if the model gives none, as under plans that divide sequences or layers.
    """

    scores: dict[str, float]
    sums: dict[str, tuple[Any, Any]]
    examples: ExampleScores | None = dataclasses.field(default=None, kw_only=True)


def evaluate(
    trainer: Trainer,
    params: PyTree,
    dataset: Dataset,
    config: Config,
    limit: int | None = None,
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Scores held-out examples.

    Args:
      trainer: Compiled functions of the model.
      params: Weights of the model on the trainer's devices, such as `TrainState.best_params`.
      dataset: Data; its held-out part is read.
      config: Config of the run, which names the task and the batch size.
      limit: Largest number of batches, spread over the examples; None for all.
      progress: Called with numbers of batches.

    Returns:
      Scores and sums.

    Raises:
      InputError: No example of the batches has a loss.
    """
    task = tasks.find(config.task)
    index, count = batch_share(trainer, config)
    batches = task.heldout(config, dataset, limit=limit, process_index=index, process_count=count)
    collector = Collector(task.heldout_documents(config, dataset, limit))
    sums = _sums(trainer, params, batches, config, progress, "scoring held-out examples", collector)
    scores = _scores(trainer, dataset, config, sums, limit is None)
    return Evaluation(scores, sums, examples=collector.result())


def further_scores(
    trainer: Trainer, params: PyTree, dataset: Dataset, config: Config, progress: Progress = ignore_progress
) -> dict[str, float]:
    """Scores the task's other held-out sets (`Task.further_heldout`), such as those of `data.challenge_path`.

    Args:
      trainer: Compiled functions of the model.
      params: As for `evaluate`.
      dataset: Data.
      config: Config of the run.
      progress: As for `evaluate`.

    Returns:
      "SET_SCORE", such as "challenge_accuracy" -> score; empty if there are no such sets.

    Raises:
      InputError: No example of a set has a loss.
    """
    index, count = batch_share(trainer, config)
    sets = tasks.find(config.task).further_heldout(config, dataset, process_index=index, process_count=count)
    sums = {
        name: _sums(trainer, params, batches, config, progress, f"scoring {name} examples", Collector())
        for name, batches in sets.items()
    }
    scores = {name: _scores(trainer, dataset, config, of_set, True) for name, of_set in sums.items()}
    return {f"{name}_{metric}": value for name, of_set in scores.items() for metric, value in of_set.items()}


def _sums(
    trainer: Trainer,
    params: PyTree,
    batches: Iterable[Mapping[str, np.ndarray]],
    config: Config,
    progress: Progress,
    work: str,
    collector: Collector,
) -> dict[str, tuple[Any, Any]]:
    """Sums of loss and metrics over batches, in float64; the collector takes those of each example."""
    total: Any = None
    last: Any = None  # sums on the devices: of one batch only, because a confusion matrix may take megabytes
    carry = trainer.initial_carry()
    count = operator.length_hint(batches)  # 0 where it is unknown
    for number, batch in enumerate(batches):
        progress(work, number, count)
        arrays = on_devices(trainer, batch, config, omitted=trainer.training_arrays)
        # Waits for the last program: two programs on the simulated devices of one CPU can deadlock over its threads.
        jax.block_until_ready(last)
        started, carry = trainer.evaluate_next(params, arrays, carry)
        total, last = _add(total, last, collector), started
    return _add(total, last, collector)


def _add(total: Any, sums: Any, collector: Collector) -> Any:
    """Adds sums on the devices to a total in float64; either may be None. The collector takes the sums of examples."""
    if sums is None:
        return total
    values = jax.tree.map(lambda x: np.asarray(x, np.float64), collector.add(jax.device_get(sums)))
    return values if total is None else jax.tree.map(np.add, total, values)


def _scores(trainer: Trainer, dataset: Dataset, config: Config, sums: PyTree, is_complete: bool) -> dict[str, float]:
    """Scores of a task from the sums of an evaluation."""
    task, normalized = tasks.find(config.task), trainer.gives_probabilities
    return task.scores(config, dataset, sums, is_complete=is_complete, gives_probabilities=normalized)


def batch_share(trainer: Trainer, config: Config) -> tuple[int, int]:
    """Part of each batch that this process reads.

    Args:
      trainer: Compiled functions of the model.
      config: Config of the run.

    Returns:
      `(index, count)`, see `distributed.batch_share`.

    Raises:
      InputError: The devices of this process hold examples that are not consecutive.
    """
    return distributed.batch_share(trainer.layout.sharding("batch"), config.data.batch_size)


def on_devices(
    trainer: Trainer, batch: Mapping[str, np.ndarray], config: Config, omitted: Collection[str] = ()
) -> Batch:
    """Places the arrays of a batch that the model reads.

    Args:
      trainer: Compiled functions of the model.
      batch: Arrays of this process's examples.
      config: Config of the run.
      omitted: Names of arrays that are left out.

    Returns:
      Global arrays.

    Raises:
      InputError: The data lack an array that the model reads.
    """
    shardings = {name: sharding for name, sharding in trainer.batch_sharding.items() if name not in omitted}
    if absent := [name for name in shardings if name not in batch]:
        raise InputError(
            f"the model reads {', '.join(absent)}, and the data of task={config.task!r} have {', '.join(batch)}: change the "
            "model's fields, or those of the data"
        )
    return {
        name: jax.make_array_from_process_local_data(
            sharding, batch[name], (config.data.batch_size, *batch[name].shape[1:])
        )
        for name, sharding in shardings.items()
    }
