"""All faults of labelled examples at once, where `prepare_examples` raises the first one: `check_examples`."""

from __future__ import annotations

import dataclasses
import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any

from hpnlp.data import tokenizers
from hpnlp.data.check import Check, CollectingReader, Faults
from hpnlp.data.examples.checks.examination import Examination
from hpnlp.data.examples.config import ExampleConfig
from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.ingest import ExampleIngest
from hpnlp.data.examples.labels import ClassIndex
from hpnlp.data.examples.prepare import find_sources
from hpnlp.data.reading import token_store
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.reading.rows import Row, RowReader
from hpnlp.data.reading.sources import LeftOut, LineCounts
from hpnlp.types import InputError, Tokenizer


def check_examples(
    config: ExampleConfig, progress: Progress = ignore_progress, labels: Sequence[str] | None = None
) -> Check:
    """Reads, splits and tokenises the examples of a config, and collects what is wrong with them.

    Args:
      config: The config.
      progress: Called as `progress(step, bytes_done, bytes_total)` while examples are read.
      labels: As for `prepare_examples`.

    Returns:
      Faults, remarks and figures. Nothing is added to the cache.

    Raises:
      InputError: The temporary files cannot be written.

    Cost: that of `prepare_examples`. Memory for the texts that are compared, see `sources.MAX_COMPARED`.
    """
    root = token_store.cache_root(config.cache)
    try:
        ingest = _CollectingIngest.of(find_sources(config, root, labels))
    except InputError as error:
        return Check(faults=(str(error),))
    faults: list[str] = []
    summary: tuple[str, ...] = ()
    unlabelled = 0
    try:
        os.makedirs(root, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as directory:
            try:
                texts = (
                    ingest.training_texts(config.tokenizer, progress) if tokenizers.is_trained(config.tokenizer) else ()
                )
                tokenizer = tokenizers.build(config.tokenizer, texts)
                record = ingest.write(directory, tokenizer, progress, ingest.examination)
            except InputError as error:
                faults.append(_without_counts(error))
                ingest.read_all()
            else:
                unlabelled = record["unlabelled"]
                summary = _summary(config, tokenizer, directory, record, faults)
    except OSError as error:
        raise InputError(f"cannot write temporary files under {root!r} ({error}): pass another data.cache") from error
    examination = ingest.examination
    if not config.fold_labels:
        fix = "write the label the same way everywhere, or pass data.fold_labels=True"
        faults += [f"a label with and without blanks: {line}: {fix}" for line in examination.blank_variants()]
    remarks = examination.remarks(ingest.heldout_limit)
    if unlabelled:
        remarks.append(f"{unlabelled:,} training examples have no label: they need a teacher, distill.teacher=RUN")
    return ingest.faults.check(examination.left_out, config.skip_bad_lines, faults, remarks, summary)


def _without_counts(error: InputError) -> str:
    """Removes the counts of left-out records from a message, because the check prints them separately."""
    return re.sub(r" \(left out: .*\)", "", str(error))


def _summary(
    config: ExampleConfig, tokenizer: Tokenizer, directory: str, record: dict[str, Any], faults: list[str]
) -> tuple[str, ...]:
    """Lines with sizes, classes, lengths and padding; where the config does not fit the examples, a fault is added."""
    try:
        examples = Examples(config, tokenizer, directory, record | {"left_out": {}, "remarks": []})
    except InputError as error:
        faults.append(_without_counts(error))
        return ()
    return tuple(examples.summary.splitlines())


@dataclasses.dataclass(frozen=True)
class _CollectingIngest(ExampleIngest):
    """Collects faults of the examples that are written, and goes on."""

    examination: Examination = dataclasses.field(default_factory=Examination)
    faults: Faults = dataclasses.field(default_factory=Faults)

    @classmethod
    def of(cls, ingest: ExampleIngest) -> _CollectingIngest:
        """An ingest of the same sources."""
        return cls(**vars(ingest), examination=Examination(ingest.fold_labels))

    def reader(self, left_out: LeftOut, has_groups: bool = True, line_counts: LineCounts | None = None) -> RowReader:
        """A reader that collects faults in the pass of the examination only: other passes read the same records."""
        reader = super().reader(left_out, has_groups, line_counts)
        return _CollectingRows(
            **vars(reader), faults=self.faults if left_out is self.examination.left_out else Faults()
        )

    def class_index(self) -> ClassIndex:
        return _LenientClassIndex(self.labels, self.fold_labels)

    def read_all(self) -> None:
        """Collects the faults of all records, after `write` has stopped early."""
        left_out = self.examination.left_out
        for collected in (self.faults.of_records, self.faults.of_files, left_out):
            collected.clear()
        for group in (self.train, self.heldout, self.challenge):
            for source in group:
                left_out.merge(source.left_out)
                for _ in self.reader(left_out, has_groups=group is self.train).read(source):
                    pass


class _LenientClassIndex(ClassIndex):
    """Accepts labels that differ in blanks around them, which an `Examination` lists."""

    def _check_written(self, name: str, label: str, where: str) -> None:
        self._written.setdefault(name, (label, where))


@dataclasses.dataclass(frozen=True)
class _CollectingRows(CollectingReader[Row], RowReader):
    faults: Faults = dataclasses.field(default_factory=Faults)
