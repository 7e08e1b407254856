"""A tokenizer whose ids are the most frequent words of a text."""

from __future__ import annotations

import collections
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from hpnlp import spec as specs
from hpnlp.data.reading.files import to_text
from hpnlp.data.tokenizers.prompt import prompt_bytes, unknown_parts, with_bos
from hpnlp.data.tokenizers.tokenizer_file import check_size, check_version, integers
from hpnlp.data.tokenizers.word_similarity import similar_order
from hpnlp.ops.softmax.structured.word_order import checked_order
from hpnlp.types import InputError, Tokenizer, WordStats

FORMAT = 1  # version of the JSON that `save` writes
# Maximum number of words of text from which the similarity of words is computed; they are held in memory.
_COMPARED = 1 << 23


class WordTokenizer(Tokenizer):
    """Splits text into words by an entry of SPLITS; a word that is not in the vocabulary becomes `<unk>`.

    A single space between two words has no token, and decode inserts it again. by="letters" also has tokens for other
    whitespace and for punctuation, so decode returns a complete text exactly, up to `<unk>`. by="whitespace" returns one space
    for any whitespace between words. Slices of the ids do not decode to slices of the text: decode from the start.
    """

    SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
    SMALLEST = len(SPECIAL) + 1
    # Name -> (pattern of a token, whose group is empty for text without a token; pattern of tokens that decode separates).
    SPLITS: ClassVar[dict[str, tuple[re.Pattern[str], re.Pattern[str]]]] = {
        # Runs of letters and digits, runs of whitespace, and single punctuation marks.
        "letters": (re.compile(r"(?<=\w) (?=\w)|(\w+|\s+|[^\w\s])"), re.compile(r"\w")),
        "whitespace": (re.compile(r"\S+"), re.compile(r"")),
    }

    lossless: bool = False

    def __init__(self, words: Sequence[str], stats: WordStats | None = None, by: str = "letters"):
        """Makes the tokenizer of a vocabulary.

        Args:
          words: The vocabulary without special tokens, in order of falling frequency, as log-uniform proposals expect.
          stats: Counts of all ids, special tokens first, in the text from which the vocabulary was made.
          by: An entry of SPLITS.

        Raises:
          InputError: `by` is unknown, words repeat, or `stats` is not of this vocabulary.
        """
        self.by = by
        self._pattern, separated = specs.lookup(self.SPLITS, by, "split of words by")
        self.words = tuple(words)
        self.stats: WordStats | None = stats
        vocabulary = (*self.SPECIAL, *self.words)
        if stats is not None and stats.counts.shape != (len(vocabulary),):
            raise InputError(
                f"{stats.counts.size} counts for {len(self.words)} words: expected one per word, after {len(self.SPECIAL)} "
                "for special tokens"
            )
        if stats is not None and stats.order is not None:
            checked_order(stats.order, len(vocabulary))
        if len(set(vocabulary)) != len(vocabulary):
            raise InputError("the words of a tokenizer must differ from each other")
        # `<eos>` written in a text is not the special token: text never encodes to a special id other than <unk>.
        self._ids = {word: i for i, word in enumerate(vocabulary) if i >= len(self.SPECIAL)}
        self._bytes = [b"", b"<unk>", b"", b"", *(word.encode("utf-8", "surrogateescape") for word in self.words)]
        self._is_separated = [False, True, False, False, *(separated.match(word) is not None for word in self.words)]
        self.vocab_size: int = len(vocabulary)
        self.pad_id: int = 0
        self.unk_id: int = 1
        self.bos_id: int | None = 2
        self.eos_id: int | None = 3

    @classmethod
    def train(cls, cap: int, texts: Iterable[bytes], by: str = "letters") -> WordTokenizer:
        """Makes the tokenizer of the most frequent words of a text; words of equal count are taken in alphabetical order.

        Args:
          cap: Maximum size of the vocabulary, special tokens included.
          texts: Documents, which are read once.
          by: An entry of SPLITS.

        Returns:
          The tokenizer, with `stats`.

        Cost: one pass over the text, then seconds plus about 0.1 ms per word for the order of similar words, which is computed
        from up to 8 million words of documents that are spread evenly over the text.
        """
        counts: collections.Counter[str] = collections.Counter()
        documents = 0
        sample = _Sample()
        split = cls((), by=by)._split
        for text in texts:
            words = split(text)
            counts.update(words)
            sample.add(words)
            documents += 1
        ranked = sorted(counts.keys() - set(cls.SPECIAL), key=lambda word: (-counts[word], word))
        kept = ranked[: cap - len(cls.SPECIAL)]
        unknown = counts.total() - sum(counts[word] for word in kept)
        tokenizer = cls(kept, by=by)
        ids = np.array([tokenizer._ids.get(word, tokenizer.unk_id) for word in sample.numbers], np.int32)
        order = similar_order([ids[document] for document in sample.documents], tokenizer.vocab_size)
        id_counts = np.array([0, unknown, documents, documents, *(counts[word] for word in kept)], np.int64)
        tokenizer.stats = WordStats(id_counts, order)
        return tokenizer

    def _split(self, text: bytes) -> list[str]:
        """The words of a text that have tokens; raises InputError if the text is not UTF-8."""
        return list(filter(None, self._pattern.findall(to_text(text))))

    def encode(self, text: bytes) -> np.ndarray:
        words = self._split(text)
        return np.fromiter(map(self._ids.get, words, itertools.repeat(self.unk_id)), np.int32, len(words))

    def encode_prompt(self, text: str) -> np.ndarray:
        data = prompt_bytes(text)
        missing = [word for word in self._split(data) if word not in self._ids]
        if missing:
            raise unknown_parts(missing, self.vocab_size)
        return with_bos(self.encode(data), self.bos_id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        decoded, after_word = [], False
        for i in np.asarray(ids, np.int64).tolist():
            is_word = i < self.vocab_size and self._is_separated[i]
            if is_word and after_word:
                decoded.append(b" ")
            decoded.append(self._bytes[i] if i < self.vocab_size else b"")
            after_word = is_word
        return b"".join(decoded)

    def save(self, path: str) -> None:
        form = {"type": "words", "version": FORMAT, "words": self.words}
        # The default is left out, as in files of older versions.
        form |= {} if self.by == "letters" else {"by": self.by}
        if self.stats is not None:
            form["counts"] = self.stats.counts.tolist()
            form |= {} if self.stats.order is None else {"order": self.stats.order.tolist()}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(form, file)


class _Sample:
    """An even sample of documents with at most _COMPARED words in all.

    Attributes:
      documents: Sampled documents, int32 [words]; words are numbered by `numbers`.
      numbers: Word -> its number, in the order of first occurrence.
    """

    def __init__(self) -> None:
        self.documents: list[np.ndarray] = []
        self.numbers: dict[str, int] = collections.defaultdict(itertools.count().__next__)
        self._words = 0
        self._seen = 0
        self._interval = 1  # number of documents per sampled document

    def add(self, words: Sequence[str]) -> None:
        """Reads the next document."""
        if self._seen % self._interval == 0:
            numbers = map(self.numbers.__getitem__, words[:_COMPARED])
            self.documents.append(np.fromiter(numbers, np.int32, min(len(words), _COMPARED)))
            self._words += len(self.documents[-1])
            while self._words > _COMPARED:  # every other document is dropped, so that the sample stays even
                self.documents, self._interval = self.documents[::2], 2 * self._interval
                self._words = sum(map(len, self.documents))
        self._seen += 1


def build(cap: object, by: object = "letters", *, texts: Iterable[bytes]) -> WordTokenizer:
    """The tokenizer of the spec words(cap, by)."""
    return WordTokenizer.train(sizes(cap, by)[1], texts, str(by))


def sizes(cap: object, by: object = "letters") -> tuple[int, int]:
    """The smallest and the largest possible number of ids of the spec words(cap, by)."""
    specs.lookup(WordTokenizer.SPLITS, str(by), "split of words by")
    return WordTokenizer.SMALLEST, check_size(cap, WordTokenizer.SMALLEST, "words(30000)")


def parse(form: Mapping[str, Any], path: str) -> WordTokenizer:
    """The tokenizer of a JSON object; files of older versions lack the counts, or the order."""
    check_version(form, FORMAT, path)
    words = form.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{path!r} is damaged: `words` is not a list of strings: save it again")
    stats = None
    if form.get("counts") is not None:
        order = None if form.get("order") is None else integers(form, "order", path)
        stats = WordStats(integers(form, "counts", path), order)
    return WordTokenizer(words, stats, str(form.get("by", "letters")))
