"""Points of a scaling law: trained models with their size, tokens, FLOPs and loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from hpnlp.types import InputError

EQUAL = (
    1.02  # runs whose FLOPs differ by at most this factor have one budget, since steps and batches are whole numbers
)


@dataclasses.dataclass(frozen=True)
class Points:
    """Trained models.

    Attributes:
      n: `[P]` numbers of parameters N, in one convention (`CONVENTIONS`).
      d: `[P]` numbers of training tokens D.
      loss: `[P]` losses in nats per token, over 0.
      c: `[P]` training FLOPs; empty for 6 N D.
    """

    n: np.ndarray
    d: np.ndarray
    loss: np.ndarray
    c: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))

    def __post_init__(self) -> None:
        if np.size(self.c) == 0 and np.shape(self.n) == np.shape(self.d):
            object.__setattr__(self, "c", 6.0 * np.asarray(self.n, np.float64) * np.asarray(self.d, np.float64))
        for name, values in self.arrays().items():
            array = np.asarray(values, np.float64)
            if array.ndim != 1 or len(array) != np.size(self.n):
                raise InputError(f"{name} has the shape {array.shape}: expected one number for each of the points")
            if not (np.isfinite(array) & (array > 0)).all():
                wrong = array[~(np.isfinite(array) & (array > 0))][0]
                raise InputError(f"{name} holds {wrong}: leave out points whose {name} is not a number over 0")
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.n)

    def __getitem__(self, index: np.ndarray) -> Points:
        return Points(**{name: values[index] for name, values in self.arrays().items()})

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays.

        Returns:
          "n", "d", "loss" and "c" -> array.
        """
        return {name: getattr(self, name) for name in ("n", "d", "loss", "c")}

    def budgets(self, factor: float | int = EQUAL) -> list[np.ndarray]:
        """Groups of points whose FLOPs are equal.

        Args:
          factor: Points that follow each other in order of FLOPs belong together if their FLOPs differ by at most this.

        Returns:
          Indices of the points of each group, in order of FLOPs.
        """
        order = np.argsort(self.c, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(np.log(self.c[order])) > np.log(factor)) + 1)

    def noise(self) -> float | None:
        """Standard deviation of the log loss between runs of equal N and D, which differ in their seeds.

        Returns:
          The deviation, about the relative one of the loss; None if no two runs have the same N and D.
        """
        groups: dict[tuple[float, float], list[float]] = {}
        for n, d, loss in zip(self.n, self.d, np.log(self.loss), strict=True):
            groups.setdefault((float(n), float(d)), []).append(float(loss))
        repeated = [np.asarray(losses) for losses in groups.values() if len(losses) > 1]
        if not repeated:
            return None
        squares = sum(float(((losses - losses.mean()) ** 2).sum()) for losses in repeated)
        return float(np.sqrt(squares / sum(len(losses) - 1 for losses in repeated)))
