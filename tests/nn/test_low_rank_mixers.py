"""Mixers that summarise the sequence, and Synthesizers: exact cases, shorter sequences, dropout, models and errors."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LMConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Causal, Full, reference
from hpnlp.spec import build, parse_one
from tests.contracts import ONCE, Mixing, assert_close, once
from tests.messages import raises

SIZES = {"vocab": 8, "dim": 8, "heads": 2, "layers": 1}


def test_linformer_with_a_row_for_each_token_is_exact_attention():
    """With the identity as its matrix, and with windows of one token."""
    for spec in ("linformer(9,share=key_value)", "linformer(9,pool)"):
        mixing = Mixing(spec, 9)
        params = jax.tree.map(lambda x: np.eye(len(x), dtype=x.dtype), mixing.params)

        def both(arrays, params, mixing=mixing):
            return mixing(mixing.inputs(arrays), params=params), reference(*(arrays[name] for name in "qkv"))

        assert_close(*once(both, mixing.arrays, params))


@pytest.mark.parametrize("spec", ["linformer(3)", "mixture(dense,random,factorized_dense,factorized_random)"])
def test_shorter_sequences_use_the_beginning_of_the_parameters(spec):
    """As sequences that are padded to the length of the parameters; longer ones raise."""
    mixing = Mixing(spec, 9)
    ids = jnp.asarray(np.arange(9)[None] < np.array([[6], [6]]), jnp.int32)

    def both(arrays):
        shorter = {name: x[:, :6] for name, x in arrays.items()}
        padded = mixing.inputs(arrays, segment_ids=ids, kv_segment_ids=ids)
        return mixing(mixing.inputs(shorter), Full()), mixing(padded, Full())[:, :6]

    assert_close(*once(both, mixing.arrays))
    longer = Mixing(spec, 10)
    raises("for sequences of 9 tokens, and these", lambda: longer(longer.inputs(longer.arrays), params=mixing.params))


@pytest.mark.parametrize("spec", ["linformer(3)", "nystrom(3,0)", "mixture(factorized_random)"])
def test_dropout_depends_on_its_key(spec):
    mixing = Mixing(spec, 9)
    module = dataclasses.replace(mixing.module, dropout=0.5)
    streams = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)

    @functools.partial(jax.jit, compiler_options=ONCE)
    def run(arrays, key):
        drops = {"rng": key, "streams": streams, "deterministic": False}
        fields = drops, {**drops, "deterministic": True}
        outputs = [module.apply(mixing.params, mixing.inputs(arrays, **x), Full()).o for x in fields]
        return *outputs, mixing(mixing.inputs(arrays), Full())

    (first, deterministic, without), (again, *_), (other, *_) = (
        jax.device_get(run(mixing.arrays, jax.random.key(seed))) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(deterministic, without)
    assert np.mean(first != other) > 0.5 and np.mean(first != without) > 0.5


@pytest.mark.parametrize("mixer", ["linformer(4)", "fnet"])
def test_encoders_with_one_text_per_sequence_ignore_padding(mixer):
    config = EncoderConfig(mixer=mixer, pooling="mean", classes=3, max_len=9, **SIZES)
    model = Encoder(config)
    batch = model.example_batch(2, 9)
    batch["segment_ids"] = jnp.asarray(np.arange(9)[None] < np.array([[4], [8]]), jnp.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), batch))
    run = jax.jit(lambda tokens: model.apply(params, batch | {"tokens": tokens}, method="logits"))
    tokens = np.random.default_rng(0).integers(0, 8, (2, 9)).astype(np.int32)
    changed = np.where(np.asarray(batch["segment_ids"]) > 0, tokens, (tokens + 3) % 8)
    np.testing.assert_array_equal(run(tokens), run(changed))
    assert np.any(run(tokens) != run((tokens + 1) % 8))


def test_models_refuse_mixers_that_cannot_honour_their_mask():
    for mixer in ("linformer", "nystrom", "fnet"):
        raises(
            f"model.mixer={mixer!r}: {mixer} lets tokens depend on later ones",
            LMConfig,
            mixer=mixer,
            max_len=4,
            **SIZES,
        )
        raises(f"{mixer} mixes documents that share a sequence", EncoderConfig, mixer=mixer, max_len=4, **SIZES)
        raises(
            rf"{mixer} cannot apply the mask Causal\(\), since it mixes all tokens", MIXERS[mixer]().within, Causal()
        )


def test_invalid_arguments_raise():
    for spec, message in (
        ("linformer(4,pool,width=9)", r"\(width=9\) has no effect with compression=pool: .* choose compression=conv"),
        ("linformer(4,conv)", r"\(rank=4\) has no effect with compression=conv: .* compression=projection or pool"),
        ("linformer(compression=conv,share=none)", r"\(share=none\) has no effect with .* compression=projection"),
        ("mixture(dens)", r"mixture\(dens\): did you mean 'dense'\?"),
        ("mixture(dense,block=4)", r"\(block=4\) has no effect with the terms dense: .* choose factorized_dense, too"),
        ("mixture(rank=4)", r"\(rank=4\) has no effect with the terms random: .* choose factorized_random, too"),
        ("mixture(dense,dense)", r"mixture\(dense, dense\): expected distinct terms"),
    ):
        raises(message, build, parse_one(spec, "model.mixer"), MIXERS, "mixer", dropout=0.0, name=None)
