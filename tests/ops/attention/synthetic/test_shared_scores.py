"""Attention with one array of scores for all sequences against dense softmax of each sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.ops.attention import Causal, Full, Window, reference
from hpnlp.ops.attention.synthetic.shared_scores import MAX_SPREAD, shared_scores_attend
from hpnlp.types import InputError
from tests.contracts import assert_close, once

T = 12
SEGMENTS = {
    "one": None,
    "padded": [[1] * T, [0, 0] + [3] * 7 + [0] * 3, [0] * T],
    "two": [[1] * 5 + [2] * 7, [1] * 9 + [0] * 3, [2, 0] * 6],
    "low": [[1] * 4 + [2] * 8, [1] * T, [2] * T],
    "packed": [[1] * 5 + [2] * 4 + [0] * 3, [1] * T, [2] * T],
}


def arrays(scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    v, scores, signs = (rng.normal(size=s).astype(np.float32) for s in ((3, T, 2, 4), (2, T, T), (3, T, 2, 4)))
    return jnp.asarray(v, dtype), jnp.asarray(scale * scores), jnp.asarray(signs)


def lowered(scores, by):
    """Scores whose first four keys have less than others, so that a segment of these has small exponentials only."""
    return scores.at[..., :4].add(-by)


def by_definition(v, scores, mask, segment_ids=None):
    zeros = jnp.zeros((*v.shape[:3], 1), v.dtype)
    operands = {} if segment_ids is None else {"segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    return reference(zeros, zeros, v, mask, bias=scores[None], **operands)


def results(function, v, scores, signs, mask, ids):
    def score(v, scores):
        o = function(v, scores, mask, segment_ids=ids)
        return jnp.sum(o.astype("float32") * signs), o

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


@pytest.mark.slow
def test_low_scores_of_a_segment_keep_gradients():
    """Squares of denominators underflow. The last difference takes `synthetic_attend`."""
    v, scores, signs = arrays()
    ids = jnp.asarray(SEGMENTS["low"], jnp.int32)

    def both(v, scores, signs):
        cases = [lowered(scores, by) for by in (MAX_SPREAD - 8, MAX_SPREAD + 15)]
        return [[results(f, v, x, signs, Full(), ids) for x in cases] for f in (shared_scores_attend, by_definition)]

    assert_close(*once(both, v, scores, signs))


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**11])
def test_low_scores_of_a_segment_in_float16(loss_scale):
    """Exponentials of -30 are 0 in float16."""
    v, scores, signs = arrays(dtype=jnp.float16)
    ids, scores = jnp.asarray(SEGMENTS["low"], jnp.int32), lowered(scores, 30.0)
    (dv, ds), o = once(lambda *a: results(shared_scores_attend, *a, Full(), ids), v, scores, loss_scale * signs)
    (dv32, ds32), o32 = once(lambda *a: results(by_definition, *a, Full(), ids), v.astype("float32"), scores, signs)
    assert o.dtype == dv.dtype == jnp.float16
    for x, scale, expected in ((o, 1, o32), (dv, loss_scale, dv32), (ds, loss_scale, ds32)):
        np.testing.assert_allclose(np.float32(x) / scale, expected, atol=5e-3)


@pytest.mark.slow
def test_vmap_has_the_derivatives_of_each_member():
    """Both branches run under vmap, also where sums of exponentials are almost 0."""
    v, scores, signs = arrays()
    ids, members = jnp.asarray(SEGMENTS["low"], jnp.int32), jnp.stack([scores, lowered(scores, MAX_SPREAD + 20)])

    def gradients(scores):
        return results(shared_scores_attend, v, scores, signs, Full(), ids)

    together = once(jax.vmap(gradients), members)
    for i, x in enumerate(members):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], together), once(gradients, x))


@pytest.mark.slow
def test_backward_pass_keeps_no_operands_of_products():
    """Beside v, the scores and the result, there are statistics of rows."""
    v, scores, ids = jnp.zeros((64, T, 2, 32)), jnp.zeros((2, T, T)), jnp.zeros((64, T), jnp.int32)

    def residuals(v, scores, ids):
        return jax.vjp(lambda v, scores: shared_scores_attend(v, scores, segment_ids=ids), v, scores)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, v, scores, ids))
    assert sum(x.size for x in kept) < 4 * v.size  # v, and the result of each branch


def test_scores_of_other_sizes_raise():
    v, _, _ = arrays()
    for shape in ((1, T, T), (2, T, 1), (2, T + 1, T + 1)):
        with pytest.raises(
            InputError, match=rf"scores \({shape[0]}, .* expected \(2, 12, 12\), the scores of all pairs"
        ):
            shared_scores_attend(v, jnp.zeros(shape))


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
