"""Sampling from logits: which ids can be drawn, and their frequencies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpnlp.ops.sampling import pick, restrict, sample

# Few values, so that ties are frequent.
LOGITS = st.sampled_from([-jnp.inf, -200.0, -3.0, -1.0, -0.0, 0.0, 0.5, 2.0, 80.0])


def restrict_by_sorting(logits, top_k, top_p):
    """Reference: (mask of the ids of a row that stay, least distance of the mass above an id to top_p), in float64."""
    logits = np.asarray(logits, np.float64)
    stays = np.ones(len(logits), bool)
    if top_k:
        stays &= logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    mass = np.where(stays, np.exp(logits - logits.max()), 0.0)
    mass /= mass.sum()
    above = np.array([mass[logits > x].sum() for x in logits])
    if top_p < 1:
        stays &= above < top_p
    return stays & np.isfinite(logits), np.abs(above - top_p).min()


def compiled(function, **static):
    return jax.jit(functools.partial(function, **static), compiler_options={"xla_backend_optimization_level": 0})


restrict_by = functools.cache(lambda **static: compiled(restrict, **static))
picks = compiled(pick)


@given(
    logits=st.sampled_from([1, 2, 7]).flatmap(lambda size: st.lists(LOGITS, min_size=size, max_size=size)),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_restrict_matches_sorting(logits, top_k, top_p):
    assume(max(logits) > -np.inf)
    expected, margin = restrict_by_sorting(logits, top_k, top_p)
    assume(top_p == 1 or margin > 1e-6)
    static = ({} if top_k else {"top_k": 0}) | ({} if top_p < 1 else {"top_p": 1.0})
    traced = ({"top_k": jnp.int32(top_k)} if top_k else {}) | ({"top_p": jnp.float32(top_p)} if top_p < 1 else {})
    out = np.asarray(restrict_by(**static)(jnp.asarray([logits], jnp.float32), **traced))[0]
    np.testing.assert_array_equal(out[expected], np.asarray(logits, np.float32)[expected])
    assert np.all(out[~expected] == -np.inf)


@given(
    logits=st.sampled_from([1, 7]).flatmap(lambda size: st.lists(LOGITS, min_size=size, max_size=size)),
    allowed=st.integers(1, 127),
    point=st.sampled_from([0.0, 0.3, float(np.float32(1) - np.float32(2**-24))]),
    temperature=st.sampled_from([0.0, 1e-30, 0.5, 1e6]),
)
def test_only_allowed_ids_are_picked(logits, allowed, point, temperature):
    may = np.array([allowed >> i & 1 for i in range(len(logits))], bool)
    possible = may & (np.asarray(logits) > -np.inf)
    assume(possible.any())
    arrays = jnp.asarray([logits], jnp.float32), jnp.asarray([point], jnp.float32)
    picked = int(picks(*arrays, temperature=jnp.float32(temperature), allowed=jnp.asarray(may))[0])
    assert possible[picked]
    if temperature < 1e-6:
        assert logits[picked] == np.asarray(logits)[possible].max()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "stay"),
    # In the last case the nucleus is three of the five ids, which have 0.37, 0.21 and 0.18 of the mass.
    [(1.0, 0, 1.0, 7), (0.5, 0, 1.0, 7), (2.0, 3, 1.0, 3), (0.7, 0, 0.8, 3), (1.5, 5, 0.7, 3)],
)
def test_sample_frequencies_match_probabilities(temperature, top_k, top_p, stay):
    """Within four standard errors; excluded ids are never drawn."""
    draws, logits = 40000, np.array([0.3, -1.0, 2.0, 0.3, 1.1, -4.0, 0.9, -jnp.inf], np.float32)
    stays, _ = restrict_by_sorting(logits / temperature, top_k, top_p)
    p = np.where(stays, np.exp(logits.astype(np.float64) / temperature), 0.0)
    p /= p.sum()
    assert stays.sum() == stay
    draw = compiled(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = draw(jnp.broadcast_to(jnp.asarray(logits)[None], (draws, len(logits))), jax.random.key(0))
    frequencies = np.bincount(drawn, minlength=len(logits)) / draws
    assert np.all(np.abs(frequencies - p) <= 4 * np.sqrt(p * (1 - p) / draws))


def test_an_empty_nucleus_keeps_the_most_probable_id():
    logits = jnp.asarray([[0.0, 2.0, 1.0]])
    for top_p in (0, 0.0, jnp.float32(0)):
        np.testing.assert_array_equal(np.isfinite(restrict(logits, top_p=top_p)), [[False, True, False]])


def test_rows_are_independent():
    rng = np.random.default_rng(0)
    logits, points = jnp.asarray(rng.normal(size=(6, 11)), jnp.float32), jnp.asarray(rng.uniform(size=6), jnp.float32)
    nucleus = compiled(pick, top_p=0.9)
    together = nucleus(logits, points)
    alone = [nucleus(logits[i : i + 1], points[i : i + 1])[0] for i in range(6)]
    np.testing.assert_array_equal(together, alone)
    assert len(set(np.asarray(together).tolist())) > 1


def test_temperature_zero_and_top_one_take_the_best_of_bfloat16_logits():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(5, 9)), jnp.bfloat16)
    best = np.argmax(np.asarray(logits, np.float32), axis=1)
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}):
        np.testing.assert_array_equal(compiled(sample, **options)(logits, jax.random.key(0)), best)
