"""Training of runs that differ by their seeds, as one compiled program: the members of an ensemble.

Every array of the training state has a leading axis of members, and a step is `jax.vmap` of the step of one run. Clipping,
skipped steps and averages are those of each member.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hpnlp import tasks
from hpnlp.data import DataConfig
from hpnlp.training.batch_lengths import BatchLengths, padding_of
from hpnlp.training.config import LIMITS, Config, flat
from hpnlp.training.config_file import write_config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.files.claim import check_steps, claimed
from hpnlp.training.files.contents import has_begun
from hpnlp.training.files.metrics import Display, JsonlWriter
from hpnlp.training.loop import count_skips, is_due, max_skips
from hpnlp.training.optimizers import averages
from hpnlp.training.optimizers.state_shardings import TrainState
from hpnlp.training.processes import distributed
from hpnlp.training.start import Setup, set_up
from hpnlp.training.trainer import Trainer
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of `train_seeds`.

    Attributes:
      paths: The run directories, in the order of the seeds, as for `ensembles.load_ensemble`.
      step: Number of steps done.
      interrupted: Name of the signal that stopped the runs early, and "" otherwise; the same command continues from `step`.
    """

    paths: list[Path]
    step: int
    interrupted: str


def train_seeds(config: Config, seeds: Sequence[int], directory: str | Path, *, accept_changes: bool = False) -> Result:
    """Trains a run for each seed, all of them as one program, to `config.train.steps`.

    A member equals the run of `loop.train` with `train.seed` set to its seed, but for rounding, and without evaluations. All
    members have checkpoints at the same steps, and go on from the newest step of which all of them have one; after a kill
    between their first checkpoints, they start again. `hpnlp train` with the same config and seed in the directory of a member
    adds its report.

    Args:
      config: Config of the runs, with `train.seed` 0.
      seeds: Different seeds, from 0 to 2^32 - 1.
      directory: Directory of the run directories, which are named "seed_0" and so on.
      accept_changes: Continue although the directories were made with another config, such as more steps.

    Returns:
      The result, also where a signal stopped the runs early.

    Raises:
      InputError: The config is not valid, needs evaluations, a teacher or several devices, has batches of several lengths, or
          sets train.writers, train.profile or train.debug_nans; a seed repeats; a directory holds a run of another config or a
          converted model; the seeds have no common step, because one was added or has gone on alone; or the gradients of a
          member are not finite, as in `loop.train`.
    """
    _check(config, seeds)
    paths = [Path(directory) / f"seed_{seed}" for seed in seeds]
    configs = [dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed)) for seed in seeds]
    with contextlib.ExitStack() as stack:
        for path, of_member in zip(paths, configs, strict=True):
            stack.enter_context(claimed(path, of_member, accept_changes))
        stopping = distributed.Stopping()
        stack.callback(stopping.end)
        setup = set_up(config, paths[0])
        if (size := setup.trainer.layout.mesh.size) > 1:
            raise InputError(f"the plan has {size} devices, and members share one: set plan.name='single'")
        setups = [
            dataclasses.replace(setup, config=of_member, workdir=path)
            for of_member, path in zip(configs, paths, strict=True)
        ]
        members = [_Member(of_member, seeds) for of_member in setups]
        for member in members:
            stack.callback(member.checkpoints.close)
        for member in members:
            check_steps(member.path, member.newest(), config.train.steps)
        step = _common_step(members, setup.trainer)
        for member in members:
            member.begin(step)
            stack.callback(member.writer.close)
        display = Display(step, config.train.steps)
        stack.callback(display.close)
        display.print(
            f"{_phrase(step, config.train.steps)}: {len(seeds)} seed{'s' * (len(seeds) > 1)} as one program, "
            f"{config.train.steps} steps of {config.data.batch_size} x {config.data.seq_len} tokens each, without "
            f"evaluations, in {directory}; losses are means over the seeds"
        )
        step = _train(setup, members, step, stopping, display)
        if stopping.signal:
            display.print(f"{stopping.signal}: saved step {step}; the same command goes on from there")
    return Result(paths, step, stopping.signal)


def _phrase(step: int, steps: int) -> str:
    """Where the runs begin, for the first line of output."""
    if step >= steps:
        return f"finished before, at step {step}"
    return f"going on from step {step}" if step else "starting"


class _Member:
    """A run among those of several seeds: its data, checkpoints and metrics."""

    writer: JsonlWriter
    first: int  # step at which this process begins
    lengths: BatchLengths  # until then, but for padding

    def __init__(self, setup: Setup, seeds: Sequence[int]) -> None:
        self.setup, self.config, self.path, self.seeds = setup, setup.config, setup.workdir, list(seeds)
        self.seed, self.key, self.batches = setup.config.train.seed, setup.key, setup.batches()
        metric, higher_is_better = tasks.find(self.config.task).primary_metric(flat(self.config))
        # At least two, so that all members have one of the same step while they save one after another.
        keep = max(2, self.config.train.keep)
        self.checkpoints = Checkpointer(self.path, keep, metric=metric, higher_is_better=higher_is_better)

    def newest(self) -> int:
        """Step of the newest checkpoint, 0 without one."""
        return self.checkpoints.latest() or 0

    def begin(self, step: int) -> None:
        """Writes vocabulary and config, and opens metrics.jsonl, for training from `step`."""
        self.setup.vocabulary.save(self.path)
        write_config(self.path, self.config)
        self.first, self.writer = step, JsonlWriter(self.path, step)

    def start(self) -> TrainState:
        """The state to begin with: that of a checkpoint, or the initial one."""
        self.lengths, trainer = BatchLengths(self.config.data.batch_size), self.setup.trainer
        if self.first == 0:
            return trainer.init(self.key)
        state, position, progress = self.checkpoints.restore(trainer.state_shapes, self.first)
        self.batches.set_state(position)
        self.lengths = BatchLengths.restored(progress, self.first, self.config)
        return state

    def next_batch(self) -> dict[str, np.ndarray]:
        """The next batch of training examples, whose padding is counted."""
        batch = next(self.batches)
        self.lengths.padding += round(padding_of(batch) * self.config.data.batch_size * self.config.data.seq_len)
        return batch

    def of_seeds(self, step: int) -> dict[str, Any]:
        """Entry of the progress of checkpoints of these seeds. `loop.train` keeps it, with the step at which it began."""
        return {"seeds": self.seeds, "step_of_seeds": step}

    def save(self, state: TrainState) -> None:
        """Starts a checkpoint, after the metrics of its steps have reached the disk."""
        self.writer.sync()
        length = self.config.data.seq_len  # may differ from that of earlier steps, with accept_changes
        steps = self.lengths.steps.get(length, 0) + int(state.step) - self.first
        lengths = dataclasses.replace(self.lengths, steps={**self.lengths.steps, length: steps})
        progress = {"best": None, "bad_evals": 0, "seconds": {}, **lengths.record()}
        progress |= self.of_seeds(int(state.step))
        self.checkpoints.save(state, self.batches.get_state(), progress)


def _common_step(members: Sequence[_Member], trainer: Trainer) -> int:
    """The newest step of which all members have a checkpoint; later ones, which a kill between saves leaves, are deleted."""
    for member in members:
        if member.checkpoints.holds_params_only():
            raise InputError(
                f"{member.path} holds a converted model, and seeds that are trained as one program start anew: choose another "
                "directory, or train them one after another"
            )
    step = min(member.newest() for member in members)
    ahead = [member for member in members if member.newest() > step]
    for member in ahead:  # all of them are checked before one is deleted
        _, _, progress = member.checkpoints.restore(trainer.state_shapes)
        is_of_seeds = member.of_seeds(member.newest()).items() <= progress.items()
        if not is_of_seeds or not all(has_begun(member.path) for member in members):
            raise InputError(_no_common_step(members))
        if step:
            member.checkpoints.step_of(step)
    for member in ahead:
        while member.newest() > step:
            member.checkpoints.delete(member.newest())
    return step


def _no_common_step(members: Sequence[_Member]) -> str:
    """Error of seeds that have gone on apart, or of which some were added or removed."""
    by_step: dict[int, list[str]] = {}
    for member in members:
        by_step.setdefault(member.newest(), []).append(str(member.seed))
    steps = ", ".join(f"{m.path.name} has {f'step {m.newest()}' if m.newest() else 'no checkpoint'}" for m in members)
    groups = " and ".join(f"--seeds={','.join(group)}" for group in by_step.values())
    return (
        f"the runs in {members[0].path.parent} do not go on from one step: {steps}: train them by commands of their own, with "
        f"{groups}, or choose another directory"
    )


def _check(config: Config, seeds: Sequence[int]) -> None:
    """Raises InputError for seeds that repeat, and configs whose runs do not have the same steps."""
    largest = LIMITS["train.seed"]
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) > largest:
        raise InputError(f"seeds={list(seeds)}: expected different numbers from 0 to {largest}, at least one")
    if config.train.seed:
        raise InputError(
            f"train.seed={config.train.seed}, seeds={list(seeds)}: both set the seeds of the runs: leave out train.seed, or "
            "train one run with it"
        )
    unsupported = {
        "optimizer.average": isinstance(averages.find(config.optimizer.average), averages.NonMonotonic),
        "train.patience": config.train.patience,
        "train.init_from": config.train.init_from,
        "train.writers": config.train.writers,
        "train.profile": config.train.profile,
        "train.debug_nans": config.train.debug_nans,
        "distill.teacher": config.distill.teacher,
        "data.buckets": tasks.find(config.task).batch_widths(config.data) > 1,
        "data.length_deviation": isinstance(config.data, DataConfig) and config.data.length_deviation,
    }
    for name, is_set in unsupported.items():
        if is_set:
            section, field = name.split(".")
            raise InputError(
                f"{name}={getattr(getattr(config, section), field)!r}: seeds that are trained as one program start anew, "
                "have the same steps, on batches of one length, and write metrics.jsonl only: leave it out, or train them one "
                "after another"
            )
    if experts := config.model.sizes().get("experts"):
        raise InputError(
            f"{experts[1]}: the loops over the tokens of each expert are not alike for all seeds: train the "
            "seeds one after another"
        )
    if tasks.find(config.task).frozen(config) is not None:
        raise InputError(f"task={config.task!r} has frozen variables: train the seeds one after another")


def _train(setup: Setup, members: Sequence[_Member], step: int, stopping: Any, display: Display) -> int:
    """Trains from `step` to the last step or a signal, with metrics and checkpoints on the way; returns the step reached."""
    config, trainer, options, first = setup.config, setup.trainer, setup.config.train, step
    if step >= options.steps:
        return step
    seeds, keys = [member.seed for member in members], _stacked([member.key for member in members])
    tokens, padding = len(members) * config.data.batch_size * config.data.seq_len, 0
    pending, skips, begun = [], np.zeros(len(members), int), 0.0
    state = _stacked([member.start() for member in members])
    with trainer.step.in_mesh():
        program = jax.jit(jax.vmap(trainer.step.jitted), donate_argnums=0)
        is_last = False
        while not is_last:
            read = [member.next_batch() for member in members]
            batches = [{name: batch[name] for name in trainer.batch_sharding} for batch in read]
            state, metrics = program(state, jax.tree.map(lambda *x: np.stack(x), *batches), keys)
            pending.append(metrics)
            step += 1
            if step == first + 1:
                jax.block_until_ready(metrics)
                begun = time.perf_counter()  # after the compilation
                padding = sum(member.lengths.padding for member in members)
                stopping.begin()  # before, a signal ends the process at once: there is nothing to save
            is_last = step == options.steps or stopping(step)
            is_saved = is_last or is_due(options.checkpoint_every, step)
            if is_saved or step % options.log_every == 0:
                lines = jax.device_get(pending)
                for number, line in enumerate(lines, step - len(lines) + 1):
                    for index, member in enumerate(members):
                        member.writer.write(number, {name: float(values[index]) for name, values in line.items()})
                    skips = count_skips(skips, line)
                    _check_skips(skips, seeds, config)
                pending.clear()
                busy, done = time.perf_counter() - begun, step - first - 1
                real = tokens * done + padding - sum(member.lengths.padding for member in members)
                display.step(step, float(lines[-1]["loss"].mean()), busy, real)
            if is_saved:
                for member in members:  # so that the newest checkpoints are never further apart than the kept ones
                    member.checkpoints.wait()
                for index, member in enumerate(members):
                    member.save(jax.tree.map(lambda x, i=index: x[i], state))
        for member in members:
            member.checkpoints.wait()
    return step


def _check_skips(skips: np.ndarray, seeds: Sequence[int], config: Config) -> None:
    """Raises InputError where the gradients of a member were not finite for too many steps."""
    if skips.max() >= max_skips(config):
        seed = seeds[int(skips.argmax())]
        raise InputError(f"the loss of seed {seed} or its gradient is not finite: lower optimizer.learning_rate")


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)
