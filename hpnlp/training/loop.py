"""The training loop.

`train` is the loop. `_Run` holds the state of a run and has a method for each part of the loop: one step, writing metrics,
evaluation, checkpoints and the end. `start` sets a run up and finds its first state. `checkpoint` has the content of a
checkpoint, and `claim` the conditions under which a run may resume.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from hpnlp import measure, tasks
from hpnlp.training.batch_lengths import BatchLengths, padding_of, sequence_length
from hpnlp.training.config import Config, flat
from hpnlp.training.evaluation import Evaluation, evaluate, further_scores, on_devices
from hpnlp.training.files.best import ScoreOrder
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.files.claim import claimed, frozen_record
from hpnlp.training.files.metrics import QUIET, Clock, Display, JsonlWriter, Writer, find_writers
from hpnlp.training.files.result import RunResult
from hpnlp.training.optimizers import averages
from hpnlp.training.optimizers.loss_scale import MINIMUM
from hpnlp.training.optimizers.state_shardings import place
from hpnlp.training.processes import distributed
from hpnlp.training.processes.progress_pipe import PIPE
from hpnlp.training.start import Setup, find_start, set_up
from hpnlp.training.starts import unused_fields
from hpnlp.types import InputError

MAX_NONFINITE_STEPS = 20  # a run stops after this number of consecutive steps without a finite gradient


def train(config: Config, workdir: str | Path, *, accept_changes: bool = False, score: bool = True) -> RunResult:
    """Trains to `config.train.steps` from the newest checkpoint in `workdir`, or else from `config.train.init_from`.

    Args:
      config: The config of the run.
      workdir: The directory that holds the run's config, vocabulary, metrics and checkpoints.
      accept_changes: Continue although the directory was made with another config, or start although the model of
        `init_from` differs in fields that leave the parameters' shapes as they are.
      score: Score all held-out examples at the end; without it, the result has no scores.

    Returns:
      The result, also where a signal stopped the run early.

    Raises:
      InputError: The config, the data, the mesh or the directory is invalid. Saved checkpoints stay.
    """
    with contextlib.ExitStack() as stack:
        run = _Run(config, Path(workdir), accept_changes, stack)
        run.announce()
        while run.step < config.train.steps and not run.stopped:
            run.train_step()
            improved = run.evaluate_if_due()
            if run.checkpoint_is_due(improved):
                run.save(improved)
            elif run.step % config.train.log_every == 0 and not run.checkpoints.saving():
                run.flush()
        return run.finish(score)


def is_due(every: int, step: int) -> bool:
    """Whether an action of every `every` steps is due after a step; never for 0."""
    return bool(every) and step % every == 0


def count_skips(count: Any, line: Mapping[str, Any]) -> Any:
    """Number of consecutive steps that were not finite.

    Args:
      count: The number before a step; or of each of several runs, `[M]`.
      line: Metrics of the step; or arrays `[M]`.

    Returns:
      The number after the step.
    """
    # A loss scale that can still fall is the likely cause, and its fall is the remedy.
    is_failure = (np.asarray(line["skipped"]) > 0) & (np.asarray(line.get("loss_scale", MINIMUM)) <= MINIMUM)
    return np.where(is_failure, count + 1, 0)


def max_skips(config: Config) -> int:
    """Number of consecutive steps without a finite gradient after which a run stops."""
    return MAX_NONFINITE_STEPS if config.optimizer.skip_nonfinite else 1


@dataclasses.dataclass(frozen=True)
class _Scores:
    """Scores on all held-out examples: of the run, its teacher and other methods; empty where there are none."""

    heldout: Evaluation = dataclasses.field(default_factory=lambda: Evaluation({}, {}))
    teacher: dict[str, float] = dataclasses.field(default_factory=dict)
    baselines: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Run:
    """A run in progress: its state, its data, its outputs, and the operations of the training loop."""

    def __init__(self, config: Config, workdir: Path, accept_changes: bool, stack: contextlib.ExitStack) -> None:
        """Sets the run up; `stack` closes what it opens."""
        self.config, self.workdir, self.stack = config, workdir, stack
        self.task = tasks.find(config.task)
        self.order = ScoreOrder(*self.task.primary_metric(flat(config)))
        self.is_lead = distributed.is_lead()
        self.fence = stack.enter_context(claimed(workdir, config, accept_changes)) if self.is_lead else None
        self.stopping = distributed.Stopping()
        stack.callback(self.stopping.end)
        self.clock = Clock()
        stack.enter_context(jax.debug_nans(config.train.debug_nans))
        self.trace = stack.enter_context(contextlib.ExitStack())  # ends a profiler trace even if the run ends early
        with self.clock("setup"):
            further_writers = find_writers(config.train.writers)
            self._begin(set_up(config, workdir, accept_changes))
        for phase, seconds in self.start.progress.get("seconds", {}).items():
            self.clock.seconds[phase] = self.clock.seconds.get(phase, 0.0) + seconds
        self.first_step = self.step = self.saved_step = int(self.start.state.step)
        self._open_outputs(further_writers)
        self.state, self.progress = self.start.state, self.start.progress
        self.pending: list[tuple[int, dict[str, jax.Array]]] = []  # metrics of steps, not yet fetched from the devices
        self.lengths = BatchLengths.restored(self.start.progress, self.step, config)
        self.compiled: set[int] = set()  # lengths of batches for which this process has a compiled step
        self.consecutive_skips = 0
        self.stopped = self._out_of_patience()  # True for a run that was stopped early before

    def _begin(self, setup: Setup) -> None:
        """Opens batches and checkpoints, finds the state to start from, and then writes vocabulary and config."""
        self.setup, self.dataset, self.trainer = setup, setup.dataset, setup.trainer
        is_measured = self.is_lead and self.config.train.baselines
        self.baseline = self.task.baseline(setup.dataset) if is_measured else None
        self.batches, self.key = setup.batches(), setup.key
        self.checkpoints = Checkpointer(
            self.workdir,
            self.config.train.keep,
            metric=self.order.metric,
            higher_is_better=self.order.higher_is_better,
            fence=self.fence,
        )
        self.stack.callback(self.checkpoints.close)
        self.start = find_start(setup, self.checkpoints, self.batches)
        if self.is_lead:
            setup.write()

    def _open_outputs(self, further_writers: list[Any]) -> None:
        """Opens metrics.jsonl, the other metric writers and the progress display."""
        config = self.config
        self.jsonl = JsonlWriter(self.workdir, self.first_step) if self.is_lead else None
        self.writers: list[Writer] = [] if self.jsonl is None else [self.jsonl]
        for make in further_writers if self.is_lead else ():
            self.writers.append(make(workdir=self.workdir, last_step=self.first_step))
        for writer in self.writers:
            self.stack.callback(writer.close)
        self.display = Display(self.first_step, config.train.steps, None if self.is_lead else QUIET)
        self.stack.callback(self.display.close)
        shapes = jax.tree.leaves(self.trainer.state_shapes.params)
        self.parameters = sum(math.prod(leaf.shape) for leaf in shapes)

    def announce(self) -> None:
        """Prints the run's start, size, devices and data, and remarks on the config."""
        config, trainer, show = self.config, self.trainer, self.display.print
        show(
            f"{self.start.phrase}: {self.parameters / 1e6:.2f}M parameters, "
            f"{distributed.describe_devices(trainer.layout.mesh)}, "
            f"{config.train.steps} steps of {config.data.batch_size} x {config.data.seq_len} tokens, in {self.workdir}"
        )
        source = self.setup.origin.source
        for remark in source.remarks if source is not None else ():
            show(f"{config.train.init_from}: {remark}")
        if trainer.undivided:
            show(f"no axis of the plan divides {', '.join(trainer.undivided)}: replicated on every device")
        show(self.dataset.summary)  # it names the files that were left out
        for remark in unused_fields.remarks(config):
            show(remark)

    def train_step(self) -> None:
        """Does one step, and sets `stopped` if a signal has arrived."""
        self.step += 1
        PIPE.base = "step"
        PIPE.report("data", self.step)
        trace_first, trace_last = self.config.train.profile_range()
        if self.step == trace_first:
            self.trace.enter_context(jax.profiler.trace(str(self.workdir / "profile")))
        with self.clock("data"):
            local = next(self.batches)
            length = sequence_length(local, self.config.data.seq_len)
            batch = on_devices(self.trainer, local, self.config)
        is_new = length not in self.compiled  # the first call with a length traces and compiles
        if is_new and self.compiled:
            with self.clock("step"):
                jax.block_until_ready(self.state.params)
        with self.clock("setup" if is_new else "step"):
            self.state, metrics = self.trainer.step(self.state, batch, self.key)
            if is_new:
                jax.block_until_ready(metrics)
        self.pending.append((self.step, metrics))
        PIPE.pace(self.pending)
        self.compiled.add(length)
        self.lengths.add(length, is_timed=not is_new, padding=padding_of(local))
        if self.step == self.first_step + 1:
            self.stopping.begin()  # before, a signal ends the process at once: there is nothing to save
        if self.step == trace_last:
            jax.block_until_ready(metrics)
            PIPE.report("report")  # writing a trace may take minutes
            self.trace.close()
        self.stopped = self.stopping(self.step)

    def evaluate_if_due(self) -> Mapping[str, float] | None:
        """Evaluates every `train.eval_every` steps and after the last step.

        Sets `stopped` after `train.patience` evaluations without improvement. A signal does not prevent an evaluation that is
        due: the resumed run would not repeat it.

        Returns:
          The scores if they are the best so far; None otherwise, and if no evaluation is due.
        """
        options = self.config.train
        if not options.eval_every or (self.step % options.eval_every and self.step < options.steps):
            return None
        scores = self.evaluate(options.eval_batches or None).scores
        for writer in self.writers:
            writer.write(self.step, {f"heldout_{name}": value for name, value in scores.items()})
        self.display.print(f"step {self.step}: held-out " + ", ".join(f"{n} {v:.4f}" for n, v in scores.items()))
        score = scores[self.order.metric]
        change = self.order.compare(self.order.stored(scores), self._best_scores(), options.min_delta)
        if change >= 0:
            self.progress |= {"best": score, "best_loss": scores["loss"]}
        self.progress |= {"bad_evals": 0 if change > 0 else self.progress["bad_evals"] + 1}
        if self.step < options.steps:
            self._start_average_if_due(score)
            if self._out_of_patience():
                self.display.print(f"no improvement in {options.patience} evaluations: stopping at step {self.step}")
                self.stopped = True
        return scores if change >= 0 else None

    def _start_average_if_due(self, score: float) -> None:
        """Starts the average of parameters if `optimizer.average` begins it with this evaluation."""
        average, scores = averages.find(self.config.optimizer.average), self.progress.get("scores", [])
        if average is None or int(self.state.averaged):
            return
        if average.is_triggered(scores, score, self.order.higher_is_better):
            self.display.print(f"step {self.step}: the average of the parameters begins")
            first = place(self.trainer.state_shapes.averaged, np.ones((), np.int32))
            self.state = dataclasses.replace(self.state, averaged=first)
        self.progress |= {"scores": [*scores, score]}

    def _best_scores(self) -> dict[str, float] | None:
        """Result of `ScoreOrder.stored` of the best evaluation so far; None before the first."""
        best, loss = self.progress["best"], self.progress.get("best_loss", math.inf)  # early versions kept no loss
        return None if best is None else self.order.stored({"loss": loss, self.order.metric: best})

    def evaluate(self, limit: int | None, params: PyTree = None) -> Evaluation:
        """Evaluation of `params`, or else of the current parameters, over at most `limit` batches."""
        self.flush()
        self.display.status("scoring held-out examples")
        params = self.state.best_params if params is None else params
        with self.clock("eval"):
            return evaluate(self.trainer, params, self.dataset, self.config, limit, self.display.progress("batches"))

    def checkpoint_is_due(self, improved: Mapping[str, float] | None) -> bool:
        """True after the last step, after the best evaluation so far, and every `train.checkpoint_every` steps."""
        options = self.config.train
        is_last = self.stopped or self.step == options.steps
        return is_last or improved is not None or is_due(options.checkpoint_every, self.step)

    def save(self, scores: Mapping[str, float] | None = None) -> None:
        """Starts a checkpoint, after the metrics of its steps have reached the disk. `scores` rank it among the best."""
        self.flush()
        with self.clock("checkpoint"):
            if self.jsonl is not None:
                self.jsonl.sync()
            progress = {**self.progress, "seconds": self.clock.seconds, "peak_memory_bytes": self._peak_memory_bytes()}
            progress |= {**self.lengths.record(), **frozen_record(self.setup.frozen)}
            self.checkpoints.save(self.state, self.batches.get_state(), progress, scores)
        self.saved_step = self.step

    def flush(self) -> None:
        """Fetches the metrics of the steps since the last flush, and writes a line for each.

        Waits for a checkpoint in progress first: metrics that were shown are at most one interval ahead of the disk.

        Raises:
          TemporaryError: A newer attempt of the run has begun.
          InputError: The gradients were not finite for MAX_NONFINITE_STEPS steps, or once without `optimizer.skip_nonfinite`.
        """
        with self.clock("checkpoint"):
            self.checkpoints.wait()
        if not self.pending:
            return
        if self.fence is not None:
            self.fence.check()
        with self.clock("step"):
            values = jax.device_get([metrics for _, metrics in self.pending])
        for (step, _), metrics in zip(self.pending, values, strict=True):
            line = {name: float(value) for name, value in metrics.items()}
            for writer in self.writers:
                writer.write(step, line)
            self._check_finite(step, line)
        last_step = self.pending[-1][0]
        if skipped := round(sum(float(metrics["skipped"]) for metrics in values)):
            self.display.print(
                f"step {last_step}: {skipped} of the last {len(values)} steps skipped: they were not finite"
            )
        busy = self.clock.seconds["data"] + self.clock.seconds["step"]
        self.display.step(last_step, float(values[-1]["loss"]), busy, self.lengths.real_timed_tokens())
        self.pending.clear()

    def _check_finite(self, step: int, line: Mapping[str, float]) -> None:
        """Raises InputError where the gradients were not finite for too many steps."""
        self.consecutive_skips = int(count_skips(self.consecutive_skips, line))
        if self.consecutive_skips >= max_skips(self.config):
            raise InputError(
                f"the loss or its gradient has not been finite for {self.consecutive_skips} steps, up to {step}: "
                "lower optimizer.learning_rate, or find the cause with train.debug_nans"
            )

    def finish(self, score: bool) -> RunResult:
        """Reads the last checkpoint back, scores the best one if asked to and no signal arrived, and returns the result."""
        PIPE.base = "report"
        with self.clock("checkpoint"):
            self.checkpoints.wait()
            shapes = self.trainer.state_shapes
            self.checkpoints.check_saved(self.saved_step, shapes.params, shapes.step)
        self.stopping.synchronize()
        self.stopping.end()
        interrupted = self.stopping.signal != ""
        scored_step, params = (self.step, self.state.best_params) if interrupted else self._best()
        scores = _Scores()
        if interrupted:
            self.display.print(
                f"{self.stopping.signal}: saved step {self.saved_step}; the same command goes on from there"
            )
        elif score:
            scores = self._score_all(params)
        flops = self.lengths.flops_by_part(self.trainer, self.config.data.seq_len)
        return RunResult(
            step=self.step,
            scored_step=scored_step,
            interrupted=interrupted,
            heldout=scores.heldout.scores,
            sums=scores.heldout.sums,
            teacher=scores.teacher,
            examples=scores.heldout.examples,
            baselines=scores.baselines,
            peak_memory_bytes=self._peak_memory_bytes(),
            dataset=self.dataset,
            model=self.setup.model,
            params=params,
            seconds=dict(self.clock.seconds),
            parameters=self.parameters,
            flops_per_step=None if flops is None else round(sum(flops.values())),
            flops_by_part=flops,
            tokens=self.lengths.tokens(),
            timed_tokens=self.lengths.timed_tokens(),
            padding=self.lengths.padding_share(),
            devices=distributed.describe_devices(self.trainer.layout.mesh),
        )

    def _score_all(self, params: Any) -> _Scores:
        """Scores of `params`, of the teacher and of other methods on all held-out examples."""
        self.display.print("scoring all held-out examples")
        heldout, teacher = self.evaluate(None, params), self.setup.teacher
        of_teacher, baselines = dict[str, float](), dict[str, Any]()
        progress = self.display.progress("batches")
        with self.clock("eval"):
            heldout.scores.update(further_scores(self.trainer, params, self.dataset, self.config, progress))
        if teacher is not None:
            self.display.print(f"scoring the teacher {teacher.source}")
            with self.clock("eval"):
                of_teacher = teacher.scores(self.dataset, self.config, progress)
        if self.baseline is not None:
            with self.clock("baselines"):
                baselines = self.baseline.result(self.display.print)
        return _Scores(heldout, of_teacher, baselines)

    def _best(self) -> tuple[int, Any]:
        """Step and weights of the checkpoint that commands load, see `run_directory.load`."""
        best = self.checkpoints.best()
        if best is None or best == self.step:
            return self.step, self.state.best_params
        jax.tree.map(lambda x: x.delete(), self.state)  # saved; its memory may be needed for the other one
        return best, self.checkpoints.restore_params(self.trainer.state_shapes, best)

    def _out_of_patience(self) -> bool:
        """True if `train.patience` evaluations in a row were no better than the best one."""
        return 0 < self.config.train.patience <= self.progress["bad_evals"]

    def _peak_memory_bytes(self) -> int:
        return max(self.start.progress.get("peak_memory_bytes", 0), measure.peak_memory_bytes())
