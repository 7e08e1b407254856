"""Attention with one array of scores for all sequences against dense softmax of each sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, Window, reference
from hpnlp.ops.attention.synthetic import shared_scores
from hpnlp.ops.attention.synthetic.shared_scores import shared_scores_attend
from tests.contracts import assert_close, once

T = 12
SEGMENTS = {
    "one": None,
    "padded": [[1] * T, [0, 0] + [3] * 7 + [0] * 3, [0] * T],
    "two": [[1] * 5 + [2] * 7, [1] * 9 + [0] * 3, [2, 0] * 6],
    "packed": [[1] * 5 + [2] * 4 + [0] * 3, [1] * T, [2] * T],
}


def arrays(scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    v, scores, signs = (rng.normal(size=s).astype(np.float32) for s in ((3, T, 2, 4), (2, T, T), (3, T, 2, 4)))
    return jnp.asarray(v, dtype), jnp.asarray(scale * scores), jnp.asarray(signs)


def by_definition(v, scores, mask, segment_ids=None):
    zeros = jnp.zeros((*v.shape[:3], 1), v.dtype)
    operands = {} if segment_ids is None else {"segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    return reference(zeros, zeros, v, mask, bias=scores[None], **operands)


def results(function, v, scores, signs, mask, ids):
    def score(v, scores):
        o = function(v, scores, mask, segment_ids=ids)
        return jnp.sum(o * signs), o

    return jax.grad(score, (0, 1), has_aux=True)(v, scores)


@pytest.mark.parametrize(
    ("mask", "segments", "scale"),
    [
        (Full(), "padded", 1.0),
        (Causal(), "two", 1.0),
        (Window(3, 0) & ~Window(0, 0), "one", 1.0),  # the first token sees none
        (Full(), "packed", 1.0),
        (Causal(), "padded", 50.0),
    ],
    ids=["full", "causal", "none visible", "packed", "spread"],
)
def test_values_and_gradients_match_the_definition(mask, segments, scale):
    """On both paths."""
    v, scores, signs = arrays(scale)
    ids = None if SEGMENTS[segments] is None else jnp.asarray(SEGMENTS[segments], jnp.int32)
    forms = (shared_scores_attend, by_definition)
    assert_close(*once(lambda *a: [results(f, *a, mask, ids) for f in forms], v, scores, signs))


@pytest.mark.parametrize(
    ("segments", "scale", "value", "taken"),
    [
        ("one", 1.0, 0.0, True),
        ("padded", 1.0, 0.0, True),
        ("two", 1.0, 0.0, True),
        ("padded", 1.0, np.nan, False),
        ("packed", 1.0, 0.0, False),
        ("one", 50.0, 0.0, False),
        ("one", np.nan, 0.0, False),
        ("one", 1.0, np.inf, False),
    ],
)
def test_one_product_is_taken_where_it_is_exact(monkeypatch, segments, scale, value, taken):
    def marked(v, *_):
        return jnp.full(v.shape, 7, v.dtype)

    monkeypatch.setattr(shared_scores, "_together", marked)
    v, scores, _ = arrays(scale)
    ids = None if SEGMENTS[segments] is None else jnp.asarray(SEGMENTS[segments], jnp.int32)
    o = once(lambda v, scores: shared_scores_attend(v, scores, segment_ids=ids), v.at[1, 0].add(value), scores)
    assert bool((o[0] == 7).all()) == taken


def test_nan_reaches_no_other_sequence():
    v, scores, _ = arrays()
    o = once(lambda v, scores: shared_scores_attend(v, scores, Causal()), v.at[0, 5].set(jnp.nan), scores)
    np.testing.assert_allclose(o[1:], by_definition(v, scores, Causal())[1:], rtol=1e-5, atol=1e-6)
    assert np.isnan(o[0, 5:]).all()


def test_low_precision_values_and_dropout():
    v, scores, _ = arrays(dtype=jnp.bfloat16)
    o = once(lambda v, scores: shared_scores_attend(v, scores), v, scores)
    assert o.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(o), by_definition(np.float32(v), scores, Full()), atol=0.02)
    dropped = once(
        lambda v, scores: shared_scores_attend(v, scores, dropout_rate=0.5, rng=jax.random.key(0)), v, scores
    )
    assert not np.allclose(np.float32(dropped), np.float32(o), atol=0.1)
