"""Tables and queries for tests of searches, and exact results."""

import jax.numpy as jnp
import numpy as np


def clustered(vocab=2000, count=50, dim=16, centres=40):
    """(queries near rows, table of clusters with sizes of Zipf's law and rows of very different norms, bias)."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, centres + 1)
    centre = rng.choice(centres, vocab, p=share / share.sum())
    w = rng.standard_normal((centres, dim))[centre] + 0.4 * rng.standard_normal((vocab, dim))
    w = w * (0.3 + 2 * np.arange(1, vocab + 1) ** -0.3)[:, None]
    q = w[rng.integers(0, vocab, count)] + 0.1 * rng.standard_normal((count, dim))
    bias = rng.standard_normal(vocab)
    return [jnp.asarray(x, jnp.float32) for x in (q, w, bias)]


def by_sorting(q, w, k, bias=None):
    """The definition, in float64: scores and ids, ties to the lower id."""
    q, w = (np.asarray(x, np.float64) for x in (q, w))
    s = q @ w.T + (0 if bias is None else np.asarray(bias, np.float64))
    ids = np.argsort(-s, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(s, ids, axis=1), ids
