"""Averages of parameters over steps (Polyak averaging), which evaluation, generation and export use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from hpnlp.spec import build, parse_one
from hpnlp.types import check_options, option


@dataclasses.dataclass(frozen=True)
class UniformAverage:
    """The mean of the parameters after each step from a step on (Polyak and Juditsky 1992)."""

    start: int = option(0, "Number of steps before the first one of the average.", least=0)
    reads_evaluations: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    def begins(self, step: jax.Array) -> jax.Array:
        """Whether an average that has not begun begins with this step.

        Args:
          step: Number of steps done before, int32.

        Returns:
          A bool scalar.
        """
        return step >= self.start

    def may_begin(self, steps: int, evaluations: int) -> bool:
        """Whether the average can begin in a run.

        Args:
          steps: Number of steps of the run.
          evaluations: Number of evaluations before its end.

        Returns:
          True if the run has more than `start` steps.
        """
        return self.start < steps

    def is_triggered(self, scores: Sequence[float], score: float, higher_is_better: bool) -> bool:
        """False: no evaluation starts the average.

        Arguments: see `NonMonotonic.is_triggered`.

        Returns:
          False.
        """
        return False


@dataclasses.dataclass(frozen=True)
class NonMonotonic:
    """The mean of the parameters since the first evaluation that is worse than the best one but for the latest `evaluations`.

    Until then, the average is the parameters. The first parameters of the average are those of that evaluation.

    References:
      Merity, Keskar and Socher 2018, "Regularizing and optimizing LSTM language models", NT-ASGD.
    """

    evaluations: int = option(5, "The non-monotone interval n: the latest n evaluations are not compared.", least=1)
    reads_evaluations: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)

    def begins(self, step: jax.Array) -> jax.Array:
        """False: an evaluation starts the average, and not a step.

        Args:
          step: Not read.

        Returns:
          A bool scalar.
        """
        return jnp.zeros((), bool)

    def may_begin(self, steps: int, evaluations: int) -> bool:
        """Whether the average can begin in a run.

        Args:
          steps: As of `UniformAverage`.
          evaluations: As of `UniformAverage`.

        Returns:
          True if an evaluation has more than `evaluations` before it.
        """
        return evaluations > self.evaluations + 1

    def is_triggered(self, scores: Sequence[float], score: float, higher_is_better: bool) -> bool:
        """Whether an evaluation starts the average.

        Args:
          scores: Scores of all evaluations before this one, the first one first.
          score: Score of this evaluation.
          higher_is_better: Direction of the scores.

        Returns:
          True if it is worse than the best one without the latest n. Scores that are not finite are no best ones.
        """
        earlier = [value for value in scores[: -self.evaluations] if math.isfinite(value)]
        if not earlier:
            return False
        return score < max(earlier) if higher_is_better else score > min(earlier)


AVERAGES: dict[str, type[UniformAverage] | type[NonMonotonic]] = {"uniform": UniformAverage, "ntasgd": NonMonotonic}


def find(spec: str) -> UniformAverage | NonMonotonic | None:
    """The average of a config.

    Args:
      spec: `optimizer.average`, an entry of AVERAGES with its argument, as in "ntasgd(5)"; "" for none.

    Returns:
      The average, or None.

    Raises:
      InputError: Unknown names, or arguments out of range.
    """
    return build(parse_one(spec, "optimizer.average"), AVERAGES, "optimizer.average") if spec.strip() else None


def next_count(spec: str, count: Any, step: jax.Array) -> Any:
    """Number of steps whose parameters are in an average after a step.

    Args:
      spec: `optimizer.average`.
      count: That number before the step, int32; 0 before the average has begun; None without an average.
      step: Number of steps done before.

    Returns:
      The number, int32; None without an average.
    """
    average = find(spec)
    if average is None:
        return None
    return jnp.where((count > 0) | average.begins(step), count + 1, 0)


def updated(average: Any, params: Any, count: jax.Array) -> Any:
    """Adds the parameters of one more step to the mean.

    Args:
      average: A tree of means of `count` - 1 parameters.
      params: The new parameters, a tree like it.
      count: Result of `next_count`; for 0, the result is the parameters.

    Returns:
      A tree of means.
    """
    share = 1.0 / jnp.maximum(count, 1).astype(jnp.float32)
    return jax.tree.map(lambda old, new: jnp.where(count > 1, old + share * (new - old), new), average, params)
