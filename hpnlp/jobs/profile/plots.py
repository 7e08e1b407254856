"""Picture of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def plot_shares(bars: Mapping[str, Mapping[str, float]], title: str, path: Path) -> None:
    """Draws horizontal bars of shares with a label for each part, of equal colours in all bars.

    Args:
      bars: Name of a bar -> part -> share; empty bars are left out.
      title: Title of the picture.
      path: File to write; its extension decides the format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend

    bars = {name: shares for name, shares in bars.items() if shares}
    labels = list(dict.fromkeys(part for shares in bars.values() for part in shares))
    figure = Figure(figsize=(9, 1.5 + 0.6 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for row, shares in enumerate(bars.values()):
        left = 0.0
        for part, share in shares.items():
            colour = "0.75" if part == "not attributed" else colormaps["tab10"](labels.index(part) % 10)
            name = part if row == 0 else None
            axes.barh(row, share, left=left, color=colour, alpha=0.85, edgecolor="white", label=name)
            if share >= 0.04:
                axes.text(left + share / 2, row, f"{100 * share:.0f} %", ha="center", va="center", fontsize=8)
            left += share
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), title=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
