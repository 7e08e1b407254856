"""Mixers that choose blocks or clusters, and differential attention: limits, dropout and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.lm import LMConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Full, PerHead, Window, attend
from tests.contracts import ONCE, Mixing, assert_close, once, reference_output
from tests.messages import raises

SIZES = {"vocab": 8, "dim": 8, "heads": 2, "layers": 2}


def test_all_blocks_give_exact_attention():
    """Moba, also with segments and blocks that do not divide the length; causal softmax attention."""
    mixing = Mixing("moba(4,9)", 23)
    ids = mixing.segment_ids

    def both(arrays):
        exact = attend(arrays["q"], arrays["k"], arrays["v"], Causal(), segment_ids=ids, kv_segment_ids=ids)
        return mixing(mixing.packed(arrays)), exact

    assert_close(*once(both, mixing.arrays))


@pytest.mark.parametrize("spec", ["moba(4,2)", "nsa(4,2,6,learned)"])
def test_sequences_shorter_than_a_block_match_the_reference(spec):
    """Values and gradients of sequences of one token and of three, without a complete block."""
    cases = [Mixing(spec, length) for length in (1, 3)]

    def results(function, mixing):
        def score(arrays, params):
            o = function(arrays, params)
            return jnp.sum(jnp.sin(o)), o

        return jax.grad(score, (0, 1), has_aux=True)(mixing.arrays, mixing.params)

    def both(m):
        return (
            results(lambda arrays, params: m(m.packed(arrays), params=params), m),
            results(lambda arrays, params: reference_output(m, arrays, params, m.mask), m),
        )

    for actual, expected in once(lambda: [both(mixing) for mixing in cases]):
        assert_close(actual, expected)


@pytest.mark.parametrize("spec", ["clustered(9,5,2)", "clustered(2,5,2)"])
def test_short_sequences_and_too_many_segments_give_exact_attention(spec):
    """Clustered attention: 8 tokens in 9 clusters, and two clusters for two and for three segments."""
    mixing = Mixing(spec, 8)
    ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 3, 3, 2, 2, 2, 2]], jnp.int32)

    def both(arrays):
        exact = attend(arrays["q"], arrays["k"], arrays["v"], segment_ids=ids, kv_segment_ids=ids)
        return mixing(mixing.inputs(arrays, segment_ids=ids, kv_segment_ids=ids)), exact

    o, exact = once(both, mixing.arrays)
    assert_close(o[1], exact[1])
    is_close = np.allclose(o[0], exact[0], atol=1e-5)
    assert is_close == (spec == "clustered(9,5,2)")


def test_dropout_of_moba_is_that_of_exact_attention():
    mixing = Mixing("moba(4,9,dropout=0.3)", 12)
    streams = jnp.arange(8, dtype=jnp.int32).reshape(2, 4) * 3
    key = jax.random.key(5)

    def both(arrays):
        exact = attend(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            Causal(),
            dropout_rate=0.3,
            rng=key,
            streams=streams,
            impl="reference",
        )
        return mixing(mixing.inputs(arrays, deterministic=False, rng=key, streams=streams)), exact

    assert_close(*once(both, mixing.arrays))


@pytest.mark.parametrize("spec", ["nsa(4,2,6,dropout=0.3)", "differential(dropout=0.3)"])
def test_dropout_depends_on_the_key_and_not_on_the_order_of_heads(spec):
    """Swapping sequences with their streams swaps the outputs."""
    mixing = Mixing(spec, 9)
    streams = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)

    @functools.partial(jax.jit, compiler_options=ONCE)
    def run(arrays, streams, key):
        return mixing(mixing.inputs(arrays, deterministic=False, rng=key, streams=streams))

    first, other = (np.asarray(run(mixing.arrays, streams, jax.random.key(seed))) for seed in (1, 2))
    arrays, streams = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[::-1]), (mixing.arrays, streams))
    assert_close(run(arrays, streams, jax.random.key(1))[::-1], first)
    assert np.abs(first - other).max() > 0.01


def test_masks_that_mixers_cannot_honour_raise():
    for spec, mask in (
        ("moba", Full()),
        ("nsa", Window(3, 0)),
        ("clustered", Causal()),
        ("clustered_improved", Window(3, 3)),
        ("differential", PerHead((Full(), Causal()))),
    ):
        raises("cannot apply", MIXERS[spec]().within, mask)


def test_models_refuse_directions_that_mixers_do_not_have():
    raises("clustered lets tokens depend on later ones", LMConfig, mixer="clustered", **SIZES)
    for spec in ("moba", "nsa"):
        raises("mixes with earlier tokens only", EncoderConfig, mixer=spec, **SIZES)


def test_pairs_need_even_numbers_of_heads():
    mixing = Mixing("differential", 3)
    odd = {name: array[:, :, :1] if name in "kv" else array for name, array in mixing.arrays.items()}
    raises("4 query and 1 key heads .*: expected even numbers", lambda: jax.eval_shape(mixing, mixing.inputs(odd)))
