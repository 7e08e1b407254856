"""Weaknesses of a fit: constants that the points do not identify, and the bias of isoFLOP parabolas."""

from __future__ import annotations

import dataclasses

import numpy as np

from hpnlp.scaling_laws.fit import Fit, fit, interpolated_flops
from hpnlp.scaling_laws.fitting.forms import LOSS_FORMS
from hpnlp.scaling_laws.fitting.frontier import isoflop_minima, power_law
from hpnlp.scaling_laws.points import Points
from hpnlp.types import InputError

FLOOR_SHARE = 0.05  # E below this share of the least loss counts as 0
OFF_CENTRE = 0.1  # distance of a minimum from the middle of its sizes, relative to half their range
FEW = 3  # numbers of tokens for each size, and of sizes, below which exponents are not identified
LINE = 0.1  # standard deviation across the main direction of (log N, log D), below which the points lie on a line
EXTRAPOLATED = 1000.0  # multiple of the largest budget at which the bias of N* is stated


@dataclasses.dataclass(frozen=True)
class Bias:
    """Bias of isoFLOP parabolas on a grid of points, without noise.

    Attributes:
      exponent: Error of a.
      size: Relative error of N* at EXTRAPOLATED times the largest budget.
      largest_offset: Largest `Minimum.offset`, with its sign.
    """

    exponent: float | int
    size: float | int
    largest_offset: float | int


def isoflop_bias(points: Points) -> Bias:
    """Computes the bias of the form isoflop: its error on noise-free losses of the form additive at the same points.

    Args:
      points: Points with at least two budgets of three sizes.

    Returns:
      The bias.

    Raises:
      InputError: The points do not determine the form additive or isoflop.

    References:
      Czech et al. 2026, "Problems with Chinchilla Approach 2: Systematic Biases in IsoFLOP Parabola Fits", arXiv:2603.22339.
    """
    law, smooth = LOSS_FORMS["additive"], fit(points, "additive", bootstrap=2)
    clean = np.exp(law.log_loss(law.to_parameters(smooth.values), *law.logs(points))[0])
    minima = isoflop_minima(dataclasses.replace(points, loss=clean))
    scale, exponent = power_law(minima)
    budgets = np.array([m.c for m in minima])
    flops = interpolated_flops(points)
    true = np.log([smooth.optimum(c, flops).n.value for c in budgets.tolist()])
    true_exponent = np.polyfit(np.log(budgets), true, 1)[0]
    far = EXTRAPOLATED * float(budgets.max())
    size = scale * far**exponent / smooth.optimum(far, flops).n.value - 1
    largest = max(minima, key=lambda minimum: abs(minimum.offset))
    return Bias(float(exponent - true_exponent), float(size), largest.offset)


def warnings(law: Fit, level: float | int = 0.9) -> list[str]:
    """Reasons to doubt a fit.

    Args:
      law: The fit.
      level: Probability of the intervals that are looked at.

    Returns:
      Sentences; empty where there is none.
    """
    texts = []
    points = law.points
    if "E" in law.constants:
        floor = law.interval("E", level)
        if floor.low < FLOOR_SHARE * points.loss.min() or floor.high - floor.low > floor.value:
            is_zero = floor.high < FLOOR_SHARE * points.loss.min()
            interval = (
                "the fit has made it 0"
                if is_zero
                else f"its {level:.0%} interval is {floor.low:.3g} to {floor.high:.3g}"
            )
            texts.append(
                f"E is not identified: {interval}; train larger models on more tokens, and judge the law by held-out losses"
            )
    for name in ("alpha", "beta", "alphaN", "alphaD"):
        if name in law.constants and (exponent := law.interval(name, level)).high - exponent.low > abs(exponent.value):
            texts.append(
                f"{name} of the form {law.form} is not identified: its {level:.0%} interval is {exponent.low:.3g} to "
                f"{exponent.high:.3g}; train more runs, further apart"
            )
    if law.form in ("additive", "kaplan"):
        tokens = [len(np.unique(points.d[points.n == n])) for n in np.unique(points.n)]
        if max(tokens) < FEW and len(np.unique(points.d)) < 2 * FEW:
            texts.append(
                f"each size was trained on at most {max(tokens)} numbers of tokens: below {FEW}, neither the exponent of D "
                "nor E is identified, whatever their intervals"
            )
        if text := _line_warning(points):
            texts.append(text)
        if len(tokens) < FEW:
            texts.append(f"there are {len(tokens)} sizes: the exponent of N is not identified below {FEW}")
        if law.agreeing < 2:
            texts.append(
                f"only 1 of {law.starts} starting points leads to the best minimum: the constants may be those of a local one"
            )
    if law.form == "isoflop" and (text := _isoflop_warning(points)):
        texts.append(text)
    return texts


def _line_warning(points: Points) -> str:
    """A sentence on points whose log D is a linear function of log N; "" for others."""
    x = np.stack([np.log(points.n), np.log(points.d)])
    if np.sqrt(max(0.0, np.linalg.eigvalsh(np.cov(x))[0])) > LINE:
        return ""
    return (
        "the tokens are nearly a power of the size in all points, as for one ratio D/N or one number of FLOPs: the terms of N "
        "and D are not told apart, and the constants and the optimum mean nothing, whatever their intervals; train each size "
        f"on at least {FEW} numbers of tokens"
    )


def _isoflop_warning(points: Points) -> str:
    """A sentence on minima off the middle of their sizes, with the bias; "" if there is none."""
    offsets = [minimum.offset for minimum in isoflop_minima(points)]
    largest = max(offsets, key=abs)
    if abs(largest) <= OFF_CENTRE:
        return ""
    share = f"{abs(largest):.0%}"
    text = f"parabolas are biased where minima are off the middle of the sizes, here by up to {share} of half the range"
    try:
        bias = isoflop_bias(points)
    except InputError:
        return f"{text}; too few points to estimate the bias"
    return (
        f"{text}: without noise, a would be off by {bias.exponent:+.4f}, and N* at {EXTRAPOLATED:g} times the largest budget "
        f"by {bias.size:+.1%}; use the form additive"
    )
