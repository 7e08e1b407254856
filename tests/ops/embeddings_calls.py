"""Calls of `hpnlp.ops.embeddings.word2vec` for test_numpy.py."""

import numpy as np

from hpnlp.ops.embeddings import word2vec
from hpnlp.ops.embeddings.word2vec import WordBlock
from tests.contracts import once

RNG = np.random.default_rng(0)
BLOCK = WordBlock(window=1, centres=4, noise=2)
CBOW = WordBlock("cbow", window=1, centres=4, noise=2)
FOUR, SIX, NOISE = (RNG.standard_normal((size, 3)) for size in (4, 6, 2))
PAIRS = np.asarray(once(lambda *a: word2vec.pair_weights(*a, BLOCK), np.zeros(6, np.int32), np.ones(4, np.int32)))

CALLS = {
    "embeddings.word2vec.block_loss": (
        (lambda *a: word2vec.block_loss(*a, PAIRS, BLOCK), (FOUR, SIX, NOISE)),
        (lambda *a: word2vec.block_loss(*a, PAIRS, CBOW), (SIX, FOUR, NOISE)),
    ),
    "embeddings.word2vec.block_gradients": (
        (lambda *a: word2vec.block_gradients(*a, PAIRS, BLOCK), (FOUR, SIX, NOISE)),
        (lambda *a: word2vec.block_gradients(*a, PAIRS, CBOW), (SIX, FOUR, NOISE)),
    ),
    "embeddings.word2vec.pair_weights": (
        (lambda s, w: word2vec.pair_weights(s, w, BLOCK), (np.zeros(6, int), np.ones(4, int))),
    ),
}
ON_HOST = {f"embeddings.word2vec.{name}" for name in ("keep_probabilities", "noise_table", "reference_block_gradients")}
