"""Judges the quality of candidates by the scores of the model as it is."""

from __future__ import annotations

import dataclasses

import numpy as np

from hpnlp.advise import kept_quality
from hpnlp.advise.kept_quality import EqualPredictions, KeptQuality
from hpnlp.advise.trial import Measured, TrialResult, trivial_name
from hpnlp.training.files.example_scores import ExampleScores


@dataclasses.dataclass(frozen=True)
class Judge:
    """Compares scores and labels with those of the model as it is.

    Attributes:
      baseline: Measurements of the model as it is.
      metric: The primary metric of the task.
      higher_is_better: Its direction.
      keep: Least share of the quality that is kept.
    """

    baseline: TrialResult
    metric: str
    higher_is_better: bool
    keep: float | int

    def quality(self, model: Measured, selects: bool) -> KeptQuality | None:
        """Comparison of a model's quality with that of the model as it is, on one of the halves of the examples.

        Args:
          model: Measurements of the model.
          selects: Whether the half is that by which candidates are selected, or that by which they are confirmed.

        Returns:
          The comparison; None without scores.
        """
        original = self.baseline.models[0].examples
        if original is None or model.examples is None:
            return None
        return self.compared(original, model.examples, selects)

    def agreement(self, model: Measured) -> EqualPredictions | None:
        """The share of labels that are those of the model as it is.

        Args:
          model: Measurements of a model.

        Returns:
          The share; None without labels.
        """
        labels = self.baseline.models[0].labels
        return kept_quality.agreement(labels, model.labels) if labels and len(labels) == len(model.labels) else None

    def compared(self, original: ExampleScores, changed: ExampleScores, selects: bool | None) -> KeptQuality | None:
        """Comparison of scores on one of the halves of the examples, or on all of them.

        Scores that are no mean over examples, such as F1, are represented by the loss. Without a trivial score, quality counts
        from 0.

        Args:
          original: Scores of one model.
          changed: Scores of the other on the same examples.
          selects: See `quality`; None for all examples.

        Returns:
          The comparison; None where a loss has no trivial score, or the half has fewer than two examples.
        """
        name = self.metric if self.metric in original.sums and self.metric in changed.sums else "loss"
        higher_is_better = self.higher_is_better and name == self.metric
        trivial = self.baseline.trivial if name == trivial_name(self.metric) else None
        halves = kept_quality.is_for_selection(kept_quality.units(original))
        chosen = np.ones_like(halves) if selects is None else halves if selects else ~halves
        if (trivial is None and not higher_is_better) or chosen.sum() < 2:
            return None
        return kept_quality.kept(
            kept_quality.subset(original, chosen),
            kept_quality.subset(changed, chosen),
            name,
            keep=self.keep,
            trivial=trivial or 0.0,
            higher_is_better=higher_is_better,
        )
