"""Rows of the results of serving, of vectors of texts and of experts as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence

from result_plots import Rows

Lines = Sequence[tuple[str, str]]


def serving(rows: Rows) -> Lines:
    """Ratios with their intervals, and seconds."""
    lines = []
    for row in rows:
        if "ratio" in row:
            figure = f"{row['ratio']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
        else:
            figure = f"{row['total_seconds']:.1f} s"
        lines.append((row["what"], figure))
    return lines


def sentence_vectors(rows: Rows) -> Lines:
    """Texts per second, and the time relative to torch."""
    lines = []
    for row in rows:
        tokens = (
            f"{row['mean_tokens']:.0f} tokens" if row["lengths"] == "equal" else f"{row['most_tokens']} tokens or fewer"
        )
        label = f"vectors of texts of {tokens}, batch {row['batch']}: time relative to BertModel of transformers"
        lines.append((label, f"{row['ours_over_torch']:.2f} ({row['ours_per_second']:.0f} texts per second)"))
    return lines


EXPERT_PEERS = {
    "dense": "layer of experts, time of a training step relative to a dense MLP of equal active FLOPs",
    "trainer": "model with experts, time of a training step relative to a dense model of equal active FLOPs",
    "torch": "layer of experts, time of a training step relative to torch with grouped products",
    "skew": "layer of experts, time of a training step relative to even loads",
    "implementations": "layer of experts by `impl`, time of a training step relative to a dense MLP of equal active FLOPs",
    "decode": "layer of experts, time of decoding relative to a dense MLP of equal active FLOPs",
}


def experts(rows: Rows) -> Lines:
    lines = []
    for row in rows:
        wall, cpu = row["wall"], row["cpu"]
        figure = (
            f"{wall['ratio']:.2f} ({wall['interval'][0]:.2f} to {wall['interval'][1]:.2f}; CPU time {cpu['ratio']:.2f}"
        )
        if "temporary_mib" in row and row["compared"] == "dense":
            first, second = row["temporary_mib"]
            figure += f"; temporary memory {first / second:.2f}"
        lines.append((f"{EXPERT_PEERS[row['compared']]}, {row['row']}", f"{figure})"))
    return lines
