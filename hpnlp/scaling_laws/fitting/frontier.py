"""Compute-optimal sizes read off the points without a formula of the loss: isoFLOP parabolas, and the envelope of curves.

Both give pairs (C, N*), to which N* = G C^a is fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from hpnlp.scaling_laws.points import Points
from hpnlp.types import InputError

GRID = 200  # FLOPs at which the envelope is read
FARTHEST = 1.0  # distance of a parabola's minimum from the middle of its sizes, relative to half their range


@dataclasses.dataclass(frozen=True)
class Minimum:
    """The best size at a number of FLOPs.

    Attributes:
      c: FLOPs.
      n: The best number of parameters.
      loss: Loss at this size.
      offset: Distance of log n from the middle of the sizes, relative to half their range; 0 is the middle, 1 the border.
    """

    c: float | int
    n: float | int
    loss: float | int
    offset: float | int = 0.0


@dataclasses.dataclass(frozen=True)
class FrontierForm:
    """A way to find the best size at each number of FLOPs.

    Attributes:
      formula: Description.
      minima: Function of the points that returns the best sizes.
      constants: Names of the constants.
    """

    formula: str
    minima: Callable[[Points], list[Minimum]]
    constants: tuple[str, ...] = ("G", "a")


def isoflop_minima(points: Points) -> list[Minimum]:
    """Minima of parabolas of the loss in log N, one for each number of FLOPs with at least 3 sizes (Hoffmann's approach 2).

    Args:
      points: Points, several of which have equal FLOPs.

    Returns:
      The minima, in order of FLOPs. Budgets whose parabola has no minimum between their sizes are left out.

    Raises:
      InputError: Fewer than two budgets have a minimum.
    """
    minima = []
    for index in points.budgets():
        log_n = np.log(points.n[index])
        if len(np.unique(points.n[index])) < 3:
            continue
        middle, half = (log_n.max() + log_n.min()) / 2, (log_n.max() - log_n.min()) / 2
        x = (log_n - middle) / half
        curvature, slope, level = np.polyfit(x, points.loss[index], 2)
        offset = -slope / (2 * curvature) if curvature > 0 else np.inf
        if abs(offset) <= FARTHEST:
            loss = level - slope**2 / (4 * curvature)
            c = float(np.exp(np.log(points.c[index]).mean()))
            minima.append(Minimum(c, float(np.exp(middle + half * offset)), float(loss), float(offset)))
    if len(minima) < 2:
        raise InputError(
            f"form isoflop: {len(minima)} of the {len(points.budgets())} numbers of FLOPs have 3 sizes and a minimum between "
            "them, expected 2: train at least 3 sizes with equal FLOPs (Study(flops=...)), or use the form additive"
        )
    return minima


def envelope_minima(points: Points) -> list[Minimum]:
    """Sizes with the least loss at each number of FLOPs, by interpolation between the points of each size (approach 1).

    Where the smallest or the largest of the sizes that reach a number of FLOPs is the best one, a size beyond it may be better,
    and there is no minimum.

    Args:
      points: Points with several D for each size.

    Returns:
      The minima at up to GRID numbers of FLOPs.

    Raises:
      InputError: The curves of at most one size lie on the envelope.
    """
    curves = []
    for n in np.unique(points.n):
        index = np.flatnonzero(points.n == n)
        index = index[np.argsort(points.c[index])]
        if len(index) > 1:
            curves.append((n, np.log(points.c[index]), np.log(points.loss[index])))
    minima = []
    for log_c in np.linspace(np.log(points.c.min()), np.log(points.c.max()), GRID):
        at = [(float(np.interp(log_c, c, loss)), float(n)) for n, c, loss in curves if c[0] <= log_c <= c[-1]]
        loss, n = min(at, default=(np.nan, np.nan))
        if at and at[0][1] < n < at[-1][1]:
            minima.append(Minimum(float(np.exp(log_c)), n, float(np.exp(loss))))
    if len({minimum.n for minimum in minima}) < 2:
        raise InputError(
            "form envelope: fewer than two sizes have the least loss between smaller and larger ones at equal FLOPs: train "
            "more sizes with more numbers of tokens each, or use the form additive"
        )
    return minima


def power_law(minima: list[Minimum]) -> np.ndarray:
    """Fits N* = G C^a by least squares of the logarithms.

    Args:
      minima: At least two minima.

    Returns:
      (G, a).
    """
    a, intercept = np.polyfit(np.log([m.c for m in minima]), np.log([m.n for m in minima]), 1)
    return np.array([np.exp(intercept), a])


FRONTIER_FORMS: Mapping[str, FrontierForm] = {
    "isoflop": FrontierForm("minima of parabolas in log N at equal C; N* = G C^a", isoflop_minima),
    "envelope": FrontierForm("least loss of all sizes at each C; N* = G C^a", envelope_minima),
}
