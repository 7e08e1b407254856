"""Rows of the result file of `awd_lstm.py` as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def awd_lstm(rows: Sequence[dict[str, Any]]) -> Sequence[tuple[str, str]]:
    """Perplexities of the recipe, its parts, ensembles and the cache, relative to their alternatives."""
    lines = []
    for row in rows:
        if row["table"] == "recipe" and row["form"] == "recipe":
            seconds = row["steps_done"] * row["step_seconds"]
            figure = f"{row['over_plain']:.2f} (perplexity {row['perplexity']:.0f}, {seconds:.0f} s of steps)"
            lines.append(("AWD-LSTM recipe: held-out perplexity relative to the plain LSTM at equal time", figure))
        elif row["table"] == "transformer":
            lines.append(
                (
                    f"AWD-LSTM recipe, {row['lstm']['parameters'] / 1e6:.2f}M parameters: held-out perplexity relative to a "
                    "transformer of equal size at equal time",
                    f"{row['over_transformer']:.2f}",
                )
            )
        elif row["table"] == "parts" and row["without"] != "nothing":
            lines.append(
                (
                    f"AWD-LSTM recipe without {row['without']}, equal steps: held-out perplexity; time of a step, relative to "
                    "all of the recipe",
                    f"{row['over_recipe']:.3f}; {row['time_over_recipe']:.2f}",
                )
            )
        elif row["table"] == "ensembles":
            lines.append(
                (
                    f"ensemble of {len(row['members'])}, {row['kind']}: held-out perplexity relative to the mean member's",
                    f"{row['over_mean_member']:.3f}",
                )
            )
        elif row["table"] == "cache":
            lines.append((f"{row['cache']}: held-out perplexity relative to no cache", f"{row['over_none']:.3f}"))
    return lines
