"""Comparisons over seeds: the mean scores of runs that differ only in `train.seed`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from hpnlp.measure import mean_interval
from hpnlp.report import folds
from hpnlp.report.paired_scores import Difference
from hpnlp.tasks.reports.reporting import Ranking

SEED = "train.seed"
NOTE = (
    "- Means over seeds: ± and the values in brackets are 95 % intervals of the t distribution over seeds; differences are "
    "paired by seed."
)


def lines(configs: Mapping[str, Mapping[str, Any]], ranking: Ranking) -> list[str]:
    """Mean scores over seeds, with 95 % intervals of the t distribution; differences are paired by seed.

    Args:
      configs: Directory of a trained run -> config.
      ranking: Scores of the runs.

    Returns:
      A line for each group of at least two runs with a score, of one directory, that differ only in `train.seed`, best mean
      first, and NOTE after them; differences are to the first group.
    """
    scored = {name: config for name, config in configs.items() if name in ranking.scores}
    groups = [group for group in folds.by_member(scored, varied=SEED) if len(group) > 1]
    scores = {group[min(group)]: {seed: ranking.scores[run] for seed, run in group.items()} for group in groups}
    order = sorted(scores, key=lambda name: statistics.fmean(scores[name].values()), reverse=ranking.higher_is_better)
    return [
        *(_line(name, scores[name], scores[order[0]], ranking.digits) for name in order),
        *([NOTE] if order else []),
    ]


def _line(name: str, scores: Mapping[int, float], best: Mapping[int, float], digits: str) -> str:
    """Mean score of the runs of a group, and its difference to the best group over the seeds that both have."""
    mean, half = mean_interval([*scores.values()])
    text = f"- {name} over seeds {', '.join(map(str, scores))}: mean {mean:{digits}} ± {half:{digits}}"
    differences = [scores[seed] - best[seed] for seed in scores if seed in best]
    if scores is best or not differences:
        return f"{text}."
    difference = Difference(statistics.fmean(differences), folds.interval_of_mean(differences))
    return f"{text}, difference to the best {difference.text(digits)}."
