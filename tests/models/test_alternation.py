"""Language models whose layers repeat a period of several mixers."""

import dataclasses

import jax
import numpy as np
import pytest

from hpnlp.models.lm import LM
from hpnlp.nn.attention import mixer_period
from hpnlp.ops.attention import Full, Window
from hpnlp.spec import Spec
from tests.mixer_cases.exact import EXACT
from tests.models.test_lm import MIXED, logits_of, make, make_batch, numpy_logits, run

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


def test_dropout_does_not_depend_on_the_period():
    """Windows over the whole sequence are full attention: the same layers drop the same entries."""
    model, params = make(layers=5, dropout=0.3)
    wide = LM(dataclasses.replace(model.config, mixer="full,window(99,0)"))
    batch = make_batch(2, 9)

    def loss(params, key, of):
        return of.apply({"params": params}, batch, False, rngs={"dropout": key, "output": key}, method=LM.loss).sum

    actual, expected = (run(lambda p, of=of: loss(p, jax.random.key(1), of), params) for of in (wide, model))
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
