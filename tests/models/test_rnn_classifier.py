"""Recurrent classifiers: equality with layers applied by hand, independence of padding, layouts and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import measure
from hpnlp.models import variables
from hpnlp.models.classifiers.rnn_classifier import RecurrentClassifier, RecurrentClassifierConfig
from hpnlp.ops.rnn import lstm
from hpnlp.types import InputError
from tests.contracts import ONCE, assert_close, once
from tests.drawn import drawn_params
from tests.messages import raises

VOCAB, CLASSES, B, T = 12, 3, 8, 7


def make(**fields: Any) -> Any:
    sizes = {"vocab": VOCAB, "classes": CLASSES, "cells": "lstm(5)", "embed_dim": 6}
    return RecurrentClassifier(RecurrentClassifierConfig(**sizes | fields))


def make_batch(length=T):
    rng = np.random.default_rng(0)
    lengths = np.array([7, 1, 3, 5, 2, 7, 4, 6])
    return {
        "tokens": jnp.asarray(rng.integers(0, VOCAB, (B, length)).astype(jnp.int32)),
        "segment_ids": jnp.asarray(np.arange(length) < lengths[:, None], jnp.int32),
        "labels": jnp.asarray(rng.integers(0, CLASSES, B).astype(jnp.int32)),
        "weights": jnp.asarray(np.arange(B) % 4 != 3, jnp.float32),
    }


params_of = functools.cache(functools.partial(drawn_params, deviation=0.5, means={"scale": 0.0}))


@functools.cache
def gradients_of(model):
    def loss(params, batch):
        return model.apply(variables.collections(params), batch).sum

    return jax.jit(jax.value_and_grad(loss), compiler_options=ONCE)


def test_losses_match_layers_applied_to_each_text():
    """Both directions of an LSTM over the tokens of one of three texts at a time, reversed by hand for the second."""
    model, batch = make(), make_batch()
    params, texts = params_of(model), 3
    batch["weights"] = batch["weights"] * (jnp.arange(B) < texts).astype(jnp.float32)
    lengths = np.asarray(batch["segment_ids"]).sum(axis=1)

    def run(layer, x):
        return lstm(x[None], layer["kernel"], layer["recurrent"], layer["bias"])[0][0]

    def loss(params):
        total = jnp.zeros(())
        forward, backward = (params["stack"][name] for name in sorted(params["stack"], key=len))
        for row in range(texts):
            x = params["embed"]["table"][batch["tokens"][row, : lengths[row]]] * np.float32(6**0.5)
            y = jnp.concatenate([run(forward, x), run(backward, x[::-1])[::-1]], axis=1)
            logits = params["head"] @ y.max(axis=0) + params["output"]["bias"]
            total += batch["weights"][row] * (jax.nn.logsumexp(logits) - logits[batch["labels"][row]])
        return total

    assert_close(gradients_of(model)(params, batch), once(jax.value_and_grad(loss), params))


def test_padding_changes_nothing():
    """Other tokens in padding, and more padding."""
    model, batch = make(), make_batch()
    params, is_token = params_of(model), make_batch()["segment_ids"] > 0
    expected = gradients_of(model)(params, batch)
    other = {**batch, "tokens": jnp.where(is_token, batch["tokens"], 3)}
    assert np.any(other["tokens"] != batch["tokens"])
    jax.tree.map(np.testing.assert_array_equal, gradients_of(model)(params, other), expected)
    longer = {**batch, **{name: jnp.pad(batch[name], ((0, 0), (0, 2))) for name in ("tokens", "segment_ids")}}
    assert_close(once(lambda p, batch: model.apply(variables.collections(p), batch).sum, params, longer), expected[0])


def test_flops_of_the_config_are_those_of_the_products():
    """The products of the forward pass, of which a training step has three times as many."""
    model = make(cells="lstm(5),gru(4)", bidirectional=True)
    shapes = jax.eval_shape(lambda: variables.collections(params_of(model)))
    flops = measure.count_flops(
        lambda v, batch: model.apply(v, batch, method="logits"), shapes, model.example_batch(B, T)
    )
    assert model.config.training_flops(B, T) == 3 * flops
    assert make(bidirectional=False).config.dim == 5 and model.config.dim == 8


def test_invalid_configs_raise():
    for fields, message in (
        ({"temporal_penalty": 0.1}, "model.temporal_penalty=0.1 is a penalty of language models .*: set it to 0"),
        ({"cells": "lstn(4)"}, "lstm"),
        ({"dtype": "int8"}, "model.dtype"),
    ):
        raises(message, RecurrentClassifierConfig, **fields)


def test_rematerialisation_raises():
    model = make().clone(remat="full")
    with pytest.raises(InputError, match="plan.remat='full': recurrent layers are not recomputed"):
        jax.eval_shape(model.init, jax.random.key(0), model.example_batch(1, 8))
