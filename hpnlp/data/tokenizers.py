"""Text to ids and back: bytes, words, and byte-pair encoding through the `tokenizers` package (extra `hf`).

`build` makes a tokenizer from a spec string, `load` reads one back; both give a `hpnlp.types.Tokenizer`. Bytes and
words are saved in a small JSON form of our own; everything else is Hugging Face's `tokenizer.json`: see `huggingface`.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from hpnlp import spec as specs
from hpnlp.data.huggingface import HFTokenizer
from hpnlp.data.prompt import prompt_bytes, unknown_parts, with_bos
from hpnlp.data.text import to_text
from hpnlp.data.word_similarity import similar_order
from hpnlp.ops.softmax.word_order import checked_order
from hpnlp.types import InputError, Tokenizer, WordStats

_FORMAT = 1
MADE = 3  # how a vocabulary is made: part of the cache's key
# Which words are similar is seen by at most so many pieces of text, which are held in memory.
_COMPARED = 1 << 23
# Of ids: 16 times the largest vocabulary published, and below what a trainer cannot allocate.
_LARGEST = 1 << 24


class ByteTokenizer:
    """The 256 byte values, bos, eos, pad and five reserved ids: 264 in all, so that a table divides over 8 devices."""

    vocab_size: int = 264
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id: int = 258
    lossless: bool = True
    stats: WordStats | None = None

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        return with_bos(self.encode(prompt_bytes(text)), self.bos_id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes()

    def save(self, path: str) -> None:
        _write_json(path, {"type": "bytes", "version": _FORMAT})


class WordTokenizer:
    """Words, by an entry of SPLITS; what is not in the vocabulary becomes `<unk>`.

    A single space between two words has no token of its own: decode puts it back. Where words never touch (by="letters") decode
    of a whole text is exact up to `<unk>`; by="whitespace" gives single spaces for whatever separated words. The pieces of a
    split text do not decode to pieces of it: decode from the start.
    """

    SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
    SMALLEST = len(SPECIAL) + 1
    # How text falls into words -> (all of them, those that a space was between).
    SPLITS: ClassVar[dict[str, tuple[re.Pattern[str], re.Pattern[str]]]] = {
        # Runs of letters and digits, runs of whitespace, and single marks.
        "letters": (re.compile(r"(?<=\w) (?=\w)|(\w+|\s+|[^\w\s])"), re.compile(r"\w")),
        "whitespace": (re.compile(r"\S+"), re.compile(r"")),
    }

    lossless: bool = False

    def __init__(self, words: Sequence[str], stats: WordStats | None = None, by: str = "letters"):
        """words: the vocabulary without special tokens, by falling frequency, which log-uniform samplers expect.

        stats: of all ids, special ones first, in the text that the vocabulary was made of. by: an entry of SPLITS.
        """
        self.by = by
        self._pieces, spaced = specs.lookup(self.SPLITS, by, "split of words by")
        self.words = tuple(words)
        self.stats: WordStats | None = stats
        known = (*self.SPECIAL, *self.words)
        if stats is not None and stats.counts.shape != (len(known),):
            raise InputError(
                f"{stats.counts.size} counts for {len(self.words)} words: expected one a word, after {len(self.SPECIAL)} of "
                "special tokens"
            )
        if stats is not None and stats.order is not None:
            checked_order(stats.order, len(known))
        if len(set(known)) != len(known):
            raise InputError("the words of a tokenizer must differ from each other")
        # A text that writes `<eos>` means the characters: special ids are never of text.
        self._ids = {word: i for i, word in enumerate(known) if i >= len(self.SPECIAL)}
        self._spoken = [b"", b"<unk>", b"", b"", *(word.encode("utf-8", "surrogateescape") for word in self.words)]
        self._is_word = [False, True, False, False, *(spaced.match(word) is not None for word in self.words)]
        self.vocab_size: int = len(known)
        self.pad_id: int = 0
        self.unk_id: int = 1
        self.bos_id: int | None = 2
        self.eos_id: int | None = 3

    @classmethod
    def train(cls, cap: int, texts: Iterable[bytes], by: str = "letters") -> WordTokenizer:
        """The `cap` (special tokens included) most frequent pieces of `texts`; ties go by the alphabet.

        Cost: beside the counting, some seconds and some 0.1 ms a word to see which words are similar, by up to 8 million
        pieces of documents from all of the text.
        """
        counts: collections.Counter[str] = collections.Counter()
        numbers: dict[str, int] = {}  # of words as they come
        documents, numbered, size, every = 0, [], 0, 1
        split = cls((), by=by)._split
        for text in texts:
            pieces = split(text)
            counts.update(pieces)
            if documents % every == 0:
                ids = (numbers.setdefault(piece, len(numbers)) for piece in pieces[:_COMPARED])
                numbered.append(np.fromiter(ids, np.int32, min(len(pieces), _COMPARED)))
                size += len(numbered[-1])
                while size > _COMPARED:  # every other document goes, so that what stays is of all the text
                    numbered, every = numbered[::2], 2 * every
                    size = sum(map(len, numbered))
            documents += 1
        ranked = sorted(counts.keys() - set(cls.SPECIAL), key=lambda word: (-counts[word], word))
        kept = ranked[: cap - len(cls.SPECIAL)]
        unknown = counts.total() - sum(counts[word] for word in kept)
        made = cls(kept, by=by)
        ids = np.array([made._ids.get(word, made.unk_id) for word in numbers], np.int32)
        order = similar_order([ids[document] for document in numbered], made.vocab_size)
        occurs = np.array([0, unknown, documents, documents, *(counts[word] for word in kept)], np.int64)
        made.stats = WordStats(occurs, order)
        return made

    def _split(self, text: bytes) -> list[str]:
        return [piece for piece in self._pieces.findall(to_text(text)) if piece]

    def encode(self, text: bytes) -> np.ndarray:
        pieces = self._split(text)
        return np.fromiter((self._ids.get(piece, self.unk_id) for piece in pieces), np.int32, len(pieces))

    def encode_prompt(self, text: str) -> np.ndarray:
        data = prompt_bytes(text)
        missing = [piece for piece in self._split(data) if piece not in self._ids]
        if missing:
            raise unknown_parts(missing, self.vocab_size)
        return with_bos(self.encode(data), self.bos_id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        parts, after_word = [], False
        for i in np.asarray(ids, np.int64).tolist():
            is_word = i < self.vocab_size and self._is_word[i]
            if is_word and after_word:
                parts.append(b" ")
            parts.append(self._spoken[i] if i < self.vocab_size else b"")
            after_word = is_word
        return b"".join(parts)

    def save(self, path: str) -> None:
        form = {"type": "words", "version": _FORMAT, "words": self.words}
        form |= {} if self.by == "letters" else {"by": self.by}  # files of before say nothing of it
        if self.stats is not None:
            form["counts"] = self.stats.counts.tolist()
            form |= {} if self.stats.order is None else {"order": self.stats.order.tolist()}
        _write_json(path, form)


def _write_json(path: str, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def _size(value: object, least: int, example: str) -> int:
    if not isinstance(value, int) or not least <= value <= _LARGEST:
        raise InputError(f"tokenizer size {value!r}: expected a number of ids, {least} to {_LARGEST}, as in {example}")
    return value


TOKENIZERS = {
    "bytes": lambda texts: ByteTokenizer(),
    "words": lambda cap, by="letters", *, texts: WordTokenizer.train(_words(cap, by)[1], texts, str(by)),
    "bpe": lambda size, texts: HFTokenizer.train(_pairs(size)[1], texts),
}


def _words(cap: Any, by: Any = "letters") -> tuple[int, int]:
    specs.lookup(WordTokenizer.SPLITS, str(by), "split of words by")
    return WordTokenizer.SMALLEST, _size(cap, WordTokenizer.SMALLEST, "words(30000)")


def _pairs(size: Any) -> tuple[int, int]:
    return HFTokenizer.SMALLEST, _size(size, HFTokenizer.SMALLEST, "bpe(8192)")


# Of those that are trained, how many ids they have, at least and at most, by their arguments.
_TRAINED = {"words": _words, "bpe": _pairs}


def is_trained(spec: str) -> bool:
    """True where `build(spec, texts)` reads the texts."""
    return specs.is_name(spec) and specs.parse_one(spec, "data.tokenizer").name in _TRAINED


def sizes(spec: str) -> tuple[int, int]:
    """How many ids the tokenizer that `spec` names has, at least and at most, whatever it is trained on.

    Raises InputError as `build`, but for the texts.
    """
    if is_trained(spec):
        return specs.build(specs.parse_one(spec, "data.tokenizer"), _TRAINED, "tokenizer")
    size = build(spec).vocab_size
    return size, size


def build(spec: str, texts: Iterable[bytes] = ()) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", "words(30000)", "words(30000, by=whitespace)", "bpe(8192)", or the
    path of a tokenizer.json.

    texts: what the vocabulary is counted over; read once, and only where `is_trained(spec)`. The result depends on
    nothing but `spec` and `texts`. Raises InputError for an unknown name, a wrong argument, or text that is not UTF-8.
    """
    if not specs.is_name(spec):
        return load(spec)
    return specs.build(specs.parse_one(spec, "data.tokenizer"), TOKENIZERS, "tokenizer", texts=texts)


def load(path: str) -> Tokenizer:
    """Reads a `tokenizer.json` (or the one in the directory `path`) that one of ours or Hugging Face's has saved."""
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    if "\0" in path or (os.path.exists(path) and not os.path.isfile(path)):  # a FIFO or a device may have no end
        raise InputError(f"the tokenizer {path!r} is not a regular file: pass the path of a tokenizer.json")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        form = json.loads(text)
    except OSError as error:
        raise InputError(
            f"cannot read the tokenizer {path!r}: {error.strerror}: pass the path of a tokenizer.json"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path!r} is no tokenizer.json: it is binary, not JSON: pass another path") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path!r} is no tokenizer.json: it is not JSON ({error}): save or download it again"
        ) from error
    if isinstance(form, dict) and "model" in form:
        return HFTokenizer.parse(text, path)
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in ("bytes", "words"):
        raise InputError(f"{path!r} is no tokenizer.json: it has neither a model nor a known type: pass another path")
    if form.get("version") != _FORMAT:
        raise InputError(f"{path!r} has format version {form.get('version')!r}, expected {_FORMAT}: update hpnlp")
    if kind == "bytes":
        return ByteTokenizer()
    words = form.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError(f"{path!r} is damaged: `words` is not a list of strings: save it again")
    stats = None
    if form.get("counts") is not None:  # files of before have none, or no order
        order = None if form.get("order") is None else _whole(form["order"], "order", path)
        stats = WordStats(_whole(form["counts"], "counts", path), order)
    return WordTokenizer(words, stats, str(form.get("by", "letters")))


def _whole(value: Any, name: str, path: str) -> np.ndarray:
    if not (isinstance(value, list) and all(isinstance(n, int) and abs(n) < 2**63 for n in value)):
        raise InputError(f"{path!r} is damaged: `{name}` is not a list of whole numbers: save it again")
    return np.array(value, np.int64)


def save_whole(tokenizer: Tokenizer, directory: str) -> None:
    """Saves `tokenizer` in `directory` so that a kill or a full disk leaves no half of it: what is there is complete."""
    fresh = os.path.join(directory, "tokenizer.tmp")
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed here
    os.mkdir(fresh)
    try:
        tokenizer.save(os.path.join(fresh, "tokenizer.json"))
        # The last is tokenizer.json, by which readers know that the others are there.
        for name in sorted(os.listdir(fresh), key=lambda name: name == "tokenizer.json"):
            os.replace(os.path.join(fresh, name), os.path.join(directory, name))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def encode_all(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[np.ndarray]:
    """`tokenizer.encode` of every text, together where the tokenizer can."""
    if isinstance(tokenizer, HFTokenizer):
        return tokenizer.encode_batch(texts)
    return [tokenizer.encode(text) for text in texts]
