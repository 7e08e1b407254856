"""Dropout within recurrent layers by its definitions, through the layer: expectations, and masks of sequences and of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.rnn import GRU, LSTM, RecurrentInputs, Regularization

KEY = jax.random.key(0)
IDS = jnp.arange(2 * 5, dtype=jnp.int32).reshape(2, 5)
X = jax.random.normal(jax.random.key(1), (2, 5, 3))
FIRST = RecurrentInputs(ids=IDS[:, :1])


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_evaluation_takes_the_expectation_of_zoneout(cell):
    """From a state of zeros, a step with zoneout leaves 1 - rate of the new hidden state."""
    plain, held = cell(4), cell(4, regularization=Regularization(zoneout=0.3))
    params = plain.init(KEY, X[:, :1], FIRST)
    y, _ = plain.apply(params, X[:, :1], FIRST)
    np.testing.assert_allclose(held.apply(params, X[:, :1], FIRST)[0], 0.7 * y, rtol=1e-6)


def test_evaluation_takes_the_expectation_of_zoneout_of_the_cell_state():
    plain, held = LSTM(4), LSTM(4, regularization=Regularization(zoneout_cell=0.2))
    params = plain.init(KEY, X[:, :1], FIRST)
    (_, (_, c)), (_, (_, new)) = (layer.apply(params, X[:, :1], FIRST) for layer in (plain, held))
    np.testing.assert_allclose(new, 0.8 * c, rtol=1e-6)


def test_masks_of_the_hidden_state_are_of_sequences_and_those_of_candidates_of_tokens():
    layer = LSTM(64, regularization=Regularization(hidden_dropout=0.5, candidate_dropout=0.5))
    inputs = RecurrentInputs(ids=IDS, deterministic=False)
    masks = layer.apply({}, inputs, method="step_masks", rngs={"dropout": KEY})
    hidden, candidate = np.asarray(masks.hidden), np.asarray(masks.candidate)
    assert (hidden == hidden[:, :1]).all() and set(np.unique(hidden)) == {0.0, 2.0}
    assert (hidden[0, 0] != hidden[1, 0]).any()
    assert (candidate != candidate[:, :1]).any(axis=(0, 2)).tolist() == [False, True, True, True, True]
