"""One pass over the documents of a corpus: split off what is held out, tokenise, and write both to disk."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.data import text
from hpnlp.data.token_store import Tokens, TokenWriter
from hpnlp.data.tokenizers import encode_all
from hpnlp.types import InputError, Tokenizer

Progress = Callable[[str, int, int], None]  # what is done, bytes read, bytes there are

_FORMAT = 3  # of what `write` writes: part of the cache's key
_GROUP_BYTES = 1 << 20
_GROUP_DOCUMENTS = 512
# More text than this changes a vocabulary little, and training one holds what it counts in memory.
_VOCABULARY_BYTES = 1 << 28
# So many documents are split as they are, however small the fraction to be held out.
_MANY = 50


def place(name: str) -> float:
    """A fixed point in [0, 1) for a document's name: which documents are held out depends on nothing else."""
    digest = hashlib.blake2s(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@dataclasses.dataclass(frozen=True)
class Ingest:
    """What is read and how it is split; the fields are those of `DataConfig`."""

    sources: tuple[text.Source, ...]
    heldout_sources: tuple[text.Source, ...]
    text_field: str
    prompt_field: str
    heldout: float
    heldout_bytes: int
    skip_bad_lines: bool

    @property
    def paths(self) -> list[str]:
        """All files that are read."""
        return [file.path for source in (*self.sources, *self.heldout_sources) for file in source.files]

    def fingerprint(self) -> Any:
        """All that the result depends on except the tokenizer and the content of `paths`, JSON-able."""
        options = [self.text_field, self.prompt_field, self.heldout, self.heldout_bytes, self.skip_bad_lines]
        files = [
            [[source.walked, [[file.path, file.name] for file in source.files]] for source in group]
            for group in (self.sources, self.heldout_sources)
        ]
        return [_FORMAT, options, files]

    def training_texts(self, progress: Progress) -> Iterator[bytes]:
        """The text that a vocabulary is counted over: the training documents, or an even sample of a large corpus."""
        for file in (file for source in self.sources for file in source.files):
            if file.kind == "tokens":
                raise InputError(
                    f"{file.path} holds token ids, from which no vocabulary can be made: pass data.tokenizer=PATH of "
                    "the tokenizer.json that made them"
                )
        cut, is_fine = self._split(None)
        total = _size(self.sources)
        share = min(1.0, _VOCABULARY_BYTES / total)
        done = 0
        for source in self.sources:
            for document in self._documents(source, None, text.LeftOut(), is_fine):
                done += len(document.text)
                progress("counting words", min(done, total), total)
                if place(document.name) >= cut and place(f"vocabulary/{document.name}") < share:
                    _check_text(document)
                    yield from (part for part in (document.prompt, document.text) if isinstance(part, bytes) and part)

    def write(self, directory: str, tokenizer: Tokenizer, progress: Progress) -> dict[str, Any]:
        """Writes `train.*` and `heldout.*` to `directory` and returns the record that reads them.

        The documents of `heldout_sources` are all held out. Otherwise those are whose `place` is under the fraction,
        and of these the lowest ones are kept for evaluation until `heldout_bytes` is reached: what lies over the cap is
        neither evaluated nor trained on, so that no document changes sides when data is added.
        """
        cut, is_fine = self._split(tokenizer.eos_id)
        left_out = text.LeftOut()
        bounds, places, sizes = [0], [], []
        sources = [(source, False) for source in self.sources] + [(source, True) for source in self.heldout_sources]
        total = _size([source for source, _ in sources])
        done = 0
        with (
            TokenWriter(directory, "train", tokenizer.vocab_size) as train,
            TokenWriter(directory, "candidates", tokenizer.vocab_size, keep_raw=True) as candidates,
        ):
            for source, is_heldout in sources:
                left_out.merge(source.left_out)
                found = 0
                for document, ids, skip in self._encoded(source, tokenizer, left_out, is_fine and not is_heldout):
                    found += 1
                    if is_heldout or place(document.name) < cut:
                        raw = document.text if isinstance(document.text, bytes) else tokenizer.decode(document.text)
                        candidates.add(ids, skip, raw)
                        places.append(place(document.name))
                        sizes.append(len(raw))
                    else:
                        train.add(ids, skip)
                    done += len(document.text) if isinstance(document.text, bytes) else document.text.nbytes
                    progress("tokenising", min(done, total), total)
                if not found:
                    but = f" (left out: {left_out})" if left_out else ""
                    raise InputError(f"data: {source.path!r} holds no text{but}: pass one that does")
                if not is_heldout:
                    bounds.append(train.tokens)
        cap = math.inf if self.heldout_sources or not self.heldout_bytes else float(self.heldout_bytes)
        kept = _lowest(np.array(places), np.array(sizes, np.int64), cap)
        heldout = _keep(directory, candidates.record(), kept, tokenizer.vocab_size)
        aside = {name: candidates.record()[name] - heldout[name] for name in ("documents", "tokens", "raw_bytes")}
        return {"train": train.record(), "heldout": heldout, "aside": aside, "bounds": bounds, "left_out": left_out}

    def _split(self, eos_id: int | None) -> tuple[float, bool]:
        """The `place` under which a document is held out, and whether text files are cut finely.

        Documents are taken whole where the fraction of them is one or more, or where there are many. Otherwise text files are
        cut into small pieces, which count as documents. The place is the fraction where that leaves text on both sides; else it
        is just over the lowest place, so that one document is held out. Reads no further than necessary to find out.
        """
        if self.heldout_sources:
            return 0.0, False
        enough = min(_MANY, 1 / self.heldout)
        left_out = text.LeftOut()
        for source in self.sources:
            left_out.merge(source.left_out)
        lowest, is_fine = 1.0, False
        for is_fine in (False, True):
            lowest, highest, count = 1.0, 0.0, 0
            for source in self.sources:
                for document in self._documents(source, eos_id, text.LeftOut() if is_fine else left_out, is_fine):
                    here = place(document.name)
                    lowest, highest, count = min(lowest, here), max(highest, here), count + 1
                    if lowest < self.heldout <= highest and (is_fine or count >= enough):
                        return self.heldout, is_fine
            if count >= enough:
                break
        self._check_count(count, left_out)
        return math.nextafter(lowest, 1.0), is_fine

    def _check_count(self, count: int, left_out: text.LeftOut) -> None:
        paths = ",".join(source.path for source in self.sources)
        if count == 0:
            raise InputError(
                f"data.path={paths!r} holds no text{f' (left out: {left_out})' if left_out else ''}: pass one that does"
            )
        if count == 1:
            raise InputError(
                f"data.path={paths!r} holds one document, which cannot be both trained on and held out: add text, or pass "
                "data.heldout_path=PATH with other text to hold out"
            )

    def _documents(
        self, source: text.Source, eos_id: int | None, left_out: text.LeftOut, is_fine: bool
    ) -> Iterator[text.Document]:
        return text.documents(
            source,
            text_field=self.text_field,
            prompt_field=self.prompt_field,
            eos_id=eos_id,
            left_out=left_out,
            skip_bad_lines=self.skip_bad_lines,
            cut_finely=is_fine,
        )

    def _encoded(
        self, source: text.Source, tokenizer: Tokenizer, left_out: text.LeftOut, is_fine: bool
    ) -> Iterator[tuple[text.Document, np.ndarray, int]]:
        """Documents with their tokens, and how many of the first ones carry no loss."""
        for group in _groups(self._documents(source, tokenizer.eos_id, left_out, is_fine)):
            parts = [part for document in group for part in (document.prompt, document.text) if isinstance(part, bytes)]
            try:
                encoded = iter(encode_all(tokenizer, parts))
            except text.NotTextError:
                for document in group:
                    _check_text(document)
                raise
            for document in group:
                prompt = next(encoded)
                is_ids = not isinstance(document.text, bytes)
                body = _check_ids(document, tokenizer.vocab_size) if is_ids else next(encoded)
                ids, skip = _framed(prompt, body, tokenizer, is_ids)
                if len(ids):
                    yield document, ids, skip
                else:
                    left_out.add("without tokens", document.where)


def _size(sources: Sequence[text.Source]) -> int:
    return max(1, sum(file.text_bytes for source in sources for file in source.files))


def _groups(documents: Iterator[text.Document]) -> Iterator[list[text.Document]]:
    """Documents in groups, so that a tokenizer can work on many at once."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP_BYTES or len(group) >= _GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _check_text(document: text.Document) -> None:
    """Raises text.NotTextError with file and place where `document` is not UTF-8."""
    for part, offset in ((document.prompt, 0), (document.text, document.offset)):
        try:
            text.to_text(part) if isinstance(part, bytes) else None
        except text.NotTextError as error:
            raise text.NotTextError(offset + error.offset, error.byte, document.where) from error


def _check_ids(document: text.Document, vocab_size: int) -> np.ndarray:
    ids = document.text
    assert isinstance(ids, np.ndarray)
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise InputError(
            f"{document.where}: id {ids[bad[0]]} at index {document.offset + bad[0]} is outside the vocabulary of "
            f"{vocab_size}: pass data.tokenizer=PATH of the tokenizer.json that made the array"
        )
    return ids.astype(np.int32)


def _framed(prompt: np.ndarray, body: np.ndarray, tokenizer: Tokenizer, is_ids: bool) -> tuple[np.ndarray, int]:
    """bos + prompt + body + eos, where the tokenizer has these and pre-tokenised data has not; and its skip."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    head = [] if bos is None or (is_ids and body[0] == bos) else [bos]
    tail = [] if eos is None or (is_ids and body[-1] == eos) else [eos]
    ids = np.concatenate([np.array(head, np.int32), prompt, body, np.array(tail, np.int32)])
    return ids, max(1, len(head) + len(prompt))


def _lowest(places: np.ndarray, sizes: np.ndarray, cap: float) -> list[int]:
    """The documents of lowest place that together stay within `cap` bytes, at least one, in their own order."""
    order = np.argsort(places, kind="stable")
    within = np.searchsorted(np.cumsum(sizes[order]), cap, "right")
    return np.sort(order[: max(1, within)]).tolist()


def _keep(directory: str, record: dict[str, Any], kept: list[int], vocab_size: int) -> dict[str, Any]:
    """Copies the documents `kept` from `candidates.*` to `heldout.*` and removes the former."""
    candidates = Tokens(directory, "candidates", record)
    with TokenWriter(directory, "heldout", vocab_size, keep_raw=True) as heldout:
        for i in kept:
            heldout.add(candidates.document(i), int(candidates.skips[i]), candidates.raw(i))
    for file in os.listdir(directory):
        if file.startswith("candidates."):
            os.remove(os.path.join(directory, file))
    return heldout.record()
