"""Triplet and large-margin losses against a loop over triplets, and batches without triplets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops import embeddings
from tests.contracts import ONCE, assert_close, once
from tests.messages import raises

RNG = np.random.default_rng(0)
X = RNG.standard_normal((9, 4)).astype(np.float32)
LABELS = np.array([0, 1, 0, 2, 1, 0, 3, 1, 2])  # class 3 has one example
MASK = np.array([True] * 7 + [False, True])  # 1 is left with two examples


def by_loop(x, labels, distance, margin, mining, mask):
    """`(sum, weight)` in float64."""
    x, kept = x.astype(np.float64), [i for i in range(len(x)) if mask[i]]

    def loss(anchor, positive, negative):
        violation = distance(x[anchor], x[positive]) - distance(x[anchor], x[negative])
        return np.log1p(np.exp(violation)) if margin is None else max(0.0, margin + violation)

    losses = []
    for anchor in kept:
        positives = [i for i in kept if i != anchor and labels[i] == labels[anchor]]
        negatives = [i for i in kept if labels[i] != labels[anchor]]
        if mining == "hard" and positives and negatives:
            farthest = max(positives, key=lambda i: distance(x[anchor], x[i]))
            nearest = min(negatives, key=lambda i: distance(x[anchor], x[i]))
            losses.append(loss(anchor, farthest, nearest))
        elif mining == "all":
            losses += [loss(anchor, *pair) for pair in itertools.product(positives, negatives)]
    weight = len(losses) if mining == "hard" else sum(value > 0 for value in losses)
    return np.float32(sum(losses)), np.float32(weight)


DISTANCES = {
    "triplet": (embeddings.triplet_loss, lambda a, b: np.sqrt(((a - b) ** 2).sum())),
    "squared": (lambda *a, **b: embeddings.triplet_loss(*a, squared=True, **b), lambda a, b: ((a - b) ** 2).sum()),
    "large_margin": (embeddings.large_margin_loss, lambda a, b: -(a * b).sum()),
}


@pytest.mark.parametrize("mining", ["hard", "all"])
def test_losses_match_a_loop(mining):
    cases = [(name, margin, mask) for name in DISTANCES for margin in (0.3, 0, None) for mask in (None, MASK)]

    def losses(x):
        return [DISTANCES[name][0](x, LABELS, margin=margin, mining=mining, mask=mask) for name, margin, mask in cases]

    for (name, margin, mask), actual in zip(cases, once(losses, jnp.asarray(X)), strict=True):
        kept = np.ones(9, bool) if mask is None else mask
        assert_close(actual, by_loop(X, LABELS, DISTANCES[name][1], margin, mining, kept))


def test_gradients_match_differences():
    """And are finite where two vectors are equal, as the distance of a vector to itself is."""
    x = X.copy()
    x[2] = x[0]
    step = 1e-4 * RNG.standard_normal(X.shape)

    def loss(x):
        return embeddings.triplet_loss(x, LABELS, margin=0.3)[0] + embeddings.large_margin_loss(x, LABELS)[0]

    gradient = once(jax.grad(loss), jnp.asarray(x))
    assert np.all(np.isfinite(gradient))
    expected = [
        sum(
            by_loop(x + sign * step, LABELS, DISTANCES[name][1], margin, "hard", np.ones(9, bool))[0].astype(np.float64)
            for name, margin in (("triplet", 0.3), ("large_margin", 0.2))
        )
        for sign in (1, -1)
    ]
    np.testing.assert_allclose((gradient * step).sum(), (expected[0] - expected[1]) / 2, rtol=2e-2)


def test_vectors_that_do_not_count_may_be_nan():
    x = np.where(MASK[:, None], X, np.nan).astype(np.float32)

    def losses(x):
        named = [loss for loss, _ in DISTANCES.values()]
        return sum(loss(x, LABELS, mining=mining, mask=MASK)[0] for loss in named for mining in ("hard", "all"))

    both = jax.jit(jax.value_and_grad(losses), compiler_options=ONCE)
    value, gradient = both(x)
    assert_close((value, gradient), both(X))
    assert not np.any(gradient[~MASK])


def test_soft_margins_count_triplets_whose_loss_is_0_in_float32():
    """Violations of -200."""
    x, labels = np.array([[100, 0], [100, 0], [-100, 0]], np.float32), np.array([0, 0, 1])
    loss, weight = once(lambda x: embeddings.triplet_loss(x, labels, margin=None, mining="all"), x)
    assert loss == 0 and weight == 2


def test_traced_batches_of_one_class_have_no_weight():
    both = once(lambda x, y: jax.value_and_grad(lambda x: embeddings.triplet_loss(x, y)[0])(x), X, jnp.zeros(9, int))
    assert both[0] == 0 and not np.any(both[1])
    weight = once(lambda x, y: embeddings.large_margin_loss(x, y, mining="all")[1], X, jnp.zeros(9, int))
    assert weight == 0


INVALID = {
    "one class": (
        {"labels": np.full(9, 4)},
        "all examples are of class 4, so that there are no negatives: put at least",
    ),
    "masked": ({"mask": np.zeros(9, bool)}, "no example counts"),
    "masked to one class": ({"mask": LABELS == 1}, "all examples are of class 1"),
    "margin": ({"margin": -0.1}, "margin -0.1: expected a number of at least 0"),
    "margin nan": ({"margin": float("nan")}, "margin nan: expected a number of at least 0"),
    "mining": ({"mining": "soft"}, "mining 'soft': expected 'hard' or 'all'"),
    "shapes": ({"labels": LABELS[1:]}, r"x \(9, 4\), labels \(8,\): expected"),
}


@pytest.mark.usefixtures("symbolic_sizes")  # beartype would raise first
@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments_raise(name):
    arguments, message = INVALID[name]
    arguments = {"labels": LABELS} | arguments
    for loss in (embeddings.triplet_loss, embeddings.large_margin_loss):
        raises(message, loss, X, **arguments)
