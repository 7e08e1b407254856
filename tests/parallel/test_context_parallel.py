"""Attention over divided sequences: values and gradients equal those of one device."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Causal, Full, PerHead, attend
from hpnlp.parallel import context_parallel
from hpnlp.parallel.context_parallel import token_order
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, MixerInputs, MixerTraits
from tests.contracts import ONCE, once
from tests.messages import raises
from tests.parallel.test_ring_schedule import MASKS, PLAIN, ZIGZAG, T

B, N, K, H = 2, 4, 2, 8


@functools.cache
def layout_of(exchange, devices=4):
    plan = Plan("sequence", exchange=exchange)
    return plan.layout({}, jax.devices()[:devices])


def arrays(dtype=jnp.float32):
    draw = np.random.default_rng(0)
    q = draw.standard_normal((B, T, N, H))
    k, v = (draw.standard_normal((B, T, K, H)) for _ in range(2))
    segments = np.sort(draw.integers(0, 3, (B, T)), axis=1)
    positions = np.concatenate([np.arange(T)[None], np.arange(T)[None] % 37])
    return [jnp.asarray(x, dtype) for x in (q, k, v)], [jnp.asarray(x, jnp.int32) for x in (segments, positions)]


def over_devices(exchange, mask, chunks, qkv, token_info, mixer=None):
    """o `[B, T, N, H]` of attention over devices, with tokens in their original order."""
    layout, mixer = layout_of(exchange), ExactMixer() if mixer is None else mixer
    size = T // 8
    indices = np.concatenate([np.arange(c * size, (c + 1) * size) for pair in chunks for c in pair])

    def body(q, k, v, segments, positions):
        inputs = MixerInputs(None, q, k, v, positions, positions, segments, segments)
        if exchange == "heads":
            return context_parallel.by_heads(mixer, inputs, mask).o
        return context_parallel.ring(mixer, inputs, mask, chunks).o

    spec = PartitionSpec(None, "sequence")
    run = jax.shard_map(body, mesh=layout.mesh, in_specs=(spec,) * 5, out_specs=spec)
    return run(*(x[:, indices] for x in (*qkv, *token_info)))[:, np.argsort(indices)]


def on_ring(chunks):
    def run(mask, qkv, token_info):
        return over_devices("ring", mask, chunks, qkv, token_info)

    return run


def on_one_device(mask, qkv, token_info):
    segments, positions = token_info
    positions = None if mask.relative else positions
    return attend(*qkv, mask, segment_ids=segments, positions=positions)


def with_gradients(run, mask, qkv, token_info):
    weights = jnp.cos(jnp.arange(T * N * H, dtype=jnp.float32)).reshape(1, T, N, H)

    def value(*qkv):
        o = run(mask, qkv, token_info)
        return (o.astype(jnp.float32) * weights).sum(), o

    return once(jax.grad(value, (0, 1, 2), has_aux=True), *qkv)


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-3)


CHUNKS = {"plain": PLAIN, "zigzag": ZIGZAG}
FEW = {("causal", "plain"), ("global", "zigzag")}
# The order of chunks does not depend on the mask, so that most masks are tested with one order.
FURTHER = {(name, "zigzag") for name in MASKS} | {("strided", "plain"), ("both ways", "plain")}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(name, chunks, marks=[] if (name, chunks) in FEW else pytest.mark.slow)
        for name, chunks in sorted(FEW | FURTHER)
    ],
)
def test_ring_equals_attention(name, chunks):
    qkv, token_info = arrays()
    expected = with_gradients(on_one_device, MASKS[name], qkv, token_info)
    assert_close(with_gradients(on_ring(CHUNKS[chunks]), MASKS[name], qkv, token_info), expected, 2e-6)


@pytest.mark.slow
def test_ring_in_bfloat16_matches_float32():
    qkv, token_info = arrays(jnp.bfloat16)
    actual = with_gradients(on_ring(ZIGZAG), Causal(), qkv, token_info)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    wide = [x.astype(jnp.float32) for x in qkv]
    assert_close(actual, with_gradients(on_one_device, Causal(), wide, token_info), 2e-2)


@pytest.mark.parametrize("name", ["causal", "global"])
def test_by_heads_equals_attention(name):
    (q, _, _), token_info = arrays()
    qkv = q, q[:, ::-1], q * 0.5

    def run(mask, qkv, token_info):
        return over_devices("heads", mask, PLAIN, qkv, token_info)

    expected = with_gradients(on_one_device, MASKS[name], qkv, token_info)
    assert_close(with_gradients(run, MASKS[name], qkv, token_info), expected, 2e-6)


def test_ring_keeps_only_the_keys_of_its_device():
    """The keys of complete sequences would take four times the memory between forward and backward pass."""
    qkv, token_info = arrays()
    saved = jax.eval_shape(
        lambda *qkv: jax.vjp(lambda *qkv: over_devices("ring", Causal(), ZIGZAG, qkv, token_info), *qkv)[1], *qkv
    )
    saved_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))
    # q, k, v, positions and segments of queries and keys, o and lse
    local_bytes = sum(x.size * 4 for x in (*qkv, *token_info, *token_info, qkv[0])) + B * T * N * 4
    assert saved_bytes <= 1.3 * local_bytes


@pytest.mark.slow
def test_memory_of_a_ring_in_a_stack_of_layers():
    """Memory grows linearly with the length: the masks of tiles of all hops are not kept at once."""

    def temp(length):
        config = LMConfig(layers=2, dim=32, heads=2, mlp_dim=32, vocab=64, max_len=length, unroll=1)
        trainer = make_trainer(LM(config), OptimizerConfig(), Plan("sequence"), steps=2, devices=jax.devices()[:4])
        batch, key = jax.eval_shape(lambda: example_batch(1, length)), jax.eval_shape(lambda: jax.random.key(0))
        with jax.set_mesh(trainer.layout.mesh):
            compiled = trainer.step.jitted.lower(trainer.state_shapes, batch, key).compile(ONCE)
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temp(1024), temp(2048)
    assert long < 2.5 * short and long < 12e6


def error_message(mixer, exchange="ring", mask=Causal(), chunks=PLAIN, **fields):  # noqa: B008
    qkv, token_info = arrays()
    layout = layout_of(exchange)

    def body(q, k, v):
        inputs = MixerInputs(q=q, k=k, v=v, **fields)
        if exchange == "heads":
            return context_parallel.by_heads(mixer, inputs, mask).o
        return context_parallel.ring(mixer, inputs, mask, chunks).o

    spec = PartitionSpec(None, "sequence")
    with pytest.raises(InputError) as caught:
        jax.eval_shape(jax.shard_map(body, mesh=layout.mesh, in_specs=(spec,) * 3, out_specs=spec), *qkv)
    return str(caught.value)


class Louder(ExactMixer):
    def __call__(self, inputs, mask):
        out = super().__call__(inputs, mask)
        return dataclasses.replace(out, o=2 * out.o)


def test_unsupported_mixers_and_lengths_raise():
    assert "model.dropout with plan.exchange=ring: choose plan.exchange=heads" in error_message(
        ExactMixer(), rng=jax.random.key(0)
    )
    per_head = ExactMixer(PerHead((Causal(), Full()) * 2))
    assert "heads with masks of their own do not run on a ring" in error_message(per_head)
    assert "are not divided over devices: set plan.sequence=1" in error_message(per_head, "heads")
    whole = SimpleNamespace(traits=MixerTraits())
    assert "SimpleNamespace has no `partial`" in error_message(whole)
    assert "Louder takes `partial` from ExactMixer and `__call__` from Louder" in error_message(Louder())
    assert "divides 2 heads of k over plan.sequence=4 devices: choose" in error_message(ExactMixer(), "heads")
    assert "a model that does not set Context.order: bring the tokens into" in error_message(ExactMixer(), chunks=None)
    raises("sequences of 36 tokens do not divide into two chunks", lambda: token_order(layout_of("ring"), [], 36))
    assert token_order(layout_of("heads"), [], 36) == (None, None)
