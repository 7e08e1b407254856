"""The call whose time and memory count: predictions, vectors, generated text, the loss of a batch, or a training step."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import tasks
from hpnlp.cost import traced_time
from hpnlp.cost.traced_time import TracedTime
from hpnlp.data.examples import Examples
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.jobs import ensembles
from hpnlp.jobs.predictor import Predictor
from hpnlp.jobs.profile import profile_run
from hpnlp.tasks.predictions import TextPrediction
from hpnlp.training import gradients
from hpnlp.training.config import Config, flat
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

TOKENS = 32  # tokens of a prompt, and those that are generated
BATCHES = 8  # training batches of a call where their lengths differ


class Program(enum.StrEnum):
    """Kinds of calls."""

    PREDICT = "predict"
    ENCODE = "encode"
    GENERATE = "generate"
    LOSS = "loss"
    TRAINING = "training"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A call of a model, as users make it.

    Attributes:
      program: The kind of the call.
      batch_size: Sequences of a batch.
      tokens: Tokens of a prompt, and those that are generated after it.
    """

    program: Program
    batch_size: int
    tokens: int = TOKENS

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Workload:
        """A workload from JSON.

        Args:
          values: Fields.

        Returns:
          The workload.
        """
        return cls(**{**values, "program": Program(values["program"])})

    def describe(self) -> str:
        """The call in words."""
        count = f"{self.batch_size} {'sequence' if self.batch_size == 1 else 'sequences'}"
        match self.program:
            case Program.PREDICT | Program.ENCODE:
                verb = "labels" if self.program is Program.PREDICT else "vectors"
                texts = "a held-out text" if self.batch_size == 1 else f"{self.batch_size} held-out texts"
                return f"{verb} of {texts} of median length"
            case Program.GENERATE:
                return f"{self.tokens} new tokens after {self.tokens} of {count}"
            case Program.LOSS:
                return f"the loss of {count}"
        return f"a training step on {count}"


def default_workload(config: Config, trains: bool, batch_size: int) -> Workload:
    """The call that matters for a task.

    Args:
      config: Config of the run.
      trains: Whether it is the training that is to become faster or smaller.
      batch_size: Sequences of a batch; 0 for those of training.

    Returns:
      The workload.
    """
    task = tasks.find(config.task)
    size = batch_size or config.data.batch_size
    if trains:
        return Workload(Program.TRAINING, size)
    if config.task in ensembles.TASKS:
        longest = flat(config).get("model.max_len", 0)  # 0 for any length
        return Workload(Program.GENERATE, size, min(TOKENS, longest // 2) if longest else TOKENS)
    if task.prediction is not None and task.input_kind(config.data) is not None and task.reads_examples:
        return Workload(Program.PREDICT, size)
    if task.text_kind(config.data) is not None and task.reads_examples:
        return Workload(Program.ENCODE, size)
    return Workload(Program.LOSS, size)


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """A call of a changed model, ready to be measured.

    Attributes:
      function: The call.
      digest: Digest of the program and of its constants: equal for equal programs.
      amount: Tokens of a call that are no padding.
      peak_bytes: Memory that the compiled program needs; None where it was not compiled ahead.
    """

    function: Callable[[], Any]
    digest: str
    amount: float
    peak_bytes: int | None = None


def make_call(workload: Workload, run: Run, dataset: Any, texts: Sequence[str] = ()) -> TimedCall:
    """The call of a run.

    Args:
      workload: The workload.
      run: The run, changed or not.
      dataset: Its data; None for a converted model without data, whose texts are random.
      texts: Texts or prompts, from `sample_texts`; () where the program reads batches.

    Returns:
      The call.

    Raises:
      InputError: The run cannot be called so.
    """
    predictor = functools.partial(Predictor.from_run, run)
    match workload.program:
        case Program.TRAINING:
            return _training(run, dataset)
        case Program.LOSS:
            batch = _resized(_batch(run, dataset), workload.batch_size)
            loss = profile_run.loss_of_batch(run, batch)
            digest = _digest(loss.compiled.executable.as_text())
            return TimedCall(loss.call, digest, _amount(batch), loss.compiled.memory.peak)
        case Program.PREDICT:
            function = functools.partial(predictor().predict, texts, workload.batch_size)
        case Program.ENCODE:
            function = functools.partial(predictor().encode, texts, workload.batch_size)
        case Program.GENERATE:
            endless = Predictor.from_run(dataclasses.replace(run, eos_ids=()))  # models do not differ in when they end
            function = functools.partial(endless.generate, texts, workload.tokens, 0.0)
    text = _lowered_loss(run, dataset, workload.batch_size) if dataset is not None else _form(run)
    return TimedCall(function, _digest(text), 1.0)


def _training(run: Run, dataset: Any) -> TimedCall:
    """A training step; where batches have several lengths, one on each of the first BATCHES."""
    widths = tasks.find(run.config.task).batch_widths(run.config.data)
    batches = [_read(run, batch) for batch in itertools.islice(dataset.train(seed=0), BATCHES if widths > 1 else 1)]
    by_shape = {_shape(batch): batch for batch in batches}
    steps = {shape: profile_run.training_step(run, batch) for shape, batch in by_shape.items()}
    order = [steps[_shape(batch)].call for batch in batches]
    programs = [step.compiled for step in steps.values()]
    return TimedCall(
        lambda: [step() for step in order],
        _digest("\n".join([*(program.executable.as_text() for program in programs), str([*map(_shape, batches)])])),
        sum(map(_amount, batches)),
        max(program.memory.peak for program in programs),
    )


def _shape(batch: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in batch.values())


def sample_texts(workload: Workload, run: Run, dataset: Any) -> list[Any]:
    """Held-out texts of median length, or prompts of training text, for `make_call`.

    Args:
      workload: The workload.
      run: The run.
      dataset: Its data.

    Returns:
      The texts; [] for programs that read batches.
    """
    if workload.program is Program.GENERATE:
        tokens = _resized(_batch(run, dataset), workload.batch_size)["tokens"]
        decode = run.tokenizer.decode
        return [_as_text(decode(row[: workload.tokens])) for row in tokens]
    if workload.program not in (Program.PREDICT, Program.ENCODE):
        return []
    if dataset is None:
        ids = np.random.default_rng(0).integers(
            run.tokenizer.vocab_size, size=(workload.batch_size, run.config.data.seq_len)
        )
        return [_as_text(run.tokenizer.decode(row)) for row in ids]
    stored = cast(Examples, dataset).stored[HELDOUT]
    examples = stored.texts(stored.spread(max(64, 4 * workload.batch_size)).tolist())
    ordered = sorted(([text.decode() for text in texts] for texts in examples), key=lambda texts: sum(map(len, texts)))
    first = max(0, (len(ordered) - workload.batch_size) // 2)
    chosen = (ordered * workload.batch_size)[first : first + workload.batch_size]
    return [texts[0] if len(texts) == 1 else texts for texts in chosen]


def traced(workload: Workload, run: Run, dataset: Any, texts: Sequence[Any]) -> TracedTime | None:
    """Time of the workload by part of the model.

    Args:
      workload: The workload.
      run: The run.
      dataset: Its data.
      texts: Texts of the workload.

    Returns:
      The time of a training step, or of the loss of a batch as long as the texts; None for generation, and if the profiler
      records no operation.
    """
    decodes = workload.program is Program.PREDICT and tasks.find(run.config.task).prediction is TextPrediction
    if workload.program is Program.GENERATE or decodes or dataset is None:
        return None
    batch = _batch(run, dataset)
    if workload.program is Program.TRAINING:
        program = profile_run.training_step(run, batch)
    else:
        batch = _resized(batch, workload.batch_size)
        if texts and "segment_ids" in batch:
            length = int(np.median((batch["segment_ids"] != 0).sum(axis=1)))
            batch = {name: a[:, :length] if a.ndim > 1 and a.shape[1] > length else a for name, a in batch.items()}
        program = profile_run.loss_of_batch(run, batch)
    for _ in range(2):
        jax.block_until_ready(program.call())
    try:
        return traced_time.trace(program.call, program.compiled.executable.as_text())
    except InputError:  # without bounds, more techniques are tried
        return None


def _as_text(decoded: Any) -> str:
    return decoded.decode("utf-8", "replace") if isinstance(decoded, bytes) else decoded


def _batch(run: Run, dataset: Any) -> dict[str, np.ndarray]:
    """The first training batch, with the arrays that the model reads."""
    return _read(run, next(iter(dataset.train(seed=0))))


def _read(run: Run, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a batch that the model reads."""
    return {name: np.asarray(batch[name]) for name in run.model.batch_axes() if name in batch}


def _resized(batch: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    return {name: np.resize(array, (count, *array.shape[1:])) for name, array in batch.items()}


def _amount(batch: Mapping[str, np.ndarray]) -> float:
    """Tokens of a batch that are no padding; examples of a batch without tokens."""
    if "segment_ids" in batch:
        return float((batch["segment_ids"] != 0).sum())
    return float(next(iter(batch.values())).shape[0])


def _lowered_loss(run: Run, dataset: Any, count: int) -> str:
    """The program of the loss of a batch before compilation, which differs for models whose calls differ."""
    batch = {name: jnp.asarray(array) for name, array in _resized(_batch(run, dataset), count).items()}
    loss = jax.jit(lambda params, batch: gradients.loss(run.model, params, batch, None).sum)
    return loss.lower(run.params, batch).as_text()


def _form(run: Run) -> str:
    """The config of a model, and shapes and dtypes of its weights."""
    leaves, structure = jax.tree.flatten(run.params)
    return f"{run.model.config} {structure} {[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
