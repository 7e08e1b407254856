"""The gate on binary decisions: a distribution for any parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.mixtures.bit_gate import BitGate
from hpnlp.ops.softmax.bit_paths import path_length, path_log_odds
from tests.contracts import assert_close


@pytest.mark.parametrize("vocab", [5, 264])
def test_probabilities_of_all_tokens_sum_to_one(vocab):
    draw = np.random.default_rng(0)
    gate, ids = BitGate(vocab), np.arange(vocab)
    log_probs = np.tile(jax.nn.log_softmax(3.0 * draw.normal(size=vocab).astype(np.float32)), (vocab, 1))
    tokens = np.tile(draw.integers(-1, vocab, (1, 3, 4)), (vocab, 1, 1))
    rows = path_log_odds(log_probs, ids), tokens, np.tile([[0, 7, 900]], (vocab, 1)), ids
    assert rows[0].shape == (vocab, path_length(vocab))
    params = jax.jit(gate.init)(jax.random.key(0), *map(jnp.asarray, rows))
    params = jax.tree.map(lambda leaf: leaf + 0.3 * draw.normal(size=leaf.shape).astype(np.float32), params)
    losses = jax.jit(lambda params, *rows: gate.apply(params, *rows, method="nll"))(params, *rows)
    assert_close(np.exp(-np.asarray(losses)).sum(), np.float32(1.0))
