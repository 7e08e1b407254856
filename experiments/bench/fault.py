"""The record of a seeded fault, for `faults.py`, `mixer_faults.py` and `wiring_faults.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong statement.

    Attributes:
      name: Name of the fault.
      effect: What is wrong then.
      path: The file.
      right: Text that occurs once in it.
      wrong: The text in its place.
      tests: Files and directories of tests, the likeliest first.
      keyword: Tests whose names match this expression run; "" for all.
    """

    name: str
    effect: str
    path: str
    right: str
    wrong: str
    tests: str
    keyword: str = ""

    def write(self, tree: Path) -> None:
        """Writes the fault into a source tree."""
        text = (tree / self.path).read_text("utf-8")
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: {self.right!r} occurs {text.count(self.right)} times in {self.path}: adapt the fault"
            )
        (tree / self.path).write_text(text.replace(self.right, self.wrong), "utf-8")
