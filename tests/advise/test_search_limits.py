"""The search of `hpnlp advise` at its limits: other weights, other goals, trainings, few examples, and printed commands."""

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest

from hpnlp.advise import AdviseSettings, Finding, Goal, advise, report, techniques
from hpnlp.advise import search as searches
from hpnlp.advise.candidate import Candidate
from hpnlp.advise.technique import Needs
from hpnlp.advise.trial import _is_same, _Model
from hpnlp.advise.trials import saved_weights
from hpnlp.advise.workload import TimedCall
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.cost.paired_times import Ratio, Verdict
from hpnlp.cost.traced_time import TracedTime
from hpnlp.errors import TemporaryError
from hpnlp.jobs.compression.versions import CalibrationData
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import locked
from hpnlp.training.files.example_scores import ExampleScores
from hpnlp.training.run_directory import load
from tests.advise.test_search import EXAMPLES, Simulated, fitting, trained  # noqa: F401  (fixtures)
from tests.messages import raises


@dataclasses.dataclass(frozen=True)
class WithTraining(Simulated):
    """Simulated trials and trainings, with the trivial score of a loss, and sizes on disk that are as the ratios."""

    arms: list = dataclasses.field(default_factory=list)

    def run(self, trial):
        result = super().run(trial)
        models = tuple(
            dataclasses.replace(
                model,
                disk_bytes=int(1000 * math.prod(self.ratios.get(name, 1.0) for name in candidate.techniques)),
            )
            for model, candidate in zip(result.models, (trial.baseline, *trial.candidates), strict=True)
        )
        return dataclasses.replace(result, models=models, trivial=-0.5 if trial.scored else None)

    def train(self, arm):
        self.arms.append(arm)
        right = np.random.default_rng(arm.seed).random(EXAMPLES) < 0.8
        totals = -right.astype(float), np.ones(EXAMPLES)
        return ExampleScores({"loss": totals}, np.arange(EXAMPLES, dtype=np.uint32)), ""


def search(run, directory, trials, **settings):
    return advise(run, AdviseSettings(**settings), directory=directory, trials=trials, log=lambda line: None)


def test_a_trained_recipe_is_recommended_with_its_steps(trained, fitting, tmp_path):  # noqa: F811
    trials = WithTraining(Path("unused"), ratios={"heads(0.5)": 0.3}, retained={"heads(0.5)": 0.6})
    changes = {"data.batch_size": 4}
    advice = search(trained, tmp_path, trials, only=("heads(0.5)",), train_seconds=40, goal=Goal.DISK, changes=changes)
    best, steps = advice.recommended, trials.arms[0].steps
    assert 1 < steps <= 10 and len(trials.arms) == 4  # steps of a second or more
    assert best.steps == steps and best.is_confirmed and best.needs is Needs.TRAINING
    assert best.agreement is None  # labels were compared before the training only
    text = report.render(advice)
    assert f"after {steps} steps, beside the unchanged model" in text
    assert f"--recipe=heads(0.5)' --finetune={steps} --data.batch_size=4" in text
    assert "Measured: bytes of the weights on disk, 0.001 MB" in text and "0.3 of the bytes on disk (0.0003 MB)" in text
    assert "--verify" not in text  # bytes are the same each time


def test_a_trained_mixer_keeps_its_quality_and_is_applied_by_a_training(trained, fitting, tmp_path):  # noqa: F811
    name = "model.mixer=linear"
    for goal in (Goal.LATENCY, Goal.TRAINING):
        trials = WithTraining(Path("unused"), ratios={name: 0.3})
        flags = "--config=lm/bytes", "--data.seq_len=64"
        advice = search(trained, tmp_path, trials, only=(name,), train_seconds=40, goal=goal, experiment=flags)
        best = advice.recommended
        assert best.steps and best.quality.has_learned and best.is_confirmed
        text = report.render(advice)
        assert (
            f"hpnlp train {' '.join(flags)} --workdir=NEW --model.mixer=linear" in text and f"--out={tmp_path}" in text
        )


@dataclasses.dataclass(frozen=True)
class WithLostStacks(WithTraining):
    """Trainings of two techniques at once answer at random."""

    def train(self, arm):
        scores, reason = super().train(arm)
        if len(arm.candidate.techniques) < 2:
            return scores, reason
        totals = -(np.arange(EXAMPLES) % 2).astype(float), np.ones(EXAMPLES)
        return dataclasses.replace(scores, sums={"loss": totals}), ""


@pytest.mark.parametrize("make", [WithTraining, WithLostStacks])
def test_a_trained_technique_is_stacked_if_a_training_of_both_keeps_the_quality(trained, fitting, tmp_path, make):  # noqa: F811
    ratios = {"model.output=sampled(1024)": 0.5, "optimizer.rows=True": 0.6, "model.unroll=0": 0.9}
    trials = make(Path("unused"), ratios=ratios)
    flags = {"only": tuple(ratios), "train_seconds": 100, "goal": Goal.TRAINING}
    best = search(trained, tmp_path, trials, **flags).recommended
    trained_names = [arm.candidate.techniques for arm in trials.arms]
    first, second, _ = ratios
    assert trained_names.count((first,)) == trained_names.count((second,)) == trained_names.count((first, second)) == 2
    assert best.candidate.techniques == ((first, second) if make is WithTraining else (first,))
    assert best.steps and best.is_confirmed and best.quality.has_learned
    assert best.ratio.median == pytest.approx(0.3 if make is WithTraining else 0.5, rel=0.05)


def test_results_are_of_the_weights_as_they_were_saved(trained, fitting, tmp_path):  # noqa: F811
    trials = WithTraining(Path("unused"))
    search(trained, tmp_path, trials, only=("int8",))
    (checkpoint,) = (trained / "checkpoints").glob("[0-9]*")
    os.utime(checkpoint, (1, 1))
    search(trained, tmp_path, trials, only=("int8",))
    first, second = (trial.digest() for trial in trials.trials if not trial.candidates)
    assert first != second
    assert saved_weights(trained, load_config(trained)) == (1, "1000000000")


def test_a_compressed_run_has_no_step(trained, tmp_path):  # noqa: F811
    config = load_config(trained)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"")
    assert saved_weights(tmp_path, config)[0] is None


def test_the_batch_size_is_that_of_the_step_that_is_measured(trained, fitting, tmp_path):  # noqa: F811
    trials = WithTraining(Path("unused"))
    search(trained, tmp_path, trials, goal=Goal.TRAINING, batch_size=3, only=("model.unroll=0",))
    assert trials.trials[0].changes == {"data.batch_size": 3} and trials.trials[0].workload.batch_size == 3


def test_confirmed_findings_keep_their_bounds(trained, fitting, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(searches, "_bound", lambda technique, traced: 3.0 if technique.shortens else None)
    trials = WithTraining(Path("unused"), ratios={"mlp(0.5)": 0.5})
    best = search(trained, tmp_path, trials, only=("mlp(0.5)",)).recommended
    assert best.bound == 3.0 and best.needs is Needs.TRAINING


def test_a_trace_that_misses_much_of_the_time_bounds_nothing():
    technique = next(t for t in techniques(2) if t.name == "mlp(0.5)")
    seconds = {"feed_forward": 0.1, "mixing": 0.4}
    assert searches._bound(technique, TracedTime(seconds, seconds, 0.0)) == pytest.approx(1.25)
    assert searches._bound(technique, TracedTime(seconds, seconds, 0.5)) is None


def test_equal_programs_on_other_amounts_are_no_equal_calls(trained):  # noqa: F811
    run = load(trained)

    def model(amount):
        return _Model(Candidate(), run, TimedCall(lambda: None, "digest", amount), 0.0, None)

    assert _is_same(model(3.0), model(3.0)) and not _is_same(model(3.0), model(6.0))


def test_a_miss_without_scores_is_no_loss_of_quality(trained, fitting, tmp_path):  # noqa: F811
    class Unscored(WithTraining):
        def measured(self, candidate, trial, times):
            return dataclasses.replace(super().measured(candidate, trial, times), examples=None)

    advice = search(trained, tmp_path, Unscored(Path("unused"), ratios={"int8": 0.5}), only=("int8",))
    assert "quality not scored" in report.verdict(advice) and "without training" not in report.verdict(advice)


def test_one_held_out_example_shows_nothing(trained, fitting, tmp_path):  # noqa: F811
    class OneExample(WithTraining):
        def measured(self, candidate, trial, times):
            model = super().measured(candidate, trial, times)
            examples = ExampleScores({"loss": (np.zeros(1), np.ones(1))}, np.zeros(1, np.uint32))
            return dataclasses.replace(model, examples=examples if trial.scored else None)

    assert (
        search(trained, tmp_path, OneExample(Path("unused"), ratios={"int8": 0.5}), only=("int8",)).recommended is None
    )


def test_of_equal_gains_the_least_change_is_recommended():
    def finding(names, median, **values):
        return Finding(Candidate(names, "recipe"), Ratio(median, median, median, Verdict.FASTER), **values)

    pair, single = finding(("a", "b"), 0.500), finding(("a",), 0.505)
    trained_single, slower = finding(("c",), 0.499, steps=9), finding(("a",), 0.52)
    assert searches._recommended([pair, trained_single, single]) is single
    assert searches._recommended([pair, trained_single, slower]) is pair and searches._recommended([]) is None


def test_a_technique_that_slows_a_stack_is_left_out(trained, fitting, tmp_path):  # noqa: F811
    class Interacting(WithTraining):
        """mlp(0.5) and int8 gain more together than alone, and less with heads(0.5), the fastest alone."""

        def run(self, trial):
            def effective(candidate):
                if not {"mlp(0.5)", "int8"} <= set(candidate.techniques):
                    return candidate
                slowed = ("slowed",) if "heads(0.5)" in candidate.techniques else ()
                return dataclasses.replace(candidate, techniques=("mlp(0.5)", "int8", "together", *slowed))

            candidates = tuple(map(effective, trial.candidates))
            return super().run(dataclasses.replace(trial, baseline=effective(trial.baseline), candidates=candidates))

    ratios = {"heads(0.5)": 0.5, "mlp(0.5)": 0.6, "int8": 0.8, "together": 0.4, "slowed": 1.2}
    advice = search(trained, tmp_path, Interacting(Path("unused"), ratios=ratios), only=tuple(ratios)[:3])
    assert set(advice.recommended.candidate.techniques) == {"mlp(0.5)", "int8"}


def test_invalid_settings_and_a_second_search_raise(trained, tmp_path):  # noqa: F811
    trials = WithTraining(Path("unused"))
    for name, value in {"keep": 97, "seconds": 0, "train_seconds": -1, "batch_size": -1, "batches": 0}.items():
        raises(f"{name}={value}: expected", search, trained, tmp_path, trials, **{name: value})
    other = {"data.heldout": 0.9}
    raises("data.heldout=0.9 would not be the run", search, trained, tmp_path, trials, changes=other)
    with locked(tmp_path), pytest.raises(TemporaryError, match="another process writes to"):
        search(trained, tmp_path, trials)
    raises("add --data.path=PATH", CalibrationData(load(trained), None, 1).gradients, None, {})
