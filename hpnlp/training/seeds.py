"""Training of runs that differ by their seeds, as one compiled program: the members of an ensemble.

Every array of the training state has a leading axis of members, and a step is `jax.vmap` of the step of one run. Clipping,
skipped steps and averages are those of each member.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hpnlp import tasks
from hpnlp.training import averages
from hpnlp.training.batch_lengths import BatchLengths
from hpnlp.training.checkpoint import Checkpointer
from hpnlp.training.config import Config
from hpnlp.training.loop import MAX_NONFINITE_STEPS
from hpnlp.training.loss_scale import MINIMUM
from hpnlp.training.metrics import JsonlWriter
from hpnlp.training.run_directory import claimed, has_begun, make_model, write_config
from hpnlp.training.state_shardings import TrainState
from hpnlp.training.step import Trainer, check_batch, make_trainer
from hpnlp.types import InputError


def train_seeds(config: Config, seeds: Sequence[int], directory: str | Path) -> list[Path]:
    """Trains a run for each seed, all of them as one program, to `config.train.steps`.

    A member equals the run of `loop.train` with `train.seed` set to its seed, but for rounding, and without evaluations; its
    one checkpoint is that of the last step. `hpnlp train` with the same config and seed in the directory of a member adds its
    report.

    Args:
      config: Config of the runs; `train.seed` is not read.
      seeds: Different seeds, at least 0.
      directory: Directory of the run directories, which are named "seed_0" and so on.

    Returns:
      The run directories, in the order of the seeds, as for `ensembles.load_ensemble`.

    Raises:
      InputError: The config is not valid, needs evaluations, a teacher or several devices, has batches of several lengths, or
          sets train.writers, train.profile or train.debug_nans; a seed repeats; a directory holds a run; or the gradients of a
          member are not finite, as in `loop.train`.
    """
    _check(config, seeds)
    paths = [Path(directory) / f"seed_{seed}" for seed in seeds]
    for path in paths:
        if has_begun(path):
            raise InputError(f"{path} holds a run: remove it, or choose another directory")
    configs = [dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed)) for seed in seeds]
    task = tasks.find(config.task)
    with contextlib.ExitStack() as stack:
        for path, of_member in zip(paths, configs, strict=True):
            stack.enter_context(claimed(path, of_member, False))
        dataset = task.dataset(config.data, None)
        vocabulary = task.vocabulary(dataset)
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        trainer = make_trainer(
            make_model(config, vocabulary),
            optimizer,
            config.plan,
            steps=config.train.steps,
            batch_size=config.data.batch_size,
        )
        check_batch(trainer.layout, config.data.batch_size, config.data.seq_len, config.optimizer.accumulate)
        streams = [dataset.train(seed=seed) for seed in seeds]
        states, history = _train(trainer, config, seeds, streams)
        lengths = BatchLengths(config.data.batch_size, {config.data.seq_len: config.train.steps})
        for index, (path, of_member, state, stream) in enumerate(zip(paths, configs, states, streams, strict=True)):
            vocabulary.save(path)
            write_config(path, of_member)
            _write_metrics(path, [{name: values[index] for name, values in line.items()} for line in history])
            saved = Checkpointer(path, metric=task.metric, higher_is_better=task.higher_is_better)
            stack.callback(saved.close)
            progress = {"best": None, "bad_evals": 0, "seconds": {}, **lengths.record()}
            saved.save(state, stream.get_state(), progress)
            saved.wait()
    return paths


def _check(config: Config, seeds: Sequence[int]) -> None:
    """Raises InputError for seeds that repeat, and configs whose runs do not have the same steps."""
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise InputError(f"seeds={list(seeds)}: expected different numbers of at least 0, at least one")
    unsupported = {
        "optimizer.average": isinstance(averages.find(config.optimizer.average), averages.NonMonotonic),
        "train.patience": config.train.patience,
        "train.init_from": config.train.init_from,
        "train.writers": config.train.writers,
        "train.profile": config.train.profile,
        "train.debug_nans": config.train.debug_nans,
        "distill.teacher": config.distill.teacher,
        "data.buckets": getattr(config.data, "buckets", 1) > 1,
        "data.length_deviation": getattr(config.data, "length_deviation", 0),
    }
    for name, is_set in unsupported.items():
        if is_set:
            section, field = name.split(".")
            raise InputError(
                f"{name}={getattr(getattr(config, section), field)!r}: seeds that are trained as one program start anew, "
                "have the same steps, on batches of one length, and write metrics.jsonl only: leave it out, or train them one "
                "after another"
            )
    if tasks.find(config.task).frozen(config) is not None:
        raise InputError(f"task={config.task!r} has frozen variables: train the seeds one after another")


def _train(
    trainer: Trainer, config: Config, seeds: Sequence[int], streams: Sequence[Any]
) -> tuple[list[TrainState], list[dict[str, np.ndarray]]]:
    """The final states of the members, and the metrics `[M]` of each step."""
    if trainer.layout.mesh.size > 1:
        raise InputError(
            f"the plan has {trainer.layout.mesh.size} devices, and members share one: set plan.name='single'"
        )
    keys, options = [jax.random.key(seed) for seed in seeds], config.train
    history: list[dict[str, np.ndarray]] = []
    pending, failures = [], np.zeros(len(seeds), int)
    state = _stacked([trainer.init(key) for key in keys])
    with trainer.step.in_mesh():
        step = jax.jit(jax.vmap(trainer.step.jitted), donate_argnums=0)
        for number in range(1, options.steps + 1):
            batches = [{name: batch[name] for name in trainer.batch_sharding} for batch in map(next, streams)]
            state, metrics = step(state, jax.tree.map(lambda *x: np.stack(x), *batches), _stacked(keys))
            pending.append(metrics)
            if number % options.log_every == 0 or number == options.steps:
                for line in jax.device_get(pending):
                    failures = _count_failures(failures, line, seeds, config.optimizer.skip_nonfinite)
                    history.append(line)
                pending.clear()
    return [jax.tree.map(lambda x, i=index: x[i], state) for index in range(len(seeds))], history


def _count_failures(
    failures: np.ndarray, line: dict[str, np.ndarray], seeds: Sequence[int], skip_nonfinite: bool
) -> np.ndarray:
    """Number of consecutive steps that were not finite, `[M]`, after another step. Raises InputError as `loop.train` does."""
    # A loss scale that can still fall is the likely cause, and its fall is the remedy.
    is_failure = (line["skipped"] > 0) & (line.get("loss_scale", MINIMUM) <= MINIMUM)
    failures = np.where(is_failure, failures + 1, 0)
    if failures.max() >= (MAX_NONFINITE_STEPS if skip_nonfinite else 1):
        seed = seeds[int(failures.argmax())]
        raise InputError(f"the loss of seed {seed} or its gradient is not finite: lower optimizer.learning_rate")
    return failures


def _write_metrics(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Writes metrics.jsonl."""
    writer = JsonlWriter(path)
    for step, line in enumerate(history, 1):
        writer.write(step, {name: float(value) for name, value in line.items()})
    writer.close()


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)
