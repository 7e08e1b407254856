"""Tokenizers without a vocabulary: hashes of words, and of the n-grams of words and characters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp import spec as specs
from hpnlp.data.reading.files import to_text
from hpnlp.data.tokenizers import word_hashes
from hpnlp.data.tokenizers.prompt import prompt_bytes
from hpnlp.data.tokenizers.tokenizer_file import check_version
from hpnlp.types import InputError, Tokenizer, WordStats

FORMAT = 1  # version of the JSON that `save` writes
_CACHED = 1 << 17  # words whose n-grams are kept
_MARK = b"\1"  # before n-grams of words, so that "the" is another n-gram than the characters of "other"
_LONGEST = 32  # largest n of n-grams of words and of characters
SIZES = (2, 1 << 24)  # bounds of the number of ids of n-grams


class HashingTokenizer(Tokenizer):
    """A tokenizer whose ids cannot be decoded.

    Attributes:
      kind: Its type in the file that it is saved as.
      by: An entry of `word_hashes.SPLITS`.
    """

    kind: str
    by: str
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int = 0
    stats: WordStats | None = None
    lossless: bool = False
    decodes: bool = False

    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, for the file."""
        return {"by": self.by}

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(prompt_bytes(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """Hashes stand for no text: returns nothing."""
        return b""

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"type": self.kind, "version": FORMAT, **self.arguments()}, file)


class HashedWordTokenizer(HashingTokenizer):
    """128 bits of each word, in lower case: the ids of a text of n words are 4 n words of 32 bits, as int32."""

    kind: str = "hashed_words"
    hashes_words: bool = True
    vocab_size: int = 1 << 32

    def __init__(self, by: str = "whitespace"):
        """Makes the tokenizer of an entry of `word_hashes.SPLITS`."""
        specs.lookup(word_hashes.SPLITS, by, "split of words by")
        self.by = by

    def encode(self, text: bytes) -> np.ndarray:
        return word_hashes.encode(to_text(text), self.by).reshape(-1).view(np.int32)


class HashedNgramTokenizer(HashingTokenizer):
    """Hashes of the words of a text, of its n-grams of words, and then of the n-grams of characters of each word (fastText).

    The mean of their vectors is the text's vector in the classifier of Joulin et al. 2016, "Bag of tricks for efficient text
    classification"; n-grams of characters are those of Bojanowski et al. 2017, with < before and > after a word. Id 0 is
    padding.
    """

    kind: str = "hashed_ngrams"

    def __init__(self, size: int, words: int = 2, least: int = 3, most: int = 6, by: str = "whitespace"):
        """Makes the tokenizer.

        Args:
          size: Number of ids.
          words: Largest number of words of an n-gram.
          least: Smallest number of characters of an n-gram.
          most: Largest number of characters of an n-gram; 0 for none of characters.
          by: An entry of `word_hashes.SPLITS`.

        Raises:
          InputError: An argument is out of range.
        """
        specs.lookup(word_hashes.SPLITS, by, "split of words by")
        if not SIZES[0] <= size <= SIZES[1]:
            raise InputError(
                f"tokenizer size {size}: expected a number of ids, {SIZES[0]} to {SIZES[1]}, as in hashed_ngrams(65536)"
            )
        if not 1 <= words <= _LONGEST or not (most == 0 or 1 <= least <= most <= _LONGEST):
            raise InputError(
                f"hashed_ngrams: words={words}, least={least}, most={most}: expected n-grams of 1 to {_LONGEST} words, and of "
                f"characters from least to most, 1 to {_LONGEST}, or most=0"
            )
        self.vocab_size: int = size
        self.words, self.least, self.most, self.by = words, least, most, by
        self._of_words: dict[str, np.ndarray] = {}

    def arguments(self) -> dict[str, Any]:
        return {"size": self.vocab_size, "words": self.words, "least": self.least, "most": self.most, "by": self.by}

    def encode(self, text: bytes) -> np.ndarray:
        words = word_hashes.split(to_text(text), self.by)
        ids = [np.zeros(0, np.int32)]
        for count in range(1, self.words + 1):
            ngrams = (" ".join(words[start : start + count]) for start in range(len(words) - count + 1))
            ids.append(self._ids([_MARK + ngram.encode("utf-8", "surrogateescape") for ngram in ngrams]))
        for word in words:  # last, so that long texts lose n-grams of characters first
            if word not in self._of_words:
                if len(self._of_words) >= _CACHED:
                    self._of_words.clear()
                self._of_words[word] = self._ids(self._characters(word))
            ids.append(self._of_words[word])
        return np.concatenate(ids)

    def _characters(self, word: str) -> list[bytes]:
        """The n-grams of characters of a word."""
        if not self.most:
            return []
        marked = f"<{word}>"
        spans = [(start, start + n) for n in range(self.least, self.most + 1) for start in range(len(marked) - n + 1)]
        return [marked[start:end].encode("utf-8", "surrogateescape") for start, end in spans]

    def _ids(self, ngrams: Sequence[bytes]) -> np.ndarray:
        return (1 + word_hashes.hashes(ngrams)[:, 0] % np.uint32(self.vocab_size - 1)).astype(np.int32)


def build_words(by: object = "whitespace", *, texts: Iterable[bytes]) -> HashedWordTokenizer:
    """The tokenizer of the spec hashed_words(by)."""
    del texts
    return HashedWordTokenizer(str(by))


def build_ngrams(
    size: int, words: int = 2, least: int = 3, most: int = 6, by: object = "whitespace", *, texts: Iterable[bytes]
) -> HashedNgramTokenizer:
    """The tokenizer of the spec hashed_ngrams(size, ...)."""
    del texts
    return HashedNgramTokenizer(size, words, least, most, str(by))


def parse(form: Mapping[str, Any], path: str) -> HashingTokenizer:
    """The tokenizer of a JSON object."""
    check_version(form, FORMAT, path)
    arguments = {name: value for name, value in form.items() if name not in ("type", "version")}
    entries = {HashedWordTokenizer.kind: build_words, HashedNgramTokenizer.kind: build_ngrams}
    try:
        return specs.build(specs.Spec(form["type"], (), tuple(arguments.items())), entries, "tokenizer", texts=())
    except InputError as error:
        raise InputError(f"{path!r} is damaged: {error}: save it again") from error
