"""The training loop.

`train` is the loop. `_Run` holds the state of a run and has a method for each part of the loop: set-up, one step, writing
metrics, evaluation, checkpoints and the end. A run resumes from the newest checkpoint of its directory, if there is one:
`_Run._find_start` decides, and `_Run._resume` restores. `checkpoint` has the content of a checkpoint, and `run_directory` the
conditions under which a run may resume.
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
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.batch_lengths import BatchLengths, check_buckets, length_of, padding_of
from hpnlp.training.config import Config, flat
from hpnlp.training.config_file import write_config
from hpnlp.training.evaluation import Evaluation, batch_share, evaluate, further_scores, on_devices
from hpnlp.training.files.best import ScoreOrder
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.files.claim import check_frozen, check_steps, claimed, frozen_record
from hpnlp.training.files.contents import has_begun
from hpnlp.training.files.metrics import QUIET, Clock, Display, JsonlWriter, Writer, find_writers, reading_progress
from hpnlp.training.files.result import Result
from hpnlp.training.optimizers import averages
from hpnlp.training.optimizers.loss_scale import MINIMUM
from hpnlp.training.optimizers.state_shardings import place
from hpnlp.training.processes import distributed
from hpnlp.training.processes.progress_pipe import PIPE
from hpnlp.training.start import Start, converted_start, find_source, find_teacher, first_start, teacher_vocabulary
from hpnlp.training.starts import unused_fields
from hpnlp.training.trainer import check_batch, make_trainer
from hpnlp.types import InputError

MAX_NONFINITE_STEPS = 20  # a run stops after this number of consecutive steps without a finite gradient


def train(config: Config, workdir: str | Path, *, accept_changes: bool = False, score: bool = True) -> Result:
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
            self._prepare(accept_changes)
        self.first_step = self.step = self.saved_step = int(self.start.state.step)
        self._open_outputs(further_writers)
        self.state, self.progress = self.start.state, self.start.progress
        self.pending: list[tuple[int, dict[str, jax.Array]]] = []  # metrics of steps, not yet fetched from the devices
        self.lengths = BatchLengths.restored(self.start.progress, self.step, config)
        self.compiled: set[int] = set()  # lengths of batches for which this process has a compiled step
        self.consecutive_skips = 0
        self.stopped = self._out_of_patience()  # True for a run that was stopped early before

    def _prepare(self, accept_changes: bool) -> None:
        """Makes data, model and trainer, and finds the state to start from; then writes vocabulary and config."""
        config, workdir = self.config, self.workdir
        begun = distributed.lead_value(has_begun(workdir))
        self.source = find_source(config, workdir)
        progress = reading_progress(console=None if self.is_lead else QUIET)
        known = self._known_vocabulary(begun)
        of_teacher = teacher_vocabulary(config)
        has_labels = known is not None and (of_teacher is None or known.labels is not None)
        self.dataset = self.task.dataset(config.data, known if has_labels else of_teacher, progress)
        self.baseline = self.task.baseline(self.dataset) if self.is_lead and config.train.baselines else None
        vocabulary = self.task.vocabulary(self.dataset)
        self.model: Any = tasks.make_model(config, vocabulary.sizes)
        accepted = ""
        if self.source is not None:
            accepted = self.source.check_model(self.model.config, accept_changes, config.task)
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        self.frozen = self.task.frozen(config)
        self.teacher = find_teacher(config, vocabulary)
        if self.teacher is not None:
            self.model = self.teacher.distilled(config, self.model)
            self.frozen = self.teacher.frozen(self.model.stored > 0)
        trainer = make_trainer(
            self.model, optimizer, config.plan, steps=config.train.steps, batch_size=config.data.batch_size
        )
        self.trainer = trainer.with_frozen(None if self.frozen is None else self.frozen.values)
        check_buckets(config, self.model, self.trainer.layout)
        check_batch(self.trainer.layout, config.data.batch_size, config.data.seq_len, config.optimizer.accumulate)
        index, count = batch_share(self.trainer, config)
        self.key = jax.random.key(config.train.seed)
        self.batches = self.dataset.train(seed=config.train.seed, process_index=index, process_count=count)
        if self.teacher is not None and self.model.stored:
            self.batches = self.teacher.stored_batches(self.batches, config.distill.cache, self.model)
        self.checkpoints = Checkpointer(
            workdir,
            config.train.keep,
            metric=self.order.metric,
            higher_is_better=self.order.higher_is_better,
            fence=self.fence,
        )
        self.stack.callback(self.checkpoints.close)
        self.start = self._find_start(accepted)
        if self.is_lead:
            if self.source is not None or known is None:
                vocabulary.save(workdir)
            if self.teacher is not None:
                self.teacher.save(workdir, self.model)
            write_config(workdir, config)

    def _known_vocabulary(self, begun: bool) -> Vocabulary | None:
        """Vocabulary of the warm start or of the resumed run; None to make one from the data."""
        if self.source is not None:  # even if an earlier attempt in the same directory has saved another one
            return self.source.vocabulary_for(self.config.task)
        return self.task.load_vocabulary(self.workdir) if begun else None

    def _find_start(self, accepted: str) -> Start:
        """State from the newest checkpoint, `train.init_from`, a converted model in the directory, or initialization.

        `accepted` lists the differences between the models that the user has accepted for a warm start.
        """
        config, trainer, checkpoints = self.config, self.trainer, self.checkpoints
        if self.source is not None or checkpoints.latest() is None:
            if self.source is None and config.train.init_from:
                raise InputError(
                    f"{checkpoints.directory} holds no complete checkpoint: remove it, and the run starts from "
                    f"train.init_from={config.train.init_from}"
                )
            return first_start(config, trainer, self.key, self.model, self.source, self.teacher, accepted)
        if checkpoints.holds_params_only():
            return converted_start(config, self.workdir, trainer, self.key, checkpoints)
        return self._resume()

    def _resume(self) -> Start:
        """Restores the newest checkpoint: training state, position in the data, progress, and seconds of each phase."""
        check_steps(self.workdir, self.checkpoints.latest(), self.config.train.steps)
        state, data_state, progress = self.checkpoints.restore(self.trainer.state_shapes)
        check_frozen(self.workdir, self.frozen, progress)
        self.batches.set_state(data_state)
        for phase, seconds in progress["seconds"].items():
            self.clock.seconds[phase] = self.clock.seconds.get(phase, 0.0) + seconds
        return Start(state, f"going on from step {int(state.step)}", progress)

    def _open_outputs(self, further_writers: list[Any]) -> None:
        """Opens metrics.jsonl, further writers and the progress display."""
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
        for remark in self.source.remarks if self.source is not None else ():
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
            length = length_of(local, self.config.data.seq_len)
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
        """Evaluates every `train.eval_every` steps and after the last one, which may be the best.

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
        periodic = bool(options.checkpoint_every) and self.step % options.checkpoint_every == 0
        return is_last or improved is not None or periodic

    def save(self, scores: Mapping[str, float] | None = None) -> None:
        """Starts a checkpoint, after the metrics of its steps have reached the disk. `scores` rank it among the best."""
        self.flush()
        with self.clock("checkpoint"):
            if self.jsonl is not None:
                self.jsonl.sync()
            progress = {**self.progress, "seconds": self.clock.seconds, "peak_memory_bytes": self._peak_memory_bytes()}
            progress |= {**self.lengths.record(), **frozen_record(self.frozen)}
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
        # A loss scale that can still fall is the likely cause, and its fall is the remedy.
        is_failure = line["skipped"] and line.get("loss_scale", MINIMUM) <= MINIMUM
        self.consecutive_skips = self.consecutive_skips + 1 if is_failure else 0
        if self.consecutive_skips >= MAX_NONFINITE_STEPS or (is_failure and not self.config.optimizer.skip_nonfinite):
            raise InputError(
                f"the loss or its gradient has not been finite for {self.consecutive_skips} steps, up to {step}: "
                "lower optimizer.learning_rate, or find the cause with train.debug_nans"
            )

    def finish(self, score: bool) -> Result:
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
        heldout = Evaluation({}, {})
        of_teacher, baselines = dict[str, float](), dict[str, Any]()
        if interrupted:
            self.display.print(
                f"{self.stopping.signal}: saved step {self.saved_step}; the same command goes on from there"
            )
        elif score:
            self.display.print("scoring all held-out examples")
            heldout = self.evaluate(None, params)
            with self.clock("eval"):
                progress = self.display.progress("batches")
                heldout.scores.update(further_scores(self.trainer, params, self.dataset, self.config, progress))
            if self.teacher is not None:
                self.display.print(f"scoring the teacher {self.teacher.source}")
                with self.clock("eval"):
                    of_teacher = self.teacher.scores(self.dataset, self.config, progress)
            if self.baseline is not None:
                with self.clock("baselines"):
                    baselines = self.baseline.result(self.display.print)
        flops = self.lengths.flops_by_part(self.trainer, self.config.data.seq_len)
        return Result(
            step=self.step,
            scored_step=scored_step,
            interrupted=interrupted,
            heldout=heldout.scores,
            sums=heldout.sums,
            teacher=of_teacher,
            examples=heldout.examples,
            baselines=baselines,
            peak_memory_bytes=self._peak_memory_bytes(),
            dataset=self.dataset,
            model=self.model,
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
