"""Reads the documents of a text corpus, chooses those to hold out, tokenises all, and writes both sides to disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpnlp.data.ingest import Candidates, Done, Ingest, nonempty
from hpnlp.data.reading.documents import Document, DocumentReader
from hpnlp.data.reading.files import NotTextError, Progress, to_text
from hpnlp.data.reading.sources import LeftOut, LineCounts, Source
from hpnlp.data.reading.split import NOTHING, Folds, HashRange, HeldOutHashes, hash_range
from hpnlp.data.reading.token_store import Tokens, TokenWriter, remove_files
from hpnlp.types import InputError, Tokenizer

_FORMAT = 3  # version of the files that `TextIngest.write` writes; part of the cache key
# From this number of documents on, text files are not cut, however small the fraction to hold out.
_MIN_WHOLE_DOCUMENTS = 50


@dataclasses.dataclass(frozen=True)
class TextIngest(Ingest[Document]):
    """Sources of a corpus and the options that decide how they are read and split.

    Attributes:
      sources: Text to train on, a part of which is held out unless `heldout_sources` are given.
      heldout_sources: Text to hold out as a whole.
      folds: Parts of the text, of which one is held out in place of a fraction.
      text_field, prompt_field, heldout, heldout_bytes, skip_bad_lines: See `DataConfig`.
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
    def groups(self) -> tuple[tuple[Source, ...], ...]:
        return self.sources, self.heldout_sources

    def options(self) -> list[Any]:
        options = [self.text_field, self.prompt_field, self.heldout, self.heldout_bytes, self.skip_bad_lines]
        return [_FORMAT, options + self.folds.fingerprint()]

    def texts(self, record: Document) -> list[bytes]:
        return [text for text in self.pieces(record) if text]

    def pieces(self, record: Document) -> list[bytes]:
        return [text for text in (record.prompt, record.text) if isinstance(text, bytes)]

    def check_text(self, record: Document) -> None:
        for data, offset in ((record.prompt, 0), (record.text, record.offset)):
            try:
                to_text(data) if isinstance(data, bytes) else None
            except NotTextError as error:
                raise NotTextError(offset + error.offset, error.byte, record.where) from error

    def read_training(self) -> Iterator[tuple[Document, bool]]:
        for file in (file for source in self.sources for file in source.files):
            if file.kind == "tokens":
                raise InputError(
                    f"{file.path} holds token ids, from which no vocabulary can be made: pass data.tokenizer=PATH of "
                    "the tokenizer.json that made them"
                )
        held_out, cut_finely = self.split(None)
        for document in self._documents(self._reader(LeftOut(), None, cut_finely)):
            yield document, held_out.includes(document.name)

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
        left_out, line_counts, candidates, bounds = LeftOut(), LineCounts(), Candidates(), [0]
        done, size = Done("tokenising", self.groups, progress), tokenizer.vocab_size
        with (
            TokenWriter(directory, "train", size) as train,
            TokenWriter(directory, "candidates", size, keep_raw=True) as candidate_writer,
        ):
            for source in (*self.sources, *self.heldout_sources):
                is_heldout = len(bounds) > len(self.sources)
                left_out.merge(source.left_out)
                reader = self._reader(left_out, tokenizer.eos_id, cut_finely and not is_heldout, line_counts)
                framed = self._framed(reader, source, tokenizer)
                for document, ids, skip in nonempty(framed, source, "text", left_out):
                    text = document.text
                    if is_heldout or held_out.includes(document.name):
                        raw = text if isinstance(text, bytes) else tokenizer.decode(text)
                        candidate_writer.add(ids, skip, raw)
                        candidates.add(document.name, len(raw))
                    else:
                        train.add(ids, skip)
                    done.add(len(text) if isinstance(text, bytes) else text.nbytes)
                if not is_heldout:
                    bounds.append(train.tokens)
        has_limit = self.heldout_bytes > 0 and not self.heldout_sources and not self.folds
        stored = Tokens(directory, "candidates", candidate_writer.record())
        with TokenWriter(directory, "heldout", size, keep_raw=True) as heldout:
            for number in candidates.lowest(self.heldout_bytes if has_limit else math.inf):
                heldout.add(stored.document(number), int(stored.skips[number]), stored.raw(number))
        remove_files(directory, "candidates")
        sizes, kept = candidate_writer.record(), heldout.record()
        return {
            "train": train.record(),
            "heldout": kept,
            "aside": {name: sizes[name] - kept[name] for name in ("documents", "tokens", "raw_bytes")},
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
        hashes = self._scan(self._reader(left_out, eos_id, cut_finely=False), enough)
        cut_finely = hashes.count < enough
        if cut_finely:
            hashes = self._scan(self._reader(LeftOut(), eos_id, cut_finely), 1)
        if hashes.has_both(self.heldout):
            return HeldOutHashes(self.heldout), cut_finely
        self._check_count(hashes.count, left_out)
        return HeldOutHashes(math.nextafter(hashes.lowest, 1.0)), cut_finely

    def _split_in_folds(self, left_out: LeftOut, eos_id: int | None) -> tuple[HeldOutHashes, bool]:
        """As `split`, for a part of `folds`."""
        for cut_finely in (False, True):
            reader = self._reader(LeftOut() if cut_finely else left_out, eos_id, cut_finely)
            if held_out := self.folds.held_out(document.name for document in self._documents(reader)):
                return held_out, cut_finely
        raise self.folds.too_few(self.training_path, "documents", left_out.in_brackets())

    def _documents(self, reader: DocumentReader) -> Iterator[Document]:
        return (document for source in self.sources for document in reader.read(source))

    def _scan(self, reader: DocumentReader, enough: int) -> HashRange:
        return hash_range(((document.name, True) for document in self._documents(reader)), self.heldout, enough)

    def _check_count(self, count: int, left_out: LeftOut) -> None:
        """Raises InputError unless there are at least two documents."""
        if count == 0:
            raise InputError(
                f"data.path={self.training_path!r} holds no text{left_out.in_brackets()}: pass one that does"
            )
        if count == 1:
            raise InputError(
                f"data.path={self.training_path!r} holds one document, which cannot be both trained on and held out: add "
                "text, or pass data.heldout_path=PATH with other text to hold out"
            )

    def _reader(
        self, left_out: LeftOut, eos_id: int | None, cut_finely: bool, line_counts: LineCounts | None = None
    ) -> DocumentReader:
        fields = self.text_field, self.prompt_field
        counts = line_counts or LineCounts()
        return DocumentReader(*fields, left_out, eos_id, self.skip_bad_lines, cut_finely, counts)

    def _framed(
        self, reader: DocumentReader, source: Source, tokenizer: Tokenizer
    ) -> Iterator[tuple[Document, np.ndarray, int]]:
        """Documents with their token ids and the number of initial tokens that carry no loss."""
        for document, (prompt, *body) in self.encoded(reader.read(source), tokenizer):
            ids, skip = _frame(prompt, body[0] if body else _check_ids(document, tokenizer), tokenizer, not body)
            if len(ids):
                yield document, ids, skip
            else:
                reader.left_out.add("without tokens", document.where)


def _check_ids(document: Document, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a pre-tokenised document as int32; raises InputError if one is not of the vocabulary."""
    ids = document.text
    assert isinstance(ids, np.ndarray)
    bad = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
    if len(bad):
        raise InputError(
            f"{document.where}: id {ids[bad[0]]} at index {document.offset + bad[0]} is outside the vocabulary of "
            f"{tokenizer.vocab_size}: pass data.tokenizer=PATH of the tokenizer.json that made the array"
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
