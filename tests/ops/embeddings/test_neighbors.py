"""Nearest neighbours and their votes, against numpy and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import embeddings
from tests.contracts import assert_close, once
from tests.messages import raises

RNG = np.random.default_rng(0)
X, Q = (RNG.standard_normal((n, 4)).astype(np.float32) for n in (40, 7))
LABELS = RNG.integers(0, 5, 40)


def predict(k, temperature):
    def of(q, x):
        near = embeddings.find_neighbors(q, x, k)
        labels = jnp.asarray(LABELS)[near.ids]
        return near, embeddings.neighbor_probabilities(near.similarities, labels, 5, temperature=temperature)

    return once(of, Q, X)


def test_votes_are_those_of_the_nearest_examples():
    near, shares = predict(3, 0.5)
    cosines = (Q / np.linalg.norm(Q, axis=1)[:, None]) @ (X / np.linalg.norm(X, axis=1)[:, None]).T
    ids = np.argsort(-cosines, axis=1)[:, :3]
    np.testing.assert_array_equal(near.ids, ids)
    votes = np.exp(np.take_along_axis(cosines, ids, 1) / 0.5)
    expected = np.stack([np.bincount(LABELS[row], vote, 5) for row, vote in zip(ids, votes, strict=True)])
    assert_close(shares, (expected / expected.sum(axis=1)[:, None]).astype(np.float32))


def test_absent_neighbors_have_no_vote():
    similarities = jnp.array([[0.5, -jnp.inf], [-jnp.inf, -jnp.inf]])

    def votes(s, y):
        return [embeddings.neighbor_probabilities(s, y, 3, temperature=t) for t in (None, 0.1)]

    for shares in once(votes, similarities, jnp.array([[2, 0], [1, 1]])):
        np.testing.assert_array_equal(shares, [[0, 0, 1], [0, 0, 0]])


def test_numbers_that_are_no_class_have_no_vote():
    """The labels are int8, which cannot count the queries."""
    labels = np.tile(np.array([[-1, 1, 7]], np.int8), (200, 1))
    shares = once(lambda s, y: embeddings.neighbor_probabilities(s, y, 3), np.ones((200, 3), np.float32), labels)
    np.testing.assert_array_equal(shares, np.tile([0, 1, 0], (200, 1)))


@pytest.mark.oracle
@pytest.mark.parametrize("k", [1, 5])
def test_predictions_match_scikit_learn(k):
    neighbors = pytest.importorskip("sklearn.neighbors")
    model = neighbors.KNeighborsClassifier(k, metric="cosine").fit(X, LABELS)
    near, shares = predict(k, None)
    distances, ids = model.kneighbors(Q)
    np.testing.assert_array_equal(near.ids, ids)
    assert_close(near.similarities, (1 - distances).astype(np.float32))
    assert_close(shares, model.predict_proba(Q).astype(np.float32))


@pytest.mark.usefixtures("symbolic_sizes")  # beartype would raise first
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones((2, 3)), np.zeros((2, 2), int), 5), r"similarities \(2, 3\), labels \(2, 2\): expected"),
        ((np.ones((2, 2)), np.zeros((2, 2), int), 0), "classes is 0: expected at least 1"),
        ((np.ones((2, 2)), np.zeros((2, 2), int), 5, 0.0), "temperature 0.0: expected a number over 0"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    raises(
        message,
        embeddings.neighbor_probabilities,
        *arguments[:3],
        temperature=arguments[3] if len(arguments) > 3 else None,
    )


@pytest.mark.parametrize("k", [1, 3])
def test_hidden_vectors_are_followed_by_the_mean_of_the_nearest_entries(k):
    entries, is_hidden = np.where(np.arange(40)[:, None] % 5 == 0, 0, X).astype(np.float32), RNG.random((7, 40)) < 0.3
    is_hidden[6] = True
    out = once(lambda h, x, b: embeddings.concat_nearest(h, x, k, temperature=0.5, is_hidden=b), Q, entries, is_hidden)
    assert out.shape == (7, 8)
    np.testing.assert_array_equal(out[:, :4], Q)
    for query, row, hidden in zip(Q[:6], out[:, 4:], is_hidden, strict=False):
        known = entries[(np.arange(40) % 5 != 0) & ~hidden]
        cosines = known @ query / np.linalg.norm(known, axis=1) / np.linalg.norm(query)
        best = np.argsort(-cosines)[:k]
        weights = np.exp(cosines[best] / 0.5)
        assert_close(row, (weights / weights.sum() @ known[best]).astype(np.float32))
    np.testing.assert_array_equal(out[6, 4:], np.zeros(4))


def test_gradients_of_all_entries_are_those_of_a_softmax():
    def by_softmax(h, x):
        cosines = embeddings.unit_norm(h) @ embeddings.unit_norm(x).T
        return jnp.concatenate([h, jax.nn.softmax(cosines / 0.5, axis=1) @ x], axis=1)

    def gradients(h, x, cotangent):
        forms = (lambda h, x: embeddings.concat_nearest(h, x, 40, temperature=0.5), by_softmax)
        return [jax.vjp(form, h, x)[1](cotangent) for form in forms]

    ours, expected = once(gradients, Q, X, RNG.standard_normal((7, 8)).astype(np.float32))
    assert_close(ours, expected)


@pytest.mark.usefixtures("symbolic_sizes")  # beartype would raise first
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q, X[:, :3]), {}, r"h \(7, 4\), entries \(40, 3\): expected \[Q, D\] and \[N, D\]"),
        ((Q, X, 41), {}, "k is 41: expected 1 to 40, the number of entries"),
        ((Q, X), {"temperature": 0.0}, "temperature 0.0: expected a number over 0"),
        ((Q, X), {"is_hidden": np.zeros((7, 7), bool)}, r"is_hidden \(7, 7\): expected \(7, 40\)"),
    ],
)
def test_invalid_arguments_of_a_memory_raise(arguments, options, message):
    raises(message, embeddings.concat_nearest, *arguments, **options)


def test_more_neighbors_than_examples_raise():
    raises("k is 41: expected 1 to 40", embeddings.find_neighbors, Q, X, 41)
