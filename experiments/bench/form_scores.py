"""Scores of runs that differ in one thing, compared with those of the plain form; see `forms.py`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from hpnlp import measure


def over(seconds: Sequence[float], plain: Sequence[float]) -> float:
    """Ratio of two times, the median over the rounds."""
    return statistics.median(a / b for a, b in zip(seconds, plain, strict=True))


def best_score(scores: Sequence[tuple[int, float]], steps: int, metric: str) -> float:
    """The best held-out score up to a number of steps."""
    choose = min if metric == "loss" else max
    return choose(score for step, score in scores if step <= steps)


def compared(scores: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Scores of the seeds, and the mean of their differences to the plain form with its interval."""
    differences = [a - b for a, b in zip(scores, plain, strict=True)]
    mean, half = measure.mean_interval(differences)
    return {
        "by_seed": list(scores),
        "score": statistics.mean(scores),
        "over_plain": statistics.mean(scores) / statistics.mean(plain),
        "difference": mean,
        "half_interval": half,
    }
