"""A decoder with a memory: caches, segments, layouts and errors. See also test_decoder_oracle.py."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.models.decode import Generation
from hpnlp.models.decoding.beam_search import beam_search
from hpnlp.models.decoding.decoding_weights import for_decoding
from hpnlp.models.encoder import EncoderConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.shared.decoder import Decoder, DecoderConfig
from hpnlp.models.variables import axes_and_shapes
from hpnlp.nn.attention import Context, Memory
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE, once
from tests.drawn import drawn
from tests.messages import raises
from tests.models.test_lm import GPT, make_batch

SIZES = {"dim": 16, "heads": 4, "kv_heads": 2, "layers": 2, "vocab": 24, "max_len": 16, "mlp_dim": 24, "memory_dim": 12}
LENGTHS = (5, 1, 4, 2)


def make(**fields):
    """A small decoder with random parameters."""
    model = Decoder(DecoderConfig(**SIZES | fields))
    return model, drawn(axes_and_shapes(model)[1], 0.4)


def make_memory(batch, length=6):
    states = np.random.default_rng(3).standard_normal((batch, length, SIZES["memory_dim"]))
    filled = np.arange(length)[None] < np.resize(LENGTHS, batch)[:, None]
    return Memory(jnp.asarray(states, jnp.float32), jnp.asarray(filled, jnp.int32))


@pytest.mark.parametrize(
    "separate", [pytest.param(False, marks=pytest.mark.slow), True], ids=["stacked", "for decoding"]
)
def test_prefill_and_extend_equal_the_full_pass(separate):
    """Further tokens take the memory's keys and values from the cache; the memory's padding does not count."""
    model, params = make(**GPT if separate else {})
    variables = {"params": for_decoding(params, model.config, 4) if separate else params}
    memory, lengths = make_memory(4), np.array([3, 7, 1, 6], np.int32)
    tokens, rows = np.asarray(make_batch(4, 12)["tokens"]), np.arange(4)
    padding = memory.segment_ids == 0
    noisy = dataclasses.replace(memory, states=jnp.where(padding[..., None], 1e4, memory.states))
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], (4, 12))

    def full(memory):
        context = Context(positions, jnp.ones_like(positions), model.config.mask, memory=memory)
        return model.apply({"params": params}, jnp.asarray(tokens), context, method="hidden")[0]

    expected, other = once(lambda *memories: [full(m) for m in memories], memory, noisy)
    np.testing.assert_array_equal(expected, other)
    h, caches = once(
        lambda t, n, m: model.apply(variables, t, n, 12, m, method="prefill"),
        tokens[:, :7],
        jnp.asarray(lengths),
        memory,
    )
    np.testing.assert_allclose(h, expected[rows, lengths - 1], atol=1e-5, rtol=1e-4)
    extend = jax.jit(lambda t, p, c: model.apply(variables, t, p, c, method="extend"), compiler_options=ONCE)
    for _ in range(2):
        places = lengths[:, None]
        h, caches = extend(jnp.asarray(tokens[rows[:, None], places]), jnp.asarray(places), caches)
        np.testing.assert_allclose(h, expected[rows[:, None], places], atol=1e-5, rtol=1e-4)
        lengths = lengths + 1


def test_tokens_depend_on_the_memory_of_their_segment():
    """d hidden[i] / d memory[s] is exactly 0 unless the segments are equal, and not 0 there."""
    model, params = make()
    segments, memory_segments = np.array([1, 1, 2, 2, 3]), np.array([2, 1, 1, 3, 0])
    positions = jnp.asarray([[0, 1, 0, 1, 0]], jnp.int32)
    tokens = jnp.arange(5, dtype=jnp.int32)[None]
    direction = jnp.asarray(np.random.default_rng(2).normal(size=16), jnp.float32)

    def outputs(states):
        memory = Memory(states, jnp.asarray(memory_segments[None], jnp.int32))
        context = Context(positions, jnp.asarray(segments[None], jnp.int32), model.config.mask, memory=memory)
        return model.apply({"params": params}, tokens, context, method="hidden")[0][0] @ direction

    jacobian = once(jax.jacrev(outputs), jnp.asarray(np.random.default_rng(4).normal(size=(1, 5, 12)), jnp.float32))
    depends = np.any(np.asarray(jacobian)[:, 0] != 0.0, axis=-1)
    np.testing.assert_array_equal(depends, segments[:, None] == memory_segments[None])


def test_weights_of_three_branches_are_counted():
    model, params = make()
    kernels = [leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "kernel"]
    assert model.config.non_embedding_parameters() == sum(kernels)


def test_invalid_configs_raise():
    for kind, fields, message in (
        (LMConfig, {}, "model.memory_dim=12: this model passes its layers no memory: set it to 0"),
        (EncoderConfig, {}, "model.memory_dim=12: this model passes its layers no memory"),
        (DecoderConfig, {"memory_dim": 0}, "model.memory_dim=0: set it to the features of the memory"),
        (DecoderConfig, {"residual": "reversible"}, "reversible layers have two branches: set model.residual='plain'"),
    ):
        raises(message, kind, **SIZES | fields)


def test_missing_and_divided_memories_raise():
    model, params = make()
    with pytest.raises(InputError, match="layers with cross-attention got no memory"):
        jax.eval_shape(lambda t: model.apply({"params": params}, t, method="logits"), jnp.zeros((1, 4), jnp.int32))
    raises(
        "the memory is not divided: set plan.sequence=1",
        make_trainer,
        model,
        OptimizerConfig(),
        Plan("sequence"),
        steps=1,
    )
    two = Memory(np.zeros((2, 3, model.config.memory_dim), np.float32), np.ones((2, 3), np.int32))
    for memory, shape in ((None, "None"), (two, re.escape("[2, 3, 12]"))):
        with pytest.raises(InputError, match=rf"memory has states of shape {shape}: .* expects states \[1, S, 12\]"):
            Generation(model, params, [[1]], tokens=1, memory=memory)
    with pytest.raises(InputError, match="model.memory_dim=0 expects None"):
        beam_search(LM(LMConfig(**SIZES | {"memory_dim": 0})), None, [[1], [2]], tokens=1, eos_id=0, memory=two)
