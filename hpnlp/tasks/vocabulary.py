"""The vocabulary of a run: the parts of its data that its model depends on, and that its directory keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hpnlp.data import examples, tokenizers
from hpnlp.model_interfaces.ranges import LIMITS
from hpnlp.spec import parse_one
from hpnlp.types import InputError, Tokenizer, WordStats

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a vocabulary, on which the sizes of a model depend.

    Attributes:
      ids: Number of ids of the tokenizer.
      stats: Counts of the ids in the training text, if they are known.
      classes: Number of labels, 0 for a task without labels.
      masked_ids: Number of ids with that of the mask (`Tokenizer.find_mask_id`); 0 if that is not known.
    """

    ids: int
    stats: WordStats | None = None
    classes: int = 0
    masked_ids: int = 0


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer of a run, and the labels of a task with labels.

    Attributes:
      tokenizer: The tokenizer.
      labels: Names of the classes in the order of their ids; None for a task without labels.
    """

    tokenizer: Tokenizer
    labels: tuple[str, ...] | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of the vocabulary."""
        ids = self.tokenizer.vocab_size
        return Sizes(ids, self.tokenizer.stats, len(self.labels or ()), max(ids, self.tokenizer.find_mask_id() + 1))

    def for_other_data(self) -> Vocabulary:
        """The vocabulary of a run that starts from this one's parameters, without what belongs to its data."""
        return self

    def save(self, workdir: Path) -> None:
        """Writes the vocabulary to a run directory; neither a kill nor a full disk leaves an incomplete file.

        Args:
          workdir: The run directory, which receives tokenizer.json, and labels.json of a task with labels.
        """
        if self.labels is not None:
            examples.save_labels(self.labels, str(workdir))
        tokenizers.save_whole(self.tokenizer, str(workdir))


def load(workdir: Path, has_labels: bool = False) -> Vocabulary | None:
    """Reads the vocabulary of a run directory.

    Args:
      workdir: The run directory.
      has_labels: Whether the task has labels.

    Returns:
      The vocabulary, or None if one of its files is absent.

    Raises:
      InputError: A file cannot be read.
    """
    path = workdir / "tokenizer.json"
    if not path.exists() or (has_labels and not (workdir / "labels.json").exists()):
        return None
    return Vocabulary(tokenizers.load(str(path)), examples.load_labels(str(workdir)) if has_labels else None)


def planned_sizes(tokenizer: str, vocab: int) -> Sizes:
    """The largest sizes of a tokenizer that is not made yet, and words with the frequencies of Zipf's law.

    Args:
      tokenizer: Value of `data.tokenizer`.
      vocab: Value of `model.vocab`, the limit of the tokenizer's size; 0 for none.

    Returns:
      The sizes.

    Raises:
      InputError: The spec of the tokenizer is not valid.
    """
    smallest, largest = tokenizers.sizes(tokenizer)
    ids = max(smallest, min(largest, vocab or largest))
    if not (tokenizers.is_trained(tokenizer) and parse_one(tokenizer, "data.tokenizer").name == "words"):
        return Sizes(ids)
    ranks = np.arange(ids)
    return Sizes(ids, WordStats(10**9 // (1 + ranks), ranks))


def fill_sizes(model: Config, sizes: Sizes, seq_len: int) -> Config:
    """A model's config with the sizes that depend on the tokenizer and on the length of the sequences.

    Args:
      model: A `models.backbone.BackboneConfig`.
      sizes: Sizes of the vocabulary.
      seq_len: Tokens per sequence.

    Returns:
      The config, with `vocab` and `max_len` where they are 0.

    Raises:
      InputError: The vocabulary is smaller than the tokenizer's, sequences are longer than the learned positions, or of
          another length than a mixer has parameters for.
    """
    c: Any = model
    if sizes.ids > LIMITS["vocab"]:
        raise InputError(
            f"the tokenizer has {sizes.ids} ids, too many for a table of words: choose task='hashed_classification', or "
            "another data.tokenizer, such as 'hashed_ngrams(65536)'"
        )
    if c.vocab and c.vocab < sizes.ids:
        raise InputError(
            f"model.vocab={c.vocab} is less than the tokenizer's {sizes.ids}: set it to 0, or to at least {sizes.ids}"
        )
    max_len = c.max_len or seq_len
    if c.position == "learned" and seq_len > max_len:
        raise InputError(f"data.seq_len={seq_len} is longer than model.max_len={max_len} learned positions: change one")
    filled = dataclasses.replace(c, vocab=c.vocab or sizes.ids, max_len=max_len)
    if filled.fixed_length() not in (0, seq_len):
        raise InputError(
            f"data.seq_len={seq_len}, model.max_len={max_len}: model.mixer={c.mixer!r} mixes sequences of one length: set "
            "both to it, or model.max_len=0"
        )
    return filled
