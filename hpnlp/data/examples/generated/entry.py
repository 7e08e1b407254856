"""`Generated`: examples that every machine has or can generate, an entry of GENERATED."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hpnlp.data.reading.sources import File

Make = Callable[[Sequence[File]], Iterator[dict[str, Any]]]


class Generated(NamedTuple):
    """Examples that are generated or converted. Every example has a field "group", the name of its group.

    Attributes:
      make: Function from the files to the examples to train on and hold out.
      origin: Path of the files that the examples are made from, "" for none; None if the user names it, as NAME:PATH.
      challenge: Function from the files to the examples that are scored apart, or None.
      heldout: Function from the files to the examples to hold out, or None to hold out some of `make`.
      formats: Extensions of files that are read beside those of records, as for `data.reading.sources.find`.
    """

    make: Make
    origin: str | None = ""
    challenge: Make | None = None
    heldout: Make | None = None
    formats: tuple[str, ...] = ()
