"""Held-out texts of a run, and the comparison of the labels that the run and an exported model predict for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp import tasks
from hpnlp.data.examples import ExampleConfig, Examples
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Classification, Tagging
from hpnlp.data.examples.kinds.unlabelled import Unlabelled
from hpnlp.tasks.predictions import LabelPrediction, TagPrediction, TrainedModel
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

CHECKED = 64  # largest number of held-out texts that an exported file is checked with

Labels = Sequence[tuple[str, float]]  # label and probability of each text, or of each word of all texts


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Labels of an exported model beside those of its run.

    Attributes:
      count: Number of labels.
      differing: Number of labels that differ.
      largest: Largest difference of the probabilities of equal labels.
    """

    count: int
    differing: int
    largest: float

    @classmethod
    def of(cls, expected: Labels, actual: Labels) -> Agreement:
        """Compares labels of the same texts, or of the same words."""
        pairs = list(zip(expected, actual, strict=True))
        equal = [abs(first - second) for (label, first), (other, second) in pairs if label == other]
        return cls(len(pairs), len(pairs) - len(equal), max(equal, default=0.0))

    def describe(self, texts: int) -> str:
        """A line on the labels of a number of texts."""
        line = f"ids and labels of {texts} held-out texts are those of the run"
        if self.differing:
            line = f"{self.differing} of {self.count} labels of {texts} held-out texts differ from the run's"
        return f"{line}; probabilities differ by at most {self.largest:.2g}"


def heldout_texts(run: Run) -> list[tuple[str, ...]]:
    """At most CHECKED held-out texts, spread over all of them.

    Args:
      run: A run of a classifier or a tagger.

    Returns:
      The text, or the texts of a pair, of each example; the words of a tagger's text are joined by spaces.

    Raises:
      InputError: The run has no data, or they cannot be read.
    """
    data = run.config.data
    if run.step == CONVERTED_STEP:
        raise InputError("it was converted and not trained, and has no data")
    if not isinstance(data, ExampleConfig):
        raise InputError("it has no labelled data")
    dataset = tasks.find(run.config.task).dataset(data, run.vocabulary)
    assert isinstance(dataset, Examples)
    stored = dataset.stored[HELDOUT]
    return [tuple(text.decode() for text in texts) for texts in stored.texts(stored.spread(CHECKED).tolist())]


def _as_examples(kind: Kind, texts: Sequence[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Config field -> value of the inputs of each example; raises InputError for other kinds than texts and taggings."""
    if isinstance(kind, Tagging):
        return [{"words_field": words} for (text,) in texts if (words := text.split())]
    if isinstance(kind, Classification):
        return [dict(zip(("text_field", "pair_field"), pair, strict=False)) for pair in texts]
    raise InputError(f"{type(kind).__name__} examples have no single sequence of tokens")


def framed_ids(run: Run, kind: Kind, texts: Sequence[tuple[str, ...]]) -> list[tuple[list[int], list[int]]]:
    """Token ids and types of texts as the model was trained on them.

    Args:
      run: A run.
      kind: Kind of its examples.
      texts: Texts of each example.

    Returns:
      `(ids, types)` of each example, without padding; types are 0 for kinds without pairs.
    """
    examples = Unlabelled(kind, run.tokenizer, _as_examples(kind, texts))
    numbers = range(len(examples.values))
    batch = kind.batch(examples, numbers, len(numbers), run.tokenizer, run.config.data.seq_len)
    lengths = batch["segment_ids"].sum(axis=1)
    types = batch.get("token_types", np.zeros_like(batch["tokens"]))
    return [
        (ids[:length].tolist(), of_ids[:length].tolist())
        for ids, of_ids, length in zip(batch["tokens"], types, lengths, strict=True)
    ]


def predicted_labels(trained: TrainedModel, kind: Kind, texts: Sequence[tuple[str, ...]]) -> Labels:
    """Labels that a model of hpnlp predicts.

    Args:
      trained: The model.
      kind: Kind of its examples.
      texts: Texts of each example.

    Returns:
      The labels.
    """
    examples = Unlabelled(kind, trained.tokenizer, _as_examples(kind, texts))
    count, data = len(examples.values), trained.config.data
    batch = kind.batch(examples, range(count), count, trained.tokenizer, data.seq_len)
    labels: list[tuple[str, float]] = []
    for prediction in tasks.find(trained.config.task).predict(trained, batch, examples.values):
        if isinstance(prediction, TagPrediction):
            labels += zip(prediction.labels, prediction.probabilities, strict=True)
        elif isinstance(prediction, LabelPrediction):
            labels.append((prediction.label, prediction.probability))
    return labels
