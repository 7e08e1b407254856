"""Bags with their numbers, and with topics in place of labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpnlp.data.examples.config import BagsConfig
from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.store import UNLABELLED, StoredExamples
from hpnlp.data.examples.topics import find_topics, parse_positives
from hpnlp.data.packing import Batch
from hpnlp.data.reading import token_store
from hpnlp.types import Tokenizer


class BagsWithTopics(StoredExamples):
    """Bags without labels, each with a topic in the place of its label.

    Attributes:
      topics: Number of the topic of each bag, int32 [n].
    """

    topics: np.ndarray

    def labels(self, number: int) -> np.ndarray:
        stored = super().labels(number)
        return np.where(stored == UNLABELLED, self.topics[number], stored).astype(np.int32)

    def all_labels(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *(self.labels(number) for number in range(self.count))])


class BagExamples(Examples):
    """Bags of texts. With `data.positives="topics(N)"`, their labels are topics of the training bags.

    A batch has the arrays of `bags.LabelledBags`, and "bag", int32 [B]: the number of a training bag, and -1 for all others.
    """

    config: BagsConfig

    def __init__(
        self, config: BagsConfig, tokenizer: Tokenizer, directory: str, record: dict[str, Any], is_cached: bool = False
    ) -> None:
        super().__init__(config, tokenizer, directory, record, is_cached)
        positives = parse_positives(config.positives)
        if positives is None:
            return
        none = np.zeros(0, np.int32)
        bags = {name: BagsWithTopics(directory, name, record[name], self.kind.parts, none) for name in self.stored}
        self.labels, numbers = find_topics(positives, bags, tokenizer, token_store.cache_root(config.cache))
        for name, stored in bags.items():
            stored.topics = numbers[name]
        self.stored = {**bags}
        self.class_counts = np.bincount(numbers["train"], minlength=len(self.labels)).astype(np.int64)
        digests = {
            name: token_store.json_hash([bags[name].digest, self.labels, numbers[name].tolist()]) for name in bags
        }
        self.heldout_digest = digests["heldout"]
        self._digests = {"data set": digests["train"], "held-out examples": self.heldout_digest}
        self.summary = "\n".join([self.summary, *self._class_lines()])

    def _batch(self, side: str, numbers: np.ndarray, count: int, width: int | None = None) -> Batch:
        bags = np.full(count, -1, np.int32)
        if side == "train":
            bags[: len(numbers)] = numbers
        return super()._batch(side, numbers, count, width) | {"bag": bags}
