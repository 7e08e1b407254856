"""A trained model that reads texts: predictions, vectors and continuations.

Example::

    model = hpnlp.load("runs/reviews")
    model.predict(["a fine film", "never again"])[0].label
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpnlp import tasks
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Texts
from hpnlp.data.examples.kinds.unlabelled import Unlabelled, as_record, converted
from hpnlp.data.reading.fields import FieldError
from hpnlp.jobs import ensembles
from hpnlp.jobs.dtypes import overflow_checked, overflow_checked_chunks, with_dtype
from hpnlp.models import decode
from hpnlp.models.decoding.decoding_weights import separate_stacks
from hpnlp.tasks.predictions import Prediction, TrainedModel
from hpnlp.training import run_directory
from hpnlp.types import InputError

BATCH_SIZE = 32
# A text, the texts of a pair, or a record with the fields of the run's data.
Example = str | Sequence[Any] | Mapping[str, Any]


class Predictor:
    """The model of a run, with methods that read texts.

    Programs are compiled at the first batch of each shape. A batch has up to `batch_size` sequences of similar lengths.

    Attributes:
      directory: Its directory.
      run: The run: config, vocabulary, model and parameters.
    """

    def __init__(self, run: str | os.PathLike[str], step: int | None = None, dtype: str | None = None) -> None:
        """Loads the model of a run.

        Args:
          run: Directory of a run, or of a compressed or converted model.
          step: Step of the checkpoint; None for the best, or the newest if none was evaluated.
          dtype: As for `hpnlp.load`.

        Raises:
          InputError: As for `hpnlp.load`.
        """
        with _quiet_libraries():
            loaded = run_directory.load(Path(run), step)
        self._set(os.fspath(run), loaded if dtype is None else with_dtype(loaded, dtype))

    @classmethod
    def from_run(cls, run: run_directory.Run, directory: str | os.PathLike[str] = "") -> Predictor:
        """The model of a run that is loaded, or a changed one.

        Args:
          run: The run.
          directory: Its directory, for messages.

        Returns:
          The model.
        """
        predictor = cls.__new__(cls)
        predictor._set(os.fspath(directory), run)
        return predictor

    def _set(self, directory: str, run: run_directory.Run) -> None:
        self.directory, self.run = directory, run
        self._task = tasks.find(run.config.task)
        if jax.default_backend() == "cpu":
            # Layers are views of their stacks where memory is aligned, and copies elsewhere.
            views = separate_stacks(jax.tree.map(np.asarray, run.params), run.model.config)
            params = jax.tree.map(lambda x: jax.device_put(x, may_alias=True), views)
        else:
            params = jax.tree.map(jnp.asarray, run.params)
        self._trained = TrainedModel(run.config, run.model, params, run.tokenizer, run.vocabulary.labels or ())
        self._kind = self._task.input_kind(run.config.data)
        self._text_kind = self._task.text_kind(run.config.data)

    @property
    def kind(self) -> Kind:
        """Form of the examples that `predict` reads; `kind.inputs` are the fields of their records.

        Raises:
          InputError: The run is of a task whose models predict nothing from texts.
        """
        if self._kind is None:
            self._task.predict(self._trained, {}, ())  # raises
        assert self._kind is not None
        return self._kind

    @property
    def text_kind(self) -> Kind:
        """Form of the examples that `encode` reads, as `kind`.

        Raises:
          InputError: The run is of a task whose models have no vectors of texts.
        """
        if self._text_kind is None:
            self._task.encode(self._trained, {})  # raises
        assert self._text_kind is not None
        return self._text_kind

    @property
    def prediction_type(self) -> type[Prediction]:
        """Class of the results of `predict`.

        Raises:
          InputError: The run is of a task that predicts nothing from texts.
        """
        if self._task.prediction is None:
            self._task.predict(self._trained, {}, ())  # raises
        assert self._task.prediction is not None
        return self._task.prediction

    def predict(self, texts: Sequence[Example], batch_size: int = BATCH_SIZE) -> list[Prediction]:
        """Predicts the labels, targets or similarities of texts.

        Args:
          texts: Texts; sequences of two texts for a task on pairs; or records with the fields of the run's data (without
            labels), such as {"text": "a fine film"}. Texts longer than `data.seq_len` tokens are cut, as in training, with
            a warning.
          batch_size: Largest number of examples of a batch.

        Returns:
          For each text: a LabelPrediction of a classifier, a TagPrediction of a tagger, a TextPrediction of a
          sequence-to-sequence model, or a SimilarityPrediction of a dual encoder.

        Raises:
          InputError: A text is empty or has the wrong form, or the run is of a task that predicts nothing from texts.
        """
        results, cut = self.predict_valid(texts, batch_size, _refuse)
        self._warn_of_cut(cut, len(results))
        return list(results.values())

    def predict_valid(
        self, texts: Sequence[Example], batch_size: int, report_bad: Callable[[int, FieldError], None]
    ) -> tuple[dict[int, Prediction], int]:
        """As `predict`, for texts of which some may be bad.

        Args:
          texts: As for `predict`.
          batch_size: As for `predict`.
          report_bad: Called with the number of a text without tokens or of the wrong form, and its error: raises an error, or
            leaves the text out.

        Returns:
          Number of a text -> its prediction, in the order of the texts; and the number of texts that were cut.

        Raises:
          InputError: As for `predict`.
        """
        return self._by_length(self.kind, texts, batch_size, self._task.predict, report_bad)

    def encode(self, texts: Sequence[Example], batch_size: int = BATCH_SIZE, partners: bool = False) -> np.ndarray:
        """Computes a vector of each text.

        Args:
          texts: As for `predict`; single texts for a dual encoder, which are encoded as first texts of pairs, or pairs, of
            which the first texts are.
          batch_size: As for `predict`.
          partners: Encode the texts as second texts of pairs, as documents beside queries: a dual encoder with
            model.shared=False does so by its second tower.

        Returns:
          float32 [n, D]: the pooled last hidden states of an encoder, or vectors of length 1 of a dual encoder.

        Raises:
          InputError: As for `predict`; or models of the run's task have no vectors.
        """
        vectors, cut = self.encode_valid(texts, batch_size, _refuse, partners)
        self._warn_of_cut(cut, len(vectors))
        return (
            np.stack([*vectors.values()]).astype(np.float32)
            if vectors
            else np.zeros((0, self.run.model.config.dim), np.float32)
        )

    def encode_valid(
        self,
        texts: Sequence[Example],
        batch_size: int,
        report_bad: Callable[[int, FieldError], None],
        partners: bool = False,
    ) -> tuple[dict[int, np.ndarray], int]:
        """As `encode`, for texts of which some may be bad.

        Args:
          texts: As for `encode`.
          batch_size: As for `encode`.
          report_bad: As for `predict_valid`.
          partners: As for `encode`.

        Returns:
          Number of a text -> its vector, in the order of the texts; and the number of texts that were cut.

        Raises:
          InputError: As for `encode`.
        """
        if isinstance(self.text_kind, Texts) and not isinstance(texts, str | bytes):
            texts = [text[0] if isinstance(text, list | tuple) and text else text for text in texts]

        def encode(trained: TrainedModel, batch: Mapping[str, np.ndarray], values: Sequence[Any]) -> list[np.ndarray]:
            vectors = self._task.encode_partners(trained, batch) if partners else self._task.encode(trained, batch)
            return list(vectors[: len(values)])

        return self._by_length(self.text_kind, texts, batch_size, encode, report_bad)

    def generate(
        self,
        prompts: Sequence[str],
        tokens: int = 200,
        temperature: float | int = 0.8,
        top_k: int = 0,
        top_p: float | int = 0.95,
        seed: int = 0,
    ) -> list[str]:
        """Continues prompts with a language model.

        Args:
          prompts: The prompts, which are one batch.
          tokens: Largest number of new tokens of each.
          temperature: Temperature of sampling; 0 takes the most probable token each time.
          top_k: Sample among the K most probable tokens; 0 for all.
          top_p: Sample among the most probable tokens whose probabilities sum to P.
          seed: Seed of sampling. Equal seeds give equal text.

        Returns:
          The continuations, without the prompts.

        Raises:
          InputError: The run is not of a language model, or an argument is invalid.
        """
        run = self.run
        if run.config.task not in ensembles.TASKS:
            raise InputError(
                f"generate continues prompts with runs of task={' or '.join(map(repr, ensembles.TASKS))}, and this run is of "
                f"task={run.config.task!r}: use predict"
            )
        if isinstance(prompts, str | bytes):
            raise InputError(f"{prompts!r:.40} is one prompt: pass a list of prompts, [{prompts!r:.40}]")
        if not prompts:
            return []
        ids = [run.tokenizer.encode_prompt(prompt) for prompt in prompts]
        generation = decode.Generation(
            run.model,
            self._trained.params,
            ids,
            tokens=tokens,
            sampling=decode.Sampling(temperature, top_k, top_p, seed, run.tokenizer.drawable_ids()),
            eos_id=run.eos_ids,
            pad_id=run.tokenizer.pad_id,
        )
        rows = np.concatenate([*overflow_checked_chunks(generation)], axis=1)
        ends = np.isin(rows, run.eos_ids)
        kept = [row[: end.argmax()] if end.any() else row for row, end in zip(rows, ends, strict=True)]
        streams = [decode.TextStream(run.tokenizer, prompt) for prompt in ids]
        return [stream.push(row, final=True) for stream, row in zip(streams, kept, strict=True)]

    def cut_message(self, cut: int, count: int) -> str:
        """A sentence on texts that are longer than the model reads.

        Args:
          cut: Number of texts that are cut.
          count: Number of texts.

        Returns:
          The sentence, with the length at which they are cut.
        """
        return f"{cut:,} of {count:,} texts were cut to data.seq_len={self.run.config.data.seq_len} tokens"

    def _warn_of_cut(self, cut: int, count: int) -> None:
        """Warns of texts that were cut, at the line that called `predict` or `encode`."""
        if cut:
            warnings.warn(self.cut_message(cut, count), stacklevel=3)

    def _by_length(
        self,
        kind: Kind,
        texts: Sequence[Example],
        batch_size: int,
        function: Callable[..., Sequence[Any]],
        report_bad: Callable[[int, FieldError], None],
    ) -> tuple[dict[int, Any], int]:
        """Results of a function of batches of a kind and of similar lengths, by the texts' numbers, and how many are cut.

        Bad texts are left out.
        """
        if isinstance(texts, str | bytes):
            raise InputError(f"{texts!r:.40} is one text: pass a list of texts, [{texts!r:.40}]")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: expected at least 1")
        values, numbers, bad = [], [], set[int]()
        for number, text in enumerate(texts):
            try:
                values.append(converted(kind, as_record(kind, text)))
                numbers.append(number)
            except FieldError as error:
                report_bad(number, error)

        def leave_out(index: int, error: FieldError) -> None:
            report_bad(numbers[index], error)
            bad.add(index)

        examples = Unlabelled(kind, self.run.tokenizer, values, leave_out)
        uncut = kind.row_lengths(examples.lengths, self.run.tokenizer, sys.maxsize)
        cut = int((uncut > self.run.config.data.seq_len).sum())
        results: dict[int, Any] = {}
        for indices, width in self._batches(kind, examples, batch_size, bad):
            count = min(batch_size, 1 << (len(indices) - 1).bit_length())
            batch = kind.batch(examples, indices, count, self.run.tokenizer, width)
            with overflow_checked(self.run):
                outputs = function(self._trained, batch, [values[index] for index in indices])
            results.update(zip(indices, outputs, strict=True))
        return {number: results[index] for index, number in enumerate(numbers) if index not in bad}, cut

    def _batches(
        self, kind: Kind, examples: Unlabelled, batch_size: int, bad: Container[int]
    ) -> Iterator[tuple[list[int], int]]:
        """`(numbers of the examples, length of the sequences)` of each batch, without bad examples."""
        most = self.run.config.data.seq_len
        lengths = kind.row_lengths(examples.lengths, self.run.tokenizer, most)
        order = [number for number in np.argsort(lengths, kind="stable").tolist() if number not in bad]
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]
            yield numbers, self.run.model.config.needed_length(most) or width_for(int(lengths[numbers[-1]]), most)


def _refuse(number: int, error: FieldError) -> None:
    raise InputError(f"text {number} {error}: correct it, or leave it out") from error


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silences warnings of orbax, which describe how it reads checkpoints."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def width_for(length: int, most: int) -> int:
    """The length to which sequences are padded, so that few programs are compiled.

    Padding costs as much time as tokens do: longer sequences than 12 tokens get less than a quarter of their tokens as padding,
    and longer ones than 128 less than an eighth.

    Args:
      length: Tokens of the longest sequence.
      most: Largest length.

    Returns:
      At least `length`, at most `most`.
    """
    steps_of_octave = 4 if length <= 128 else 8
    step = max(4, (1 << (length - 1).bit_length()) // (2 * steps_of_octave))
    return min(-(-length // step) * step, most)
