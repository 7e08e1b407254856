"""Rows of the measurement of advice as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from result_plots import Rows

Lines = Sequence[tuple[str, str]]
REGRET = 0.1
UNATTRIBUTED = 0.1


def advise(rows: Rows) -> Lines:
    """Counts over all fixtures, and the recommendation for each beside the best of the exhaustive set."""
    recommended = [row for row in rows if row["recommended"]]
    profiled = [row for row in rows if row["not_attributed"] is not None]
    exceeded = sum(len(row["bounds_exceeded"]) for row in rows)
    counts = [
        (
            "fixtures whose planted answer was recommended, and no decoy",
            [row["is_winner"] and not row["decoys"] for row in rows],
        ),
        (f"fixtures with a regret of at most {100 * REGRET:.0f} %", [row["regret"] <= REGRET for row in rows]),
        (
            "confirmed intervals that hold the ratio of the exhaustive set",
            [bool(row["is_covered"]) for row in recommended],
        ),
        ("recommendations that are slower than the model as it is", [row["is_slower"] for row in recommended]),
        (
            f"profiles with at most {100 * UNATTRIBUTED:.0f} % of the time outside of all operations",
            [row["not_attributed"] <= UNATTRIBUTED for row in profiled],
        ),
    ]
    compared = [row["estimates"] for row in rows if row.get("estimates", {}).get("pairs")]
    counts += [
        (
            "fixtures with half of the estimates for this machine within 30 % of the measured ratio",
            [estimates["within"] >= 0.5 for estimates in compared],
        ),
        (
            "fixtures with a rank correlation of estimated and measured ratios of at least 0.8",
            [estimates["rank"] >= 0.8 for estimates in compared],
        ),
    ]
    lines = [(label, f"{sum(values)} of {len(values)}") for label, values in counts]
    lines.append(("gains beyond the bound of their technique", f"{exceeded} of {sum(row['bounds'] for row in rows)}"))
    return [*lines, *(_line(row) for row in rows)]


def _line(row: Mapping[str, Any]) -> tuple[str, str]:
    """The recommendation for a fixture, and the best of the exhaustive set."""
    label = f"`{row['fixture']}`, goal {row['goal']}: {row['recommended'] or 'nothing'} recommended"
    best = f"best of all {row['best']} {_ratio(row['best_ratio'])}" if row["best"] else "nothing helps"
    minutes = f"{row['advise_seconds'] / 60:.0f} min, all {row['exhaustive_seconds'] / 60:.0f} min"
    figure = f"{_ratio(row['ratio'])}; " if row["ratio"] else ""
    return label, f"{figure}{best}; {minutes}"


def _ratio(ratio: Sequence[float]) -> str:
    """A ratio with its interval, if that is known and not a point."""
    median, *ends = ratio
    if not ends or ends[0] == ends[1]:
        return f"{median:.2f}"
    return f"{median:.2f} ({ends[0]:.2f} to {ends[1]:.2f})"


def bert(rows: Rows) -> Lines:
    """Time of the recommended candidate, and of other programs with the unchanged model, over float32."""
    lines = []
    for row in rows:
        quality = row["quality"]
        kept = f", keeps at least {quality['low']:.1%} of the quality" if quality else ""
        for name, (median, low, high) in row["over float32"].items():
            program = (
                f"{row['recommended']} (recommended{kept})" if name == "recommended" else f"{name}, unchanged model"
            )
            label = f"BERT classifier, 6 x 384, T 128, {row['what']}: time of {program} over float32"
            lines.append((label, f"{median:.3f} ({low:.3f} to {high:.3f})"))
    return lines
