"""One pass over the documents of a corpus: choose those to hold out, tokenise all, and write both sides to disk."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.data import tokenizers
from hpnlp.data.reading.documents import Document, DocumentReader, NotTextError, to_text
from hpnlp.data.reading.files import Progress
from hpnlp.data.reading.records import Fields
from hpnlp.data.reading.sources import LeftOut, LineCounts, Source
from hpnlp.data.reading.split import NOTHING, Folds, HeldOutHashes, hash_fraction
from hpnlp.data.reading.token_store import Tokens, TokenWriter
from hpnlp.types import InputError, Tokenizer

_FORMAT = 3  # version of the files that `Ingest.write` writes; part of the cache key
# Sizes from which a group of documents is tokenised at once, on all cores if the tokenizer supports it.
_GROUP_BYTES = 1 << 20
_GROUP_DOCUMENTS = 512
# From this number of documents on, text files are not cut, however small the fraction to hold out.
_MIN_WHOLE_DOCUMENTS = 50


@dataclasses.dataclass(frozen=True)
class Ingest:
    """Sources of a corpus and the options that decide how they are read and split.

    Attributes:
      sources: Text to train on, a part of which is held out unless `heldout_sources` are given.
      heldout_sources: Text to hold out as a whole.
      text_field: See `DataConfig`.
      prompt_field: See `DataConfig`.
      heldout: See `DataConfig`.
      heldout_bytes: See `DataConfig`.
      skip_bad_lines: See `DataConfig`.
      folds: Parts of the text, of which one is held out in place of a fraction.
    """

    sources: tuple[Source, ...]
    heldout_sources: tuple[Source, ...]
    text_field: str
    prompt_field: str
    heldout: float
    heldout_bytes: int
    skip_bad_lines: bool
    folds: Folds = Folds()

    @property
    def paths(self) -> list[str]:
        """Paths of all files that are read."""
        return [file.path for source in (*self.sources, *self.heldout_sources) for file in source.files]

    def fingerprint(self) -> Any:
        """Lists everything that the result depends on, except the tokenizer and the content of the files.

        Returns:
          A JSON-able value.
        """
        options = [self.text_field, self.prompt_field, self.heldout, self.heldout_bytes, self.skip_bad_lines]
        options += self.folds.fingerprint()
        files = [
            [[source.walked, [[file.path, file.name] for file in source.files]] for source in group]
            for group in (self.sources, self.heldout_sources)
        ]
        return [_FORMAT, options, files]

    def training_texts(self, spec: str, progress: Progress) -> Iterator[bytes]:
        """Reads the text from which a vocabulary is made: the training documents, or an even sample of a larger corpus.

        Args:
          spec: The tokenizer that is trained; see `tokenizers.training_bytes`.
          progress: Called while text is read.

        Yields:
          Prompts and texts.

        Raises:
          InputError: A file cannot be read, holds token ids, or is not UTF-8.
        """
        for file in (file for source in self.sources for file in source.files):
            if file.kind == "tokens":
                raise InputError(
                    f"{file.path} holds token ids, from which no vocabulary can be made: pass data.tokenizer=PATH of "
                    "the tokenizer.json that made them"
                )
        held_out, cut_finely = self.split(None)
        total = _total_bytes(self.sources)
        share = min(1.0, tokenizers.training_bytes(spec) / total)
        done = 0
        reader = self._reader(LeftOut(), None, cut_finely)
        for source in self.sources:
            for document in reader.read(source):
                done += len(document.text)
                progress("counting words", min(done, total), total)
                is_sampled = hash_fraction(f"vocabulary/{document.name}") < share
                if is_sampled and not held_out.includes(document.name):
                    _check_text(document)
                    yield from (text for text in (document.prompt, document.text) if isinstance(text, bytes) and text)

    def write(self, directory: str, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
        """Tokenises all documents and writes them to the files `train.*` and `heldout.*`.

        Documents of `heldout_sources` are all held out, and so is a part of `folds`. Otherwise a document whose `hash_fraction`
        is below the threshold is a candidate, and candidates with the lowest hashes are held out until `heldout_bytes` is
        reached. Other candidates are neither evaluated nor trained on, so that no document changes sides when data is added.

        Args:
          directory: An empty directory.
          tokenizer: The tokenizer.
          progress: Called while text is read.

        Returns:
          A JSON-able record: "train" and "heldout" for `Tokens`, "aside" with the sizes of what is on neither side,
          "bounds" with the number of training tokens before and after each source, "left_out" with a `LeftOut`, and "lines"
          with a `LineCounts`.

        Raises:
          InputError: A file cannot be read or does not suit the tokenizer, or a source holds no text.
        """
        held_out, cut_finely = self.split(tokenizer.eos_id)
        left_out, line_counts = LeftOut(), LineCounts()
        bounds = [0]
        total = _total_bytes([*self.sources, *self.heldout_sources])
        done = 0
        with (
            TokenWriter(directory, "train", tokenizer.vocab_size) as train,
            _Candidates(directory, tokenizer) as candidates,
        ):
            for index, source in enumerate([*self.sources, *self.heldout_sources]):
                is_heldout = index >= len(self.sources)
                left_out.merge(source.left_out)
                reader = self._reader(left_out, tokenizer.eos_id, cut_finely and not is_heldout, line_counts)
                is_empty = True
                for document, ids, skip in _encode_documents(reader, source, tokenizer):
                    is_empty = False
                    if is_heldout or held_out.includes(document.name):
                        candidates.add(document, ids, skip)
                    else:
                        train.add(ids, skip)
                    done += len(document.text) if isinstance(document.text, bytes) else document.text.nbytes
                    progress("tokenising", min(done, total), total)
                if is_empty:
                    raise InputError(f"data: {source.path!r} holds no text{left_out.in_brackets()}: pass one that does")
                if not is_heldout:
                    bounds.append(train.tokens)
        has_limit = self.heldout_bytes > 0 and not self.heldout_sources and not self.folds
        heldout = candidates.write_heldout(float(self.heldout_bytes) if has_limit else math.inf)
        aside = {name: candidates.record()[name] - heldout[name] for name in ("documents", "tokens", "raw_bytes")}
        return {
            "train": train.record(),
            "heldout": heldout,
            "aside": aside,
            "bounds": bounds,
            "left_out": left_out,
            "lines": dataclasses.asdict(line_counts),
        }

    def split(self, eos_id: int | None) -> tuple[HeldOutHashes, bool]:
        """Chooses the hashes of held-out documents, and whether text files are cut finely.

        Documents are kept whole if there are many, or if `heldout` of their number is at least one document. Otherwise text
        files are cut into small pieces that count as documents. The threshold is `heldout` if that leaves text on both sides;
        otherwise it is just above the lowest hash, so that one document is held out. With `folds`, text files are cut if there
        are fewer documents than parts.

        Args:
          eos_id: Token between the documents of files of token ids; None if there are no such files.

        Returns:
          The hashes of the held-out documents of `sources`, and whether text files are cut finely.

        Raises:
          InputError: A file cannot be read, or there are not enough documents.
        """
        if self.heldout_sources:
            return NOTHING, False
        left_out = LeftOut()
        for source in self.sources:
            left_out.merge(source.left_out)
        if self.folds:
            return self._split_in_folds(left_out, eos_id)
        enough = math.ceil(min(_MIN_WHOLE_DOCUMENTS, 1 / self.heldout))
        cut_finely = False
        has_both, count, lowest = self._scan(self._reader(left_out, eos_id, cut_finely), enough)
        if count < enough:
            cut_finely = True
            has_both, count, lowest = self._scan(self._reader(LeftOut(), eos_id, cut_finely), 1)
        if has_both:
            return HeldOutHashes(self.heldout), cut_finely
        self._check_count(count, left_out)
        return HeldOutHashes(math.nextafter(lowest, 1.0)), cut_finely

    def _split_in_folds(self, left_out: LeftOut, eos_id: int | None) -> tuple[HeldOutHashes, bool]:
        """As `split`, for a part of `folds`."""
        for cut_finely in (False, True):
            reader = self._reader(LeftOut() if cut_finely else left_out, eos_id, cut_finely)
            names = (document.name for source in self.sources for document in reader.read(source))
            if held_out := self.folds.held_out(names):
                return held_out, cut_finely
        raise self.folds.too_few(",".join(source.path for source in self.sources), "documents", left_out.in_brackets())

    def _scan(self, reader: DocumentReader, enough: int) -> tuple[bool, int, float]:
        """Reads names until both sides of the split have a document and there are `enough` documents, or until the end.

        Returns whether both sides have a document, the number of documents read, and the lowest hash.
        """
        lowest, highest, count = 1.0, 0.0, 0
        for source in self.sources:
            for document in reader.read(source):
                fraction = hash_fraction(document.name)
                lowest, highest, count = min(lowest, fraction), max(highest, fraction), count + 1
                if count >= enough and lowest < self.heldout <= highest:
                    return True, count, lowest
        return False, count, lowest

    def _check_count(self, count: int, left_out: LeftOut) -> None:
        """Raises InputError unless there are at least two documents."""
        paths = ",".join(source.path for source in self.sources)
        if count == 0:
            raise InputError(f"data.path={paths!r} holds no text{left_out.in_brackets()}: pass one that does")
        if count == 1:
            raise InputError(
                f"data.path={paths!r} holds one document, which cannot be both trained on and held out: add text, or pass "
                "data.heldout_path=PATH with other text to hold out"
            )

    def _reader(
        self, left_out: LeftOut, eos_id: int | None, cut_finely: bool, line_counts: LineCounts | None = None
    ) -> DocumentReader:
        fields = Fields(self.text_field, self.prompt_field)
        return DocumentReader(fields, left_out, eos_id, self.skip_bad_lines, cut_finely, line_counts or LineCounts())


class _Candidates:
    """Documents that may be held out, on disk, with the hash of the name and the size in bytes of each."""

    def __init__(self, directory: str, tokenizer: Tokenizer):
        self._directory = directory
        self._tokenizer = tokenizer
        self._writer = TokenWriter(directory, "candidates", tokenizer.vocab_size, keep_raw=True)
        self._fractions: list[float] = []
        self._sizes: list[int] = []

    def __enter__(self) -> _Candidates:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)

    def add(self, document: Document, ids: np.ndarray, skip: int) -> None:
        """Appends a document; see `TokenWriter.add`."""
        raw = document.text if isinstance(document.text, bytes) else self._tokenizer.decode(document.text)
        self._writer.add(ids, skip, raw)
        self._fractions.append(hash_fraction(document.name))
        self._sizes.append(len(raw))

    def record(self) -> dict[str, Any]:
        """The record of all candidates, for `Tokens`."""
        return self._writer.record()

    def write_heldout(self, max_bytes: float) -> dict[str, Any]:
        """Copies the selected candidates to `heldout.*`, removes the files of the candidates, and returns the record."""
        candidates = Tokens(self._directory, "candidates", self.record())
        with TokenWriter(self._directory, "heldout", self._tokenizer.vocab_size, keep_raw=True) as heldout:
            for i in self._select(max_bytes):
                heldout.add(candidates.document(i), int(candidates.skips[i]), candidates.raw(i))
        for file in os.listdir(self._directory):
            if file.startswith("candidates."):
                os.remove(os.path.join(self._directory, file))
        return heldout.record()

    def _select(self, max_bytes: float) -> list[int]:
        """Indices of the documents with the lowest hashes that stay within `max_bytes`, at least one, in their order."""
        order = np.argsort(np.array(self._fractions), kind="stable")
        sizes = np.array(self._sizes, np.int64)
        count = np.searchsorted(np.cumsum(sizes[order]), max_bytes, "right")
        return np.sort(order[: max(1, count)]).tolist()


def _total_bytes(sources: Sequence[Source]) -> int:
    return max(1, sum(file.text_bytes for source in sources for file in source.files))


def _encode_documents(
    reader: DocumentReader, source: Source, tokenizer: Tokenizer
) -> Iterator[tuple[Document, np.ndarray, int]]:
    """Documents with their token ids and the number of initial tokens that carry no loss."""
    for group in _groups(reader.read(source)):
        texts = [text for document in group for text in (document.prompt, document.text) if isinstance(text, bytes)]
        try:
            encoded = iter(tokenizer.encode_batch(texts))
        except NotTextError:  # lacks the name of the document, which `_check_text` adds
            for document in group:
                _check_text(document)
            raise
        for document in group:
            prompt = next(encoded)
            is_ids = not isinstance(document.text, bytes)
            body = _check_ids(document, tokenizer.vocab_size) if is_ids else next(encoded)
            ids, skip = _frame(prompt, body, tokenizer, is_ids)
            if len(ids):
                yield document, ids, skip
            else:
                reader.left_out.add("without tokens", document.where)


def _groups(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Consecutive documents in groups, so that a tokenizer can encode many at once."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_text(document: Document) -> None:
    """Raises NotTextError with file and offset if `document` is not UTF-8."""
    for data, offset in ((document.prompt, 0), (document.text, document.offset)):
        try:
            to_text(data) if isinstance(data, bytes) else None
        except NotTextError as error:
            raise NotTextError(offset + error.offset, error.byte, document.where) from error


def _check_ids(document: Document, vocab_size: int) -> np.ndarray:
    """The ids of a pre-tokenised document as int32; raises InputError if one is not of the vocabulary."""
    ids = document.text
    assert isinstance(ids, np.ndarray)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise InputError(
            f"{document.where}: id {ids[bad[0]]} at index {document.offset + bad[0]} is outside the vocabulary of "
            f"{vocab_size}: pass data.tokenizer=PATH of the tokenizer.json that made the array"
        )
    return ids.astype(np.int32)


def _frame(prompt: np.ndarray, body: np.ndarray, tokenizer: Tokenizer, is_ids: bool) -> tuple[np.ndarray, int]:
    """Joins bos, prompt, body and eos, and counts the initial tokens without loss.

    bos and eos are left out if the tokenizer has none, or if pre-tokenised data has them already.
    """
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    head = [] if bos is None or (is_ids and body[0] == bos) else [bos]
    tail = [] if eos is None or (is_ids and body[-1] == eos) else [eos]
    ids = np.concatenate([np.array(head, np.int32), prompt, body, np.array(tail, np.int32)])
    return ids, max(1, len(head) + len(prompt))
