"""Skip-gram and CBOW with negative sampling against loops over pairs, and against autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.embeddings import word2vec
from hpnlp.ops.embeddings.word2vec import WordBlock
from tests.contracts import assert_close
from tests.messages import raises

T, K, W, D, V = 6, 3, 2, 5, 9


def make_block(objective, seed=0):
    rng = np.random.default_rng(seed)
    block = WordBlock(objective, window=W, centres=T, noise=K, negatives=4.0)
    segments = np.array([-1, 0, 0, 0, 1, 1, 1, 1, 1, 2])
    pairs = word2vec.pair_weights(segments, rng.integers(1, W + 1, T), block)
    sizes = (T, block.contexts) if objective == "skip_gram" else (block.contexts, T)
    vectors = [rng.standard_normal((size, D)).astype(np.float32) for size in (*sizes, K)]
    return block, vectors, pairs


def test_pairs_lie_within_windows_and_sentences():
    block = WordBlock(window=2, centres=3, noise=1)
    pairs = word2vec.pair_weights(np.array([0, 0, 0, 0, 1, -1, -1]), np.array([1, 2, 2]), block)
    expected = [
        [0, 1, 0, 1, 0, 0, 0],  # the window has width 1
        [0, 1, 1, 0, 0, 0, 0],  # the sentence ends after the word itself
        [0, 0, 0, 0, 0, 0, 0],  # a sentence of one word
    ]
    np.testing.assert_array_equal(pairs, expected)


@pytest.mark.parametrize("objective", word2vec.OBJECTIVES)
def test_gradients_match_autodiff_and_loops(objective):
    block, vectors, pairs = make_block(objective)
    by_grad = jax.grad(word2vec.block_loss, argnums=(0, 1, 2))
    actual, by_autodiff = jax.jit(
        lambda *vectors: (word2vec.block_gradients(*vectors, pairs, block), by_grad(*vectors, pairs, block))
    )(*vectors)
    by_loops = word2vec.reference_block_gradients(*vectors, pairs, block)
    for gradient, other, loops in zip(actual, by_autodiff, by_loops, strict=True):
        assert_close(gradient, other)
        assert_close(gradient, loops.astype(np.float32))


@pytest.mark.parametrize("objective", word2vec.OBJECTIVES)
def test_blocks_take_steps_of_gradient_descent(objective):
    """Two blocks equal two steps on the dense gradient of the loss, and rows of other words stay as they are."""
    rng = np.random.default_rng(1)
    block = WordBlock(objective, window=W, centres=T, noise=K, negatives=4.0)
    tokens = rng.integers(0, V - 2, 2 * T + 2 * W)
    segments, widths = np.repeat([0, 1], T + W), rng.integers(1, W + 1, 2 * T)
    noise, rates = rng.integers(0, V - 2, (2, K)), np.array([0.3, 0.1], np.float32)
    table = rng.standard_normal((2 * V, D)).astype(np.float32)

    def loss(table, start):
        words = tokens[start : start + T + 2 * W]
        pairs = word2vec.pair_weights(segments[start : start + T + 2 * W], widths[start : start + T], block)
        read, predicted = words[W : W + T], words
        if objective == "cbow":
            read, predicted = predicted, read
        return word2vec.block_loss(table[read], table[V + predicted], table[V + noise[start // T]], pairs, block)

    def descend(table):
        for step in range(2):
            table = table - rates[step] * jax.grad(loss)(table, step * T)
        return table

    expected = jax.jit(descend)(table)
    trained = word2vec.train_blocks(jnp.asarray(table), tokens, segments, widths, noise, rates, block)
    assert_close(trained, expected)
    untouched = [V - 2, V - 1, 2 * V - 2, 2 * V - 1]
    np.testing.assert_array_equal(np.asarray(trained)[untouched], table[untouched])


def test_subsampling_follows_the_formulas():
    counts = np.array([900, 90, 10, 0])
    share = 0.01 / np.array([0.9, 0.09, 0.01])
    paper = word2vec.keep_probabilities(counts, 0.01, "paper")
    np.testing.assert_allclose(paper[:3], np.minimum(np.sqrt(share), 1), rtol=1e-6)
    c = word2vec.keep_probabilities(counts, 0.01, "c")
    np.testing.assert_allclose(c[:3], np.minimum(np.sqrt(share) + share, 1), rtol=1e-6)
    assert c[3] == 1 and (word2vec.keep_probabilities(np.zeros(2, int), 0.01) == 1).all()
    assert (word2vec.keep_probabilities(counts, 0.0) == 1).all()


def test_noise_has_shares_of_the_powers_of_counts():
    counts = np.array([16, 0, 81, 1])
    table = word2vec.noise_table(counts, 0.75, 3600)
    np.testing.assert_array_equal(np.bincount(table, minlength=4), 3600 * np.array([8, 0, 27, 1]) / 36)


def test_merged_tables_move_by_the_changes_of_two_copies():
    changes = np.array([[[2, 2], [4, 0], [0, 0]], [[4, 0], [0, 0], [0, 0]], [[3, 1], [2, 0], [0, 0]]], np.float32)
    table = np.ones((3, 2), np.float32)
    merged = word2vec.merge_tables(jnp.asarray(table), [jnp.asarray(table + change) for change in changes])
    np.testing.assert_allclose(merged - table, [[6, 2], [6, 0], [0, 0]], rtol=1e-6)  # 2 / 3 of the first row's sum


def test_invalid_arguments_raise():
    for call, message in (
        (lambda: word2vec.keep_probabilities(np.ones(1, int), -1.0), "threshold=-1.0: expected at least 0"),
        (lambda: word2vec.keep_probabilities(np.ones(1, int), 1.0, "word"), "form='word': expected one of c, paper"),
        (lambda: word2vec.noise_table(np.zeros(2, int)), "0 occurrences: expected at least one entry and one"),
    ):
        raises(message, call)
