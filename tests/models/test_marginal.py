"""The marginal over documents: against enumeration in numpy, its gradient in closed form, and its invariances."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.pairs import marginal as marginals
from hpnlp.models.pairs.marginal import MARGINALS
from tests.messages import raises

B, K, M = 3, 4, 2
WEIGHTS = np.array([[1, 1], [1, 0], [0, 0]], np.float32)


def log_marginal(scores, log_probs, weights, marginal):
    return marginals.log_marginal(jnp.asarray(scores), jnp.asarray(log_probs), jnp.asarray(weights), marginal)


def drawn():
    """Scores, and probabilities of the label of each hidden token with each document."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(B, K)).astype(np.float32), rng.uniform(0.05, 0.9, (B, K, M)).astype(np.float32)


def by_enumeration(scores, probabilities, marginal):
    """log p(y | x) of each hidden token or text, by sums of products of probabilities in float64."""
    result = []
    for text in range(B):
        prior = np.exp(scores[text].astype(np.float64))
        prior /= prior.sum()
        hidden = [m for m in range(M) if WEIGHTS[text, m]]
        if marginal == "sequence":
            total = sum(prior[z] * np.prod([float(probabilities[text, z, m]) for m in hidden]) for z in range(K))
            result.append(np.log(total) if hidden else 0.0)
        else:
            sums = [sum(prior[z] * float(probabilities[text, z, m]) for z in range(K)) for m in range(M)]
            result.append([np.log(sums[m]) if m in hidden else 0.0 for m in range(M)])
    return np.array(result)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_values_and_gradients_match_enumeration(marginal):
    scores, probabilities = drawn()
    values, weights = log_marginal(scores, np.log(probabilities), WEIGHTS, marginal)
    np.testing.assert_allclose(values, by_enumeration(scores, probabilities, marginal), rtol=1e-5)
    np.testing.assert_array_equal(weights, WEIGHTS if marginal == "token" else [1, 1, 0])

    def total(scores):
        values, weights = log_marginal(scores, np.log(probabilities), WEIGHTS, marginal)
        return (values * weights).sum()

    prior = np.asarray(jax.nn.softmax(jnp.asarray(scores), axis=1))
    likelihood = probabilities if marginal == "token" else np.prod(probabilities ** WEIGHTS[:, None], 2, keepdims=True)
    posterior = prior[:, :, None] * likelihood
    posterior /= posterior.sum(axis=1, keepdims=True)
    expected = ((posterior - prior[:, :, None]) * np.asarray(weights).reshape(B, 1, -1)).sum(axis=2)
    np.testing.assert_allclose(jax.grad(total)(scores), expected, atol=1e-6)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_order_of_documents_changes_nothing(marginal):
    scores, probabilities = drawn()
    expected = log_marginal(scores, np.log(probabilities), WEIGHTS, marginal)[0]
    for order in itertools.islice(itertools.permutations(range(K)), 1, 24, 7):
        actual = log_marginal(scores[:, order], np.log(probabilities[:, order]), WEIGHTS, marginal)[0]
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("marginal", MARGINALS)
def test_batch_without_hidden_tokens_has_loss_and_weight_0(marginal):
    """The log-probabilities of padding may be anything."""

    def total(scores, log_probs):
        values, weights = log_marginal(scores, log_probs, jnp.zeros((B, M)), marginal)
        return (values * weights).sum(), weights

    (loss, weights), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        drawn()[0], jnp.full((B, K, M), -jnp.inf)
    )
    assert loss == 0 and not weights.any() and not any(g.any() for g in gradients)


def test_unknown_marginal_raises():
    raises("marginal='tokens': .*token", lambda: log_marginal(*drawn(), WEIGHTS, "tokens"))
