"""Trainings of candidates beside the model as it is, of equal steps, after which their quality is judged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from hpnlp.advise.advice import AdviseSettings, Finding
from hpnlp.advise.arm import Arm
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.judge import Judge
from hpnlp.advise.kept_quality import QualityVerdict
from hpnlp.advise.trials import Trials
from hpnlp.training.files.example_scores import ExampleScores

TRAINED, SEEDS = 2, 2  # most techniques that are trained, and seeds of each


@dataclasses.dataclass(frozen=True)
class Trainings:
    """Trainings of candidates.

    Attributes:
      run: Directory of the run.
      saved: Time at which its weights were saved.
      settings: Settings of the search.
      trials: Runs the processes.
      judge: Compares scores.
      steps: Steps of each training.
      log: Called with lines on the progress.
    """

    run: Path
    saved: str
    settings: AdviseSettings
    trials: Trials
    judge: Judge
    steps: int
    log: Callable[[str], None]

    def judged(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings with their quality after trainings of equal steps of both models.

        A finding keeps its quality if it does with each of SEEDS seeds. Techniques of new models are trained from new
        parameters, and those that remove units from the run's weights; so is the model as it is beside them, once for each.

        Args:
          findings: Findings of candidates.

        Returns:
          The findings with the least quality over seeds.
        """
        scores: dict[tuple[str, bool, int], ExampleScores] = {}
        errors: dict[str, str] = {}
        both = sorted({bool(f.candidate.recipe) for f in findings})
        for is_further, seed in itertools.product(both, range(SEEDS)):
            candidates = [f.candidate for f in findings if bool(f.candidate.recipe) is is_further]
            for candidate in [Candidate(), *candidates]:
                self.log(f"training {candidate.name}, seed {seed}")
                scores_of_arm, reason = self.trials.train(self._arm(candidate, seed, is_further))
                if scores_of_arm is None:
                    errors[candidate.name] = reason
                else:
                    scores[candidate.name, is_further, seed] = scores_of_arm
        return [self._judged(finding, scores, errors) for finding in findings]

    def _arm(self, candidate: Candidate, seed: int, is_further: bool) -> Arm:
        changes, batches = self.settings.changes, self.settings.batches
        return Arm(str(self.run), changes, candidate, self.steps, seed, is_further, batches, self.saved)

    def _judged(
        self, finding: Finding, scores: dict[tuple[str, bool, int], ExampleScores], errors: dict[str, str]
    ) -> Finding:
        name, is_further = finding.candidate.name, bool(finding.candidate.recipe)
        pairs = [
            (scores.get((Candidate().name, is_further, s)), scores.get((name, is_further, s))) for s in range(SEEDS)
        ]
        qualities = [self.judge.compared(first, second, None) for first, second in pairs if first and second]
        known = [quality for quality in qualities if quality is not None]
        if len(known) < SEEDS:
            return dataclasses.replace(finding, error=errors.get(name) or errors.get(Candidate().name, "no scores"))
        worst = min(known, key=lambda quality: quality.low)
        kept = all(quality.verdict is QualityVerdict.KEPT for quality in known)
        return dataclasses.replace(finding, quality=worst, is_kept=kept, steps=self.steps, agreement=None)
