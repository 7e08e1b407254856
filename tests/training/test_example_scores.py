"""Scores of single held-out examples: derivatives by the weights, standard errors, and files."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.training.files import example_scores
from hpnlp.training.files.example_scores import Collector, ExampleScores, with_examples

WEIGHTS = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0], [0.5, 0, 0]], np.float32)
LABELS = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [2, 1, 3]], np.int32)
VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)


def sums_of(batch):
    """A loss, a metric, an auxiliary loss, a confusion matrix, and a share of sequences, which is no sum over examples."""
    w = batch["weights"]
    whole = (w.sum(1) > 0).astype(jnp.float32)
    return {
        "loss": ((w * VALUES).sum(), w.sum()),
        "accuracy": (jnp.where(VALUES > 3, w, 0.0).sum(), w.sum()),
        "balance_loss": (jnp.ones(()), jnp.ones(())),
        "confusion": (jnp.zeros((2, 2)), jnp.ones(())),
        "exact_match": (whole.sum(), whole.sum()),
    }, None


def test_scores_of_examples_are_the_terms_of_the_sums():
    sums, _ = jax.jit(lambda batch: with_examples(sums_of, batch))({"weights": WEIGHTS, "labels": LABELS})
    collector = Collector()
    others = collector.add(jax.device_get(sums))
    assert others.keys() == {"loss", "accuracy", "balance_loss", "confusion", "exact_match"}
    scores = collector.result()
    assert scores.sums.keys() == {"loss", "accuracy"}  # of the examples with a weight
    np.testing.assert_allclose(scores.sums["loss"], [(WEIGHTS * VALUES).sum(1)[[0, 1, 3]], WEIGHTS.sum(1)[[0, 1, 3]]])
    np.testing.assert_allclose(scores.sums["accuracy"][0], np.where(VALUES > 3, WEIGHTS, 0).sum(1)[[0, 1, 3]])
    assert len(set(scores.identity.tolist())) == 3  # the second example has fewer labels than the first
    no_weights, _ = with_examples(lambda batch: ({"loss": (1.0, 1.0)}, None), {"labels": LABELS})
    assert no_weights == {"loss": (1.0, 1.0)} and Collector().result() is None


def scores_of(totals, weights, identity=None):
    identity = np.arange(len(totals), dtype=np.uint32) if identity is None else identity
    return ExampleScores({"loss": (np.float64(totals), np.float64(weights))}, identity)


def test_standard_errors_match_their_definition(tmp_path):
    rng = np.random.default_rng(0)
    totals = rng.normal(1, 1, 400)
    one, other = scores_of(totals, np.ones(400)), scores_of(totals + rng.normal(0, 0.1, 400), np.ones(400))
    assert one.standard_error("loss") == pytest.approx(totals.std(ddof=1) / 20)
    assert one.standard_error("accuracy") is None
    difference = other.sums["loss"][0] - totals
    assert other.paired_error(one, "loss") == pytest.approx(difference.std(ddof=1) / 20)
    assert other.paired_error(one, "accuracy") is None
    assert other.paired_error(scores_of(totals, np.ones(400), one.identity[::-1]), "loss") is None
    assert other.paired_error(scores_of(totals, np.arange(400)), "loss") is None
    assert scores_of([1.0], [1.0]).standard_error("loss") is None
    one.write(tmp_path)
    read = ExampleScores.read(tmp_path)
    np.testing.assert_allclose(read.sums["loss"][0], totals, rtol=1e-6)
    # Weighted means by the bootstrap.
    weights = rng.uniform(0.5, 2, 400)
    drawn = rng.integers(0, 400, (2000, 400))
    expected = ((weights * totals)[drawn].sum(1) / weights[drawn].sum(1)).std()
    assert scores_of(weights * totals, weights).standard_error("loss") == pytest.approx(expected, rel=0.1)


def test_many_examples_are_added_up_in_groups(monkeypatch):
    monkeypatch.setattr(example_scores, "MAX_EXAMPLES", 4)
    collector = Collector()
    for first in (0, 4):
        ones, identity = np.ones(4), np.arange(first, first + 4, dtype=np.uint32)
        examples = {"loss": (ones * first, ones), "identity": identity}
        collector.add({"loss": (4.0 * first, 4.0), "examples": examples})
    scores = collector.result()
    np.testing.assert_array_equal(scores.sums["loss"], [[0, 0, 8, 8], [2, 2, 2, 2]])
    np.testing.assert_array_equal(scores.identity, [1, 5, 9, 13])


def test_examples_of_a_document_are_added_up(tmp_path):
    documents = np.array([7, 3, 7, 1, 5, 9, 9, 3])
    scores = dataclasses.replace(scores_of(np.arange(8), np.arange(1, 9)), documents=documents)
    assert scores.document_count == 5
    result = scores.by_document()
    np.testing.assert_array_equal(result.sums["loss"], [[3, 8, 4, 2, 11], [4, 10, 5, 4, 13]])  # of 1, 3, 5, 7 and 9
    np.testing.assert_array_equal(result.identity, [3, 8, 4, 2, 11])
    assert scores.standard_error("loss") == result.standard_error("loss")
    scores.write(tmp_path)
    np.testing.assert_array_equal(ExampleScores.read(tmp_path).documents, documents)
    for same in (
        np.arange(8),
        documents % 2,
        None,
    ):  # each example its own, fewer than five documents, and unknown ones
        alone = dataclasses.replace(scores, documents=same)
        assert alone.document_count == 0 and alone.by_document() is alone


def test_a_collector_leaves_out_the_documents_of_what_fills_a_batch():
    collector = Collector(np.array([[4, 4, 2], [2, -1, -1]]))
    for weights in ([1.0, 1, 1], [1.0, 0, 0]):
        examples = {"loss": (np.ones(3) * weights, np.array(weights)), "identity": np.arange(3, dtype=np.uint32)}
        collector.add({"loss": (sum(weights), sum(weights)), "examples": examples})
    np.testing.assert_array_equal(collector.result().documents, [4, 4, 2, 2])
