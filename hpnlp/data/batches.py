"""Iterators over batches that shuffle or stream, mix, shard and resume.

grain orders rows by number (shuffle, repeat, mix, shard, read ahead), and the dataset makes and pads a batch of the rows with
given numbers (`packing.assemble`, `examples.kind.Kind.batch`). The state of an iterator is therefore the number of batches it
has returned, for every dataset and number of processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpnlp.data import packing
from hpnlp.types import InputError

if TYPE_CHECKING:
    import grain

T = TypeVar("T")
_STATE_VERSION = 1
# Number of rows in a training stream. grain's own endless repeat overflows, because grain converts lengths to floats.
_ENDLESS = 1 << 52


class Batches:
    """An endless iterator over training batches. Its state is a small JSON-able dict, the same on every process.

    Batches that were read ahead are not part of the state: after `set_state`, the next batch is the one that followed when the
    state was taken, bit for bit, also with another number of processes.
    """

    def __init__(
        self,
        batches: grain.DatasetIterator,
        made_from: Mapping[str, str],
        change: Callable[[packing.Batch, int], packing.Batch] | None = None,
    ):
        """Wraps an iterator of grain.

        Args:
          batches: A `grain.DatasetIterator` over batches.
          made_from: Name -> digest or option on which the batches depend; compared by `set_state`.
          change: See `changed`; None to return batches as they are.
        """
        self._batches = batches
        self._made_from = dict(made_from)
        self._change = change

    def changed(self, change: Callable[[packing.Batch, int], packing.Batch]) -> Batches:
        """The same iterator over changed batches: `change(batch, number of the batch)`, after an earlier change."""
        before = self._change
        both = change if before is None else lambda batch, number: change(before(batch, number), number)
        return Batches(self._batches, self._made_from, both)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> packing.Batch:
        if self._change is None:
            return next(self._batches)
        number = self._batches.get_state()["next_index"]
        return self._change(next(self._batches), number)

    def get_state(self) -> dict[str, Any]:
        """Reads the position of the iterator.

        Returns:
          A JSON-able state for `set_state`.
        """
        return {"version": _STATE_VERSION, **self._made_from, "batches": self._batches.get_state()["next_index"]}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of an earlier `get_state`.

        Args:
          state: Result of `get_state` of an iterator over the same data.

        Raises:
          InputError: The state is damaged, or of other data.
        """
        try:
            version, batches = state["version"], int(state["batches"])
            # A name that the state lacks does not count as a difference: old states lack the digest of the held-out text.
            differing = [name for name, value in self._made_from.items() if state.get(name, value) != value]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the data iterator's state is damaged ({error!r}): take another checkpoint") from error
        if version != _STATE_VERSION:
            raise InputError(
                f"the data iterator's state is of version {version}, expected {_STATE_VERSION}: update hpnlp"
            )
        if not 0 <= batches <= _ENDLESS:
            raise InputError(f"the data iterator's state is damaged (batches={batches}): take another checkpoint")
        if differing:
            raise InputError(
                f"the data iterator's state is of another {' and '.join(differing)}: the text, its split, its tokenizer, its "
                "order or the shape of a stream's batches has changed since, or the run was begun by a version of hpnlp that "
                "held out whole files: give the run its old data back, continue with that version, or start another run "
                "(train.init_from takes the model of this one)"
            )
        self._batches.set_state({"next_index": batches})

    def close(self) -> None:
        """Stops reading ahead."""
        self._batches.close()


@dataclasses.dataclass(frozen=True)
class Share:
    """Rows of each batch that one process reads.

    Of n processes with b = `batch_size` / n rows each, process p gets the rows `[p b, (p + 1) b)` of a batch.

    Attributes:
      batch_size: Rows per batch over all processes.
      process_index: Index of this process.
      process_count: Number of processes, which divides `batch_size`.
      argument: Name of `batch_size`, for messages.
    """

    batch_size: int
    process_index: int
    process_count: int
    argument: str = "batch_size"

    def __post_init__(self) -> None:
        if not 0 <= self.process_index < self.process_count:
            raise InputError(f"process_index={self.process_index}: expected 0 to {self.process_count - 1}")
        if self.batch_size % self.process_count:
            raise InputError(
                f"{self.argument}={self.batch_size} is not a multiple of the {self.process_count} processes that share it: "
                f"pass {math.ceil(self.batch_size / self.process_count) * self.process_count}"
            )

    @property
    def rows(self) -> int:
        """Rows per batch of this process, b."""
        return self.batch_size // self.process_count

    @property
    def span(self) -> slice:
        """Place of these rows in a batch."""
        return slice(self.process_index * self.rows, (self.process_index + 1) * self.rows)


def shuffled_batches(
    ranges: Sequence[tuple[int, int]],
    weights: Sequence[float],
    make: Callable[[np.ndarray, int], packing.Batch],
    made_from: Mapping[str, str],
    seed: int,
    share: Share,
) -> Batches:
    """Iterates endlessly over training batches, in a new order each epoch.

    Args:
      ranges: Row numbers `(first, end)` of each source.
      weights: Shares of the sources in the rows; empty for one source.
      make: Makes the batch of rows: (their numbers, integers [b]; b) -> arrays.
      made_from: See `Batches`.
      seed: Seed of the order, at least 0.
      share: Rows of this process.
    """
    import grain  # takes half a second to import

    check_seed(seed)
    sources = [
        grain.MapDataset.range(first, end)
        .seed(int(np.random.SeedSequence([seed, i]).generate_state(1)[0]))
        .shuffle()
        .repeat(_ENDLESS // (end - first))
        for i, (first, end) in enumerate(ranges)
    ]
    order = grain.MapDataset.mix(sources, weights) if weights else sources[0]
    rows = order.batch(share.rows, batch_fn=np.array)[share.process_index :: share.process_count]
    return _read_ahead(rows.map(lambda numbers: make(numbers, share.rows)), made_from)


def bucketed_batches(
    order: Callable[[int], tuple[np.ndarray, int]],
    make: Callable[[np.ndarray, int, int], packing.Batch],
    made_from: Mapping[str, str],
    share: Share,
) -> Batches:
    """Iterates endlessly over training batches of rows of similar lengths, whose width is the same for all processes.

    Args:
      order: Rows and width of a batch, by its number.
      make: Makes the batch of rows: (their numbers, integers [b]; b; the width) -> arrays.
      made_from: See `Batches`.
      share: Rows of this process.
    """
    import grain  # takes half a second to import

    def read(batch: int) -> packing.Batch:
        numbers, width = order(int(batch))
        return make(numbers[share.span], share.rows, width)

    return _read_ahead(grain.MapDataset.range(_ENDLESS).map(read), made_from)


def streamed_batches(
    total: int,
    make: Callable[[np.ndarray, int], packing.Batch],
    made_from: Mapping[str, str],
    seed: int,
    share: Share,
) -> Batches:
    """Iterates endlessly over training batches in which each example continues the same example of the batch before.

    Example i of batch n is the row `start + i total // batch_size + n`, modulo `total`: the examples begin at equal distances
    in the text, and each of them reads all of it.

    Args:
      total: Number of rows.
      make: Makes a batch: (`start + i total // batch_size` of its examples, int64 [b]; the number of the batch) -> arrays.
        Numbers of rows count on after `total`.
      made_from: See `Batches`.
      seed: Seed of `start`, at least 0.
      share: Examples of this process.
    """
    import grain  # takes half a second to import

    check_seed(seed)
    start = int(np.random.SeedSequence(seed).generate_state(1)[0]) % total
    examples = np.arange(share.batch_size, dtype=np.int64)[share.span]
    first = start + examples * total // share.batch_size
    return _read_ahead(grain.MapDataset.range(_ENDLESS).map(lambda batch: make(first, batch)), made_from)


def _read_ahead(batches: grain.MapDataset, made_from: Mapping[str, str]) -> Batches:
    """Iterator over a `grain.MapDataset` of batches."""
    import grain

    # One thread that reads two batches ahead hides the page faults of text that is not in memory yet.
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return Batches(iter(batches.to_iter_dataset(ahead)), made_from)


class FiniteBatches(Iterator[T]):
    """An iterator whose length `operator.length_hint` returns, for displays of progress."""

    def __init__(self, batches: Iterable[T], count: int) -> None:
        """Begins to iterate.

        Args:
          batches: The batches.
          count: Their number.
        """
        self._batches, self._count = iter(batches), count

    def __next__(self) -> T:
        batch = next(self._batches)
        self._count -= 1
        return batch

    def __length_hint__(self) -> int:
        return max(0, self._count)


def ordered_batches(total: int, limit: int | None, share: Share) -> Iterator[tuple[np.ndarray, int]]:
    """Divides rows into the batches of one evaluation, in order; each process gets the same number of batches.

    Args:
      total: Number of rows.
      limit: Maximum number of batches, whose rows are spread evenly; None for all rows.
      share: Rows of this process.

    Returns:
      An iterator over (row numbers, rows per process); the last batches may have fewer numbers, and no row comes twice.
    """
    _check_limit(limit)
    batch_size = share.batch_size
    count = min(total, limit * batch_size) if limit else total
    numbers = np.arange(count) * total // count
    starts = range(share.span.start, -(-count // batch_size) * batch_size, batch_size)
    return FiniteBatches(((numbers[i : i + share.rows], share.rows) for i in starts), len(starts))


def ordered_streams(total: int, limit: int | None, share: Share) -> Iterator[tuple[np.ndarray, int]]:
    """As `ordered_batches`, where each example continues the same example of the batch before.

    The examples share the rows in equal consecutive parts, of which `limit` batches read the beginning. The last examples may
    have fewer rows than the others, or none.
    """
    _check_limit(limit)
    length = -(-total // share.batch_size)
    starts = np.arange(share.batch_size, dtype=np.int64) * length
    count = min(length, limit) if limit else length
    batches = (starts + i for i in range(count))
    return FiniteBatches(((numbers[numbers < total][share.span], share.rows) for numbers in batches), count)


def check_seed(seed: int) -> None:
    """Raises InputError if a seed is negative."""
    if seed < 0:
        raise InputError(f"seed={seed}: expected at least 0")


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit}: expected at least one batch, or None for all")
