"""Rows of `recipes.py`, `precision.py` and `pair_encoders.py` as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from result_plots import Rows

Lines = Sequence[tuple[str, str]]  # (label, figure)
MIB = 2**20


def recipes(rows: Rows) -> Lines:
    """Accuracy of each technique and of its control, their paired difference, and sizes and times of models."""
    lines = []
    for row in rows:
        if row["table"] == "models":
            figure = f"{row['parameters']:,}; {row['over_first_1']:.2f}; {row['over_first_8']:.2f}"
            label = f"classifier of functions, {row['what']}: parameters; time relative to the teacher, B 1; B 8"
            lines.append((label, figure))
            continue
        figure = f"{row['technique_score']:.1%}; {row['control_score']:.1%}; {_points(row)}"
        if row["technique_share"] < 0.995:
            figure += f"; {row['technique_share']:.1%} of the weights are not 0"
        if "teacher_score" in row:
            size = row["technique_parameters"] / row["teacher_parameters"]
            figure += f"; teacher {row['teacher_score']:.1%}, {size:.2f} of its parameters"
        lines.append((f"{row['what']}: accuracy of both; difference in points", figure))
    return lines


def _points(row: Mapping[str, Any]) -> str:
    return f"{100 * row['difference']:+.1f} +- {100 * row['half_interval']:.1f}"


def precision(rows: Rows) -> Lines:
    """Losses, times, memory and largest batches by dtype."""
    lines = []
    for row in rows:
        if row["table"] == "training":
            figure = f"{row['loss']:.4f} nats per byte"
            if "difference" in row:
                figure += f"; {row['difference']:+.4f} +- {row['half_interval']:.4f}"
            if any(row["skipped_steps"]):
                figure += f"; {max(row['skipped_steps'])} of {row['steps']:,} steps skipped"
            lines.append((f"language model trained in {row['what']}: held-out loss; difference to float32", figure))
        elif row["table"] == "steps" and row["what"] != "float32":
            label = f"training step in {row['what']}: time relative to float32; temporary memory relative to float32"
            low, high = row["interval"]
            figure = f"{row['over_float32']:.2f} ({low:.2f} to {high:.2f}); {row['temp_over_float32']:.2f}"
            lines.append((label, figure))
        elif row["table"] == "batches":
            speed = f"; {row['sequences_per_second']:,.0f}" if "sequences_per_second" in row else ""
            label = (
                f"encoder in {row['limit_bytes'] // MIB} MiB, {row['what']}: largest batch; sequences per second there"
            )
            lines.append((label, f"{row['batch']:,}{speed}"))
        elif row["table"] == "training batches":
            label = f"training step of the encoder in {row['limit_bytes'] // MIB:,} MiB, {row['what']}: largest batch"
            lines.append((label, f"{row['batch']:,}"))
    return lines


def pair_encoders(rows: Rows) -> Lines:
    """Share of docstrings whose own body comes first, and time of a docstring."""
    lines = []
    for row in rows:
        if row["table"] == "quality":
            figure = f"{row['score']:.1%}"
            if "difference" in row:
                figure += f"; {_points(row)} points to the dual encoder"
            label = f"{row['what']}: own body first among {row['candidates']}, {row['queries']:,} docstrings"
            lines.append((label, figure))
        else:
            figure = f"{1e3 * row['seconds']:.1f} ms"
            if "over_dual_encoder" in row:
                low, high = row["interval"]
                figure += (
                    f", {row['over_dual_encoder']:,.0f} times that of the dual encoder ({low:,.0f} to {high:,.0f})"
                )
            if "body_seconds" in row:
                figure += f", and once {1e3 * row['body_seconds']:.1f} ms for each body"
            lines.append((f"{row['what']}: time to order {row['candidates']} bodies of a docstring", figure))
    return lines
