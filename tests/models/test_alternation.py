"""Language models whose layers repeat a period of several mixers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decoding_weights import separate_layers
from hpnlp.models.lm import LM
from hpnlp.nn.attention import mixer_period
from hpnlp.ops.attention import Full, Window
from hpnlp.spec import Spec
from tests.mixer_cases.exact import EXACT
from tests.models.test_lm import MIXED, ONCE, logits_of, loss_of, make, make_batch, numpy_logits, run

PERIODS = {"mixer": "window(2,0),full", "layers": 5}  # two periods, and one more layer


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("full", (Spec("full"),)),
        ("full*3,full", (Spec("full"),)),
        ("window(2)*2,full", (Spec("window", (2,)), Spec("window", (2,)), Spec("full"))),
        ("a,b,a,b", (Spec("a"), Spec("b"))),
        ("a,b,a", (Spec("a"), Spec("b"), Spec("a"))),
    ],
)
def test_alternation_is_the_shortest_period(text, period):
    assert mixer_period(text) == period


@pytest.mark.parametrize(
    ("fields", "patterns"),
    [(PERIODS, (Window(2), Full())), (MIXED, tuple(EXACT.values()))],
    ids=["periods", "every mixer"],
)
def test_logits_match_reference(fields, patterns):
    model, params = make(**fields)
    tokens = make_batch(1, 13)["tokens"]
    ours = logits_of(model, params, tokens)
    np.testing.assert_allclose(ours[0], numpy_logits(model.config, params, tokens[0], patterns), atol=2e-5, rtol=1e-5)


@pytest.mark.slow  # the contracts of mixers have the gradients of each of them
def test_every_mixer_learns_in_two_steps():
    model, params = make(**MIXED)
    batch = make_batch(2, 11)
    step = jax.jit(jax.value_and_grad(lambda p: loss_of(model, p, batch)), compiler_options=ONCE)
    losses = []
    for _ in range(2):
        loss, grads = jax.device_get(step(params))
        losses.append(float(loss))
        for leaf in jax.tree.leaves(grads["layers"]):
            assert np.isfinite(leaf).all() and np.abs(leaf).reshape(len(EXACT), -1).max(axis=1).all()
        params = jax.tree.map(lambda p, g: jnp.asarray(np.asarray(p) - np.float32(1e-3) * g), params, grads)
    assert losses[1] < losses[0]


@pytest.mark.slow  # test_layer_forms.py has them for two stacks
def test_gradients_equal_those_layer_by_layer():
    model, params = make(**PERIODS)
    batch = make_batch(2, 9)
    expected, by_layer = run(
        jax.value_and_grad(lambda p: loss_of(model, separate_layers(p, model.config), batch)), params
    )
    other = LM(dataclasses.replace(model.config, unroll=1), remat="dots")
    loss, grads = run(jax.value_and_grad(lambda p: loss_of(other, p, batch)), params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), grads, by_layer)


@pytest.mark.slow
def test_prefill_and_extend_equal_separate_layers():
    """Caches of different sizes pass through the loop over periods, and equal those of layers with separate parameters."""
    model, params = make(**PERIODS)
    tokens, lengths = make_batch(2, 12)["tokens"], jnp.asarray([3, 9], jnp.int32)

    def decode(params):
        variables = {"params": params}
        h, caches = model.apply(variables, tokens[:, :9], lengths, 12, method=LM.prefill)
        new = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
        further, caches = model.apply(variables, new, lengths[:, None], caches, method=LM.extend)
        return jnp.stack([h, further[:, 0]]), caches

    (h, caches), (expected, by_layer) = run(decode, params), run(decode, separate_layers(params, model.config))
    np.testing.assert_allclose(h, expected, atol=1e-5)
    assert [cache.k.shape[1] for cache in by_layer] == [3, 12, 3, 12, 3]
    stacked, remaining = caches
    assert [cache.k.shape[:2] for cache in stacked] == [(2, 4 * 2), (2, 4 * 2)] and len(remaining) == 1


def test_dropout_does_not_depend_on_the_period():
    """Windows over the whole sequence are full attention: the same layers drop the same entries."""
    model, params = make(layers=5, dropout=0.3)
    wide = LM(dataclasses.replace(model.config, mixer="full,window(99,0)"))
    batch = make_batch(2, 9)

    def loss(params, key, of):
        return of.apply({"params": params}, batch, False, rngs={"dropout": key, "output": key}, method=LM.loss).sum

    actual, expected = (run(lambda p, of=of: loss(p, jax.random.key(1), of), params) for of in (wide, model))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
