"""A mixer without projections in a model: decoding, reversible layers and layouts."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decode import Generation
from hpnlp.models.decoding.decoding_weights import separate_layers
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import is_matrix
from tests.drawn import drawn_params
from tests.training.test_step import MODEL, ONE, Run, assert_leaves_close, batch_of, trainer_of

CONFIG = LMConfig(mixer="conv(3)", vocab=11, dim=16, heads=2, layers=3, mlp_dim=32, max_len=64)


@pytest.mark.parametrize("residual", [pytest.param("plain", marks=pytest.mark.slow), "reversible"])
def test_greedy_ids_equal_the_argmax_of_the_full_pass(residual):
    """Prompts are shorter and longer than the convolution."""
    model = LM(dataclasses.replace(CONFIG, residual=residual))
    params = drawn_params(model, 0.3, {"table": 1.0})
    prompts = [np.arange(length) % 11 for length in (1, 2, 9)]
    new = np.concatenate(list(Generation(model, params, prompts, tokens=6, temperature=0.0)), axis=1)
    rows = [np.concatenate([prompt, ids]) for prompt, ids in zip(prompts, new, strict=True)]
    padded = jnp.asarray([np.pad(row, (0, 15 - len(row))) for row in rows], jnp.int32)
    best = np.asarray(jax.jit(lambda p: model.apply({"params": p}, padded, method="logits"))(params).argmax(-1))
    for row, prompt, expected in zip(rows, prompts, best, strict=True):
        np.testing.assert_array_equal(row[len(prompt) :], expected[len(prompt) - 1 : len(row) - 1])
    assert len(separate_layers(params, CONFIG)["layers"]) == 3


@pytest.mark.slow  # test_layer_forms.py has this mixer under a layout, beside another one
@pytest.mark.parametrize(
    ("plan", "devices"),
    [(Plan("zero3", tensor=2), 8), (Plan("zero3", pipeline=2, tensor=2), 8), (Plan("3d"), 8)],
    ids=["zero3 x tensor", "pipeline x zero3 x tensor", "3d"],
)
def test_layouts_match_one_device(plan, devices):
    model = dataclasses.replace(MODEL, mixer="conv", layers=4, dropout=0.3)
    single, parallel = (Run(trainer_of(*where, model), model) for where in (ONE, (plan, devices)))
    for seed in range(2):
        expected, actual = single.step(batch_of(seed)), parallel.step(batch_of(seed))
        assert actual == pytest.approx(expected, rel=1e-5)
        if seed == 0:
            assert_leaves_close(parallel.gradients(), single.gradients(), 1e-5)


def test_filters_are_no_matrix():
    """Neither muon nor weight decay applies to them."""
    params = nn.meta.unbox(jax.eval_shape(LM(CONFIG).init, jax.random.key(0), example_batch(1, 8))["params"])
    assert not is_matrix(params)["layers"]["attention"]["mixer"]["taps"]
