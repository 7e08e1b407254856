"""Figure of a study: isoFLOP curves, the envelope, the optimum, residuals and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.scaling_laws.analysis import FACTORS, Analysis
from hpnlp.scaling_laws.fit import Fit, FlopsPerToken, interpolated_flops
from hpnlp.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = 5  # budgets whose isoFLOP curve is drawn


def draw(analysis: Analysis, path: Path) -> None:
    """Draws the figure.

    Args:
      analysis: The results of a study.
      path: File to write; its extension decides the format.

    Raises:
      InputError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend

    figure = Figure(figsize=(13, 8), layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    law, points = analysis.law, analysis.law.points
    flops = interpolated_flops(points)
    _isoflop_curves(axes[0], law, flops)
    _envelope(axes[1], law, flops)
    budgets = np.geomspace(points.c.min(), points.c.max() * FACTORS[-1], 13)
    optima = [law.optimum(float(budget), flops) for budget in budgets]
    for panel, label, unit, estimates in (
        (axes[2], "N*", "parameters", [optimum.n for optimum in optima]),
        (axes[3], "D*/N*", "tokens per parameter", [optimum.ratio for optimum in optima]),
    ):
        panel.fill_between(
            budgets, [e.low for e in estimates], [e.high for e in estimates], alpha=0.25, label="90 % interval"
        )
        panel.loglog(budgets, [e.value for e in estimates], label=f"{label}, additive")
        panel.axvline(points.c.max(), color="0.5", linewidth=0.8, linestyle=":", label="largest run")
        panel.set(xlabel="C, FLOPs", ylabel=f"{label}, {unit}")
        panel.legend(frameon=False, fontsize=8)
    _residuals(axes[4], law)
    _predictions(axes[5], analysis)
    for panel, values in ((axes[0], points.n), (axes[4], points.d)):
        _decimal_ticks(panel, values)
    for panel in axes:
        panel.grid(alpha=0.3)
    figure.suptitle(f"{len(points)} runs, convention {analysis.convention}", fontsize=10)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {path} ({error}): name a file that can be written, as scaling.png") from error


def _isoflop_curves(axes: Axes, law: Fit, flops: FlopsPerToken) -> None:
    """Loss against N at equal C by the law, with its minima, and the points at their sizes."""
    points = law.points
    sizes = np.geomspace(points.n.min() / 2, points.n.max() * 2, 100)
    budgets = np.geomspace(points.c.min(), points.c.max(), CURVES)
    colors = _colors(points.c, points.c)
    for budget, color in zip(budgets, _colors(budgets, points.c), strict=True):
        losses = [law.predict(float(n), float(budget / flops(n))).value for n in sizes]
        axes.plot(sizes, losses, color=color, linewidth=1, label=f"C = {budget:.1e}")
        best = law.optimum(float(budget), flops)
        if best.loss and sizes[0] < best.n.value < sizes[-1]:
            axes.plot(best.n.value, best.loss.value, "*", color=color, markersize=10)
    axes.scatter(points.n, points.loss, c=colors, s=18, zorder=3)
    low, high = points.loss.min(), points.loss.max()
    axes.set(
        xscale="log", xlabel="N, parameters", ylabel="held-out loss, nats per token", ylim=(0.93 * low, 1.15 * high)
    )
    axes.set_title("isoFLOP curves of the law, minima (stars), runs (dots)", fontsize=9)
    axes.legend(frameon=False, fontsize=7)


def _decimal_ticks(axes: Axes, values: np.ndarray) -> None:
    """Ticks such as 20k of a logarithmic x axis, as many as fit."""
    from matplotlib import ticker

    subs = (1.0, 2.0, 5.0) if values.max() < 300 * values.min() else (1.0,)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _colors(values: np.ndarray, among: np.ndarray) -> Any:
    from matplotlib import colormaps

    low, high = np.log(among.min()), np.log(among.max())
    return colormaps["viridis"]((np.log(values) - low) / max(high - low, 1e-9) * 0.9)


def _envelope(axes: Axes, law: Fit, flops: FlopsPerToken) -> None:
    """Loss against C for each size, and the least loss at each C."""
    points = law.points
    for index, n in enumerate(np.unique(points.n)):
        chosen = np.flatnonzero(points.n == n)
        chosen = chosen[np.argsort(points.c[chosen])]
        axes.plot(
            points.c[chosen], points.loss[chosen], "o-", color=f"C{index % 10}", markersize=4, label=f"N = {n:,.0f}"
        )
    budgets = np.geomspace(points.c.min(), points.c.max(), 30)
    best = [law.optimum(float(budget), flops).loss for budget in budgets]
    axes.plot(
        budgets, [loss.value if loss else np.nan for loss in best], "k--", linewidth=1.2, label="envelope of the law"
    )
    axes.set(xscale="log", xlabel="C, FLOPs", ylabel="held-out loss, nats per token")
    axes.legend(frameon=False, fontsize=7)


def _residuals(axes: Axes, law: Fit) -> None:
    """Measured over predicted loss against D, one colour for each size."""
    points = law.points
    for index, n in enumerate(np.unique(points.n)):
        chosen = points.n == n
        axes.plot(
            points.d[chosen],
            100 * law.residuals[chosen],
            "o",
            color=f"C{index % 10}",
            markersize=4,
            label=f"N = {n:,.0f}",
        )
    axes.axhline(0, color="0.4", linewidth=0.8)
    axes.set(xscale="log", xlabel="D, tokens", ylabel="measured over predicted loss, less 1, %")
    axes.legend(frameon=False, fontsize=7)


def _predictions(axes: Axes, analysis: Analysis) -> None:
    """Predicted against measured losses: fitted runs as dots, held-out ones with intervals."""
    points, law = analysis.law.points, analysis.law
    predicted = points.loss / np.exp(law.residuals)
    axes.plot(points.loss, predicted, "o", color="0.6", markersize=4, label="fitted")
    for index, p in enumerate(analysis.predictions):
        error = [[p.predicted.value - p.predicted.low], [p.predicted.high - p.predicted.value]]
        label = "held out, 90 % interval" if index == 0 else None
        axes.errorbar(p.member.loss, p.predicted.value, yerr=error, fmt="s", color="C3", capsize=3, label=label)
    every = [*points.loss, *(p.member.loss for p in analysis.predictions)]
    axes.plot([min(every), max(every)], [min(every), max(every)], color="0.4", linewidth=0.8)
    axes.set(xlabel="measured loss, nats per token", ylabel="predicted loss, nats per token")
    axes.legend(frameon=False, fontsize=8)
