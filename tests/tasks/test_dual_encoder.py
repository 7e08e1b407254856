"""Scores of retrieval against scikit-learn, and the report of dual encoders."""

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from hpnlp.data.examples import PairsConfig
from hpnlp.data.examples.kinds.graded import read_graded
from hpnlp.tasks import TASKS
from hpnlp.tasks.reports.dual_encoder_report import partner_ranks, retrieval_scores, spearman
from hpnlp.tasks.reports.reporting import Outcome
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.types import InputError
from tests.drawn import drawn_params
from tests.messages import raises


@pytest.mark.oracle
def test_scores_match_scikit_learn():
    """With one relevant partner, the mean reciprocal rank is the average precision of the ranking."""
    metrics = pytest.importorskip("sklearn.metrics")
    scores = np.random.default_rng(0).normal(size=(40, 40)) + 1.5 * np.eye(40)
    actual = retrieval_scores(partner_ranks(scores))
    labels = np.arange(40)
    for k in (1, 10):
        assert actual[f"recall_at_{k}"] == pytest.approx(
            metrics.top_k_accuracy_score(labels, scores, k=k, labels=labels)
        )
    assert actual["mrr"] == pytest.approx(metrics.label_ranking_average_precision_score(np.eye(40), scores))


def test_ties_and_numbers_that_are_not_finite_count_against_the_partner():
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 0.5], [np.nan, np.nan, np.nan]])
    np.testing.assert_array_equal(partner_ranks(scores), [2, 1, 3])


def test_a_batch_or_part_of_one_pair_is_refused():
    for batch_size, parts, message in (
        (1, 1, "data.batch_size=1: a pair has no negatives: set data.batch_size to at least 2"),
        (4, 4, "data.batch_size=4, optimizer.accumulate=4: a pair has no negatives: set data.batch_size to at least 8"),
    ):
        config = configs.default("dual_encoder")
        config.data.batch_size, config.optimizer.accumulate, config.model.negatives = batch_size, parts, "part"
        raises(message, TASKS["dual_encoder"].model, configs.resolve(config), Sizes(ids=30))
        if parts > 1:
            config.model.negatives = "batch"
            assert TASKS["dual_encoder"].model(configs.resolve(config), Sizes(ids=30)).config.compares_examples


def test_models_have_as_many_hard_negatives_as_the_data():
    config = configs.default("dual_encoder")
    config.data.negative_fields, config.data.batch_size = "worse,worst", 1
    task = TASKS["dual_encoder"]
    assert task.model(configs.resolve(config), Sizes(ids=30)).config.negative_texts == 2
    config.model.negative_texts = 1
    with pytest.raises(InputError, match="model.negative_texts=1, and data.negative_fields='worse,worst' has 2"):
        task.model(configs.resolve(config), Sizes(ids=30))


def test_spearman_gives_ties_their_mean_rank():
    draw = np.random.default_rng(0)
    grades, similarities = draw.integers(0, 5, 50), np.round(draw.normal(size=50), 1)
    assert spearman(similarities, grades) == pytest.approx(stats.spearmanr(similarities, grades).statistic, abs=1e-12)
    assert spearman(np.exp(grades), grades) == pytest.approx(1) and spearman(-grades, grades) == pytest.approx(-1)
    for similarities in (np.ones(50), np.where(np.arange(50) == 3, np.nan, grades)):
        assert np.isnan(spearman(similarities, grades))


def graded_config(directory, **options):
    """A config whose pairs with grades, in a table, are texts with letters in common, and others."""
    records = [{"text": f"text {i}", "pair": f"partner {i}", "worse": "other"} for i in range(20)]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    rows = ["text,pair,grade", "ab,ab,5", "ab,ac,3.5", "ab,xy,0", "cd,cde,4", "cd,xz,1e-1"]
    (directory / "graded.csv").write_text("\n".join(rows))
    config = configs.default("dual_encoder")
    config.data.update(path=str(directory / "pairs.jsonl"), graded_path=str(directory / "graded.csv"), seq_len=16)
    config.data.update(cache=str(directory / "cache"), grade_field="grade", negative_fields="worse", **options)
    config.model.update(layers=0, dim=16, position="none")
    return configs.resolve(config)


def test_report_correlates_similarities_with_grades(tmp_path):
    config, task = graded_config(tmp_path, batch_size=2), TASKS["dual_encoder"]
    dataset = task.dataset(config.data, None)
    model = task.model(config, Sizes(ids=dataset.tokenizer.vocab_size))
    outcome = Outcome(config, dataset, model, drawn_params(model, 1.0), {})
    assert {"graded_spearman", "graded_pairs"} <= task.report.numbers(dataset, {}, {}).keys()
    numbers = task.report.section(outcome).numbers
    pairs, grades = read_graded(config.data, dataset.tokenizer)
    assert grades.tolist() == [5, 3.5, 0, 4, 0.1] and numbers["graded_pairs"] == 5
    batch = dataset.kind.batch(pairs, range(5), 5, dataset.tokenizer, 16)
    first, second = outcome.compiled("embed")(batch)
    expected = stats.spearmanr((first * second).sum(axis=1), grades).statistic
    assert numbers["graded_spearman"] == pytest.approx(expected)


def test_bad_grades_raise_before_training(tmp_path):
    for cells, message in (
        ("ab,ac,high", "graded.csv, line 2: field 'grade' is 'high', expected a number"),
        ("ab,ac,3\nab,ad,3.0", "graded.csv' holds 2 pairs, which have no different grades"),
        ("ab,,3", "graded.csv, line 2: field 'pair' is empty"),
    ):
        config = graded_config(tmp_path)
        (tmp_path / "graded.csv").write_text(f"text,pair,grade\n{cells}\n")
        raises(message, TASKS["dual_encoder"].dataset, config.data, None)


def test_sets_of_one_pair_raise_before_training(tmp_path):
    for name, count in (("pairs", 20), ("one", 1)):
        lines = [json.dumps({"text": f"text {i}", "pair": f"partner {i}"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = PairsConfig(path=str(tmp_path / "pairs.jsonl"), cache=str(tmp_path / "cache"), seq_len=16)
    assert TASKS["dual_encoder"].dataset(data, None).heldout_examples > 1
    one = dataclasses.replace(data, challenge_path=str(tmp_path / "one.jsonl"))
    raises("data.challenge_path holds one pair, which has no negatives", TASKS["dual_encoder"].dataset, one, None)
    with pytest.raises(InputError, match="one pair is held out, and has no negatives: hold out more"):
        TASKS["dual_encoder"].dataset(dataclasses.replace(data, heldout_examples=1), None)
