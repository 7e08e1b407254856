"""All faults of text at once, where `stream.prepare` raises the first one: `check_text`; and the form of the result."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hpnlp.data import stream
from hpnlp.data.config import DataConfig
from hpnlp.data.reading.documents import Document, DocumentReader
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.reading.records import SKIP
from hpnlp.data.reading.rows import RecordReader
from hpnlp.data.reading.sources import MAX_COMPARED, LeftOut, Source, described
from hpnlp.data.reading.split import NOTHING, HeldOutHashes
from hpnlp.data.text_ingest import TextIngest
from hpnlp.types import InputError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Check:
    """Faults, remarks and figures of data, as lines with counts and the first places.

    Attributes:
      faults: Faults that stop a training.
      remarks: Properties that may be mistakes, such as duplicates.
      left_out: What is not read, and why.
      figures: Sizes, classes and lengths.
    """

    faults: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Faults:
    """Faults that are collected while data are read.

    Attributes:
      of_records: Reason -> number and places of records.
      of_files: Messages on files.
    """

    of_records: LeftOut = dataclasses.field(default_factory=LeftOut)
    of_files: list[str] = dataclasses.field(default_factory=list)

    def add_record(self, where: str, error: InputError) -> None:
        """Counts a record by its message without the place, the fix, and remarks in brackets."""
        message = str(error).removeprefix(f"{where}: ").partition(f": {SKIP}")[0]
        self.of_records.add(re.sub(r" \(.*\)", "", message), where)

    def read(self, read: Callable[[Source], Iterator[T]], source: Source) -> Iterator[T]:
        """Reads the files of a source, and goes on after a fault of a file."""
        for file in source.files:
            try:
                yield from read(dataclasses.replace(source, files=(file,)))
            except InputError as error:
                self.of_files.append(str(error))

    def check(
        self,
        left_out: LeftOut,
        skips_records: bool,
        faults: Sequence[str],
        remarks: Sequence[str],
        figures: Sequence[str],
    ) -> Check:
        """The result with more faults, in which records that are skipped are no faults."""
        records = described(self.of_records, "record", ": ")
        # Faults of the examples may be consequences of those of files and records, which come first.
        faults = [*self.of_files, *([] if skips_records else records), *faults]
        skipped = records if skips_records else []
        return Check(tuple(faults), tuple(remarks), (*described(left_out), *skipped), tuple(figures))


class CollectingReader(RecordReader[T]):
    """Collects faults of records and of files, and reads on; goes before the class of another reader."""

    faults: Faults

    def read(self, source: Source) -> Iterator[T]:
        return self.faults.read(super().read, source)

    def report_bad(self, where: str, error: InputError, reason: str = "") -> None:
        self.faults.add_record(where, error)


def check_text(config: DataConfig, progress: Progress = ignore_progress) -> Check:
    """Reads the text of a config, and collects what is wrong with it. Text without faults is also tokenised, into the cache.

    Args:
      config: The config.
      progress: Called as `progress(step, bytes_done, bytes_total)` while text is tokenised.

    Returns:
      Faults, remarks and figures.

    Cost: one pass over the text, and that of `stream.prepare`. Memory for MAX_COMPARED documents.
    """
    try:
        ingest = stream.find_sources(config)
    except InputError as error:
        return Check(faults=(str(error),))
    left_out, collected, repeated, first = LeftOut(), Faults(), LeftOut(), {}
    skips_lines = config.skip_bad_lines or config.tokenizer != "bytes"  # other tokenizers read UTF-8 only
    fields = config.text_field, config.prompt_field
    reader = _CollectingDocuments(*fields, left_out, skip_bad_lines=skips_lines, faults=collected)
    held_out = _held_out(ingest)
    for index, source in enumerate([*ingest.sources, *ingest.heldout_sources]):
        left_out.merge(source.left_out)
        for document in reader.read(source):
            is_heldout = index >= len(ingest.sources) or held_out.includes(document.name)
            _compare(document, is_heldout, first, repeated)
    check = collected.check(left_out, config.skip_bad_lines, (), described(repeated, "document"), ())
    if check.faults:
        return check
    try:
        return dataclasses.replace(check, figures=(stream.prepare(config, progress=progress).summary,))
    except InputError as error:
        return dataclasses.replace(check, faults=(str(error),))


def _held_out(ingest: TextIngest) -> HeldOutHashes:
    """Hashes of held-out documents, as far as they are known before faults are corrected."""
    if not ingest.folds:
        return NOTHING if ingest.heldout_sources else HeldOutHashes(ingest.heldout)
    try:
        return ingest.split(None)[0]
    except InputError:  # the fault is reported by the pass over all documents
        return NOTHING


def _compare(document: Document, is_heldout: bool, first: dict[int, tuple[str, bool]], repeated: LeftOut) -> None:
    """Counts a record whose text another one has."""
    if not document.is_record:
        return
    key = hash((document.prompt, document.text))
    if key not in first:
        if len(first) < MAX_COMPARED:
            first[key] = document.where, is_heldout
        return
    where, is_other_heldout = first[key]
    sides = " on the other side of the split" if is_heldout != is_other_heldout else ""
    repeated.add(f"with the text of an earlier one{sides}", f"{document.where} = {where}")


@dataclasses.dataclass(frozen=True)
class _CollectingDocuments(CollectingReader[Document], DocumentReader):
    faults: Faults = dataclasses.field(default_factory=Faults)
