"""Reads labelled examples, chooses those to hold out, numbers the classes, tokenises the texts and writes them to disk."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data import tokenizers
from hpnlp.data.examples.checks.examination import Examination
from hpnlp.data.examples.fields import FieldError
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.labels import (
    UNKNOWN_HELDOUT,
    UNKNOWN_TRAINING,
    UNLABELLED_HELDOUT,
    ClassIndex,
    UnknownLabelError,
    in_order,
)
from hpnlp.data.examples.rows import Row, RowReader
from hpnlp.data.examples.store import UNLABELLED, ExampleWriter, StoredExamples
from hpnlp.data.reading.files import Progress
from hpnlp.data.reading.records import SKIP
from hpnlp.data.reading.sources import LeftOut, LineCounts, Source
from hpnlp.data.reading.split import NOTHING, Folds, HeldOutHashes, hash_fraction
from hpnlp.types import InputError, Tokenizer

_FORMAT = 5  # version of the files that `ExampleIngest.write` writes; part of the cache key
# Sizes from which a group of examples is tokenised at once, on all cores if the tokenizer supports it.
_GROUP_BYTES = 1 << 20
_GROUP_EXAMPLES = 512
_OTHER_CLASSES = "; a model of other classes needs a run in another workdir, without train.init_from"


def _version(kind: Kind) -> list[str]:
    """Name of a kind; for a kind outside of the package, also digests of the files of its classes, and its options.

    _FORMAT does not change with these files, and options that the package does not know may decide about texts and labels.
    """
    name = type(kind).__name__
    classes = [c for c in type(kind).__mro__ if issubclass(c, Kind) and not c.__module__.startswith("hpnlp.")]
    if not classes:
        return [name]
    # Each function names its file. The module of a class need not be in sys.modules, such as a file beside the registered one.
    functions = [f.fget if isinstance(f, property) else f for c in classes for f in vars(c).values()]
    files = {f.__code__.co_filename for f in functions if isinstance(f, types.FunctionType)}
    code = [Path(file).read_bytes() for file in sorted(files) if os.path.isfile(file)]  # none in an interactive session
    return [name, *(hashlib.sha256(content).hexdigest() for content in code), repr(vars(kind))]


@dataclasses.dataclass(frozen=True)
class ExampleIngest:
    """Sources of examples and the options that decide how they are read and split.

    Attributes:
      kind: Kind of the examples.
      train: Sources of examples to train on, a part of which is held out if `heldout` is empty.
      heldout: Sources of examples that are all held out.
      challenge: Sources of examples that are scored separately.
      group_field: See `ExampleConfig`.
      heldout_fraction: `ExampleConfig.heldout`.
      heldout_examples: See `ExampleConfig`.
      skip_bad_lines: See `ExampleConfig`.
      fold_labels: See `ExampleConfig`.
      labels: Names of the only classes that labels may have; None to find them in the training examples.
      folds: Parts of the examples, of which one is held out in place of a fraction.
    """

    kind: Kind
    train: tuple[Source, ...]
    heldout: tuple[Source, ...]
    challenge: tuple[Source, ...]
    group_field: str
    heldout_fraction: float
    heldout_examples: int
    skip_bad_lines: bool
    fold_labels: bool
    labels: tuple[str, ...] | None
    folds: Folds = Folds()

    @property
    def paths(self) -> list[str]:
        """Paths of all files that are read."""
        return [file.path for sources in self._groups for source in sources for file in source.files]

    @property
    def heldout_limit(self) -> int | None:
        """Largest number of held-out examples that are scored; None for all."""
        return self.heldout_examples if self.heldout_examples and not self.heldout and not self.folds else None

    @property
    def _groups(self) -> tuple[tuple[Source, ...], ...]:
        return self.train, self.heldout, self.challenge

    def fingerprint(self) -> Any:
        """Lists everything that the result depends on, except the tokenizer, the content of the files and `labels`.

        Returns:
          A JSON-able value.
        """
        options = [self.group_field, self.heldout_fraction, self.heldout_examples, self.skip_bad_lines]
        options += self.kind.stored_options()
        options += ["fold_labels"] if self.fold_labels else []
        options += self.folds.fingerprint()
        files = [
            [[source.walked, [[file.path, file.name] for file in source.files]] for source in group]
            for group in self._groups
        ]
        return ["examples", _FORMAT, *_version(self.kind), self.kind.columns, options, files]

    def training_texts(self, spec: str, progress: Progress) -> Iterator[bytes]:
        """Reads the text from which a vocabulary is made: the training examples, or a sample if they are larger.

        Args:
          spec: The tokenizer that is trained; see `tokenizers.training_bytes`.
          progress: Called while text is read.

        Yields:
          The texts of the examples.

        Raises:
          InputError: A file cannot be read or holds an invalid record.
        """
        held_out = self._held_out()
        total = _total_bytes(self.train)
        share, done = min(1.0, tokenizers.training_bytes(spec) / total), 0
        reader = self.reader(LeftOut())
        for source in self.train:
            for row in reader.read(source):
                texts = [text.encode() for text in self.kind.texts(row.values)]
                done += sum(map(len, texts))
                progress("counting words", min(done, total), total)
                if not held_out.includes(row.group) and hash_fraction(f"vocabulary/{row.group}") < share:
                    yield from texts

    def write(
        self, directory: str, tokenizer: Tokenizer, progress: Progress, examination: Examination | None = None
    ) -> dict[str, Any]:
        """Tokenises all examples and writes them to the files `train.*`, `heldout.*` and `challenge.*`.

        As for text corpora, an example whose group has a hash below a threshold is a candidate. The candidates with the lowest
        hashes are held out, at most `heldout_examples`; the other candidates are neither evaluated nor trained on. With
        `folds`, all examples of a part are held out.

        Args:
          directory: An empty directory.
          tokenizer: The tokenizer.
          progress: Called while examples are read.
          examination: Counts what is found; None to make one.

        Returns:
          A JSON-able record: "train", "heldout" and "challenge" for `StoredExamples`; "unlabelled", the number of training
          examples without a label; "aside", the number of candidates that
          are not held out; "names" and "counts" of the classes in the order of the ids that are stored; "labels", the names of
          the classes in the order of their final ids; "left_out", a `LeftOut`, and "scored_left_out", that of the sources
          which "heldout" and "challenge" come from; "lines", a `LineCounts`; and "remarks", the lines of
          `Examination.remarks`.

        Raises:
          InputError: A file cannot be read or holds an invalid record, or the classes are not valid.
        """
        writing = _Writing(self, directory, tokenizer, progress, examination or Examination(self.fold_labels))
        held_out = self._held_out()
        with (
            ExampleWriter(directory, "train", tokenizer.vocab_size, writing.classes.names) as train,
            _Candidates(writing, "heldout") as heldout,
        ):
            for source in self.train:
                writing.read(source, heldout, train, held_out)
            before = copy.deepcopy(writing.left_out) if self.heldout else LeftOut()
            for source in self.heldout:
                writing.read(source, heldout)
        if not train.examples:
            fix = _OTHER_CLASSES if UNKNOWN_TRAINING in writing.left_out else ""
            left_out = writing.left_out.in_brackets()
            raise InputError(f"no valid example is left to train on{left_out}: add examples{fix}")
        labels = self._class_names(writing)
        heldout_record = heldout.write_selected(self.heldout_limit)
        if not heldout_record["examples"]:
            with_labels = " with labels, or pass data.heldout_path=PATH with such" if self.kind.unlabelled else ""
            left_out = writing.left_out.in_brackets()
            raise InputError(f"no valid example is held out{left_out}: add examples{with_labels}")
        scored_left_out = {"heldout": writing.left_out.since(before)}
        before = copy.deepcopy(writing.left_out)
        with _Candidates(writing, "challenge") as challenge:
            for source in self.challenge:
                writing.read(source, challenge)
        challenge_record = challenge.write_selected(None)
        scored_left_out["challenge"] = writing.left_out.since(before)
        return {
            "train": train.record(),
            "heldout": heldout_record,
            "challenge": challenge_record,
            "unlabelled": writing.unlabelled,
            "aside": heldout.aside,
            "names": writing.classes.names,
            "counts": writing.classes.counts,
            "labels": labels,
            "left_out": writing.left_out,
            "scored_left_out": scored_left_out,
            "lines": dataclasses.asdict(writing.examination.line_counts),
            "remarks": writing.examination.remarks(self.heldout_limit),
        }

    def _class_names(self, writing: _Writing) -> list[str]:
        """Names of the classes, in the order of their final ids. Raises InputError if training examples have too few."""
        labels = list(self.labels) if self.labels is not None else _trained_classes(writing.classes)
        if not self.kind.has_labels or len(labels) >= 2:
            return labels
        if writing.unlabelled and not labels:
            raise InputError(
                f"none of the {writing.unlabelled:,} training examples has a label: pass distill.teacher=RUN, whose "
                "classes are taken"
            )
        shown = f"only the class {labels[0]!r}" if labels else "no class"
        raise InputError(
            f"the training examples have {shown}: expected at least two classes: add examples of another class"
        )

    def class_index(self) -> ClassIndex:
        """Makes the numbering of classes.

        Returns:
          The numbering, without classes unless `labels` has them.
        """
        return ClassIndex(self.labels, self.fold_labels)

    def reader(self, left_out: LeftOut, has_groups: bool = True, line_counts: LineCounts | None = None) -> RowReader:
        """Makes a reader of the sources.

        Args:
          left_out: Counts what is not read.
          has_groups: False for sources that are not split, whose records need no group.
          line_counts: Numbers of records and lines, where they differ; None to count in vain.

        Returns:
          The reader.
        """
        group_field = self.group_field if has_groups else ""
        return RowReader(self.kind, group_field, left_out, self.skip_bad_lines, line_counts=line_counts or LineCounts())

    def _held_out(self) -> HeldOutHashes:
        """Hashes of held-out groups: a fold, or those below the fraction, or the lowest one if one side would be empty."""
        if self.heldout:
            return NOTHING
        if self.folds:
            return self._held_out_fold()
        lowest, highest, left_out = 1.0, 0.0, LeftOut()
        for source in self.train:
            for row in self.reader(left_out).read(source):
                fraction = hash_fraction(row.group)
                highest = max(highest, fraction)
                if not self.lacks_labels(row):  # records without labels are not held out
                    lowest = min(lowest, fraction)
                if lowest < self.heldout_fraction <= highest:
                    return HeldOutHashes(self.heldout_fraction)
        if lowest == 1.0 and highest:
            raise InputError(
                "no example has a label, so that none can be held out and scored: pass data.heldout_path=PATH with labelled "
                "ones"
            )
        if lowest >= highest and not (self.kind.unlabelled and highest):
            kind = f"group ({self.group_field!r})" if self.group_field else "example"
            count = (
                f"holds only one {kind}, which cannot be both trained on and held out"
                if highest
                else "holds no examples"
            )
            paths = ",".join(source.path for source in self.train)
            raise InputError(
                f"data.path={paths!r} {count}{left_out.in_brackets()}: add examples, or pass data.heldout_path=PATH with "
                "others to hold out"
            )
        return HeldOutHashes(math.nextafter(lowest, 1.0))

    def _held_out_fold(self) -> HeldOutHashes:
        """Hashes of the part of `folds` that is held out."""
        left_out = LeftOut()
        names = (row.group for source in self.train for row in self.reader(left_out).read(source))
        if held_out := self.folds.held_out(names):
            return held_out
        noun = f"groups ({self.group_field!r})" if self.group_field else "examples"
        raise self.folds.too_few(",".join(source.path for source in self.train), noun, left_out.in_brackets())

    def lacks_labels(self, row: Row) -> bool:
        """Whether an example has no label, although others of its kind have one.

        Args:
          row: The record.

        Returns:
          False for kinds whose records may not lack labels.
        """
        return self.kind.unlabelled and "" in self.kind.labels(row.values)


def _trained_classes(classes: ClassIndex) -> list[str]:
    """Names of the classes of training examples, in the order of their final ids."""
    return in_order([name for name, count in zip(classes.names, classes.counts, strict=True) if count])


def _total_bytes(sources: Sequence[Source]) -> int:
    return max(1, sum(file.text_bytes for source in sources for file in source.files))


class _Writing:
    """State of `ExampleIngest.write`: the classes, the records that are left out, and the progress."""

    def __init__(
        self,
        ingest: ExampleIngest,
        directory: str,
        tokenizer: Tokenizer,
        progress: Progress,
        examination: Examination,
    ):
        self.ingest = ingest
        self.directory = directory
        self.tokenizer = tokenizer
        self.examination = examination
        self.left_out = examination.left_out
        self.unlabelled = 0  # training examples without a label
        self.classes = ingest.class_index()
        self._progress = progress
        self._done = 0
        self._total = _total_bytes([source for group in ingest._groups for source in group])

    def read(
        self,
        source: Source,
        candidates: _Candidates,
        train: ExampleWriter | None = None,
        held_out: HeldOutHashes = NOTHING,
    ) -> None:
        """Appends the examples of a source to `candidates` if their group is held out, otherwise to `train`.

        Without `train`, all are candidates. Examples without a label are no candidates: they are trained on, unless their group
        is held out.
        """
        self.left_out.merge(source.left_out)
        kind, is_empty = self.ingest.kind, True
        reader = self.ingest.reader(self.left_out, train is not None, self.examination.line_counts)
        for rows in _groups(reader.read(source), kind):
            pieces = [[piece.encode() for piece in kind.pieces(row.values)] for row in rows]
            encoded = iter(self.tokenizer.encode_batch([piece for row in pieces for piece in row]))
            for row, texts in zip(rows, pieces, strict=True):
                is_empty = False
                ids = [next(encoded) for _ in texts]
                is_scored = train is None or held_out.includes(row.group)
                self._add(row, ids, is_scored, reader, candidates, train)
        if is_empty:
            raise InputError(
                f"data: {source.path!r} holds no examples{self.left_out.in_brackets()}: pass one that does"
            )

    def _add(
        self,
        row: Row,
        ids: Sequence[Any],
        is_scored: bool,
        reader: RowReader,
        candidates: _Candidates,
        train: ExampleWriter | None,
    ) -> None:
        """Appends an example with the ids of its texts to `candidates` or `train`, or counts it as left out."""
        kind, lacks_labels = self.ingest.kind, self.ingest.lacks_labels(row)
        if lacks_labels and (train is None or (is_scored and self.ingest.group_field)):
            self.left_out.add(UNLABELLED_HELDOUT, row.where)
            return
        is_scored &= not lacks_labels
        names = kind.labels(row.values)
        try:
            labels = [self.classes.add(name, row.where) if name else UNLABELLED for name in names]
            labels = np.array(labels, np.int32)
            parts, stored = kind.join(ids, labels)
        except UnknownLabelError as error:
            self._report_unknown(row.where, error, is_scored)
            return
        except FieldError as error:
            reader.report_bad(row.where, InputError(f"{row.where}: {error}: {SKIP}"))
            return
        raw = [text.encode() for text in kind.texts(row.values)]
        self._done += sum(map(len, raw))
        self._progress("tokenising", min(self._done, self._total), self._total)
        if train is None or is_scored:
            fraction = candidates.add(row, parts, raw, stored, kind.grade(row.values))
            self.examination.add_scored(candidates.name, fraction, row.where, raw, names)
        else:
            train.add(parts, raw, stored, kind.grade(row.values))
            self.classes.count(labels)
            self.unlabelled += lacks_labels
            self.examination.add_training(row.where, raw, [name for name in names if name])

    def _report_unknown(self, where: str, error: UnknownLabelError, is_scored: bool) -> None:
        """Counts an example of no class of the run, or raises InputError."""
        if not self.ingest.skip_bad_lines:
            # Without LIST_ALL: `hpnlp check-data` does not read the classes of a run.
            labels = self.ingest.labels or ()
            teacher = f"; the classes are those of the teacher, {', '.join(labels[:10])}{', ...' * (len(labels) > 10)}"
            fix = (
                f"{teacher}: name one that was trained on such labels"
                if self.ingest.kind.unlabelled
                else _OTHER_CLASSES
            )
            raise InputError(f"{where}: {error}: {SKIP}{fix}") from error
        self.left_out.add(UNKNOWN_HELDOUT if is_scored else UNKNOWN_TRAINING, f"{error.label!r}, {where}")


def _groups(rows: Iterator[Row], kind: Kind) -> Iterator[list[Row]]:
    """Consecutive rows in groups, so that a tokenizer can encode many at once."""
    group, size = [], 0
    for row in rows:
        group.append(row)
        size += sum(map(len, kind.texts(row.values)))
        if size >= _GROUP_BYTES or len(group) >= _GROUP_EXAMPLES:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Candidates:
    """Examples that may be held out, on disk, with the hashes of their groups."""

    def __init__(self, writing: _Writing, name: str):
        self._writing = writing
        self.name = name
        self._writer = ExampleWriter(
            writing.directory, "candidates", writing.tokenizer.vocab_size, writing.classes.names
        )
        self._fractions: list[float] = []
        self.aside = 0

    def __enter__(self) -> _Candidates:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)

    def add(
        self,
        row: Row,
        token_ids: Sequence[np.ndarray],
        texts: Sequence[bytes],
        labels: np.ndarray,
        grade: float | None,
    ) -> float:
        """Appends an example, see `ExampleWriter.add`, and returns the hash of its group."""
        self._writer.add(token_ids, texts, labels, grade)
        self._fractions.append(hash_fraction(row.group))
        return self._fractions[-1]

    def write_selected(self, limit: int | None) -> dict[str, Any]:
        """Copies the examples with the lowest hashes, at most `limit`, to the files of `name`, and returns their record.

        Only examples whose labels are known count. The files of the candidates are removed.
        """
        directory, kind = self._writing.directory, self._writing.ingest.kind
        names = self._writing.classes.names
        stored = StoredExamples(directory, "candidates", self._writer.record(), kind.parts, np.arange(len(names)))
        # Before the limit applies, so that a resumed run, which refuses unknown labels as it reads, selects the same examples.
        known = np.array([number for number in range(stored.count) if self._is_known(stored.labels(number))], np.int64)
        order = known[np.argsort(np.array(self._fractions, np.float64)[known], kind="stable")[:limit]]
        self.aside = len(known) - len(order)
        with ExampleWriter(directory, self.name, self._writing.tokenizer.vocab_size, names) as writer:
            for number in np.sort(order).tolist():
                indices = range(kind.parts)
                texts = [stored.text(number, part) for part in indices]
                grade = stored.grade(number) if stored.has_grades else None
                writer.add([stored.part(number, part) for part in indices], texts, stored.labels(number), grade)
        for file in os.listdir(directory):
            if file.startswith("candidates."):
                os.remove(os.path.join(directory, file))
        return writer.record()

    def _is_known(self, labels: np.ndarray) -> bool:
        """Whether training examples have all labels of an example; if not, raises InputError or counts the example."""
        classes = self._writing.classes
        for label in np.unique(labels[labels >= 0]).tolist():
            if not classes.counts[label] and self._writing.ingest.labels is None:
                where = classes.place(label)
                fault = f"the label {classes.names[label]!r} is held out, and no training example has it"
                fix = "mend it, add training examples with it, or pass data.skip_bad_lines=True to leave such examples out"
                reader = self._writing.ingest.reader(self._writing.left_out)
                reader.report_bad(where, InputError(f"{where}: {fault}: {fix}"), UNKNOWN_HELDOUT)
                return False
        return True
