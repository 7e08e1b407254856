"""Arguments and masks that linear attention cannot honour raise an error."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Full, Window
from tests.contracts import Mixing, once
from tests.messages import raises

NAMES = "linear", "retention", "gla", "gated_delta"


@pytest.mark.parametrize("name", NAMES)
def test_other_masks_raise(name):
    mixer = MIXERS[name]()
    assert mixer.within(Causal()) == Causal()
    for mask in (Window(3, 0), Causal() & Window(3), *([] if mixer.traits.bidirectional else [Full()])):
        raises("cannot apply the mask", mixer.within, mask)


def test_tiny_weights_give_means_and_finite_gradients():
    """Features of exp(-25), whose products' squares are 0 in float32, give those of 1; of exp(-100), outputs of 0."""
    mixing = Mixing("linear", 5)
    v = mixing.arrays["v"]
    q, k = (jnp.zeros_like(mixing.arrays[name]) for name in "qk")

    def results(shift):
        def score(arrays):
            o = mixing(mixing.inputs(mixing.arrays | arrays))
            return jnp.sum(o * o), o

        return jax.grad(score, has_aux=True)({"q": q - shift, "k": k - shift, "v": v})

    (_, o), (gradients, tiny), (none, zero) = once(lambda: [results(jnp.float32(x)) for x in (0, 25, 100)])
    np.testing.assert_allclose(tiny, o, atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, none)))
    assert not np.asarray(zero).any()


@pytest.mark.parametrize("name", ["linear", "performer", "rfa", "lightconv", "dynamicconv"])
def test_decoding_with_full_masks_raises(name):
    """Mixers of both directions, whose caches hold preceding tokens only."""
    mixing = Mixing(name, 2)
    inputs = mixing.inputs(mixing.arrays)
    cache = jax.eval_shape(mixing.start, dataclasses.replace(inputs, capacity=3))
    extend = lambda inputs, cache: mixing.module.apply(mixing.params, inputs, Full(), cache, method="extend")  # noqa: E731
    raises("a cache cannot apply the mask Full", jax.eval_shape, extend, inputs, cache)
