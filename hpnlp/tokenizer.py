"""The protocol of tokenizers, and the word statistics of the text that a vocabulary was made from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class WordStats:
    """Frequencies and similarity of the words of a vocabulary in the text that the tokenizer was trained on.

    Compared and hashed by content, so that a Flax module can have it as a field. (Flax would walk through tuples of V
    numbers at every call.)

    Attributes:
      counts: int64 `[V]`, number of occurrences of each id.
      order: int64 `[V]`, a permutation of the ids that places words of similar use side by side; None if unknown.
    """

    counts: np.ndarray
    order: np.ndarray | None = None

    def __post_init__(self) -> None:
        for name in ("counts", "order"):
            if (value := getattr(self, name)) is not None:
                array = np.array(value, np.int64)
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WordStats) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @functools.cached_property
    def _content(self) -> tuple[bytes, bytes]:
        return self.counts.tobytes(), b"" if self.order is None else self.order.tobytes()

    def padded(self, vocab: int) -> WordStats:
        """The statistics of a larger vocabulary whose additional ids do not occur.

        Args:
          vocab: Size of the larger vocabulary.

        Returns:
          Statistics of `vocab` ids; the additional ids come last in `order`.
        """
        added = np.arange(len(self.counts), vocab)
        order = None if self.order is None else np.concatenate([self.order, added])
        return WordStats(np.pad(self.counts, (0, len(added))), order)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. A class that derives from it inherits `encode_batch`.

    Attributes:
      vocab_size: Ids are in `[0, vocab_size)`.
      bos_id: Id that begins a document, None if the tokenizer has none.
      eos_id: Id that ends a document, None if the tokenizer has none.
      pad_id: Id of padding.
      stats: Word statistics of the text that the vocabulary was made from, if known.
      lossless: True if `decode(encode(x)) == x` for every x that `encode` accepts, and there is a bos. Without bos nothing
          predicts the first token of a document, and bits per byte would count bytes that cost nothing.
      decodes: False for hashes, which stand for no text.
      hashes_words: True if ids are the bits of hashes of words (`data.tokenizers.hashing_tokenizers.HashedWordTokenizer`).
      is_trained_here: False for a published tokenizer, whose files are copied where a run is exported.
      spec: `data.tokenizer` of runs that start from a run with this tokenizer; "" for the path of its file.
      mask_id: Id of the tokenizer's own token that hides a word, as BERT's; None for none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int
    stats: WordStats | None
    lossless: bool
    decodes: bool = True
    hashes_words: bool = False
    is_trained_here: bool = True
    spec: str = ""
    mask_id: int | None = None

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of one document, without bos and eos.

        Args:
          text: The document.

        Returns:
          int32 `[tokens]`.

        Raises:
          InputError: The tokenizer cannot read `text`.
        """
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of several documents; a tokenizer may override it to use all cores.

        Args:
          texts: The documents.

        Returns:
          The result of `encode` for each document.

        Raises:
          InputError: The tokenizer cannot read one of the documents.
        """
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> np.ndarray:
        """Ids of a prompt: as `encode`, preceded by bos if the tokenizer has one.

        Args:
          text: The prompt.

        Returns:
          int32 `[tokens]`.

        Raises:
          InputError: Parts of `text` have no id of their own; the message names every one of them.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Text of ids.

        Args:
          ids: int `[tokens]`.

        Returns:
          The bytes that the ids stand for; special ids stand for nothing.
        """
        ...

    def find_mask_id(self) -> int:
        """The id of the mask: that of the tokenizer's own mask, or else the first id after the vocabulary.

        A model for masked language modelling has at least `find_mask_id() + 1` rows of embeddings. Reserved ids are not used.

        Returns:
          The id.
        """
        return self.vocab_size if self.mask_id is None else self.mask_id

    def drawable_ids(self) -> np.ndarray:
        """Ids that generation may draw: those that stand for text, and not the id of unknown text.

        Returns:
          bool `[vocab_size]`.
        """
        # Each id twice, because some tokenizers drop one space at the beginning, and with it the text of a single space.
        ids = range(self.vocab_size)
        return np.array([self.decode([i, i]) != b"" and self.decode([i]) != b"<unk>" for i in ids])

    def save(self, path: str) -> None:
        """Writes the tokenizer to a file, which `hpnlp.data.tokenizers.load` reads back.

        Args:
          path: Path of the file `tokenizer.json`.
        """
        ...
