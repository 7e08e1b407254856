"""Remarks on labelled examples that are no errors: duplicates, blank texts, and labels that differ only in case or blanks."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from hpnlp.data.examples.labels import folded
from hpnlp.data.reading.files import printable
from hpnlp.data.reading.sources import MAX_COMPARED, LeftOut, LineCounts, described

_SHOWN = 5  # groups of labels that are listed


class Examination:
    """Compares examples while they are read.

    Attributes:
      left_out: Counts what is not read.
      line_counts: Numbers of records and lines, where they differ.
    """

    def __init__(self, fold_labels: bool = False) -> None:
        """Begins a comparison, in which `fold_labels` is `data.fold_labels`."""
        self._fold = fold_labels
        self.left_out = LeftOut()
        self.line_counts = LineCounts()
        self._remarks = LeftOut()
        self._training: dict[int, tuple[str, int]] = {}  # hash of the texts -> (place, hash of the labels)
        # set -> [(hash of the group, hash of the texts, place)]
        self._scored: dict[str, list[tuple[float, int, str]]] = {}
        self._labels: Counter[str] = Counter()
        self._places: dict[str, str] = {}  # label -> place of its first example

    def add(self, where: str, texts: Sequence[bytes], labels: Sequence[str]) -> int:
        """Counts an example of any set, with its labels as they are written in the data, and returns a hash of the texts."""
        labels = [folded(label) for label in labels] if self._fold else labels
        self._labels.update(labels)
        for label in labels:
            self._places.setdefault(label, where)
        if not all(text.strip() for text in texts):
            self._remarks.add("with a text of blanks only", where)
        return hash(tuple(texts))

    def add_training(self, where: str, texts: Sequence[bytes], labels: Sequence[str]) -> None:
        """Counts a training example; see `add`."""
        key, labels_hash = self.add(where, texts, labels), hash(tuple(map(folded, labels) if self._fold else labels))
        if first := self._training.get(key):
            place, first_labels = first
            other = " and another label" if first_labels != labels_hash and labels and first_labels != hash(()) else ""
            self._remarks.add(f"with the texts{other} of an earlier training example", f"{where} = {place}")
        elif len(self._training) < MAX_COMPARED:
            self._training[key] = where, labels_hash

    def add_scored(self, name: str, fraction: float, where: str, texts: Sequence[bytes], labels: Sequence[str]) -> None:
        """Counts an example that may be scored, of the set `name`; see `add`.

        `fraction` is the hash of the example's group: of a limited number, those with the lowest are scored.
        """
        scored = self._scored.setdefault(name, [])
        key = self.add(where, texts, labels)
        if len(scored) < MAX_COMPARED:
            scored.append((fraction, key, where))

    def remarks(self, limit: int | None) -> list[str]:
        """Lines with counts and first places, after all examples were added. `limit`: held-out examples that are scored."""
        repeated = LeftOut()
        for name, scored in self._scored.items():
            for _, key, where in scored if limit is None or name != "heldout" else heapq.nsmallest(limit, scored):
                if key in self._training:
                    repeated.add(
                        f"of the {name} set with the texts of a training example", f"{where} = {self._training[key][0]}"
                    )
        lines = [*described(self._remarks, "example"), *described(repeated, "example"), *self._similar_labels()]
        if len(self._training) == MAX_COMPARED:
            lines.append(f"duplicates of the first {MAX_COMPARED:,} different training examples only were counted")
        return lines

    def blank_variants(self) -> list[str]:
        """Lines on labels that differ only in blanks around them, which is an error unless labels are folded."""
        return self._variants(str.strip)

    def _similar_labels(self) -> list[str]:
        lines = self._variants(folded)
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        fix = "data.fold_labels=True makes one class of each group"
        return [f"labels that differ only in case or blanks: {'; '.join(lines[:_SHOWN])}{more}: {fix}"] if lines else []

    def _variants(self, key: Callable[[str], str]) -> list[str]:
        """A line for each group of labels that are equal under `key`."""
        groups: dict[str, list[str]] = {}
        for label in self._labels:
            groups.setdefault(key(label), []).append(label)
        return [
            ", ".join(f"{label!r} ({self._labels[label]:,}: {printable(self._places[label])}, ...)" for label in group)
            for group in groups.values()
            if len(group) > 1
        ]
