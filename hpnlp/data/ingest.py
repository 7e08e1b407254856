"""One pass over data of any kind: tokenise all records, and write each to its side of the split.

A record is a document of a text corpus (`text_ingest.TextIngest`) or a labelled example (`examples.ingest.ExampleIngest`).
`prepared` finds the result in the cache, or makes it.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from hpnlp.data import tokenizers
from hpnlp.data.reading import token_store
from hpnlp.data.reading.digest import Snapshot
from hpnlp.data.reading.files import NotTextError, Progress
from hpnlp.data.reading.sources import LeftOut, Source
from hpnlp.data.reading.split import hash_fraction
from hpnlp.types import InputError, JSONValue, Tokenizer

# Sizes from which a group of records is tokenised at once, on all cores if the tokenizer supports it.
_GROUP_BYTES = 1 << 20
_GROUP_RECORDS = 512


@runtime_checkable
class IngestRecord(Protocol):
    """A document or an example, with the name by which it is held out or not, and its place for error messages."""

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> str: ...


R = TypeVar("R", bound=IngestRecord)
T = TypeVar("T")


class Ingest(abc.ABC, Generic[R]):
    """Sources of data and the options that decide how they are read and split."""

    @property
    @abc.abstractmethod
    def groups(self) -> tuple[tuple[Source, ...], ...]:
        """Sources to train on, and then sources of each set of which all is scored."""

    @abc.abstractmethod
    def options(self) -> list[Any]:
        """Everything that the result depends on, except the tokenizer and the files; JSON-able."""

    @abc.abstractmethod
    def read_training(self) -> Iterator[tuple[R, bool]]:
        """Reads the records of the training sources, each with whether it is held out."""

    @abc.abstractmethod
    def texts(self, record: R) -> list[bytes]:
        """Texts of a record, from which a vocabulary is made."""

    @abc.abstractmethod
    def pieces(self, record: R) -> list[bytes]:
        """Texts of a record to tokenise one by one."""

    @abc.abstractmethod
    def write(self, directory: str, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
        """Tokenises all records, writes them to an empty directory, and returns a JSON-able record of the files."""

    def check_text(self, record: R) -> None:
        """Raises NotTextError with the record's place if a text is not UTF-8."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files that are read."""
        return [file.path for sources in self.groups for source in sources for file in source.files]

    @property
    def training_path(self) -> str:
        """The training sources as in `data.path`, for messages."""
        return ",".join(source.path for source in self.groups[0])

    def fingerprint(self) -> list[Any]:
        """Everything that the result depends on, except the tokenizer and the content of the files; JSON-able."""
        files = [
            [[source.walked, [[file.path, file.name] for file in source.files]] for source in sources]
            for sources in self.groups
        ]
        return [*self.options(), files]

    def training_texts(self, spec: str, progress: Progress) -> Iterator[bytes]:
        """Reads the text from which a vocabulary is made: the training records, or an even sample if there is more.

        Args:
          spec: The tokenizer that is trained; see `tokenizers.training_bytes`.
          progress: Called while text is read.

        Yields:
          Texts of records.

        Raises:
          InputError: A file cannot be read or holds an invalid record.
        """
        done = Done("counting words", self.groups[:1], progress)
        share = min(1.0, tokenizers.training_bytes(spec) / done.total)
        for record, is_heldout in self.read_training():
            texts = self.texts(record)
            done.add(sum(map(len, texts)))
            if not is_heldout and hash_fraction(f"vocabulary/{record.name}") < share:
                self.check_text(record)
                yield from texts

    def encoded(self, records: Iterable[R], tokenizer: Tokenizer) -> Iterator[tuple[R, list[np.ndarray]]]:
        """Records with the token ids of their `pieces`; many are tokenised at once."""
        for group in _groups((record, self.pieces(record)) for record in records):
            try:
                ids = iter(tokenizer.encode_batch([piece for _, pieces in group for piece in pieces]))
            except NotTextError:  # lacks the place of the record
                for record, _ in group:
                    self.check_text(record)
                raise
            for record, pieces in group:
                yield record, [next(ids) for _ in pieces]


def nonempty(items: Iterator[T], source: Source, noun: str, left_out: LeftOut) -> Iterator[T]:
    """Yields what was read of a source; raises InputError if there is nothing."""
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise InputError(f"data: {source.path!r} holds no {noun}{left_out.in_brackets()}: pass one that does")


def _groups(records: Iterator[tuple[R, list[bytes]]]) -> Iterator[list[tuple[R, list[bytes]]]]:
    """Consecutive records in groups, so that a tokenizer can encode many at once."""
    group, size = [], 0
    for record, pieces in records:
        group.append((record, pieces))
        size += sum(map(len, pieces))
        if size >= _GROUP_BYTES or len(group) >= _GROUP_RECORDS:
            yield group
            group, size = [], 0
    if group:
        yield group


class Done:
    """Reports the progress of reading sources, in bytes of their text."""

    def __init__(self, step: str, groups: Iterable[Iterable[Source]], progress: Progress):
        self.total = max(1, sum(source.text_bytes for group in groups for source in group))
        self._step, self._progress, self._done = step, progress, 0

    def add(self, size: int) -> None:
        """Counts bytes that are read."""
        self._done += size
        self._progress(self._step, min(self._done, self.total), self.total)


class Candidates:
    """Hashes of the names of records that may be held out, in the order in which the records are stored."""

    def __init__(self) -> None:
        self._fractions: list[float] = []
        self._sizes: list[int] = []

    def add(self, name: str, size: int = 1) -> float:
        """Appends a record, and returns its hash."""
        self._fractions.append(hash_fraction(name))
        self._sizes.append(size)
        return self._fractions[-1]

    def hashes(self, numbers: Sequence[int]) -> np.ndarray:
        """The hashes of records with these numbers, float64 [n]; equal for equal names."""
        return np.array(self._fractions, np.float64)[np.array(numbers, np.int64)]

    def lowest(self, limit: float | int, known: Sequence[int] | None = None) -> list[int]:
        """Numbers, ascending, of the records with the lowest hashes whose sizes add up to at most `limit`; at least one record.

        `known` are the numbers to choose from, ascending; None for all.
        """
        numbers = np.array(range(len(self._sizes)) if known is None else known, np.int64)
        order = numbers[np.argsort(np.array(self._fractions, np.float64)[numbers], kind="stable")]
        count = np.searchsorted(np.cumsum(np.array(self._sizes, np.int64)[order]), limit, "right")
        return np.sort(order[: max(1, count)]).tolist()


def prepared(
    ingest: Ingest[Any],
    spec: str,
    tokenizer: Tokenizer | None,
    root: str,
    prefix: str,
    progress: Progress,
    labels: Sequence[str] | None = None,
) -> tuple[Tokenizer, str, dict[str, Any], bool]:
    """Tokenises the data of an ingest, or finds the result in the cache.

    Args:
      ingest: The sources and their options.
      spec: The tokenizer to train if `tokenizer` is None.
      tokenizer: The tokenizer.
      root: Directory of the cache.
      prefix: First part of the entry's name.
      progress: Called while files are hashed and read.
      labels: Names of the only classes that labels may have; None to find them.

    Returns:
      `(tokenizer, directory of the entry, record of Ingest.write, whether the cache held the entry)`.

    Raises:
      InputError: The data or the cache is invalid, or a file changes while it is read.
    """
    snapshot = Snapshot(ingest.paths)
    content = [ingest.fingerprint(), snapshot.digest(root, progress)]
    tokenizer = tokenizer or _trained_tokenizer(spec, ingest.training_texts(spec, progress), root, content, snapshot)
    is_cached = True

    def write(directory: str) -> dict[str, Any]:
        nonlocal is_cached
        is_cached = False
        record = ingest.write(directory, tokenizer, progress)
        snapshot.check()
        return record

    key = [content, tokenizers.tokenizer_digest(tokenizer)]
    name = f"{prefix}-{token_store.json_hash(key)}"
    # The classes of a run that is resumed are mostly those that its data have by themselves.
    if labels is not None and (token_store.find(root, name) or {}).get("labels") != list(labels):
        name = f"{prefix}-{token_store.json_hash([*key, list(labels)])}"
    directory, record = token_store.cached(root, name, write)
    return tokenizer, directory, record, is_cached


def _trained_tokenizer(
    spec: str, texts: Iterable[bytes], root: str, content: JSONValue, snapshot: Snapshot
) -> Tokenizer:
    """Trains a tokenizer on texts, or finds it in the cache under the key `content` of all text that is read."""

    def write(directory: str) -> dict[str, Any]:
        built = tokenizers.build(spec, texts)
        built.save(os.path.join(directory, "tokenizer.json"))
        snapshot.check()
        return {}

    key = token_store.json_hash([tokenizers.TRAINING_VERSION, spec, content])
    directory, _ = token_store.cached(root, f"tokenizer-{key}", write)
    return tokenizers.load(directory)
