"""The words of a report of `hpnlp advise`."""

import dataclasses
import types

import numpy as np

from hpnlp.advise import AdviseSettings, Needs, report, techniques, trial
from hpnlp.advise.kept_quality import EqualPredictions, KeptQuality, subset
from hpnlp.compress.recipe import parse_recipe
from hpnlp.compress.stages import STRUCTURE
from hpnlp.data.tokenizers import ByteTokenizer
from hpnlp.tasks.predictions import LabelPrediction
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import default, resolve
from hpnlp.training.run_directory import Run
from tests.advise.test_search import searched, trained  # noqa: F401  (fixture)


def test_too_few_examples_are_counted_by_the_answers_that_differ(trained):  # noqa: F811
    advice, _ = searched(trained, settings=AdviseSettings(only=("int8",), batches=10), ratios={"int8": 0.5})
    original = advice.baseline.models[0]
    assert original.examples is not None
    examples = subset(original.examples, original.examples.identity < 160)
    original = dataclasses.replace(original, scores={"accuracy": 0.4313}, examples=examples)
    quality = KeptQuality(1.0, 0.7949, 0.97, 0.3, 80, has_learned=True, discordant=0.0)
    values = default("classification")
    values.update_from_flattened_dict({"data.path": "reviews.csv"})
    text = report.render(
        dataclasses.replace(
            advice,
            config=resolve(values),
            baseline=dataclasses.replace(advice.baseline, models=(original,), trivial=0.2375),
            findings=[dataclasses.replace(advice.findings[0], quality=quality, is_kept=False)],
            recommended=None,
            seconds=900.0,
        )
    )
    assert "is shown to keep 97 % of the quality" in text and "keeps 100 % of the quality, at least 79.4 %" in text
    assert "losses under 4.3 points cannot be excluded for models that differ on 2.4 % of them" in text
    assert "--keep=0.97 needs about 4,500 in each half: leave out --batches, or lower --keep." in text
    assert "| technique | time (unchanged: 1) |" in text and "| 100 %, at least 79.4 % | loss not excluded |" in text
    assert "the search took 15.0 min of 10.0" in text


def test_equal_labels_are_a_column_and_the_labels_stay_in_the_trial(trained):  # noqa: F811
    advice, _ = searched(trained, settings=AdviseSettings(only=("int8",)), ratios={"int8": 0.5})
    assert "equal labels" not in report.render(advice)
    (finding,) = advice.findings
    finding = dataclasses.replace(
        finding,
        agreement=EqualPredictions(0.75, 0.5, 4),
        measured=dataclasses.replace(finding.measured, labels=tuple("abca")),
    )
    advice = dataclasses.replace(advice, findings=[finding])
    assert "| equal labels | verdict |" in report.render(advice) and "| 75 % |" in report.render(advice)
    values = report.to_json(advice)["findings"][0]
    assert values["agreement"]["share"] == 0.75 and not values["measured"]["labels"]


def test_memory_of_the_compiled_program_is_a_column_where_it_is_known(trained):  # noqa: F811
    advice, _ = searched(trained, settings=AdviseSettings(only=("int8",)), ratios={"int8": 0.5})
    assert "memory" not in report.render(advice)
    (finding,), original = advice.findings, advice.baseline.models[0]
    for column, values, others in (
        ("memory of the call", {"peak_bytes": 30, "memory_bytes": 4}, {"peak_bytes": 120, "memory_bytes": 8}),
        ("memory of the weights", {"memory_bytes": 30}, {"peak_bytes": 100, "memory_bytes": 120}),
    ):
        changed = dataclasses.replace(finding, measured=dataclasses.replace(finding.measured, **values))
        models = (dataclasses.replace(original, **others),)
        baseline = dataclasses.replace(advice.baseline, models=models)
        text = report.render(dataclasses.replace(advice, findings=[changed], baseline=baseline))
        assert f"| faster at most | {column} | quality that is kept |" in text and "|  | 0.25 | 100 %" in text


def test_labels_are_predicted_for_examples_without_a_label_and_not_for_padding(monkeypatch):
    config = resolve(default("classification"))

    def labelled(batches, prediction=LabelPrediction):
        task = types.SimpleNamespace(prediction=prediction, heldout=lambda config, dataset, limit: batches[:limit])
        monkeypatch.setattr(trial.tasks, "find", lambda name: task)
        vocabulary = Vocabulary(ByteTokenizer(), ("a", "b"))
        run = Run(config, vocabulary, model=None, params=None, step=0, eos_ids=())
        return trial._Process._labels(None, run, None)

    def predictions(model, batch, count):
        return [LabelPrediction(model.labels[i % 2], 1.0, {}) for i in range(count)]

    monkeypatch.setattr(trial, "label_predictions", predictions)
    unlabelled = {"weights": np.array([1.0, 0.0, 0.0]), "teacher_weights": np.array([1.0, 1.0, 0.0])}
    assert labelled([unlabelled, {"weights": np.array([1.0, 0.0])}]) == ("a", "b", "a")
    assert labelled([{"weights": np.zeros(2)}]) == labelled([{"tokens": np.zeros(2)}]) == labelled([], None) == ()


def test_recipes_that_need_training_can_be_trained_further():
    recipes = [t for t in techniques() if t.is_recipe and t.needs is Needs.TRAINING]
    assert recipes and all(stage.changes == STRUCTURE for t in recipes for stage in parse_recipe(t.name))
