"""Settings and results of a search for techniques."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp.advise.candidate import Candidate
from hpnlp.advise.kept_quality import EqualPredictions, KeptQuality
from hpnlp.advise.technique import Goal, Needs, Technique
from hpnlp.advise.trial import Measured, TrialResult
from hpnlp.advise.workload import Workload
from hpnlp.cost.paired_times import Ratio, Verdict
from hpnlp.errors import InputError
from hpnlp.training.config import Config


@dataclasses.dataclass(frozen=True)
class AdviseSettings:
    """Settings of a search.

    Attributes:
      goal: What is to become less.
      keep: Least share of the original's quality above the trivial one, see `kept_quality`.
      seconds: Time of the search; the confirmation may take longer.
      batch_size: Sequences of a batch; 0 for one where the goal is latency, and for that of the run otherwise.
      batches: Largest number of held-out batches of a score; None for all.
      only: Names of techniques or groups to try, as in `hpnlp techniques`; () for all.
      exclude: Names of techniques or groups to leave out.
      train_seconds: Time for trainings, which are apart from the time of the search; 0 for none.
      changes: Fields of the run's config that are set, such as data.path.
      table: Techniques to choose among; () for all.
      experiment: Flags of `hpnlp train` for the config of the run, for the commands of the report.
    """

    goal: Goal = Goal.LATENCY
    keep: float | int = 0.97
    seconds: float | int = 600.0
    batch_size: int = 0
    batches: int | None = None
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    train_seconds: float | int = 0.0
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    table: tuple[Technique, ...] = ()
    experiment: tuple[str, ...] = ("--config=EXPERIMENT",)

    def check(self) -> None:
        """Checks the numbers.

        Raises:
          InputError: A number is outside of its range.
        """
        for name, value, is_valid, expected in (
            ("keep", self.keep, 0 < self.keep < 1, "a share between 0 and 1, such as 0.97"),
            ("seconds", self.seconds, self.seconds > 0, "a time above 0"),
            ("train_seconds", self.train_seconds, self.train_seconds >= 0, "a time, or 0 for no trainings"),
            ("batch_size", self.batch_size, self.batch_size >= 0, "a number of sequences, or 0"),
            ("batches", self.batches, self.batches is None or self.batches > 0, "a number above 0, or None for all"),
        ):
            if not is_valid:
                raise InputError(f"{name}={value}: expected {expected}")

    def quantity(self, workload: Workload) -> str:
        """The quantity that the goal makes less.

        Args:
          workload: The call that is measured.

        Returns:
          Words for a report.
        """
        match self.goal:
            case Goal.DISK:
                return "bytes of the weights on disk"
            case Goal.MEMORY:
                return f"memory of {workload.describe()}"
        return workload.describe()


@dataclasses.dataclass(frozen=True)
class Finding:
    """Measurements and quality of a candidate.

    Attributes:
      candidate: The candidate.
      ratio: What the goal counts, over that of the model as it is: time, or bytes. None if it could not be measured.
      cpu: Ratio of CPU times; None where no time is measured.
      error: The reason why it could not be measured; "" if it was.
      bound: Largest factor by which it can become faster; None where none is known.
      quality: Comparison of the quality; None where it was not scored.
      measured: Sizes and scores.
      needs: Work before its quality can be judged.
      is_confirmed: Whether `ratio` and `quality` are those of new rounds in a new process, and of the examples by which the
        candidate was not selected.
      steps: Steps of the training after which the quality was measured; 0 without a training.
      is_kept: Whether the quality is shown to be kept; of confirmed candidates, with one error rate for all of them.
      agreement: Share of a classifier's labels that are those of the model as it is; None where they were not compared.
    """

    candidate: Candidate
    ratio: Ratio | None
    cpu: Ratio | None = None
    error: str = ""
    bound: float | None = None
    quality: KeptQuality | None = None
    measured: Measured | None = None
    needs: Needs = Needs.NOTHING
    is_confirmed: bool = False
    steps: int = 0
    is_kept: bool = False
    agreement: EqualPredictions | None = None

    @property
    def is_trained(self) -> bool:
        """Whether the quality is that after a training."""
        return self.steps > 0

    @property
    def gain(self) -> float:
        """Factor by which it is faster or smaller, for an order; -inf if it could not be measured."""
        return 1 / self.ratio.median if self.ratio is not None else -math.inf

    @property
    def is_faster(self) -> bool:
        """Whether it is shown to be faster, or smaller."""
        return self.ratio is not None and self.ratio.verdict is Verdict.FASTER


@dataclasses.dataclass(frozen=True)
class Advice:
    """Result of a search.

    Attributes:
      run: Directory of the run.
      config: Its config.
      settings: Settings of the search.
      workload: The call that was measured.
      baseline: The model as it is.
      recommended: The confirmed candidate; None if nothing helps.
      findings: Candidates that were measured, the largest gain first; those that were confirmed stand for themselves.
      bounded: Name of a technique that was not tried -> the factor that it gains at most.
      refused: Name of a technique that does not fit the run -> reason.
      untrained: Names of techniques that need the training of a new model.
      skipped: Names of techniques for which there was no time left.
      seconds: Time of the search.
      directory: Directory of the measurements, in which the report is written.
      has_data: Whether there were examples.
    """

    run: str
    config: Config
    settings: AdviseSettings
    workload: Workload
    baseline: TrialResult
    recommended: Finding | None
    findings: Sequence[Finding]
    bounded: Mapping[str, float]
    refused: Mapping[str, str]
    untrained: Sequence[str]
    skipped: Sequence[str]
    seconds: float
    directory: Path
    has_data: bool
