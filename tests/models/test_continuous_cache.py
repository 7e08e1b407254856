"""The continuous cache: its distribution, batches that continue each other, and errors."""

import jax
import numpy as np
import pytest

from hpnlp.models import variables
from hpnlp.models.mixtures import continuous_cache
from hpnlp.models.mixtures.continuous_cache import CacheConfig, CachedModel
from tests.contracts import ONCE
from tests.messages import raises
from tests.models.test_ensemble import B, T, V, batch_of, rnn, weights_of

STEPS = 3


def run(cache, batches, weights, model=None):
    """`(losses of batches, log-probabilities [steps, B, T, V], states [steps, B, T, D], weight)` of batches in turn."""
    model = model or rnn()
    cached = CachedModel(model, cache)

    def step(weights, carry, batch):
        log_probs = cached.apply(variables.collections(weights, carry), batch, method="log_probs")
        out = cached.apply(variables.collections(weights, carry), batch, method="loss")
        inner = {name: tree for name, tree in carry["layers"].items() if not name.startswith("cache")}
        h, _ = model.apply(variables.collections(weights, {"layers": inner}), batch, method="token_states")
        logits = model.apply({"params": weights}, h.reshape(B * T, -1), method="next_logits")
        return (out.sum, log_probs, h, jax.nn.log_softmax(logits).reshape(B, T, V)), out.carry

    step, carry, results = jax.jit(step, compiler_options=ONCE), cached.initial_carry(B), []
    for batch in batches:
        result, carry = step(weights, carry, batch)
        results.append(result)
    return [np.stack([np.asarray(x, np.float64) for x in xs]) for xs in zip(*results, strict=True)]


@pytest.fixture(scope="module")
def batches():
    return [batch_of(seed) for seed in range(STEPS)]


def test_mixed_probabilities_match_a_loop(batches):
    """Every token of every sequence; the cache is shorter than the text, longer than a batch, and some labels have no loss."""
    cache, weights = CacheConfig(size=7, theta=2.0, weight=0.3), weights_of([rnn()])[0]
    losses, log_probs, h, of_model = run(cache, batches, weights)
    probs = np.exp(log_probs)
    np.testing.assert_allclose(probs.sum(axis=-1), 1.0, rtol=1e-5)
    for row in range(B):
        entries = []  # (state, word or None) of each token before
        for step, batch in enumerate(batches):
            for token in range(T):
                expected = np.exp(of_model[step, row, token])
                recent = [(k, w) for k, w in entries[-cache.size :] if w is not None]
                if recent:
                    scores = np.exp([cache.theta * (k @ h[step, row, token]) for k, _ in recent])
                    mixture = np.zeros(V)
                    np.add.at(mixture, [w for _, w in recent], scores / scores.sum())
                    expected = (1 - cache.weight) * expected + cache.weight * mixture
                np.testing.assert_allclose(probs[step, row, token], expected, rtol=2e-4, atol=1e-6)
                word = int(batch["labels"][row, token]) if batch["weights"][row, token] else None
                entries.append((h[step, row, token], word))
    for step, batch in enumerate(batches):
        of_labels = np.take_along_axis(log_probs[step], np.asarray(batch["labels"])[..., None], -1)[..., 0]
        assert losses[step] == pytest.approx(-(np.asarray(batch["weights"]) * of_labels).sum(), rel=1e-4)


def test_a_weight_of_0_is_the_model(batches):
    weights = weights_of([rnn()])[0]
    losses, log_probs, _, of_model = run(CacheConfig(size=7, theta=2.0, weight=0.0), batches, weights)
    np.testing.assert_array_equal(log_probs, of_model)
    for step, batch in enumerate(batches):
        of_labels = np.take_along_axis(of_model[step], np.asarray(batch["labels"])[..., None], -1)[..., 0]
        assert losses[step] == pytest.approx(-(np.asarray(batch["weights"]) * of_labels).sum(), rel=1e-5)


def test_unknown_caches_raise():
    raises("unknown cache 'continous'.*did you mean 'continuous'", continuous_cache.find, "continous(9)")
