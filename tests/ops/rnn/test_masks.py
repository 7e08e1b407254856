"""Masks of recurrent networks: one mask where the paper has one, expectations in evaluation, and independence of the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.rnn import StepMasks, drop_weights, dropout_factors, lstm, zoneout_shares
from tests.contracts import assert_close, once
from tests.messages import raises

IDS = jnp.arange(6 * 40, dtype=jnp.int32).reshape(6, 40)
KEY, OTHER = jax.random.key(0), jax.random.key(1)


def test_factors_depend_on_the_key_the_token_and_the_feature():
    factors = dropout_factors(KEY, IDS, 16, 0.3)
    assert set(np.unique(factors)) == {np.float32(0), np.float32(1 / 0.7)}
    assert abs(float(factors.mean()) - 1) < 4 * np.sqrt(0.3 / 0.7 / factors.size)
    assert (factors != dropout_factors(OTHER, IDS, 16, 0.3)).any()
    np.testing.assert_array_equal(factors[2:4], dropout_factors(KEY, IDS[2:4], 16, 0.3))


def test_a_number_for_each_sequence_gives_one_mask_of_all_steps():
    factors = dropout_factors(KEY, IDS[:, :1], 16, 0.5)
    assert factors.shape == (6, 1, 16) and len(np.unique(np.asarray(factors), axis=0)) == 6


def test_zoneout_holds_at_its_rate_and_in_expectation():
    shares = zoneout_shares(KEY, IDS, 16, 0.2, deterministic=False)
    assert set(np.unique(shares)) == {0.0, 1.0}
    assert abs(float(shares.mean()) - 0.2) < 4 * np.sqrt(0.2 * 0.8 / shares.size)
    np.testing.assert_array_equal(zoneout_shares(None, IDS, 16, 0.2, True), np.full((6, 1, 16), 0.2, np.float32))


def test_held_features_keep_their_values_exactly():
    rng = np.random.default_rng(0)
    x, w, u = (jnp.asarray(rng.standard_normal(s).astype(jnp.float32)) for s in ((2, 5, 3), (3, 16), (4, 16)))
    start = (jnp.ones((2, 4)), 2 * jnp.ones((2, 4)))
    held = jnp.ones((2, 1, 4))
    y, (h, c) = once(lambda x: lstm(x, w, u, None, start, masks=StepMasks(hold_h=held, hold_c=held)), x)
    assert_close((y, h, c), (jnp.ones((2, 5, 4)), *start))


def test_dropped_candidates_do_not_erase_the_memory():
    rng = np.random.default_rng(0)
    x, w, u = (jnp.asarray(rng.standard_normal(s).astype(jnp.float32)) for s in ((2, 5, 3), (3, 16), (4, 16)))
    b = jnp.zeros(16).at[4:8].set(100.0)  # forget gates of 1
    start = (jnp.ones((2, 4)), 2 * jnp.ones((2, 4)))
    _, (_, c) = once(lambda x: lstm(x, w, u, b, start, masks=StepMasks(candidate=jnp.zeros((2, 5, 4)))), x)
    assert_close(c, start[1])


def test_weights_are_dropped_once_for_a_pass():
    w = jnp.ones((30, 40))
    dropped = drop_weights(w, KEY, 0.5)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_array_equal(dropped, drop_weights(w, KEY, 0.5))
    assert (dropped != drop_weights(w, OTHER, 0.5)).any()
    assert abs(float(dropped.mean()) - 1) < 4 / np.sqrt(w.size)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_out_of_range_raise(rate):
    calls = (
        lambda: dropout_factors(KEY, IDS, 4, rate),
        lambda: zoneout_shares(KEY, IDS, 4, rate, False),
        lambda: drop_weights(jnp.ones((2, 2)), KEY, rate),
    )
    for call in calls:
        raises("expected at least 0, and less than 1", call)
