"""All faults of text at once, where `stream.prepare` raises the first one: `check_text`; and the form of the result."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from hpnlp.data import stream
from hpnlp.data.config import DataConfig
from hpnlp.data.documents import Document, DocumentReader
from hpnlp.data.files import Progress, ignore_progress
from hpnlp.data.ingest import hash_fraction
from hpnlp.data.records import SKIP, Fields
from hpnlp.data.sources import MAX_COMPARED, LeftOut, Source, described
from hpnlp.types import InputError


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


def reason(where: str, error: InputError) -> str:
    """The part of a message that records with the same fault share.

    Args:
      where: Place of the record.
      error: The error of the record.

    Returns:
      The message without the place, the fix, and remarks in brackets.
    """
    return re.sub(r" \(.*\)", "", str(error).removeprefix(f"{where}: ").partition(f": {SKIP}")[0])


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
    needs_text = config.tokenizer != "bytes"
    fields, left_out = Fields(config.text_field, config.prompt_field), LeftOut()
    reader = _CollectingReader(fields, left_out, None, config.skip_bad_lines or needs_text)
    repeated, first = LeftOut(), {}
    for sources, is_heldout in ((ingest.sources, bool(ingest.heldout_sources)), (ingest.heldout_sources, False)):
        for source in sources:
            left_out.merge(source.left_out)
            for document in reader.read(source):
                side = hash_fraction(document.name) < config.heldout if not ingest.heldout_sources else not is_heldout
                _compare(document, side, first, repeated)
    records = described(reader.faults_of_records, "record", ": ")
    faults = [*(records if not config.skip_bad_lines else ()), *reader.faults_of_files]
    figures = ()
    if not faults:
        try:
            figures = (stream.prepare(config, progress=progress).summary,)
        except InputError as error:
            faults.append(str(error))
    left_out.pop("bad lines", None)  # counted with their reasons
    skipped = records if config.skip_bad_lines else ()
    return Check(tuple(faults), tuple(described(repeated, "document")), (*described(left_out), *skipped), figures)


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
class _CollectingReader(DocumentReader):
    """Collects faults of records and of files, and reads on."""

    faults_of_records: LeftOut = dataclasses.field(default_factory=LeftOut)
    faults_of_files: list[str] = dataclasses.field(default_factory=list)

    def read(self, source: Source) -> Iterator[Document]:
        for file in source.files:
            try:
                yield from super().read(dataclasses.replace(source, files=(file,)))
            except InputError as error:
                self.faults_of_files.append(str(error))

    def _report_bad(self, where: str, error: InputError) -> None:
        self.faults_of_records.add(reason(where, error), where)
