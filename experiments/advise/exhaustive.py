"""The exhaustive set of a fixture: all techniques that fit alone, and pairs of the best, without the shortcuts of the search.

It shares the processes that measure with `hpnlp advise`, and no decision: nothing is left out by a bound or for lack of time,
and quality is compared on all held-out examples.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpnlp import tasks
from hpnlp.advise import Advice, Goal, Needs, Technique, kept_quality, techniques
from hpnlp.advise.arm import Arm
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.kept_quality import QualityVerdict
from hpnlp.advise.trainings import SEEDS
from hpnlp.advise.trial import Trial, TrialResult, wall_ratio
from hpnlp.advise.trials import Trials
from hpnlp.advise.workload import Program
from hpnlp.compress.weights_file import has_weights
from hpnlp.cost.paired_times import GROUP, LEAST, Ratio, Verdict
from hpnlp.errors import InputError
from hpnlp.planner.compressed import run_outline, saved_step
from hpnlp.training.config import flat
from hpnlp.training.files.example_scores import ExampleScores

SECONDS = 300.0  # after which the rounds of a group end
BEST = 6  # techniques of which pairs are measured, and those that are trained


@dataclasses.dataclass(frozen=True)
class Entry:
    """A member of the exhaustive set.

    Attributes:
      candidate: The candidate.
      ratio: What the goal counts, over that of the model as it is; None if it could not be measured.
      is_kept: Whether the quality is shown to be kept.
      needs: Work before its quality can be judged.
      bound: Largest factor by which it can become faster; None where none is known.
      error: The reason why it could not be measured; "" if it was.
      is_trained: Whether its quality is that after a training.
    """

    candidate: Candidate
    ratio: Ratio | None
    is_kept: bool = False
    needs: Needs = Needs.NOTHING
    bound: float | None = None
    error: str = ""
    is_trained: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it is shown to be faster, or smaller, and to keep the quality."""
        return self.is_kept and self.ratio is not None and self.ratio.verdict is Verdict.FASTER

    @property
    def gain(self) -> float:
        """Factor by which it is faster or smaller; 0 if it could not be measured."""
        return 1 / self.ratio.median if self.ratio is not None else 0.0

    @property
    def exceeds_bound(self) -> bool:
        """Whether the whole interval of the gain is beyond the bound."""
        return self.bound is not None and self.ratio is not None and self.ratio.high < 1 / self.bound


class ExhaustiveSet:
    """Measures the set of a run.

    Attributes:
      advice: The advice for the run, of which the settings, the workload and the trace are taken.
      trials: Trials in a directory of their own.
      rounds: Paired rounds of each candidate.
      most: Most techniques to measure.
    """

    def __init__(self, advice: Advice, trials: Trials, rounds: int, most: int | None) -> None:
        self.advice, self.trials, self.most = advice, trials, most
        self.settings, self.config = advice.settings, advice.config
        self.step = saved_step(advice.run, advice.config)
        self.trains = advice.workload.program is Program.TRAINING
        self.rounds = 1 if self.settings.goal in (Goal.MEMORY, Goal.DISK) else rounds
        self.metric, self.higher_is_better = tasks.find(self.config.task).primary_metric(flat(self.config))
        alone = trials.run(self._trial([], 0))
        self.baseline, self.trivial = alone.models[0].examples, alone.trivial

    def measure(self) -> list[Entry]:
        """Singles, pairs of the best that keep the quality, and the recommended candidate if it is neither."""
        listed = self._techniques()
        singles = self._trained(self._entries([Candidate().plus(t) for t in listed], {t.name: t for t in listed}))
        by_name = {t.name: t for t in listed}
        best = sorted((e for e in singles if e.is_good), key=lambda e: -e.gain)[:BEST]
        exact = [by_name[e.candidate.name] for e in best if not e.is_trained]
        entries = [*singles, *self._entries(list(_pairs(exact)), {})]
        recommended = self.advice.recommended
        names = {frozenset(entry.candidate.techniques) for entry in entries}
        if recommended is not None and frozenset(recommended.candidate.techniques) not in names:
            (entry,) = self._entries([recommended.candidate], {})
            entries.append(dataclasses.replace(entry, is_kept=entry.is_kept or recommended.is_trained))
        return entries

    def find(self, entries: Sequence[Entry], candidate: Candidate) -> Entry:
        """The entry with the techniques of a candidate, in any order."""
        names = frozenset(candidate.techniques)
        return next(entry for entry in entries if frozenset(entry.candidate.techniques) == names)

    def _techniques(self) -> list[Technique]:
        """Techniques of the goal that fit the run, as far as the settings let them be judged."""
        layers = self.config.model.layers if "layers" in vars(self.config.model) else 4
        result, outline = [], None if has_weights(self.advice.run) else run_outline(self.advice.run)
        for technique in self.settings.table or techniques(layers):
            if self.settings.goal not in technique.goals:
                continue
            needs_new_model = not technique.is_recipe and technique.needs is not Needs.NOTHING
            if needs_new_model and not self.trains and not self.settings.train_seconds:
                continue
            if not (self.trains and technique.is_recipe) and not technique.refusal(outline, self.config):
                result.append(technique)
        return result[: self.most]

    def _entries(self, candidates: Sequence[Candidate], by_name: Mapping[str, Technique]) -> list[Entry]:
        """Measures candidates, and scores them. by_name: techniques of the candidates that are single."""
        entries = []
        for i in range(0, len(candidates), GROUP):
            group = candidates[i : i + GROUP]
            print(f"  {', '.join(candidate.name for candidate in group)}", flush=True)
            result = self.trials.run(self._trial(group, self.rounds))
            for number, candidate in enumerate(group):
                technique = by_name.get(candidate.name)
                entries.append(self._entry(candidate, technique, result, number))
        return entries

    def _trial(self, candidates: Sequence[Candidate], rounds: int) -> Trial:
        return Trial(
            run=self.advice.run,
            step=self.step,
            changes=self.settings.changes,
            workload=self.advice.workload,
            baseline=Candidate(),
            candidates=tuple(candidates),
            rounds=rounds,
            seconds=SECONDS,
            scored=True,
            batches=self.settings.batches,
        )

    def _entry(self, candidate: Candidate, technique: Technique | None, result: TrialResult, number: int) -> Entry:
        model, baseline = result.models[number + 1], result.models[0]
        needs = technique.needs if technique else Needs.NOTHING
        if model.error:
            return Entry(candidate, None, needs=needs, error=model.error)
        ratio = wall_ratio(result, number)
        if self.settings.goal is Goal.MEMORY:
            ratio = _exact_ratio(model.peak_bytes, baseline.peak_bytes)
        elif self.settings.goal is Goal.DISK:
            ratio = _exact_ratio(model.disk_bytes, baseline.disk_bytes)
        kept = needs is Needs.NOTHING if self.trains else self._keeps(self.baseline, model.examples)
        traced = self.advice.baseline.traced
        return Entry(candidate, ratio, kept, needs, technique.bound(traced) if technique and traced else None)

    def _keeps(self, original: ExampleScores | None, changed: ExampleScores | None) -> bool:
        if original is None or changed is None:
            return False
        name = self.metric if self.metric in original.sums else "loss"
        result = kept_quality.kept(
            original, changed, name,
            keep=self.settings.keep,
            trivial=self.trivial if self.trivial is not None and name == self.metric else 0.0,
            higher_is_better=self.higher_is_better and name == self.metric,
        )  # fmt: skip
        return result.verdict is QualityVerdict.KEPT

    def _trained(self, singles: Sequence[Entry]) -> list[Entry]:
        """Trains the fastest entries that need it for as many steps as the run, beside the model as it is."""
        lost = [e for e in singles if e.needs is Needs.TRAINING and not e.is_kept and e.gain > 1 + LEAST]
        chosen = sorted(lost, key=lambda e: -e.gain)[:BEST] if self.settings.train_seconds else []
        kept = {e.candidate.name: self._keeps_after_training(e.candidate) for e in chosen}
        return [
            dataclasses.replace(e, is_kept=kept[e.candidate.name], is_trained=True) if e.candidate.name in kept else e
            for e in singles
        ]

    def _keeps_after_training(self, candidate: Candidate) -> bool:
        is_further = bool(candidate.recipe)
        for seed in range(SEEDS):
            original, changed = (self._scores(c, seed, is_further) for c in (Candidate(), candidate))
            if not self._keeps(original, changed):
                return False
        return True

    def _scores(self, candidate: Candidate, seed: int, is_further: bool) -> ExampleScores | None:
        print(f"  training {candidate.name}, seed {seed}", flush=True)
        steps, batches = self.config.train.steps, self.settings.batches
        return self.trials.train(
            Arm(self.advice.run, self.settings.changes, candidate, steps, seed, is_further, batches)
        )[0]


def _exact_ratio(size: int | None, of_baseline: int | None) -> Ratio | None:
    """A ratio of sizes, which do not vary."""
    if not size or not of_baseline:
        return None
    quotient = size / of_baseline
    verdict = Verdict.FASTER if quotient < 1 - LEAST else Verdict.SLOWER if quotient > 1 + LEAST else Verdict.EQUAL
    return Ratio(quotient, quotient, quotient, verdict)


def _pairs(listed: Sequence[Technique]) -> Iterator[Candidate]:
    """Pairs of techniques that do not exclude each other."""
    for first, second in itertools.combinations(listed, 2):
        try:
            yield Candidate().plus(first).plus(second)
        except InputError:
            continue


def describe(entry: Entry) -> dict[str, Any]:
    """An entry as plain values."""
    ratio = entry.ratio
    return {
        "name": entry.candidate.name,
        "ratio": interval(ratio),
        "verdict": ratio.verdict if ratio else "",
        "is_kept": entry.is_kept,
        "bound": entry.bound,
        "error": entry.error,
    }


def interval(ratio: Ratio | None) -> list[float] | None:
    """Median and interval of a ratio, without ends that are not known."""
    if ratio is None:
        return None
    high = ratio.high if ratio.high != float("inf") else None
    return [ratio.median] if high is None else [ratio.median, ratio.low, high]
