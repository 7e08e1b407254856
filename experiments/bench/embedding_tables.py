"""Tables of the results of embeddings, for docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
Lines = list[tuple[str, str]]


def word_embeddings(rows: Rows) -> Lines:
    """Words per second relative to gensim, and similarity of held-out pairs beside gensim's.

    Args:
      rows: Rows of the result file.

    Returns:
      `(label, figure)` of each line.
    """
    names = {"skip_gram": "skip-gram", "cbow": "CBOW"}
    lines = []
    for row in rows:
        label = (
            f"{names[row['objective']]}, negative sampling, D {row['dim']}, V {row['vocab']:,}, {row['epochs']} passes over "
            f"{row['words']:,} words"
        )
        if row["form"].startswith("hpnlp"):
            form = row["form"].removeprefix("hpnlp")
            lines.append(
                (
                    f"{label}{form}: words/s relative to gensim",
                    f"{row['over_gensim']:.2f} ({row['words_per_second']:,.0f} words/s)",
                )
            )
        if row["form"] == "hpnlp":
            peer = next(r for r in rows if r["objective"] == row["objective"] and r["form"] == "gensim, file")
            for name, text in (
                ("spearman", "rank correlation of cosines and held-out mutual information"),
                ("pair_accuracy", "held-out pairs that are more similar than other pairs"),
            ):
                lines.append((f"{label}: {text}; gensim", f"{row[name]:.3f}; {peer[name]:.3f}"))
    return lines
