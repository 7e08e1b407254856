"""The search of `hpnlp advise` with simulated measurements: known gains and losses, noise, crashes and resumption."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from hpnlp.advise import AdviseSettings, Goal, advise, report
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.kept_quality import QualityVerdict
from hpnlp.advise.search import CONFIRMED
from hpnlp.advise.technique import Technique
from hpnlp.advise.trial import RESULT, SPEC, Measured, Trial, TrialResult
from hpnlp.advise.trials import Trials
from hpnlp.advise.workload import Program, Workload
from hpnlp.cost.paired_times import Usage, Verdict, compare_times
from hpnlp.training import loop
from hpnlp.training.files.example_scores import ExampleScores
from tests import tiny
from tests.messages import raises

EXAMPLES, ACCURACY = 6000, 0.8
MACHINE = {"backend": "cpu", "cpu": "simulated", "cores": 2, "device": "cpu", "jax": "0"}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    loop.train(tiny.make(train__steps=1), directory)
    return directory


@dataclasses.dataclass(frozen=True)
class Simulated(Trials):
    """Trials of techniques with known ratios of times and shares of the quality, which multiply; 1 for all others.

    Attributes:
      ratios: Name of a technique -> its ratio; or two of them, of the first process and of later ones.
      retained: Name of a technique -> the share of the quality that it keeps.
      seed: Of noise and of the examples on which models differ.
    """

    ratios: dict = dataclasses.field(default_factory=dict)
    retained: dict = dataclasses.field(default_factory=dict)
    seed: int = 0
    trials: list = dataclasses.field(default_factory=list)

    def run(self, trial):
        self.trials.append(trial)
        rng = np.random.default_rng([self.seed, len(self.trials)])
        level = 0.0

        def use(function, calls):  # noise that only adds time, in bursts
            nonlocal level
            level = 0.9 * level + abs(rng.normal(0, 0.02)) + (0.3 if rng.random() < 0.02 else 0.0)
            return Usage(function() * math.exp(level / 2), function())

        def seconds(candidate):
            factors = [self.ratios.get(name, 1.0) for name in candidate.techniques]
            return lambda: math.prod(f[min(1, trial.attempt)] if isinstance(f, tuple) else f for f in factors)

        times = None
        if trial.rounds:
            functions = {str(i): seconds(candidate) for i, candidate in enumerate(trial.candidates)}
            times = compare_times(seconds(trial.baseline), functions, rounds=trial.rounds, min_seconds=0, use=use)
        models = [self.measured(trial.baseline, trial, None)]
        models += [
            self.measured(candidate, trial, times.programs[str(i)] if times else None)
            for i, candidate in enumerate(trial.candidates)
        ]
        first = (times.baseline, times.equal) if times else (0.0, None)
        return TrialResult(tuple(models), 1.0, *first, MACHINE, -0.5 if trial.scored else None)

    def measured(self, candidate, trial, times):
        scores, examples = {}, None
        if trial.scored:
            rng = np.random.default_rng(self.seed)
            right = rng.random(EXAMPLES) < ACCURACY
            share = math.prod(self.retained.get(name, 1.0) for name in candidate.techniques)
            if candidate.techniques:  # errors of its own, and as many answers that become right
                rng = np.random.default_rng([self.seed, sum(map(ord, candidate.name))])
                lost = (1 - share) * (ACCURACY - 0.5) / ACCURACY
                flips = rng.random(EXAMPLES)
                right = np.where(right, flips > 0.02 + lost, flips < 0.02 * ACCURACY / (1 - ACCURACY))
            ones = np.ones(EXAMPLES)
            examples = ExampleScores({"loss": (-right.astype(float), ones)}, np.arange(EXAMPLES, dtype=np.uint32))
            scores = {"loss": float(-right.mean())}
        return Measured(candidate.name, times=times, disk_bytes=100, scores=scores, examples=examples)


def searched(trained, *, settings=None, **options):
    """The advice of a simulated search; accuracies are losses of the opposite sign, as the trivial score is."""
    settings = settings or AdviseSettings()
    trials = Simulated(Path("unused"), **options)
    return advise(trained, settings, trials=trials, log=lambda line: None), trials


def test_the_fastest_stack_that_keeps_the_quality_is_confirmed_and_recommended(trained):
    ratios = {"int8": 0.7, "mlp(0.5)": 0.8, "heads(0.5)": 0.3, "bf16": 0.75}
    advice, trials = searched(trained, ratios=ratios, retained={"heads(0.5)": 0.6})
    best = advice.recommended
    assert best is not None and set(best.candidate.techniques) == {"int8", "mlp(0.5)"}
    assert best.candidate.recipe == "mlp(0.5),int8" and best.is_confirmed and best.is_kept
    assert best.ratio.low <= 0.7 * 0.8 <= best.ratio.high * 1.05
    by_name = {f.candidate.name: f for f in advice.findings}
    assert by_name["heads(0.5)"].quality.verdict is QualityVerdict.LOST and by_name["heads(0.5)"].is_faster
    last = trials.trials[-1]
    assert (
        last.attempt == 1 and not last.scored and len(last.candidates) <= CONFIRMED
    )  # scores of both halves are known
    text = report.render(advice)
    assert text.startswith("int8 + mlp(0.5): 1.") and "Confirmed in a second process." in text
    assert "loses too much without training" in text and "--recipe=mlp(0.5),int8" in text


def test_techniques_that_can_be_joined_are_scored_before_others_of_one_family(trained, fitting):
    """Four formats of numbers, of which a model has one, leave no time for what makes it smaller."""
    ratios = {"int8": 0.4, "bf16": 0.41, "int4": 0.42, "ternary": 0.43, "mlp(0.5)": 0.6, "heads(0.5)": 0.7}
    advice, trials = searched(trained, ratios=ratios)
    first = next(trial for trial in trials.trials if trial.scored and trial.candidates)
    assert {"int8", "mlp(0.5)", "heads(0.5)"} <= {candidate.name for candidate in first.candidates}
    assert advice.recommended is not None
    assert set(advice.recommended.candidate.techniques) == {"int8", "mlp(0.5)", "heads(0.5)"}


@pytest.fixture
def fitting(monkeypatch):
    """All techniques fit, without the time to find out."""
    monkeypatch.setattr(Technique, "refusal", lambda *_: "")


def test_equal_programs_are_recommended_in_at_most_one_of_twenty_searches(trained, fitting):
    recommended = [searched(trained, seed=seed)[0].recommended for seed in range(20)]
    assert sum(best is not None for best in recommended) <= 1


def test_models_below_the_limit_are_recommended_in_at_most_one_of_twenty_searches(trained, fitting):
    ratios = {"int8": 0.5, "int4": 0.4, "ternary": 0.3, "bf16": 0.45}
    found = [
        searched(trained, seed=seed, ratios=ratios, retained=dict.fromkeys(ratios, 0.965))[0].recommended
        for seed in range(20)
    ]
    assert sum(best is not None for best in found) <= 1


def test_what_is_fast_in_its_first_process_only_or_wrong_is_refused(trained):
    advice, _ = searched(trained, ratios={"int8": (0.5, 1.0), "bf16": 0.2}, retained={"bf16": 0.0})
    assert advice.recommended is None
    by_name = {f.candidate.name: f for f in advice.findings}
    assert by_name["int8"].is_confirmed and not by_name["int8"].is_faster
    assert by_name["bf16"].quality.verdict is QualityVerdict.LOST
    assert "Nothing here is worth it" in report.verdict(advice) and "bf16" in report.verdict(advice)


def test_only_and_exclude_choose_techniques_and_an_empty_choice_raises(trained):
    settings = AdviseSettings(only=("int8", "bf16"), exclude=("bf16",))
    advice, _ = searched(trained, settings=settings, ratios={"int8": 0.5})
    assert [f.candidate.name for f in advice.findings] == ["int8"]
    raises(
        "no technique with --goal=latency is left of --only=optimizer.name=lion",
        searched,
        trained,
        settings=AdviseSettings(only=("optimizer.name=lion",)),
    )


class Runner:
    """Runs trials without a process: writes a result, or ends as by a signal where a candidate is among `killed`."""

    def __init__(self, killed=()):
        self.killed, self.calls = killed, 0

    def __call__(self, command, environment, log):
        self.calls += 1
        directory = Path(command[-1])
        trial = Trial.from_json((directory / SPEC).read_text())
        if any(name in self.killed for c in trial.candidates for name in c.techniques):
            return -9
        models = tuple(Measured(c.name) for c in (trial.baseline, *trial.candidates))
        TrialResult(models, 1.0, 0.0, None, MACHINE).write(directory)
        return 0


def trial_of(*names):
    candidates = tuple(Candidate((name,), name) for name in names)
    return Trial("run", 1, {}, Workload(Program.LOSS, 1), Candidate(), candidates, 1, 1.0)


def test_a_candidate_that_ends_its_process_is_the_only_one_that_fails(tmp_path):
    runner = Runner(killed=("int8",))
    result = Trials(tmp_path, runner).run(trial_of("bf16", "int8", "fp8"))
    assert [(m.name, m.error) for m in result.models[1:]] == [
        ("bf16", ""), ("int8", "signal 9, as for lack of memory"), ("fp8", "")
    ]  # fmt: skip
    done = runner.calls
    again = Trials(tmp_path, runner).run(trial_of("bf16"))
    assert runner.calls == done and again.models[1].name == "bf16"  # finished trials are read
    (tmp_path / trial_of("bf16").digest() / RESULT).write_text("{")
    assert Trials(tmp_path, runner).run(trial_of("bf16")).models[1].error == "" and runner.calls == done + 1
    raises("the model as it is cannot be measured: signal 9", Trials(tmp_path / "x", lambda *_: -9).run, trial_of())


def test_a_result_is_read_as_it_was_written(tmp_path):
    usage = (Usage(1.0, 0.5), Usage(1.1, 0.6))
    times = compare_times(lambda: 1.0, {"a": lambda: 2.0}, rounds=8, min_seconds=0, use=lambda f, n: Usage(f()))
    examples = ExampleScores({"loss": (np.ones(3), np.ones(3))}, np.arange(3, dtype=np.uint32))
    model = Measured("a", times=times.programs["a"], scores={"loss": 1.0}, examples=examples, peak_bytes=5)
    result = TrialResult((model,), 2.0, usage[0].wall, times.equal, MACHINE, 0.5)
    result.write(tmp_path)
    read = TrialResult.read(tmp_path)
    assert read.models[0].times == model.times and read.models[0].times.wall.verdict is Verdict.SLOWER
    assert read.equal == result.equal and np.array_equal(read.models[0].examples.identity, examples.identity)
    assert json.loads((tmp_path / RESULT).read_text())["models"][0]["peak_bytes"] == 5


def test_a_report_names_what_was_not_tried_and_why(trained, tmp_path):
    advice, _ = searched(trained, settings=AdviseSettings(goal=Goal.LATENCY), ratios={"int8": 0.5})
    paths = report.write(advice, tmp_path)
    assert [path.name for path in paths] == list(report.FILES) and paths[2].stat().st_size > 5000
    text = paths[0].read_text()
    assert "not tried, since they need the training of a new model" in text and "model.mixer=linear" in text
    assert "experts(0.5) does not fit" in text
    candidate, values = report.read_candidate(tmp_path, "int8")
    assert candidate.recipe == "int8" and values["ratio"]["verdict"] == "faster"
    raises("has no such row: did you mean", report.read_candidate, tmp_path, "int88")
    raises("run hpnlp advise without --verify first", report.read_candidate, tmp_path / "x", "int8")
