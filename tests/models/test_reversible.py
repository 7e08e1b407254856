"""Language models of reversible layers: gradients against the same layers with separate parameters, which keep activations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import measure
from hpnlp.models.decoding.decoding_weights import separate_layers
from hpnlp.models.lm import LM, example_batch
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, MixerOutput
from tests.messages import raises
from tests.models.test_lm import REVERSIBLE, loss_of, make, make_batch, run


class Reporting(ExactMixer):
    """A mixer that reports a loss."""

    def __call__(self, inputs, mask):
        o = super().__call__(inputs, mask).o
        return MixerOutput(
            o, {"size_loss": (jnp.sum(o**2), jnp.float32(o.size)), "tokens": (jnp.sum(o), jnp.sum(o**4))}
        )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"mixer": "window(2,0),full", "layers": 5}, marks=pytest.mark.slow),
        {"mixer": "reporting,window(3,0)", "layers": 2, "dropout": 0.3, "out_bias": True},
        pytest.param({"layers": 2, "dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=["period", "reports", "bfloat16"],
)
def test_gradients_equal_those_layer_by_layer(fields, monkeypatch):
    monkeypatch.setitem(MIXERS, "reporting", lambda **extra: Reporting(Full(), **extra))
    model, params = make(**REVERSIBLE | {"layers": 4} | fields)
    batch, key = make_batch(2, 9), jax.random.key(3)

    def loss(params):
        out = model.apply({"params": params}, batch, False, rngs={"dropout": key, "output": key}, method=LM.loss)
        return out.sum + sum(value / weight for value, weight in out.aux.values()), out.aux

    losses = loss, lambda p: loss(separate_layers(p, model.config))
    actual, expected = run(lambda p: [jax.value_and_grad(f, has_aux=True)(p) for f in losses], params)
    assert actual[0][1].keys() == ({"size_loss", "tokens"} if "reporting" in model.config.mixer else set())
    for a, b in zip(jax.tree.leaves(actual[0]), jax.tree.leaves(expected[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)
    for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


def test_parameters_have_the_form_of_plain_layers():
    (model, params), (plain, plain_params) = make(**REVERSIBLE), make()
    assert jax.tree.structure(params) == jax.tree.structure(plain_params)
    batch = make_batch(2, 9)
    losses = run(lambda a, b: (loss_of(model, a, batch), loss_of(plain, b, batch)), params, plain_params)
    assert losses[0] != losses[1]


def test_rematerialisation_raises():
    model, params = make(**REVERSIBLE)
    raises("plan.remat='full': reversible", lambda: loss_of(LM(model.config, remat="full"), params, make_batch(2, 9)))
    with pytest.raises(InputError, match="plan.remat='full': reversible layers"):
        make_trainer(model, OptimizerConfig(), Plan("single", remat="full"), steps=10)


def test_experts_raise():
    for fields in ({"mlp": "top_k(4)"}, {"form": "block,block(mlp='hash(4)')", "layers": 2}):
        raises(r"model.mlp='.*\(4\)': the backward pass .*: set model.residual='plain'", make, **REVERSIBLE | fields)


@pytest.mark.slow  # tests/ops/test_reversible.py has the memory of one stack
@pytest.mark.parametrize("mixer", ["full", "window(8,0),full"])
def test_memory_does_not_grow_with_depth(mixer):
    model, _ = make(**REVERSIBLE | {"dim": 64, "layers": 4, "mixer": mixer})

    def temp(layers):
        deep = LM(dataclasses.replace(model.config, layers=layers))
        batch = jax.eval_shape(lambda: example_batch(4, 64))
        params = jax.eval_shape(lambda: make(**dataclasses.asdict(deep.config))[1])
        return measure.compile(jax.grad(lambda p, batch: loss_of(deep, p, batch)), params, batch).memory.temp

    assert temp(24) <= 1.05 * temp(8)
