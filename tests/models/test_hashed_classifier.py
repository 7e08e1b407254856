"""Projection networks: equality with loops over words and channels, independence of padding, sizes, layouts and errors."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import measure
from hpnlp.models import variables
from hpnlp.models.classifiers.hashed_classifier import HashedClassifier, HashedClassifierConfig
from hpnlp.ops.ngram_attention import NGRAMS
from tests import projection_reference as reference
from tests.contracts import ONCE, assert_close, once
from tests.drawn import drawn_params
from tests.messages import raises

CLASSES, B, T = 3, 8, 7
LENGTHS = np.array([7, 1, 3, 5, 2, 7, 4, 6])
PRADO = "prado(unigram=3, bigram=2, trigram=0, skip1bigram=4)"
PQRNN = "pqrnn(3, layers=2, width=2, zoneout=0.3)"


def make(encoder: str, **fields: Any) -> Any:
    sizes: dict[str, Any] = {"projection": 128, "bottleneck": 5, "classes": CLASSES}
    return HashedClassifier(HashedClassifierConfig(encoder=encoder, **sizes | fields))


def make_batch():
    rng = np.random.default_rng(0)
    return {
        "tokens": jnp.asarray(rng.integers(-(2**31), 2**31, (B, T, 4), dtype=np.int32)),
        "segment_ids": jnp.asarray(np.arange(T) < LENGTHS[:, None], jnp.int32),
        "labels": jnp.asarray(rng.integers(0, CLASSES, B).astype(np.int32)),
        "weights": jnp.asarray(np.arange(B) % 4 != 3, jnp.float32),
    }


params_of = functools.cache(functools.partial(drawn_params, deviation=0.5, means={"scale": 0.0}))


@functools.cache
def gradients_of(model):
    def loss(params, batch):
        return model.apply(variables.collections(params), batch).sum

    return jax.jit(jax.value_and_grad(loss), compiler_options=ONCE)


def dense_layer(params, hashes, index, size):
    """Features of the words of one text after one dense layer, norm and ReLU."""
    kernel = params["kernel"][:, index * size : (index + 1) * size]
    norm, rows = params[f"norm_{index}"], []
    for word in hashes:
        x = reference.features(word.view(np.uint32), len(kernel)) @ kernel
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * norm["scale"] + norm["bias"]
        rows.append(np.maximum(x, 0))
    return np.array(rows)


def prado_vector(params, words):
    pooled = []
    for name in ("unigram", "bigram", "skip1bigram"):
        p = params[name]
        kernels = (p["values"]["kernel"], p["bias"], p["logits"]["kernel"], np.zeros(len(p["bias"])))
        pooled.append(reference.ngram_attention(words[0], words[1], len(words[0]), NGRAMS[name], *kernels))
    return np.concatenate(pooled)


def pqrnn_vector(params, words):
    (x,) = words
    for layer in range(2):
        forward, backward = (params[f"layer_{layer}_{name}"] for name in ("forward", "backward"))
        hold = 0.3 ** (layer + 1)
        first = reference.qrnn(x, forward["kernel"], forward["bias"], 2, hold)
        second = reference.qrnn(x[::-1], backward["kernel"], backward["bias"], 2, hold)[::-1]
        x = np.concatenate([first, second], axis=1)
    scores = np.exp(x @ params["pool"]["query"])
    return scores @ x / scores.sum()


@pytest.mark.parametrize(("encoder", "branches", "vector"), [(PRADO, 2, prado_vector), (PQRNN, 1, pqrnn_vector)])
def test_logits_equal_loops_over_single_words(encoder, branches, vector):
    model, batch = make(encoder), make_batch()
    params = params_of(model)
    logits = once(lambda p, batch: model.apply(variables.collections(p), batch, method="logits"), params, batch)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for row, length in enumerate(LENGTHS):
        hashes = np.asarray(batch["tokens"][row, :length])
        words = [dense_layer(p["bottleneck"], hashes, index, 5) for index in range(branches)]
        expected = p["head"] @ vector(p["encoder"], words) + p["output"]["bias"]
        assert_close(logits[row], expected.astype(np.float32))


@pytest.mark.parametrize("encoder", [PRADO, PQRNN])
def test_padding_changes_nothing(encoder):
    model, batch = make(encoder), make_batch()
    params, is_token = params_of(model), make_batch()["segment_ids"] > 0
    expected = gradients_of(model)(params, batch)
    other = {**batch, "tokens": jnp.where(is_token[..., None], batch["tokens"], 77)}
    assert np.any(other["tokens"] != batch["tokens"])
    jax.tree.map(np.testing.assert_array_equal, gradients_of(model)(params, other), expected)
    longer = {**batch, "tokens": jnp.pad(batch["tokens"], ((0, 0), (0, 2), (0, 0)), constant_values=5)}
    longer["segment_ids"] = jnp.pad(batch["segment_ids"], ((0, 0), (0, 2)))
    assert_close(gradients_of(model)(params, longer), expected)


@pytest.mark.parametrize("encoder", [PRADO, PQRNN])
def test_flops_of_the_config_are_those_of_the_products(encoder):
    """The products of the forward pass over an even length, of which a training step has three times as many."""
    model = make(encoder)
    shapes = jax.eval_shape(lambda: variables.collections(params_of(model)))
    flops = measure.count_flops(
        lambda v, batch: model.apply(v, batch, method="logits"), shapes, model.example_batch(B, 8)
    )
    assert model.config.training_flops(B, 8) == 3 * flops


def test_default_model_has_the_published_size():
    """The products of the published configuration, its norms, and the biases of n-grams and classes."""
    model = HashedClassifier(HashedClassifierConfig(classes=28))
    shapes = jax.eval_shape(model.init, jax.random.key(0), model.example_batch(1, 8))
    count = sum(x.size for x in jax.tree.leaves(nn.meta.unbox(shapes)))
    assert count == 65_536 + 40_960 + 3_584 + 4 * 64 + 2 * 64 + 28


def test_invalid_fields_raise():
    for fields, message in (
        ({"encoder": "prada"}, "unknown encoder 'prada'.*prado"),
        ({"encoder": "prado(quadgram=4)"}, "quadgram"),
        ({"encoder": "prado(bigram=0, trigram=0)"}, "some of one kind"),
        ({"encoder": "prado,pqrnn"}, "model.encoder"),
        ({"dtype": "bfloat16"}, "float32 only"),
    ):
        raises(message, HashedClassifierConfig, **fields)


def test_rematerialisation_raises():
    model = HashedClassifier(HashedClassifierConfig(classes=3), remat="full")
    raises(
        "plan.remat='full'.*set plan.remat='none'",
        jax.eval_shape,
        model.init,
        jax.random.key(0),
        model.example_batch(1, 8),
    )
