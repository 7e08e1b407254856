"""Classification: scores, the confusion matrix, ranking, and errors of tasks that do not fit."""

import dataclasses
import functools
import json
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from hpnlp.models.variables import collections
from hpnlp.parallel.memory import host_offload
from hpnlp.tasks import TASKS
from hpnlp.tasks.classification import ClassificationTask
from hpnlp.tasks.reports.label_report import MAX_DRAWN, MAX_LABEL, drawn_confusion, macro_f1
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.tasks.vocabulary import Sizes, Vocabulary, load
from hpnlp.training import config as configs
from hpnlp.training.files.claim import claimed
from hpnlp.types import InputError
from tests.messages import raises
from tests.models.test_encoder import TAGS, make, make_batch

REPORT = TASKS["classification"].report


def counted(labels, predictions, classes):
    confusion = np.zeros((classes, classes))
    np.add.at(confusion, (labels, predictions), 1)
    return confusion


def test_macro_f1_is_the_mean_over_classes_that_occur():
    rng = np.random.default_rng(0)
    labels, predictions = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    labels[labels == 3], predictions[predictions == 3] = 2, 2  # class 3 does not occur
    scores = []
    for name in (0, 1, 2, 4):
        hits = np.sum((labels == name) & (predictions == name))
        precision, recall = hits / np.sum(predictions == name), hits / np.sum(labels == name)
        scores.append(2 * precision * recall / (precision + recall))
    assert macro_f1(counted(labels, predictions, 6)) == pytest.approx(np.mean(scores), rel=1e-12)
    assert macro_f1(counted([0, 1], [1, 0], 3)) == 0.0 and np.isnan(macro_f1(np.zeros((2, 2))))


@pytest.mark.oracle
def test_macro_f1_matches_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    labels, predictions = rng.integers(0, 7, 300), rng.integers(0, 9, 300)
    expected = metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert macro_f1(counted(labels, predictions, 9)) == pytest.approx(expected, rel=1e-12)


def test_rare_classes_are_drawn_as_one():
    rng = np.random.default_rng(2)
    classes = MAX_DRAWN + 7
    confusion = rng.integers(0, 2, (classes, classes)) + 5 * (1 + np.arange(classes))[:, None]
    heatmap = drawn_confusion(confusion, tuple(f"class {i}" for i in range(classes)))
    assert heatmap.counts.shape == (MAX_DRAWN, MAX_DRAWN) and heatmap.counts.sum() == confusion.sum()
    assert heatmap.rows[0] == f"class {classes - 1}" and heatmap.rows[-1] == "8 others"
    assert heatmap.counts[0, 0] == confusion[-1, -1]
    small = drawn_confusion(np.array([[1, 0], [2, 3]]), ("a\nb", "c" * 99))
    assert list(small.rows) == ["c" * MAX_LABEL + "...", "a b"] and small.counts.tolist() == [[3, 2], [0, 1]]


def test_reports_fetch_offloaded_parameters():
    model, params = make(**TAGS)
    batch = make_batch(model.config)
    expected = jax.jit(functools.partial(model.apply, method="logits"))(collections(params), batch)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=host_offload.HOST)
    layers = jax.tree.map(lambda x: jax.device_put(x, host), params["layers"])
    outcome = Outcome(None, None, model, {**params, "layers": layers}, {})
    np.testing.assert_array_equal(outcome.compiled("logits")(jax.device_get(batch)), expected)


def report_of(**changes):
    numbers = {
        "heldout_accuracy": 0.5,
        "heldout_loss": 1.0,
        "heldout_examples": 1200,
        "heldout_digest": "one",
        "scored_weight": 1200.0,
        "classes": 3,
        "majority_accuracy": 0.25,
        "words_accuracy": None,
    }
    return numbers | changes


def test_runs_are_ranked_by_accuracy_on_the_same_examples():
    reports = {"a": report_of(), "b": report_of(heldout_accuracy=0.75), "c": report_of(heldout_digest="other")}
    reports |= {"d": report_of(heldout_loss=None), "e": report_of(scored_weight=1190.0)}
    ranking = REPORT.rank(reports)
    assert ranking.scores == {"a": 0.5, "b": 0.75} and ranking.higher_is_better
    assert ranking.unscored.keys() == {"c", "d", "e"} and "not finite" in ranking.unscored["d"]
    assert all("other held-out examples, or on other labels" in ranking.unscored[name] for name in "ce")


CONFIG = configs.resolve({"task": "classification", "model": {"dim": 8, "heads": 2}, "data": {"seq_len": 8}})


def test_models_that_do_not_fit_raise():
    for section, field, value, message in (
        ("model", "pooling", "none", "model.pooling='none' labels every token"),
        ("model", "classes", 4, "model.classes=4, but the data have 3 labels: set it to 0"),
        ("model", "vocab", 5, "model.vocab=5 is less than the tokenizer's 20"),
        ("train", "eval_stride", 4, "train.eval_stride=4 is for language models"),
    ):
        changed = dataclasses.replace(getattr(CONFIG, section), **{field: value})
        with pytest.raises(InputError, match=message):
            ClassificationTask().model(dataclasses.replace(CONFIG, **{section: changed}), Sizes(20, classes=3))


def test_pairs_need_two_token_types():
    data = dataclasses.replace(CONFIG.data, pair_field="second")
    for types in (0, 1, 2):
        model = dataclasses.replace(CONFIG.model, token_types=types)
        paired = dataclasses.replace(CONFIG, data=data, model=model)
        expected = pytest.raises(InputError, match="model.token_types=1 does not tell") if types == 1 else nullcontext()
        with expected:
            assert ClassificationTask().model(paired, Sizes(20, classes=3)).config.token_types == types


def test_workdir_inside_the_scored_examples_raises(tmp_path):
    data = dataclasses.replace(CONFIG.data, challenge_path=str(tmp_path))
    with (
        pytest.raises(InputError, match="lies in data.challenge_path="),
        claimed(tmp_path / "run", dataclasses.replace(CONFIG, data=data), accept_changes=False),
    ):
        pass


def test_sizes_of_the_model_are_those_of_the_data():
    model = ClassificationTask().model(CONFIG, Sizes(20, classes=3))
    assert (model.config.vocab, model.config.max_len, model.config.classes) == (20, 8, 3)


def test_labels_are_saved_with_the_tokenizer(tmp_path):
    from hpnlp.data import tokenizers

    vocabulary = Vocabulary(tokenizers.build("bytes"), ("no", "yes"))
    vocabulary.save(tmp_path)
    assert load(tmp_path, has_labels=True).labels == ("no", "yes") and load(tmp_path).labels is None
    (tmp_path / "labels.json").unlink()
    assert load(tmp_path, has_labels=True) is None and load(tmp_path) is not None


def test_config_has_the_fields_of_its_task():
    values = configs.default("classification")
    assert configs.resolve(values).data == ClassificationTask.data_config() and "label_field" in values.data
    values.model.dim = 32
    assert configs.from_json(configs.to_json(configs.resolve(values))) == configs.resolve(values)
    assert configs.differences(configs.Config(), CONFIG) == ["task: 'lm' -> 'classification'"]
    raises("unknown config field data.packing", configs.resolve, {"task": "classification", "data": {"packing": "fit"}})
    with pytest.raises(InputError, match="model is a LMConfig: task='classification' expects ClassifierConfig"):
        configs.Config(configs.Config().model, task="classification")
    written = json.loads(configs.to_json(configs.Config()))
    del written["task"]
    raises("restore task", lambda: configs.from_json(json.dumps(written)))
    written["fields"] -= 1  # a file of a version without tasks
    assert configs.from_json(json.dumps(written)) == configs.Config()


def test_config_takes_its_fields_to_another_task():
    values = configs.default()
    values.model.dim, values.train.steps = 32, 7
    other = configs.for_task(values, "classification")
    assert (other.task, other.model.dim, other.train.steps, other.model.pooling) == ("classification", 32, 7, "mean")
    values.data.packing = "fit"
    raises("the config sets data.packing='fit', which this task does not", configs.for_task, values, "classification")
