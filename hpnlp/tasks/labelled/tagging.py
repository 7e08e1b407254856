"""Tagging: a label of each word of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples import Examples, TaggingConfig
from hpnlp.data.examples.baselines import MAX_TRAINED
from hpnlp.data.examples.dataset import HELDOUT
from hpnlp.data.examples.store import StoredExamples
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.tasks.labelled.labels import LabelTask
from hpnlp.tasks.predictions import TagPrediction, TrainedModel, tag_predictions
from hpnlp.tasks.reports.label_report import MARK, LabelReport, text_around
from hpnlp.tasks.task import Batch, RunConfig
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError

BASELINES = {
    "majority_accuracy": "the most frequent training label",
    "token_accuracy": "the most frequent training label of each word's first token",
}


class TaggingTask(LabelTask):
    """Tagging: a label of each word of a text."""

    name = "tagging"
    model_config = EncoderConfig
    data_config = TaggingConfig
    prediction = TagPrediction
    report = LabelReport("label", BASELINES, text_around, f" ({MARK} stands before the labelled word)")

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        if config.model.pooling != "none":
            raise InputError(f"model.pooling={config.model.pooling!r} makes one label of a text: set it to 'none'")
        return super().model(config, sizes)

    def predict(self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]) -> list[TagPrediction]:
        return tag_predictions(trained, batch, [example["words_field"] for example in values])

    def baseline(self, dataset: Examples) -> TaggingBaselines:
        return TaggingBaselines(dataset)


class TaggingBaselines:
    """Accuracies of taggers that do not use the context of a word."""

    def __init__(self, dataset: Examples) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Counts the labels of tokens.

        Args:
          log: Not called.

        Returns:
          `majority_accuracy`, of the most frequent training label; `token_accuracy`, of the label that the first token of a
          word has most often, or else the most frequent one. At most MAX_TRAINED training examples are counted. Of equally
          frequent labels, the first one counts. Both are None if no training example has labels.
        """
        dataset, train = self._dataset, self._dataset.stored["train"]
        classes = len(dataset.labels)
        if not dataset.class_counts.any():
            return {"majority_accuracy": None, "token_accuracy": None}
        tokens, labels = _labelled(train, train.spread(MAX_TRAINED).tolist())
        majority = int(np.bincount(labels, minlength=classes).argmax())
        # Only pairs that occur are counted: all tokens times all labels may be many.
        pairs, counts = np.unique(tokens.astype(np.int64) * classes + labels, return_counts=True)
        tokens, labels = np.divmod(pairs, classes)
        order = np.lexsort((labels, -counts, tokens))
        seen, first = np.unique(tokens[order], return_index=True)
        best = np.full(dataset.tokenizer.vocab_size, majority, np.int64)
        best[seen] = labels[order][first]
        heldout = dataset.stored[HELDOUT]
        tokens, labels = _labelled(heldout, range(heldout.count))
        return {
            "majority_accuracy": float(np.mean(labels == majority)),
            "token_accuracy": float(np.mean(best[tokens] == labels)),
        }


def _labelled(stored: StoredExamples, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`(token ids, class ids)` `[n]`: the first token of each word that has a label, and the label."""
    tokens = np.concatenate([stored.part(number, 0) for number in numbers])
    labels = np.concatenate([stored.labels(number) for number in numbers])
    return tokens[labels >= 0], labels[labels >= 0]  # others are NO_LABEL or UNLABELLED
