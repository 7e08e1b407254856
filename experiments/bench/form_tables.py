"""Rows of the result files of `forms.py` as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from result_plots import Rows

Lines = Sequence[tuple[str, str]]  # (label, figure)

# Group of a benchmark -> what its forms are.
GROUPS = {
    "gates": "byte-level recurrent language model, two layers",
    "outputs": "byte-level LSTM, three layers",
    "initial": "byte-level LSTM, sequences of 32 bytes",
    "layers": "byte-level LSTM",
    "dropout": "byte-level LSTM on 140 kB",
    "language_model": "byte-level language model",
    "numbers": "numbers to words, sequence to sequence",
}


def difference(scores: dict[str, Any]) -> str:
    """The mean difference to the plain form, with its interval."""
    half = scores["half_interval"]
    return f"{scores['difference']:+.4f}" + (f" +- {half:.4f}" if half is not None else "")


def line(row: dict[str, Any], subject: str) -> tuple[str, str]:
    """Differences of a form to the plain one after equal steps and in equal time."""
    metric = {"loss": "held-out loss", "pair_accuracy": "held-out pair accuracy"}[row["metric"]]
    label = (
        f"{subject}, {row['form']} ({row['parameters']:,} parameters), over {row['plain']}: {metric} after "
        f"{row['steps']['steps']:,} steps; after equal time (95 % intervals of {len(row['steps']['by_seed'])} seeds)"
    )
    figure = (
        f"{difference(row['steps'])}; {difference(row['time'])} ({row['time']['steps']:,} steps); "
        f"time of a step {row['step_time_over_plain']:.2f}"
    )
    if row["flops_over_plain"] is not None and row["flops_over_plain"] != 1:
        figure += f", FLOPs {row['flops_over_plain']:.2f}"
    if row["claim"]:
        figure += f"; {row['paper']}: {row['claim']}"
    return label, figure


def forms(rows: Rows) -> Lines:
    """Tricks of recurrent models, and blocks, each beside the plain form of its group."""
    lines = []
    for row in rows:
        if row["form"] == row["plain"]:
            subject = f"{GROUPS[row['group']]}, {row['form']} ({row['parameters']:,} parameters)"
            lines.append(
                (f"{subject}: held-out loss after {row['steps']['steps']:,} steps", f"{row['steps']['score']:.4f}")
            )
        else:
            lines.append(line(dict(row), GROUPS[row["group"]]))
    return lines


def recurrent_sizes(rows: Rows) -> Lines:
    """LSTMs beside transformers of as many parameters."""
    return [line(dict(row), "byte-level language model") for row in rows if row["form"] != row["plain"]]


def word_codes(rows: Rows) -> Lines:
    """Word vectors by output layer, and the codes in which they are stored."""
    lines = []
    for row in rows:
        if row["group"] == "storage":
            label = (
                f"word vectors of {row['words']:,} words stored as {row['form']}: bytes per word; share of the 10 nearest "
                "words found; held-out pair accuracy; time of a search relative to float32"
            )
            quality = f"{row['bytes_per_word']:.0f}; {row['recall']:.3f}; {row['pair_accuracy']:.3f}"
            lines.append((label, f"{quality}; {row['time_over_float32']:.2f}"))
        elif row["form"] != row["plain"]:
            lines.append(line(dict(row), "skip-gram"))
    return lines
