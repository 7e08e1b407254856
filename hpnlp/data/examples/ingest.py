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

from hpnlp.data.examples.checks.examination import Examination
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.labels import (
    UNKNOWN_HELDOUT,
    UNKNOWN_TRAINING,
    UNLABELLED_HELDOUT,
    ClassIndex,
    UnknownLabelError,
    in_order,
)
from hpnlp.data.examples.store import UNLABELLED, ExampleWriter, StoredExamples
from hpnlp.data.ingest import Candidates, Done, Ingest, nonempty
from hpnlp.data.reading.fields import FieldError
from hpnlp.data.reading.files import Progress
from hpnlp.data.reading.records import SKIP
from hpnlp.data.reading.rows import Row, RowReader
from hpnlp.data.reading.sources import LeftOut, LineCounts, Source
from hpnlp.data.reading.split import NOTHING, Folds, HeldOutHashes, hash_range
from hpnlp.data.reading.token_store import remove_files
from hpnlp.types import InputError, Tokenizer

_FORMAT = 6  # version of the files that `ExampleIngest.write` writes; part of the cache key
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
class ExampleIngest(Ingest[Row]):
    """Sources of examples and the options that decide how they are read and split.

    Attributes:
      kind: Kind of the examples.
      train: Sources of examples to train on, a part of which is held out if `heldout` is empty.
      heldout: Sources of examples that are all held out.
      challenge: Sources of examples that are scored separately.
      heldout_fraction: `ExampleConfig.heldout`.
      labels: Names of the only classes that labels may have; None to find them in the training examples.
      folds: Parts of the examples, of which one is held out in place of a fraction.
      group_field, heldout_examples, skip_bad_lines, fold_labels: See `ExampleConfig`.
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
    def heldout_limit(self) -> int | None:
        """Largest number of held-out examples that are scored; None for all."""
        return self.heldout_examples if self.heldout_examples and not self.heldout and not self.folds else None

    @property
    def groups(self) -> tuple[tuple[Source, ...], ...]:
        return self.train, self.heldout, self.challenge

    def options(self) -> list[Any]:
        options = [self.group_field, self.heldout_fraction, self.heldout_examples, self.skip_bad_lines]
        options += self.kind.stored_options()
        options += ["fold_labels"] if self.fold_labels else []
        options += self.folds.fingerprint()
        return ["examples", _FORMAT, *_version(self.kind), self.kind.columns, options]

    def texts(self, record: Row) -> list[bytes]:
        return [text.encode() for text in self.kind.texts(record.values)]

    def pieces(self, record: Row) -> list[bytes]:
        return [piece.encode() for piece in self.kind.pieces(record.values)]

    def read_training(self) -> Iterator[tuple[Row, bool]]:
        held_out = self._held_out()
        return ((row, held_out.includes(row.name)) for row in self._training_rows(LeftOut()))

    def _training_rows(self, left_out: LeftOut) -> Iterator[Row]:
        return (row for source in self.train for row in self.reader(left_out).read(source))

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
            _ScoredSet(writing, "heldout") as heldout,
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
        with _ScoredSet(writing, "challenge") as challenge:
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
        """Makes the numbering of classes, without classes unless `labels` has them."""
        return ClassIndex(self.labels, self.fold_labels)

    def reader(self, left_out: LeftOut, has_groups: bool = True, line_counts: LineCounts | None = None) -> RowReader:
        """Makes a reader of the sources; records of sources that are not split need no group."""
        group_field = self.group_field if has_groups else ""
        return RowReader(self.kind, group_field, left_out, self.skip_bad_lines, line_counts=line_counts or LineCounts())

    def _held_out(self) -> HeldOutHashes:
        """Hashes of held-out groups: a fold, or those below the fraction, or the lowest one if one side would be empty."""
        if self.heldout:
            return NOTHING
        if self.folds:
            return self._held_out_fold()
        left_out = LeftOut()
        # Records without labels are not held out.
        names = ((row.name, not self.lacks_labels(row)) for row in self._training_rows(left_out))
        hashes = hash_range(names, self.heldout_fraction)
        if hashes.has_both(self.heldout_fraction):
            return HeldOutHashes(self.heldout_fraction)
        _, lowest, highest = hashes
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
            raise InputError(
                f"data.path={self.training_path!r} {count}{left_out.in_brackets()}: add examples, or pass "
                "data.heldout_path=PATH with others to hold out"
            )
        return HeldOutHashes(math.nextafter(lowest, 1.0))

    def _held_out_fold(self) -> HeldOutHashes:
        """Hashes of the part of `folds` that is held out."""
        left_out = LeftOut()
        if held_out := self.folds.held_out(row.name for row in self._training_rows(left_out)):
            return held_out
        noun = f"groups ({self.group_field!r})" if self.group_field else "examples"
        raise self.folds.too_few(self.training_path, noun, left_out.in_brackets())

    def lacks_labels(self, row: Row) -> bool:
        """Whether an example has no label, although others of its kind have one."""
        return self.kind.unlabelled and "" in self.kind.labels(row.values)


def _trained_classes(classes: ClassIndex) -> list[str]:
    """Names of the classes of training examples, in the order of their final ids."""
    return in_order([name for name, count in zip(classes.names, classes.counts, strict=True) if count])


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
        self._done = Done("tokenising", ingest.groups, progress)

    def read(
        self,
        source: Source,
        candidates: _ScoredSet,
        train: ExampleWriter | None = None,
        held_out: HeldOutHashes = NOTHING,
    ) -> None:
        """Appends the examples of a source to `candidates` if their group is held out, otherwise to `train`.

        Without `train`, all are candidates. Examples without a label are no candidates: they are trained on, unless their group
        is held out.
        """
        self.left_out.merge(source.left_out)
        reader = self.ingest.reader(self.left_out, train is not None, self.examination.line_counts)
        encoded = self.ingest.encoded(reader.read(source), self.tokenizer)
        for row, ids in nonempty(encoded, source, "examples", self.left_out):
            self._add(row, ids, train is None or held_out.includes(row.name), reader, candidates, train)

    def _add(
        self,
        row: Row,
        ids: Sequence[Any],
        is_scored: bool,
        reader: RowReader,
        candidates: _ScoredSet,
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
        raw = self.ingest.texts(row)
        self._done.add(sum(map(len, raw)))
        content = parts, raw, stored, kind.grade(row.values)
        if train is None or is_scored:
            fraction = candidates.add(row.name, *content)
            self.examination.add_scored(candidates.name, fraction, row.where, raw, names)
        else:
            train.add(*content)
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


class _ScoredSet:
    """Examples that may be scored, on disk until those with the lowest hashes of their groups are chosen.

    Attributes:
      aside: Number of examples that were not chosen.
    """

    def __init__(self, writing: _Writing, name: str):
        self._writing = writing
        self.name = name
        self._writer = ExampleWriter(
            writing.directory, "candidates", writing.tokenizer.vocab_size, writing.classes.names
        )
        self._candidates = Candidates()
        self.aside = 0

    def __enter__(self) -> _ScoredSet:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)

    def add(self, name: str, *content: Any) -> float:
        """Appends an example, of which `content` are the arguments of `ExampleWriter.add`, and returns the hash of its name."""
        self._writer.add(*content)
        return self._candidates.add(name)

    def write_selected(self, limit: int | None) -> dict[str, Any]:
        """Copies the examples with the lowest hashes, at most `limit`, to the files of `name`, and returns their record.

        Only examples whose labels are known count. The files of the candidates are removed.
        """
        directory, kind = self._writing.directory, self._writing.ingest.kind
        names = self._writing.classes.names
        stored = StoredExamples(directory, "candidates", self._writer.record(), kind.parts, np.arange(len(names)))
        # Before the limit applies, so that a resumed run, which refuses unknown labels as it reads, selects the same examples.
        known = [number for number in range(stored.count) if self._is_known(stored.labels(number))]
        selected = self._candidates.lowest(math.inf if limit is None else limit, known)
        self.aside = len(known) - len(selected)
        with ExampleWriter(directory, self.name, self._writing.tokenizer.vocab_size, names) as writer:
            for number in selected:
                writer.add(*stored.example(number))
        remove_files(directory, "candidates")
        return writer.record() | {"groups": self._write_groups(selected)}

    def _write_groups(self, selected: Sequence[int]) -> int:
        """Writes the number of the group of each selected example; returns the number of these numbers, 0 without groups.

        Examples of sources that are not split are read without their groups.
        """
        if not self._writing.ingest.group_field or self._writing.ingest.heldout:
            return 0
        groups, numbers = np.unique(self._candidates.hashes(selected), return_inverse=True)
        if len(groups) == len(numbers):
            return 0
        numbers.astype(np.int32).tofile(os.path.join(self._writing.directory, f"{self.name}.groups"))
        return len(numbers)

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
