"""The model of word vectors against loops over pairs of words."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.word_vectors import WordVectors, WordVectorsConfig
from hpnlp.types import WordStats
from tests.contracts import assert_close
from tests.messages import raises

V, D, W = 11, 4, 2
STATS = WordStats(np.array([40, 20, 10, 9, 8, 7, 6, 5, 4, 3, 2]), np.arange(V))
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]], np.int32)
TOKENS = np.array([[0, 1, 0, 2, 3, 4, 0], [5, 6, 7, 8, 9, 0, 0]], np.int32)
BATCH = {"tokens": TOKENS, "labels": TOKENS, "segment_ids": SEGMENTS, "positions": SEGMENTS}
BATCH |= {"weights": (SEGMENTS > 0).astype(np.float32)}


BATCH = jax.tree.map(jnp.asarray, BATCH)


def make(**fields):
    model = WordVectors(WordVectorsConfig(**{"dim": D, "window": W, "vocab": V, "output": "full", **fields}), STATS)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), model.example_batch(1, 8)))
    params = jax.tree.map(lambda x: 10 * x, params)  # initial vectors are small
    return model, params


def expected_loss(config, params, keep):
    """`(sum, weight)` of the loss by loops, with the probability that training uses each pair."""
    embed, head = (np.asarray(x, np.float64) for x in (params["params"]["embed"]["table"], params["params"]["head"]))

    def nll(h, label):
        scores = head @ h
        return np.log(np.exp(scores).sum()) - scores[label]

    total = weight = 0.0
    for tokens, segments in zip(TOKENS, SEGMENTS, strict=True):
        for t, center in enumerate(tokens):
            around = [
                (u, (W - abs(u - t) + 1) / W * keep[center] * keep[tokens[u]])
                for u in range(max(0, t - W), min(len(tokens), t + W + 1))
                if u != t and segments[u] == segments[t] > 0
            ]
            if not around:
                continue
            if config.objective == "skip_gram":
                total += sum(w * nll(embed[center], tokens[u]) for u, w in around)
                weight += sum(w for _, w in around)
            else:
                h = sum(w * embed[tokens[u]] for u, w in around) / sum(w for _, w in around)
                total, weight = total + keep[center] * nll(h, center), weight + keep[center]
    return total, weight


def pair_accuracy(embed, keep):
    """`(right, weight)` of adjacent words, each compared with the word that follows half a batch and half a row before."""
    unit, (rows, length) = embed / np.linalg.norm(embed, axis=1, keepdims=True), TOKENS.shape
    right = weight = 0.0
    for place in range(rows * length):
        row, t = divmod(place, length)
        if t == length - 1 or not SEGMENTS[row, t] == SEGMENTS[row, t + 1] > 0:
            continue
        other_row, other_t = divmod((place - rows * length // 2 - length // 2) % (rows * length), length)
        other = other_row, (other_t + 1) % length
        word, following = TOKENS[row, t], TOKENS[row, t + 1]
        if SEGMENTS[other] == 0 or TOKENS[other] == following:
            continue
        weight += keep[word] * keep[following]
        right += keep[word] * keep[following] * (unit[word] @ unit[following] > unit[word] @ unit[TOKENS[other]])
    return np.float32(right), np.float32(weight)


@pytest.mark.parametrize("objective", ["skip_gram", "cbow"])
def test_held_out_loss_matches_loops(objective):
    model, params = make(objective=objective, subsample=0.1)
    share = STATS.counts / STATS.counts.sum()
    keep = np.minimum(1, np.sqrt(0.1 / share) + 0.1 / share)
    out = jax.jit(functools.partial(model.apply, method="loss"))(params, BATCH)
    total, weight = expected_loss(model.config, params, keep)
    assert_close((out.sum, out.weight), (jnp.float32(total), jnp.float32(weight)))
    right, weight = pair_accuracy(np.asarray(params["params"]["embed"]["table"]), keep)
    assert 0 < right < weight
    assert_close(out.aux["pair_accuracy"], (right, weight))


def test_pairs_of_one_row_are_compared_with_words_of_that_row():
    model, params = make()
    row = {name: jnp.ones_like(x[:1, :6]) for name, x in BATCH.items()} | {"tokens": jnp.arange(6)[None]}
    assert jax.jit(functools.partial(model.apply, method="loss"))(params, row).aux["pair_accuracy"][1] > 0


def train_loss(model, params, seed):
    rngs = {"dropout": jax.random.key(seed), "output": jax.random.key(0)}
    return jax.jit(lambda params: model.apply(params, BATCH, False, method="loss", rngs=rngs))(params)


def test_training_draws_windows_and_words():
    """The weight of pairs is that of windows of drawn widths, over the words that subsampling keeps."""
    model, params = make(subsample=0.05)
    weights = [float(train_loss(model, params, seed).weight) for seed in range(3)]
    every = train_loss(make(subsample=0.0, dynamic=False)[0], params, 0).weight
    # 2 (n - 1) + 2 (n - 2) pairs of a document of n words
    assert every == 10 + 6 + 14 and len(set(weights)) > 1 and max(weights) <= every


def test_windows_reach_over_words_that_are_left_out():
    """Words that are kept move to the front, in their order."""
    model, params = make(subsample=0.1)
    arguments = jnp.asarray(TOKENS), jnp.asarray(SEGMENTS)
    tokens, segments = model.apply(params, *arguments, method="_subsampled", rngs={"dropout": jax.random.key(3)})
    counts = (np.asarray(segments) > 0).sum(axis=1)
    assert 0 < counts.sum() < (SEGMENTS > 0).sum()
    for row, count in enumerate(counts):
        assert (np.asarray(segments)[row, count:] == 0).all()
        order = iter(zip(TOKENS[row].tolist(), SEGMENTS[row].tolist(), strict=True))
        kept = zip(tokens[row, :count].tolist(), segments[row, :count].tolist(), strict=True)
        assert all(pair in order for pair in kept)  # a subsequence


def test_subsampling_without_counts_raises():
    model = WordVectors(WordVectorsConfig(vocab=V, output="full"))
    raises("model.subsample=0.001 needs the words'", lambda: model.init(jax.random.key(0), model.example_batch(1, 8)))
