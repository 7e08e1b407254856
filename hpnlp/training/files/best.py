"""The order of a run's evaluations, by which training finds the best checkpoint and commands load it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class ScoreOrder:
    """Order of evaluations: by the metric, then by the held-out loss, then by the step; the later of two equal ones is better.

    Attributes:
      metric: Name of the primary metric.
      higher_is_better: Direction of the metric.
    """

    metric: str = "loss"
    higher_is_better: bool = False

    def stored(self, scores: Mapping[str, float]) -> dict[str, float]:
        """The scores that decide the order, by their names in checkpoints.

        Args:
          scores: Scores of an evaluation by name.

        Returns:
          The metric and the loss.
        """
        return {f"heldout_{name}": float(scores[name]) for name in dict.fromkeys((self.metric, "loss"))}

    def key(self, stored: Mapping[str, float]) -> tuple[float, float]:
        """Sorting key of an evaluation, the best last. A stable sort keeps equal ones in the order of their steps.

        Args:
          stored: Result of `stored`; early versions have stored no loss beside the metric.

        Returns:
          The key.
        """
        score = stored[f"heldout_{self.metric}"]
        return (score if self.higher_is_better else -score, -stored.get("heldout_loss", math.inf))

    def compare(self, stored: Mapping[str, float], best: Mapping[str, float] | None, min_delta: float = 0.0) -> int:
        """Compares an evaluation with the best one before it.

        Args:
          stored: Result of `stored`.
          best: That of the best evaluation so far, or None.
          min_delta: Smallest difference of the metric that is an improvement, see `train.min_delta`.

        Returns:
          1 for an improvement, which is the new best one; 0 for another new best one, of equal scores or, with a `min_delta`,
          of an equal metric; -1 otherwise. A model whose loss is not finite is never the best, although its accuracy is finite.
        """
        if not all(map(math.isfinite, stored.values())):
            return -1
        if best is None:
            return 1
        (score, loss), (best_score, best_loss) = self.key(stored), self.key(best)
        if score != best_score:
            return 1 if score > best_score + min_delta else -1
        return int(min_delta == 0 and loss > best_loss) if loss >= best_loss else -1
