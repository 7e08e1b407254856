"""Pictures of attention matrices and of losses by the length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.jobs.inspect.attention import HELD, LEADING, POINTS, LayerAttention
from hpnlp.jobs.inspect.positions import ContextLosses, Z

NUMBERED = 12  # heads up to which the cells of a picture of all heads have numbers


def draw_spectra(layers: Sequence[LayerAttention], path: Path) -> None:
    """Draws the cumulative singular values of each layer, and their share in the leading quarter by layer and head.

    Args:
      layers: The attention of the layers.
      path: File to write.
    """
    figure, (curves, cells) = _figure(2, (11.0, max(3.8, 1.6 + 0.25 * len(layers))))
    x = np.linspace(0, 1, POINTS)
    colors = _colors(len(layers))
    for layer, color in zip(layers, colors, strict=True):
        label = f"layer {layer.layer}" if layer is layers[0] or layer is layers[-1] else None
        curves.plot(x, layer.measures.by_head("curve").mean(axis=0), color=color, linewidth=1.4, label=label)
    even = np.mean([layer.uniform.by_head("curve").mean(axis=0) for layer in layers], axis=0)
    curves.plot(x, even, color="0.4", linestyle="--", linewidth=1, label="even attention")
    curves.legend(loc="lower right", frameon=False, fontsize=8, labelcolor="linecolor")
    curves.axhline(HELD, color="0.6", linestyle=":", linewidth=0.9)
    curves.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="share of the singular values, largest first", ylabel="share of their sum",
        title="spectrum of the attention matrices, mean over heads",
    )  # fmt: skip
    curves.grid(alpha=0.3)
    widest = max(layer.measures.leading.shape[1] for layer in layers)
    grid = np.full((len(layers), widest), np.nan)
    for row, layer in zip(grid, layers, strict=True):
        row[: layer.measures.leading.shape[1]] = layer.measures.by_head("leading")
    image = cells.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    cells.set(
        xlabel="head", ylabel="layer", xticks=_ticks(widest), yticks=range(len(layers)),
        yticklabels=[layer.layer for layer in layers], title=f"share in the leading {100 * LEADING:.0f} %",
    )  # fmt: skip
    if widest <= NUMBERED:
        for row, column in zip(*np.nonzero(np.isfinite(grid)), strict=True):
            color = "black" if grid[row, column] > 0.6 else "white"
            cells.text(column, row, f"{grid[row, column]:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=cells)
    figure.savefig(path, dpi=130)


def draw_attention(layers: Sequence[LayerAttention], path: Path) -> None:
    """Draws the distance and the entropy of the heads of each layer.

    Args:
      layers: The attention of the layers.
      path: File to write.
    """
    figure, panels = _figure(2, (11.0, 3.8))
    labels = {"distance": "mean distance of query and key, tokens", "entropy": "mean entropy of a row, nats"}
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for place, layer in enumerate(layers):
            of_heads, even = layer.measures.by_head(name), layer.uniform.by_head(name).mean()
            axes.plot([place] * len(of_heads), of_heads, "o", color="C0", alpha=0.6, markersize=4)
            axes.plot([place - 0.3, place + 0.3], [of_heads.mean()] * 2, color="C0", linewidth=2)
            axes.plot([place - 0.3, place + 0.3], [even] * 2, color="0.4", linewidth=1.2, linestyle="--")
        # Labels beside the last layer, at the heights of its lines.
        mean, even = (side.by_head(name).mean() for side in (layers[-1].measures, layers[-1].uniform))
        sides = ("bottom", "top") if mean > even else ("top", "bottom")
        for text, height, color, side in zip(
            ("mean of the heads", "even attention"), (mean, even), ("C0", "0.4"), sides, strict=True
        ):
            place = (len(layers) - 0.65, height)
            axes.annotate(text, place, xytext=(4, 0), textcoords="offset points", va=side, fontsize=8, color=color)
        axes.set(xlabel="layer", ylabel=label, xticks=range(len(layers)), xticklabels=[layer.layer for layer in layers])
        axes.set_xlim(-0.6, len(layers) - 0.4 + 0.25 * len(layers) + 0.6)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=130)


def draw_losses(losses: ContextLosses, path: Path) -> None:
    """Draws the loss by the length of the context, with 95 % intervals.

    Args:
      losses: The losses.
      path: File to write.
    """
    figure, (axes,) = _figure(1, (7.0, 3.8))
    places = range(len(losses.bins))
    errors = [Z * (item.error or 0.0) for item in losses.bins]
    axes.errorbar(places, [item.loss for item in losses.bins], errors, fmt="o-", color="C0", capsize=3, markersize=4)
    axes.axhline(losses.loss, color="0.4", linestyle="--", linewidth=1)
    axes.annotate(
        f"all tokens {losses.loss:.3f}",
        (0, losses.loss),
        xytext=(2, 4),
        textcoords="offset points",
        fontsize=8,
        color="0.4",
    )
    axes.set_xticks(places, [item.name for item in losses.bins], rotation=45, ha="right", fontsize=8)
    axes.set(xlabel="tokens of the document before the token", ylabel="held-out loss, nats per token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def _figure(panels: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure with panels side by side."""
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0]


def _colors(count: int) -> Any:
    """Colours of consecutive layers, which differ in brightness as well."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0, 0.85, count))


def _ticks(count: int) -> range:
    return range(0, count, max(1, count // 16))
