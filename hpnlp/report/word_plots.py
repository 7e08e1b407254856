"""Pictures of words in the plane."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.report.plots import drawable, pyplot
from hpnlp.types import InputError


def plot_words(points: np.ndarray, words: Sequence[str], groups: Sequence[str], path: Path) -> None:
    """Plots words in the plane, with their texts, which are moved or left out where they would overlap.

    The picture shows the region of the coloured words, if there are any.

    Args:
      points: `[N, 2]` coordinates.
      words: N words.
      groups: Group of each word, which decides its colour; "" for frequent words, which are grey.
      path: File to write; its extension decides the format.

    Raises:
      InputError: The file cannot be written.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 7), layout="constrained")
    names = [name for name in dict.fromkeys(groups) if name]
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)} | {"": "0.6"}
    shown = points[[bool(group) or not names for group in groups]]
    # Without coloured words, some words that are far from all others do not decide on the region.
    low, high = (shown.min(0), shown.max(0)) if names else np.percentile(shown, [2, 98], axis=0)
    margin = 0.12 * np.maximum(high - low, 1e-6)
    axes.set(xlim=(low[0] - margin[0], high[0] + 2 * margin[0]), ylim=(low[1] - margin[1], high[1] + margin[1]))
    texts = []
    for name, color in colors.items():
        chosen = [number for number, group in enumerate(groups) if group == name]
        chosen = [n for n in chosen if (abs(points[n] - (low + high) / 2) <= (high - low) / 2 + margin).all()]
        if chosen:
            label = drawable(name) if name else "frequent words"
            axes.scatter(points[chosen, 0], points[chosen, 1], s=8, color=color, label=label if names else None)
        style = {"fontsize": 7 if name else 6, "color": color, "textcoords": "offset points", "gid": name}
        texts += [axes.annotate(drawable(words[n]), points[n], xytext=(3, 2), **style) for n in chosen]
    if names:
        axes.legend(fontsize=8)
    axes.set(xlabel="first principal component", ylabel="second principal component")
    place_texts(figure, texts)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {path} ({error}): name a file that can be written, as words.png") from error
    finally:
        plt.close(figure)


def place_texts(figure: Any, texts: Sequence[Any]) -> None:
    """Moves the texts of points to a side where they overlap no earlier one; those without a gid are left out if there is none.

    Args:
      figure: Figure of matplotlib, which keeps its layout from now on.
      texts: Annotations with offsets in points, the most important ones first.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer, taken = figure.canvas.get_renderer(), []
    for text in texts:
        for x, y in itertools.product((3, -3), (2, -2)):
            text.set(ha="left" if x > 0 else "right", va="bottom" if y > 0 else "top")
            text.xyann = x, y
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
        else:
            if not text.get_gid():
                text.remove()
                continue
            text.set(ha="left", va="bottom")
            text.xyann = (3, 2)
        taken.append(text.get_window_extent(renderer))
