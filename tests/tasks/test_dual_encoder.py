"""Scores of retrieval against scikit-learn, and the report of dual encoders."""

import numpy as np
import pytest

from hpnlp.tasks import TASKS
from hpnlp.tasks.dual_encoder_report import partner_ranks, retrieval_scores
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.types import InputError


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


def test_a_batch_of_one_pair_is_refused():
    config = configs.default("dual_encoder")
    config.data.batch_size = 1
    with pytest.raises(InputError, match="data.batch_size=1: a pair has no negatives"):
        TASKS["dual_encoder"].model(configs.resolve(config), Sizes(ids=30))
