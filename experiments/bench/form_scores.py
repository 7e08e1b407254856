"""Scores of runs that differ in one thing, compared with those of the plain form; see `forms.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import scipy.stats


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
    half = None
    if len(differences) > 1:
        quantile = float(scipy.stats.t.ppf(0.975, len(differences) - 1))
        half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return {
        "by_seed": list(scores),
        "score": statistics.mean(scores),
        "over_plain": statistics.mean(scores) / statistics.mean(plain),
        "difference": statistics.mean(differences),
        "half_interval": half,
    }
