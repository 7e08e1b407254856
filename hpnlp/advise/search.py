"""The search for the techniques that make a model faster or smaller and keep its quality.

It screens all techniques that fit the run in few paired rounds, scores the faster ones on one half of the held-out examples,
adds techniques to the best one while that pays, and measures the result again, in new processes and on the other half.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpnlp import measure, tasks
from hpnlp.advise import kept_quality
from hpnlp.advise.advice import Advice, AdviseSettings, Finding
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.judge import Judge
from hpnlp.advise.kept_quality import QualityVerdict
from hpnlp.advise.technique import PROGRAMS, Goal, Needs, Technique
from hpnlp.advise.techniques import wanted
from hpnlp.advise.trainings import SEEDS, TRAINED, Trainings
from hpnlp.advise.trial import Measured, Trial, TrialResult, wall_ratio
from hpnlp.advise.trials import Trials, saved_weights
from hpnlp.advise.workload import Program, Workload, default_workload
from hpnlp.compress.weights_file import has_weights
from hpnlp.cost.paired_times import GROUP, LEAST, LOOKS, Ratio, Verdict
from hpnlp.cost.traced_time import TracedTime
from hpnlp.errors import InputError
from hpnlp.jobs.evaluate_run import changed_config
from hpnlp.jobs.profile.profile_run import LEAST_COVERAGE
from hpnlp.planner.compressed import run_outline
from hpnlp.training.config import flat, with_changes
from hpnlp.training.config_file import load_config
from hpnlp.training.files.checkpoint import CONVERTED_STEP
from hpnlp.training.files.contents import locked

SCREEN = LOOKS[1]  # rounds of the first measurement of a technique
SCREEN_SECONDS, CONFIRM_SECONDS = 20.0, 120.0  # after which rounds end at the next look
SMALL_BOUND = 1.05  # techniques that gain less at most are not tried
SCORED = 8  # most techniques that are scored
STACKED = 3  # most techniques that are added to the first one
CONFIRMED = 3  # candidates that are confirmed
ENOUGH = 4  # techniques that keep the quality, after which no more are scored
SCORING = Workload(Program.LOSS, 1)  # trials without rounds have it, so that their results serve all workloads
SCREEN_SHARE, SCORE_SHARE, STACK_SHARE = 0.5, 0.7, 0.85  # share of the time after which a phase begins nothing more
FASTER = (Verdict.FASTER, Verdict.UNRESOLVED)
NOT_SLOWER = (Verdict.FASTER, Verdict.EQUAL)

Item = TypeVar("Item")


def advise(
    run: str | Path,
    settings: AdviseSettings = AdviseSettings(),  # noqa: B008  (frozen)
    *,
    directory: str | Path | None = None,
    trials: Trials | None = None,
    log: Callable[[str], None] = print,
) -> Advice:
    """Measures which techniques make a model faster or smaller on this machine, and keep its quality.

    Args:
      run: Directory of a run.
      settings: See AdviseSettings.
      directory: Directory of the measurements, RUN/advise by default: a search that was interrupted goes on there.
      trials: Runs processes; by default as subprocesses.
      log: Called with lines on the progress.

    Returns:
      The advice.

    Raises:
      InputError: The run or a setting is invalid, the model as it is cannot be measured, or another search writes to the
        directory.
    """
    directory = Path(directory or Path(run) / "advise")
    with locked(directory):
        return _Search(Path(run), settings, trials or Trials(directory / "trials"), log).run(directory)


class _Search:
    """A search and its findings so far."""

    def __init__(self, run: Path, settings: AdviseSettings, trials: Trials, log: Callable[[str], None]) -> None:
        settings.check()
        config = load_config(run)
        trains = PROGRAMS.get(settings.goal) == "training" or settings.goal is Goal.MEMORY
        if trains and settings.batch_size:  # the batches of the data have another size
            changes = {**settings.changes, "data.batch_size": settings.batch_size}
            settings = dataclasses.replace(settings, changes=changes)
        self.path, self.settings, self.trials, self.log = run, settings, trials, log
        self.config = with_changes(config, settings.changes)
        size = settings.batch_size or (1 if settings.goal is Goal.LATENCY else 0)
        self.workload = default_workload(self.config, trains, size)
        environment = measure.environment()
        names = ("cpu", "cores", "device", "jax", "hpnlp", "commit")
        self.machine = ", ".join(f"{name} {environment[name]}" for name in names)
        self.step, self.saved = saved_weights(run, config)
        # A larger part held out, for example, would have examples of the training.
        if self.step != CONVERTED_STEP and not trains:
            changed_config(config, {k: v for k, v in settings.changes.items() if k.startswith(("data.", "model."))})
        is_converted = self.step == CONVERTED_STEP and tasks.find(config.task).reads_examples
        self.has_data = not is_converted or "data.path" in settings.changes
        if not self.has_data and (settings.train_seconds or self.workload.program in (Program.TRAINING, Program.LOSS)):
            raise InputError(f"{run} was converted, and has no examples to train with: add --data.path=PATH")
        self.begun = time.monotonic()
        self.scored: dict[str, Measured] = {}  # by the name of the candidate

    def run(self, directory: Path) -> Advice:
        """Searches."""
        listed = wanted(self.settings, flat(self.config).get("model.layers", 4))
        self.baseline = baseline = self._measured_baseline()
        metric, higher_is_better = tasks.find(self.config.task).primary_metric(flat(self.config))
        self.judge = Judge(baseline, metric, higher_is_better, self.settings.keep)
        chosen, bounded, refused, untrained = self._chosen(listed, baseline.traced)
        screened, skipped = self._screen(chosen)
        faster = [
            f for f in screened if f.ratio is not None and f.ratio.verdict in FASTER and f.ratio.median < 1 - LEAST
        ]
        techniques = {t.name: t for t in chosen}
        faster = _in_turn(faster, lambda finding: techniques[finding.candidate.name].family)
        scored = self._score(faster[:SCORED])
        by_name = {finding.candidate.name: finding for finding in [*screened, *scored]}
        trained = self._trained(scored, techniques)
        by_name |= {finding.candidate.name: finding for finding in trained}
        good = _ordered([f for f in [*scored, *trained] if f.is_kept])
        stack = self._stacked(good, techniques)
        confirmed = self._confirm(stack, good)
        by_name |= {finding.candidate.name: finding for finding in confirmed}
        accepted = [f for f in confirmed if f.is_faster and f.is_kept]
        findings = sorted(by_name.values(), key=lambda f: f.gain, reverse=True)
        return Advice(
            str(self.path),
            self.config,
            self.settings,
            self.workload,
            baseline,
            _recommended(accepted),
            findings,
            bounded,
            refused,
            untrained,
            skipped,
            time.monotonic() - self.begun,
            directory,
            self.has_data,
        )

    @property
    def _left(self) -> float:
        """Seconds that are left of the time for the search."""
        return self.begun + self.settings.seconds - time.monotonic()

    @property
    def _spent(self) -> float:
        """Share of the time that is over."""
        return 1 - self._left / self.settings.seconds

    @property
    def _trains(self) -> bool:
        return self.workload.program is Program.TRAINING

    @property
    def _is_timed(self) -> bool:
        """Whether the goal is a time, which varies, or bytes, which do not."""
        return self.settings.goal not in (Goal.MEMORY, Goal.DISK)

    def _trial(self, candidates: Sequence[Candidate], rounds: int, **options: Any) -> Trial:
        """A trial of candidates beside the model as it is."""
        if not self._is_timed:  # the memory of a step is known once it is compiled
            rounds = int(self.settings.goal is Goal.MEMORY)
        seconds = CONFIRM_SECONDS if rounds > SCREEN else SCREEN_SECONDS
        values = {
            "baseline": Candidate(), "seconds": seconds, "batches": self.settings.batches,
            "workload": self.workload if rounds or not self._is_timed else SCORING,
        } | options  # fmt: skip
        return Trial(
            run=str(self.path),
            step=self.step,
            changes=self.settings.changes,
            candidates=tuple(candidates),
            rounds=rounds,
            machine=self.machine,
            saved=self.saved,
            has_data=self.has_data,
            **values,
        )

    def _measured_baseline(self) -> TrialResult:
        """Time and scores of the model as it is."""
        if not self.has_data:
            self.log(f"{self.path} was converted, and has no examples: only times are measured; add --data.path=PATH")
        step = "" if self.step is None else f", step {self.step}"
        self.log(f"{self.path}{step}: measuring {self.settings.quantity(self.workload)}")
        # A training has no score before it, but needs the trivial one.
        scored = not self._trains or bool(self.settings.train_seconds)
        result = self.trials.run(self._trial([], SCREEN, scored=scored, profiled=self._is_timed))
        if self._is_timed and result.equal is not None and result.equal.high > 1.25 * result.equal.low:
            self.log(
                "this machine is busy: the interval of two equal calls is wider than a quarter; small gains will not be found"
            )
        if self._is_timed and result.equal is not None and result.equal.verdict in (Verdict.FASTER, Verdict.SLOWER):
            self.log("equal calls differ by their place in a round: do not trust the times")
        return result

    def _chosen(
        self, listed: Sequence[Technique], traced: TracedTime | None
    ) -> tuple[list[Technique], dict[str, float], dict[str, str], list[str]]:
        """Techniques to try, the most promising first; and those that are not tried."""
        chosen, bounded, refused, untrained, present = [], {}, {}, [], flat(self.config)
        outline = None if has_weights(self.path) else run_outline(self.path)
        for technique in listed:
            needs_new_model = not technique.is_recipe and technique.needs is not Needs.NOTHING
            if technique.changes and technique.changes.items() <= present.items():
                continue
            elif needs_new_model and not self._trains and not self.settings.train_seconds:
                untrained.append(technique.name)
            elif reason := technique.refusal(outline, self.config):
                refused[technique.name] = reason
            elif (bound := _bound(technique, traced)) is not None and bound < SMALL_BOUND:
                bounded[technique.name] = bound
            else:
                chosen.append(technique)
        chosen.sort(key=lambda t: (t.needs is not Needs.NOTHING, -(_bound(t, traced) or math.inf)))
        exact = [t for t in chosen if t.needs is Needs.NOTHING and not t.is_recipe]
        others = _in_turn([t for t in chosen if t not in exact], lambda technique: technique.group)
        return [*exact, *others], bounded, refused, untrained

    def _screen(self, chosen: Sequence[Technique]) -> tuple[list[Finding], list[str]]:
        """Few rounds of each technique, the largest gain first; and the names of those for which there was no time."""
        findings: list[Finding] = []
        groups = [chosen[i : i + GROUP] for i in range(0, len(chosen), GROUP)]
        for number, group in enumerate(groups):
            if number and self._spent > SCREEN_SHARE:
                return _ordered(findings), [t.name for t in itertools.chain(*groups[number:])]
            self._report(f"group {number + 1} of {len(groups)}: {', '.join(t.name for t in group)}", findings)
            candidates = [Candidate().plus(technique) for technique in group]
            result = self.trials.run(self._trial(candidates, SCREEN))
            findings += [
                dataclasses.replace(finding, needs=technique.needs, bound=_bound(technique, self.baseline.traced))
                for finding, technique in zip(self._findings(candidates, result), group, strict=True)
            ]
        return _ordered(findings), []

    def _report(self, work: str, findings: Sequence[Finding]) -> None:
        unit = "time" if self._is_timed else "bytes"
        best = min((f for f in findings if f.is_faster), key=lambda f: f.ratio.median if f.ratio else 1.0, default=None)
        so_far = f"; so far {best.candidate.name}, {best.ratio.median:.2f} of the {unit}" if best and best.ratio else ""
        left = max(0, self._left)
        shown = f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left" if left else "the time is over"
        self.log(f"{work} ({shown}{so_far})")

    def _findings(self, candidates: Sequence[Candidate], result: TrialResult) -> Iterator[Finding]:
        for number, (candidate, model) in enumerate(zip(candidates, result.models[1:], strict=True)):
            yield Finding(
                candidate,
                self._ratio(result, number),
                model.times.cpu if model.times else None,
                model.error,
                measured=model,
                agreement=self.judge.agreement(model),
            )

    def _ratio(self, result: TrialResult, number: int) -> Ratio | None:
        """Ratio of the goal's quantity, a time or a number of bytes, to that of the baseline."""
        model, baseline = result.models[number + 1], result.models[0]
        if model.error:
            return None
        if self._is_timed:
            return wall_ratio(result, number)
        sizes = (model.peak_bytes, baseline.peak_bytes)
        if self.settings.goal is Goal.DISK:
            sizes = (model.disk_bytes, baseline.disk_bytes)
        if not sizes[0] or not sizes[1]:
            return None
        quotient = sizes[0] / sizes[1]
        verdict = Verdict.FASTER if quotient < 1 - LEAST else Verdict.SLOWER if quotient > 1 + LEAST else Verdict.EQUAL
        return Ratio(quotient, quotient, quotient, verdict)

    def _score(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings with their quality on the half of the examples by which candidates are selected."""
        if self._trains:  # from new parameters: only what leaves the model as it is can be judged
            return [dataclasses.replace(f, is_kept=f.needs is Needs.NOTHING) for f in findings]
        new = [f for f in findings if f.needs is Needs.TRAINING and not f.candidate.recipe]  # with new weights
        findings = [f for f in findings if f not in new]
        scored: list[Finding] = new
        for i in range(0, len(findings), GROUP):
            group = findings[i : i + GROUP]
            if i and (self._spent > SCORE_SHARE or sum(f.is_kept for f in scored) >= ENOUGH):
                return [*scored, *findings[i:]]
            self._report(f"scoring {', '.join(f.candidate.name for f in group)}", findings)
            for finding, model in zip(group, self._scores([f.candidate for f in group]), strict=True):
                quality = self.judge.quality(model, selects=True)
                kept = quality is not None and quality.verdict is QualityVerdict.KEPT
                equal = self.judge.agreement(model)
                scored.append(
                    dataclasses.replace(finding, quality=quality, is_kept=kept, error=model.error, agreement=equal)
                )
        return scored

    def _scores(self, candidates: Sequence[Candidate]) -> Sequence[Measured]:
        """The candidates with the scores of all held-out examples, of which each judgement reads a half."""
        models = self.trials.run(self._trial(candidates, 0, scored=True)).models[1:]
        self.scored |= {candidate.name: model for candidate, model in zip(candidates, models, strict=True)}
        return models

    def _trained(self, findings: Sequence[Finding], by_name: Mapping[str, Technique]) -> list[Finding]:
        """The fastest findings that need training, and the best of them with one more technique, after trainings."""
        if not self.settings.train_seconds:
            return []
        chosen = [f for f in _ordered(findings) if f.needs is Needs.TRAINING and f.is_faster and not f.is_kept][
            :TRAINED
        ]
        if not chosen:
            return []
        timed = self._trial([], LOOKS[0], workload=Workload(Program.TRAINING, self._batch_size))
        step = self.trials.run(dataclasses.replace(timed, rounds=LOOKS[0]))  # also where the goal is no time
        others = [f for f in findings if f not in chosen and f.is_kept]
        # By the techniques, and not by what was kept, so that a search that goes on has the steps of its trainings.
        has_stack = any(_trainable(f.candidate, technique) for f in chosen for technique in by_name.values())
        arms = SEEDS * (len(chosen) + len({bool(f.candidate.recipe) for f in chosen}) + has_stack)
        steps = max(1, int(self.settings.train_seconds / arms / step.baseline_seconds))
        self.log(f"training {arms} times {steps} steps: {', '.join(f.candidate.name for f in chosen)}")
        trainings = Trainings(self.path, self.saved, self.settings, self.trials, self.judge, steps, self.log)
        trained = trainings.judged(chosen)
        good = _ordered([f for f in trained if f.is_kept])
        if not good:
            return trained
        stack = self._trained_stack(good[0].candidate, [by_name[f.candidate.name] for f in [*good[1:], *others]])
        return [*trained, *trainings.judged(stack)]

    def _trained_stack(self, base: Candidate, additions: Sequence[Technique]) -> list[Finding]:
        """The candidate with the technique by which it becomes fastest; [] if none makes it faster.

        A training applies either changes of the config or a recipe.
        """
        joined = [c for t in additions if (c := _trainable(base, t)) is not None][:GROUP]
        faster = [f for f in self._beside(base, joined) if f.is_faster] if joined else []
        if not faster:
            return []
        candidates = [faster[0].candidate]
        findings = self._findings(candidates, self.trials.run(self._trial(candidates, SCREEN)))
        return [dataclasses.replace(finding, needs=Needs.TRAINING) for finding in findings if finding.is_faster]

    @property
    def _batch_size(self) -> int:
        return int(self.config.data.batch_size)

    def _stacked(self, good: Sequence[Finding], by_name: Mapping[str, Technique]) -> Candidate:
        """The best candidate with more techniques, while that makes it faster and keeps the quality."""
        stack = good[0].candidate if good else Candidate()
        if good and good[0].is_trained:
            return stack
        others = [by_name[f.candidate.name] for f in good[1:] if not f.is_trained]
        for _ in range(STACKED):
            larger = [candidate for technique in others if (candidate := _joined(stack, technique)) is not None][:GROUP]
            if not larger or (len(stack.techniques) > 1 and self._spent > STACK_SHARE):
                break
            self.log(f"adding to {stack.name}: {', '.join(c.techniques[-1] for c in larger)}")
            findings = [f for f in self._beside(stack, larger) if f.is_faster]
            added = next((f.candidate for f in findings if self._trains or self._keeps(f.candidate)), None)
            if added is None:
                break
            stack = added
            others = [technique for technique in others if technique.name not in stack.techniques]
        return self._reduced(stack, by_name)

    def _keeps(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps the quality on the half of the examples by which candidates are selected."""
        (model,) = self._scores([candidate])
        quality = self.judge.quality(model, selects=True)
        return quality is not None and quality.verdict is QualityVerdict.KEPT

    def _reduced(self, stack: Candidate, by_name: Mapping[str, Technique]) -> Candidate:
        """The stack without a technique that those after it have made useless."""
        names = stack.techniques
        if len(names) < 3 or self._spent > STACK_SHARE:
            return stack
        smaller = [
            functools.reduce(Candidate.plus, (by_name[name] for name in names if name != left_out), Candidate())
            for left_out in names[:-1]
        ]
        self.log(f"leaving out of {stack.name}: {', '.join(names[:-1])}")
        findings = self._beside(stack, smaller)
        return next((f.candidate for f in findings if f.ratio and f.ratio.verdict in NOT_SLOWER), stack)

    def _beside(self, stack: Candidate, candidates: Sequence[Candidate]) -> list[Finding]:
        """Few rounds of candidates beside a stack, the largest gain first; none if the stack cannot be measured again."""
        try:
            result = self.trials.run(self._trial(candidates, SCREEN, baseline=stack))
        except InputError as error:
            self.log(f"{stack.name} alone cannot be measured: {error}")
            return []
        return _ordered(list(self._findings(candidates, result)))

    def _confirm(self, stack: Candidate, good: Sequence[Finding]) -> list[Finding]:
        """New rounds in a new process, and the quality on the other half of the examples, of the best candidates."""
        singles = [f.candidate for f in good if f.candidate.techniques != stack.techniques]
        candidates = [c for c in [stack, *singles] if c.techniques][:CONFIRMED]
        if not candidates:
            return []
        self.log(f"confirming {', '.join(c.name for c in candidates)}")
        is_scored = all(c.name in self.scored for c in candidates)
        result = self.trials.run(self._trial(candidates, LOOKS[-1], scored=not (self._trains or is_scored), attempt=1))
        if is_scored:
            models = [
                model if model.error else _with_scores(model, self.scored[candidate.name])
                for candidate, model in zip(candidates, result.models[1:], strict=True)
            ]
            result = dataclasses.replace(result, models=(result.models[0], *models))
        findings = [dataclasses.replace(finding, is_confirmed=True) for finding in self._findings(candidates, result)]
        before = {f.candidate.name: f for f in good}
        findings = [
            dataclasses.replace(f, needs=earlier.needs, bound=earlier.bound)
            if (earlier := before.get(f.candidate.name)) is not None
            else f
            for f in findings
        ]
        qualities = [self.judge.quality(model, selects=False) for model in result.models[1:]]
        final, judged = [], []
        for finding, quality in zip(findings, qualities, strict=True):
            earlier = before.get(finding.candidate.name)
            if earlier is not None and earlier.is_trained:
                times = {"ratio": finding.ratio, "cpu": finding.cpu, "error": finding.error, "is_confirmed": True}
                judged.append(dataclasses.replace(earlier, **times))
            elif self._trains:
                final.append(dataclasses.replace(finding, is_kept=not finding.error))
            else:
                judged.append(dataclasses.replace(finding, quality=quality))
        with_quality = [f for f in judged if f.quality is not None]
        accepted = kept_quality.confirmed([f.quality for f in with_quality if f.quality is not None])
        names = {
            f.candidate.name
            for f, is_kept in zip(with_quality, accepted, strict=True)
            if is_kept and (f.is_kept or not f.is_trained)
        }
        return [*final, *(dataclasses.replace(f, is_kept=f.candidate.name in names) for f in judged)]


def _in_turn(listed: Sequence[Item], key: Callable[[Item], str]) -> list[Item]:
    """The items of each key in turn, each in its order, so that the first ones have several keys."""
    groups: dict[str, list[Item]] = {}
    for item in listed:
        groups.setdefault(key(item), []).append(item)
    return [item for row in itertools.zip_longest(*groups.values()) for item in row if item is not None]


def _bound(technique: Technique, traced: TracedTime | None) -> float | None:
    """The bound of a technique; None if the trace misses too much of the time."""
    return technique.bound(traced) if traced is not None and traced.coverage >= LEAST_COVERAGE else None


def _joined(stack: Candidate, technique: Technique) -> Candidate | None:
    """The candidate with one more technique; None if they exclude each other."""
    try:
        return stack.plus(technique)
    except InputError:
        return None


def _trainable(base: Candidate, technique: Technique) -> Candidate | None:
    """The candidate with one more technique, if it has either changes of the config or a recipe; otherwise None."""
    joined = _joined(base, technique)
    return joined if joined is not None and not (joined.recipe and joined.changes) else None


def _recommended(accepted: Sequence[Finding]) -> Finding | None:
    """The finding with the largest gain; of those that gain as much, the one that changes least."""
    best = max(accepted, key=lambda f: f.gain, default=None)
    if best is None:
        return None
    near = [f for f in accepted if f.gain * (1 + LEAST) >= best.gain]
    return min(near, key=lambda f: (f.is_trained, len(f.candidate.techniques), bool(f.candidate.recipe), -f.gain))


def _with_scores(model: Measured, scored: Measured) -> Measured:
    """A model with the scores of an earlier measurement."""
    return dataclasses.replace(model, scores=scored.scores, examples=scored.examples, labels=scored.labels)


def _ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings, the largest gain first."""
    return sorted(findings, key=lambda f: f.gain, reverse=True)
