"""The training loop: everything that a run does between its config and its result, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hpnlp import measure
from hpnlp.data.baselines import Baselines
from hpnlp.data.stream import Corpus, prepare
from hpnlp.data.tokenizers import save_whole
from hpnlp.models.lm import LM
from hpnlp.training import distributed, warm_start
from hpnlp.training.checkpoint import Checkpointer
from hpnlp.training.config import Config
from hpnlp.training.loss_scale import LEAST
from hpnlp.training.metrics import QUIET, Clock, Display, JsonlWriter, find_writers, now_and_then
from hpnlp.training.run_directory import claimed, has_begun, make_model, saved_tokenizer, write_config
from hpnlp.training.step import Batch, Trainer, check_batch, make_trainer
from hpnlp.types import InputError, Writer

HOPELESS = 20  # steps in a row without a finite gradient, after which a run stops


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run ends with. interrupted: a signal stopped it early, and the same command goes on from `step`. devices: how
    many, and what they are divided into.

    heldout: `loss` in nats a token and, for tokenizers that lose nothing and output layers that give probabilities,
    `bits_per_byte`. baselines: bits per byte of compressors on the same text, see `data.baselines`; {} where the run was
    interrupted and on processes that do not lead. Over all restarts: seconds, by phase, of which "setup" holds all
    compilation, and peak_memory_bytes.
    """

    step: int
    interrupted: bool
    heldout: dict[str, float]
    baselines: dict[str, Any]
    corpus: Corpus
    model: LM
    params: Any
    seconds: dict[str, float]
    peak_memory_bytes: int
    parameters: int
    flops_per_step: int | None
    devices: str


def train(config: Config, workdir: str | Path, *, accept_changes: bool = False) -> Result:
    """Trains to `config.train.steps`, going on from the newest checkpoint in `workdir`, or else from `config.train.init_from`.

    accept_changes: go on though the directory was made by another config, or start though the model of `init_from` differs in
    more than shapes tell.

    Raises InputError where the config, the data, the mesh or the directory is at fault; what was saved stays.
    """
    workdir = Path(workdir)
    with contextlib.ExitStack() as stack:
        lead = distributed.is_lead()
        if lead:
            stack.enter_context(claimed(workdir, config, accept_changes))
        stopping = distributed.Stopping()
        stack.callback(stopping.end)
        clock = Clock()
        stack.enter_context(jax.debug_nans(config.train.debug_nans))
        trace = stack.enter_context(contextlib.ExitStack())  # what ends the run early ends a trace, too

        with clock("setup"):
            further_writers = find_writers(config.train.writers)
            begun = distributed.agreed(has_begun(workdir))
            say_progress = now_and_then(console=None if lead else QUIET)
            source = _source(config, workdir)
            # A warm start takes the tokenizer that its parameters know, also where an attempt before it has saved another.
            tokenizer = source.tokenizer if source is not None else saved_tokenizer(workdir) if begun else None
            corpus = prepare(config.data, tokenizer, say_progress)
            baselines = Baselines(corpus) if lead else None
            model = make_model(config, corpus.tokenizer)
            changed = "" if source is None else warm_start.check_model(model.config, source, accept_changes)
            optimizer = config.optimizer.for_batch(config.data.batch_size)
            trainer = make_trainer(model, optimizer, config.plan, steps=config.train.steps)
            check_batch(trainer.layout, config.data.batch_size, config.data.seq_len, config.optimizer.accumulate)
            part = distributed.share(trainer.batch_sharding, (config.data.batch_size, config.data.seq_len))
            key = jax.random.key(config.train.seed)
            rows = corpus.train(seed=config.train.seed, process_index=part[0], process_count=part[1])
            checkpoints = Checkpointer(workdir, config.train.keep)
            stack.callback(checkpoints.close)
            progress: dict[str, Any] = {"best": None, "bad_evals": 0}
            peak = measure.peak_memory_bytes
            begin = "starting"
            if source is not None:
                params, phrase = warm_start.load_params(source, trainer, config.plan)
                state, first = trainer.init(key, params), 0
                begin = f"starting from {phrase}{f' ({changed})' * bool(changed)}"
            elif checkpoints.latest() is None:
                if config.train.init_from:
                    raise InputError(
                        f"{checkpoints.directory} holds no complete checkpoint: remove it, and the run starts from "
                        f"train.init_from={config.train.init_from}"
                    )
                state, first = trainer.init(key), 0
            elif checkpoints.holds_params_only():  # a converted model: everything but the parameters begins here
                warm_start.check_own(config.train.init_from, workdir)
                warm_start.check_tokenizer(config.data.tokenizer, warm_start.find(workdir))
                state, first = trainer.init(key, checkpoints.restore_params(trainer.state_shapes)), 0
                begin = f"starting from the converted model of {workdir}, with its tokenizer"
            else:
                state, data_state, progress = checkpoints.restore(trainer.state_shapes)
                rows.set_state(data_state)
                first = int(state.step)
                begin = f"going on from step {first}"
                for phase, seconds in progress["seconds"].items():
                    clock.seconds[phase] += seconds
                before = progress.get("peak_memory_bytes", 0)  # older checkpoints do not say
                peak = lambda: max(before, measure.peak_memory_bytes())  # noqa: E731
            if lead and (source is not None or not begun or not (workdir / "tokenizer.json").exists()):
                save_whole(corpus.tokenizer, str(workdir))
            if lead:
                write_config(workdir, config)

        jsonl = JsonlWriter(workdir, first) if lead else None
        writers: list[Writer] = [] if jsonl is None else [jsonl]
        for make in further_writers if lead else ():
            writers.append(make(workdir=workdir, last_step=first))
        for writer in writers:
            stack.callback(writer.close)
        tokens = config.data.batch_size * config.data.seq_len
        display = Display(first, config.train.steps, tokens, None if lead else QUIET)
        stack.callback(display.close)
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainer.state_shapes.params))
        display.say(_greeting(begin, config, workdir, parameters, trainer.layout.mesh))
        for remark in source.remarks if source is not None else ():
            display.say(f"{config.train.init_from}: {remark}")
        if trainer.undivided:
            display.say(f"no axis of the plan divides {', '.join(trainer.undivided)}: whole on every device")
        display.say(corpus.summary)  # what was left out, too: nobody misses a file in silence
        if config.optimizer.warmup >= config.train.steps:
            display.say(
                f"optimizer.warmup={config.optimizer.warmup} lasts to the end of train.steps={config.train.steps}: the "
                "learning rate does not reach its peak"
            )

        pending: list[tuple[int, dict[str, jax.Array]]] = []
        skipped_in_a_row = 0

        def flush() -> None:
            """Fetches the metrics of the steps since the last flush, and writes a line for each.

            Lines wait for a checkpoint in the making: what was shown is never more than an interval ahead of the disk.
            """
            nonlocal skipped_in_a_row
            with clock("checkpoint"):
                checkpoints.wait()
            if not pending:
                return
            with clock("step"):
                values = jax.device_get([metrics for _, metrics in pending])
            for (number, _), metrics in zip(pending, values, strict=True):
                line = {name: float(value) for name, value in metrics.items()}
                for writer in writers:
                    writer.write(number, line)
                # A loss scale that can fall is the cause, and the cure.
                lost = line["skipped"] and line.get("loss_scale", LEAST) <= LEAST
                skipped_in_a_row = skipped_in_a_row + 1 if lost else 0
                if skipped_in_a_row >= HOPELESS or (lost and not config.optimizer.skip_nonfinite):
                    raise InputError(
                        f"the loss or its gradient has not been finite for {skipped_in_a_row} steps, up to {number}: "
                        "lower optimizer.learning_rate, or look for the cause with train.debug_nans"
                    )
            if skipped := round(sum(float(metrics["skipped"]) for metrics in values)):
                display.say(
                    f"step {pending[-1][0]}: {skipped} of the last {len(values)} steps skipped: they were not finite"
                )
            display.step(pending[-1][0], float(values[-1]["loss"]), clock.seconds["data"] + clock.seconds["step"])
            pending.clear()

        def save(loss: float | None = None) -> None:
            """Starts a checkpoint; the lines of its steps are on disk before it is."""
            flush()
            with clock("checkpoint"):
                if jsonl is not None:
                    jsonl.sync()
                kept = {**progress, "seconds": clock.seconds, "peak_memory_bytes": peak()}
                checkpoints.save(state, rows.get_state(), kept, loss)

        def evaluate(limit: int | None) -> dict[str, float]:
            flush()
            display.doing("scoring held-out text")
            with clock("eval"):
                return heldout_loss(trainer, state.best_params, corpus, config, limit)

        trace_first, trace_last = config.train.profile_range()
        step = saved = first
        stop = _patience_is_over(config, progress)  # a run that was stopped early stays so

        while step < config.train.steps and not stop:
            step += 1
            if step == trace_first:
                trace.enter_context(jax.profiler.trace(str(workdir / "profile")))
            with clock("data"):
                batch = _on_devices(trainer, next(rows), config)
            with clock("setup" if step == first + 1 else "step"):  # the first call traces and compiles
                state, metrics = trainer.step(state, batch, key)
                pending.append((step, metrics))
                if step == first + 1:
                    jax.block_until_ready(metrics)
                    stopping.begin()  # until here, a signal ends the process: there is nothing to save
            if step == trace_last:
                jax.block_until_ready(metrics)
                trace.close()

            stop = stopping(step)
            last = step == config.train.steps or stop
            loss = None
            # Also when a signal has come: the run that goes on must find what an undisturbed one would.
            if config.train.eval_every and step % config.train.eval_every == 0 and step < config.train.steps:
                scores = evaluate(config.train.eval_batches or None)
                for writer in writers:
                    writer.write(step, {f"heldout_{name}": value for name, value in scores.items()})
                display.say(f"step {step}: held-out " + ", ".join(f"{n} {v:.4f}" for n, v in scores.items()))
                limit = math.inf if progress["best"] is None else progress["best"] - config.train.min_delta
                better = math.isfinite(scores["loss"]) and scores["loss"] < limit
                progress |= (
                    {"best": scores["loss"], "bad_evals": 0} if better else {"bad_evals": progress["bad_evals"] + 1}
                )
                if better:
                    loss = scores["loss"]
                if _patience_is_over(config, progress):
                    display.say(f"no improvement in {config.train.patience} evaluations: stopping at step {step}")
                    last = stop = True
            if (
                last
                or loss is not None
                or (config.train.checkpoint_every and step % config.train.checkpoint_every == 0)
            ):
                save(loss)
                saved = step
            elif step % config.train.log_every == 0 and not checkpoints.saving():
                flush()

        with clock("checkpoint"):
            checkpoints.wait()
            checkpoints.check_saved(saved, trainer.state_shapes.params, trainer.state_shapes.step)
        stopping.agree()
        stopping.end()
        interrupted = stopping.signal != ""
        if interrupted:
            display.say(f"{stopping.signal}: saved step {saved}; the same command goes on from there")
        else:
            display.say("scoring all held-out text")
        heldout = {} if interrupted else evaluate(None)
        result = Result(
            step=step,
            interrupted=interrupted,
            heldout=heldout,
            baselines={} if interrupted or baselines is None else baselines.result(display.say),
            peak_memory_bytes=peak(),
            corpus=corpus,
            model=model,
            params=state.best_params,
            seconds=dict(clock.seconds),
            parameters=parameters,
            flops_per_step=trainer.flops(config.data.batch_size, config.data.seq_len),
            devices=_devices(trainer.layout.mesh),
        )
        return result


def _patience_is_over(config: Config, progress: Mapping[str, Any]) -> bool:
    return 0 < config.train.patience <= progress["bad_evals"]


def heldout_loss(
    trainer: Trainer, params: Any, corpus: Corpus, config: Config, limit: int | None = None
) -> dict[str, float]:
    """The loss of the held-out text in nats a token and, where all of it was scored and none was lost, bits a byte, unless the
    loss is of no probabilities.

    limit: at most so many batches, spread over the text.
    """
    part = distributed.share(trainer.batch_sharding, (config.data.batch_size, config.data.seq_len))
    batches = corpus.heldout(
        batch_size=config.data.batch_size,
        stride=config.train.eval_stride or None,
        limit=limit,
        process_index=part[0],
        process_count=part[1],
    )
    sums: list[Any] = []
    for batch in batches:
        rows = _on_devices(trainer, batch, config)
        # One after the other: two programs on the pretended devices of one CPU can wait for each other's threads forever.
        jax.block_until_ready(sums[-1:])
        sums.append(trainer.evaluate(params, rows))
    total, weight = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
    if not weight:
        raise InputError(
            f"train.eval_batches={config.train.eval_batches}: no token of the held-out text that was looked at is "
            "predicted (prompts fill its rows): raise it, 0 for all, or hold out other text"
        )
    scores = {"loss": float(total / weight)}
    if corpus.tokenizer.lossless and limit is None and trainer.gives_probabilities:
        scores["bits_per_byte"] = float(total) / math.log(2) / corpus.heldout_bytes
    return scores


def _on_devices(trainer: Trainer, batch: Mapping[str, np.ndarray], config: Config) -> Batch:
    shape = config.data.batch_size, config.data.seq_len
    put = lambda rows: jax.make_array_from_process_local_data(trainer.batch_sharding, rows, shape)  # noqa: E731
    return {name: put(rows) for name, rows in batch.items()}


def _devices(mesh: Any) -> str:
    devices = jax.devices()
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    used = f"{mesh.size} of {len(devices)}" if mesh.size < len(devices) else len(devices)
    return f"{used} {devices[0].platform} device{'s' * (len(devices) > 1)}{f' ({axes})' * bool(axes)}"


def _source(config: Config, workdir: Path) -> warm_start.Source | None:
    """The model that `train.init_from` names; None without one, or where the run goes on from a checkpoint of its own."""
    if not config.train.init_from or distributed.agreed(Checkpointer.exist(workdir)):
        return None
    source = warm_start.find(config.train.init_from)
    warm_start.check_tokenizer(config.data.tokenizer, source)
    return source


def _greeting(begin: str, config: Config, workdir: Path, parameters: int, mesh: Any) -> str:
    return (
        f"{begin}: {parameters / 1e6:.2f}M parameters, {_devices(mesh)}, {config.train.steps} steps of "
        f"{config.data.batch_size} x {config.data.seq_len} tokens, in {workdir}"
    )
