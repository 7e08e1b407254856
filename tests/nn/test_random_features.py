"""Mixers with random features: buffers from step to step, and invalid arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.mixers.performer import PerformerMixer
from hpnlp.nn.mixers.rfa import RFAMixer
from hpnlp.ops.attention import Causal, Full, Window
from tests.messages import raises


@pytest.mark.parametrize("mixer", [PerformerMixer(6, redraw=2), RFAMixer(6, redraw=2), PerformerMixer(6, redraw=0)])
def test_projections_are_drawn_anew_every_few_steps(mixer):
    """After the second and the fourth step, by the key of the step; never with redraw=0."""
    w = jnp.ones((3, 4))
    advance = jax.jit(lambda step, key: mixer.advance({"projections": w}, {}, step, key)["projections"])
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [advance(jnp.int32(step), keys[step]) for step in range(4)]
    changed = [bool(np.any(x != w)) for x in drawn]
    assert changed == ([False, True, False, True] if mixer.redraw else [False] * 4)
    assert not mixer.redraw or np.any(drawn[1] != drawn[3])


def test_averages_of_optimal_features_follow_the_batch():
    """The mean of |q + k|^2 / sqrt(H) over all pairs of a batch enters with weight 0.1, unless the batch has no tokens."""
    mixer, rng = PerformerMixer(6, "optimal"), np.random.default_rng(0)
    q, k = rng.standard_normal((2, 5, 4))
    sums = {"squares": np.square(q).sum() + np.square(k).sum(), "queries": q.sum(0), "keys": k.sum(0), "tokens": 5.0}
    buffers = {"projections": jnp.ones((6, 4)), "gamma": jnp.full(2, 3.0)}

    @jax.jit
    def advance(statistics):
        statistics = {name: jnp.asarray(x, jnp.float32) for name, x in statistics.items()}
        of_heads = {name: x if name == "tokens" else jnp.stack([x, x]) for name, x in statistics.items()}
        return mixer.advance(buffers, of_heads, jnp.int32(0), jax.random.key(0))["gamma"]

    mean = np.square(q[:, None] + k[None]).sum(-1).mean() / 2
    np.testing.assert_allclose(advance(sums), 0.9 * 3 + 0.1 * np.full(2, mean), rtol=1e-5)
    np.testing.assert_array_equal(advance({name: 0 * x for name, x in sums.items()}), buffers["gamma"])


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: PerformerMixer(7, "hyperbolic"), "an even number"),
        (lambda: RFAMixer(7), "an even number over 0"),
        (lambda: PerformerMixer(8).within(Window(2)), r"random features cannot apply the mask .*pass Causal\(\)"),
        (lambda: RFAMixer(8, gate=True).within(Full()), r"with gates cannot apply the mask .*pass Causal\(\)"),
    ):
        raises(message, call)
    assert PerformerMixer(8).within(Full()) == Full() and RFAMixer(8, gate=True).within(Causal()) == Causal()
