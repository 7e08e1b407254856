"""Ensembles: mean probabilities, states from batch to batch, generation, stacked members and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from hpnlp.models import variables
from hpnlp.models.decode import GREEDY, Generation
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.mixtures.ensemble import Ensemble, averaged, joined
from hpnlp.models.rnn import RNN, RNNConfig
from tests.contracts import ONCE
from tests.drawn import drawn_params
from tests.messages import raises

V, B, T = 11, 3, 5


def rnn(cells="lstm(6)", **fields):
    return RNN(RNNConfig(cells=cells, vocab=V, **fields), keeps_state=True)


def lm(**fields):
    return LM(LMConfig(layers=2, dim=8, heads=2, mlp_dim=16, vocab=V, max_len=64, unroll=1, **fields))


def batch_of(seed):
    draw = np.random.default_rng(seed)
    tokens, labels = draw.integers(0, V, (2, B, T)).astype(np.int32)
    batch = {
        "tokens": tokens,
        "labels": labels,
        "segment_ids": np.ones((B, T), np.int32),
        "positions": np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        "weights": (draw.random((B, T)) < 0.8).astype(np.float32),
    }
    return jax.tree.map(jnp.asarray, batch)


def weights_of(models):
    """Parameters that differ from member to member."""
    return [jax.tree.map(lambda x, i=i: (1 + 0.3 * i) * x, drawn_params(m, 0.7)) for i, m in enumerate(models)]


MEMBERS = {
    "equal": [rnn(), rnn(), rnn()],
    "recurrent": [rnn(), rnn("gru(5)")],
    "mixed": [rnn(), lm(), rnn("gru(5),gru(7)", tied=True)],
}
KINDS = ["equal", pytest.param("mixed", marks=pytest.mark.slow)]


@functools.cache
def step_of(model):
    """The log-probabilities of all words of a batch, and the carry after it, by the model's own methods."""

    def run(weights, carry, batch):
        h, carry = model.apply(variables.collections(weights, carry), batch, method="token_states")
        logits = model.apply({"params": weights}, h.reshape(B * T, -1), method="next_logits")
        return jax.nn.log_softmax(logits).reshape(B, T, V), carry

    return jax.jit(run, compiler_options=ONCE)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_mean_probabilities(kind):
    """Over two batches, the second of which continues the first; not above the mean of the members (Jensen)."""
    models = MEMBERS[kind]
    weights = weights_of(models)
    ensemble = Ensemble(tuple(models))

    def loss(weights, carry, batch):
        out = ensemble.apply(variables.collections(joined(weights), carry), batch, method="loss")
        return out.sum, out.weight, out.carry

    step = jax.jit(loss, compiler_options=ONCE)
    carry, carries = ensemble.initial_carry(B), [model.initial_carry(B) for model in models]
    for batch in (batch_of(0), batch_of(1)):
        total, weight, carry = step(weights, carry, batch)
        log_probs = []
        for i, model in enumerate(models):
            of_member, carries[i] = step_of(model)(weights[i], carries[i], batch)
            log_probs.append(np.asarray(of_member, np.float64))
        labels = np.asarray(batch["labels"])[None, :, :, None]
        of_labels = np.take_along_axis(np.stack(log_probs), np.broadcast_to(labels, (len(models), B, T, 1)), -1)[..., 0]
        expected = -np.log(np.exp(of_labels).mean(axis=0))
        mask = np.asarray(batch["weights"])
        assert total == pytest.approx((mask * expected).sum(), rel=1e-5) and weight == mask.sum()
        assert total < (mask * -of_labels).sum() / len(models) - 1e-3


def test_mean_probabilities_match_numpy():
    log_probs = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32) * 30 - 60
    expected = scipy.special.logsumexp(log_probs.astype(np.float64), axis=0) - np.log(4)
    np.testing.assert_allclose(averaged(jnp.asarray(log_probs)), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["recurrent", pytest.param("mixed", marks=pytest.mark.slow)])
def test_generation_draws_from_mean_probabilities(kind):
    """Greedily, token by token, as from the whole sequences of each member."""
    models = MEMBERS[kind]
    weights, ensemble = weights_of(models), Ensemble(tuple(models))
    prompts = [np.array([3, 1, 4], np.int32), np.array([5], np.int32)]
    made = np.concatenate(list(Generation(ensemble, joined(weights), prompts, tokens=4, sampling=GREEDY)), axis=1)

    @functools.partial(jax.jit, compiler_options=ONCE)
    def probabilities(weights, tokens):
        logits = [m.apply({"params": w}, tokens, method="logits") for m, w in zip(models, weights, strict=True)]
        return jnp.stack([jax.nn.softmax(x) for x in logits]).mean(axis=0)

    for prompt, ids in zip(prompts, made, strict=True):
        whole = np.zeros(8, np.int32)
        whole[: len(prompt)] = prompt
        whole[len(prompt) : len(prompt) + 4] = ids
        best = np.asarray(probabilities(weights, whole[None]))[0].argmax(axis=-1)
        np.testing.assert_array_equal(ids, best[len(prompt) - 1 : len(prompt) + 3])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "an ensemble has no members: name at least one run"),
        (
            [rnn(), RNN(RNNConfig(cells="lstm(6)", vocab=V + 1))],
            "member 1 of the ensemble has 12 words, and member 0 11",
        ),
        (
            [rnn(output="margin", tied=False)],
            "member 0 of the ensemble has model.output='margin', which gives no probab",
        ),
    ],
)
def test_members_that_do_not_fit_raise(members, message):
    raises(message, Ensemble, tuple(members))


def test_an_ensemble_is_not_trained():
    ensemble = Ensemble((rnn(),))
    raises("an ensemble is not trained: set optimizer.rows=False", ensemble.rows, batch_of(0))
    raises("an ensemble has no method 'taps'", ensemble.apply, {"params": {}}, batch_of(0), method="taps")
