"""The mixture of a model and its neighbours: weights, generated text of several prompts, and precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models import decode
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.mixtures.knn_model import KnnModel, mixed_log_prob, neighbour_weight
from hpnlp.models.rnn import RNN, RNNConfig
from hpnlp.models.variables import FROZEN
from hpnlp.retrieval import knn
from hpnlp.retrieval.datastore import index_vectors
from hpnlp.retrieval.index import Index

VOCAB = 23


def with_store(model, keys, words, k=3):
    """The model with a datastore of keys."""
    vectors, centre, scale = index_vectors([keys.astype(np.float16)])
    search, state = Index("exact").build(vectors).as_search()
    mixture = {name: jnp.float32(value) for name, value in knn.linear(0.6, 2.0).items()}
    frozen = {"index": state, "words": jnp.asarray(words), "centre": jnp.float32(centre), "mixture": mixture}
    frozen["scale"] = jnp.float32(scale)
    return KnnModel(model, search, k, frozen), frozen


def test_a_weight_that_saturates_keeps_losses_finite():
    mixture = {"weight": jnp.float32(40.0), "log_temperature": jnp.float32(0.0)}
    distances, words = jnp.array([[0.0, 1.0], [jnp.inf, jnp.inf]]), jnp.array([[3, 4], [0, 0]])
    weights = neighbour_weight(mixture, distances, words)
    assert 0.999 < weights[0] < 1.0 and weights[1] == 0
    losses = mixed_log_prob(mixture, jnp.array([-1.0, -1.0]), distances, words, jnp.array([5, 5]))
    assert jnp.isfinite(losses).all() and losses[1] == -1.0


def test_products_of_searches_are_not_rounded():
    """On GPUs and TPUs, the default precision of float32 products has errors of the size of distances."""
    model, frozen = with_store(None, np.random.default_rng(0).normal(size=(9, 4)), np.arange(9))
    text = str(jax.make_jaxpr(lambda h: model.neighbours(frozen, h))(jnp.ones((2, 4))))
    assert "dot_general" in text and text.count("dot_general") == text.count("HIGHEST, Precision.HIGHEST")


@pytest.mark.parametrize("kind", ["lm", "rnn"])
def test_prompts_of_several_lengths_are_continued_as_by_whole_passes(kind):
    if kind == "lm":
        inner = LM(LMConfig(layers=1, dim=16, heads=2, vocab=VOCAB, mlp_dim=16, position="rope"))
    else:
        inner = RNN(RNNConfig(cells="lstm(16)", vocab=VOCAB))
    params = jax.jit(inner.init)(jax.random.key(0), inner.example_batch(1, 8))["params"]
    draw = np.random.default_rng(0)
    model, frozen = with_store(inner, draw.normal(size=(50, 16)), draw.integers(0, VOCAB, 50).astype(np.int32))
    prompts = [draw.integers(0, VOCAB, n).astype(np.int32) for n in (1, 7, 4)]
    generation = decode.Generation(model, {**params, FROZEN: frozen}, prompts, tokens=6, sampling=decode.GREEDY)
    continued = np.concatenate([*generation], axis=1)

    @jax.jit
    def log_probs(ids):
        ones, places = jnp.ones(ids.shape, jnp.int32), jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
        batch = {"tokens": ids, "labels": ids, "segment_ids": ones, "positions": places, "weights": ones}
        return model.apply({"params": params, FROZEN: frozen}, batch, method="log_probs")

    for prompt, text in zip(prompts, continued, strict=True):
        ids = np.concatenate([prompt, text])
        padded = np.pad(ids, (0, 16 - len(ids)))[None]  # later tokens change no earlier distribution
        best = np.asarray(log_probs(padded)[0]).argmax(axis=1)
        np.testing.assert_array_equal(best[len(prompt) - 1 : len(ids) - 1], text)
