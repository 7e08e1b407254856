"""Statistics of models of several stacks: losses and buffers of both are equal on every layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig, standalone_decoder
from hpnlp.models.variables import axes_and_shapes, collections, join, split
from hpnlp.nn.feed_forward import FEED_FORWARDS
from hpnlp.nn.mixers import MIXERS
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.centered_columns import centered_columns
from tests.centered_keys import centered_keys
from tests.contracts import once
from tests.training.test_statistics import assert_runs_equal

B, T = 16, 8
SIZES = {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "mlp_dim": 32, "vocab": 24, "max_len": T, "unroll": 1}
STATE = {"mixer": "centered", "mlp": "columns", **SIZES}
MODELS = {
    "seq2seq": lambda: Seq2SeqModel(
        Seq2SeqModelConfig(**STATE, encoder_mixer="centered", encoder_layers=4, target_len=T)
    ),
    "shared towers": lambda: DualEncoder(DualEncoderConfig(**STATE, negatives="part")),
    "two towers": lambda: DualEncoder(DualEncoderConfig(**STATE, negatives="part", shared=False)),
    "two towers, one set": lambda: DualEncoder(DualEncoderConfig(**STATE, shared=False)),
}
NAMES = ("keys_loss", "hidden_loss", "columns_loss")
PREFIXES = {
    "seq2seq": ("encoder_", ""),
    "shared towers": ("",),
    "two towers": ("", "pair_"),
    "two towers, one set": ("", "pair_"),
}
LAYOUTS = {"zero3 x tensor": (Plan("zero3", tensor=2), 8), "ring": (Plan("data", sequence=2), 4)}


@pytest.fixture(scope="module", autouse=True)
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MIXERS, "centered", centered_keys)
        patch.setitem(FEED_FORWARDS, "columns", centered_columns)
        yield


@functools.cache
def case(name):
    """`(model, weights, batch)`: random tokens of different lengths."""
    model, draw = MODELS[name](), np.random.default_rng(0)
    batch = model.example_batch(B, T)
    lengths = {prefix: draw.integers(T // 2, T + 1, (B, 1)) for prefix in ("", "pair_", "target_")}

    def fill(name, x):
        prefix = next((prefix for prefix in ("pair_", "target_") if name.startswith(prefix)), "")
        if name.endswith(("tokens", "labels")):
            return jnp.asarray(draw.integers(0, 24, x.shape).astype(jnp.int32))
        if name.endswith("positions"):
            return jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
        return x * (np.arange(T)[None] < lengths[prefix]) if x.ndim == 2 else x

    batch = {key: jnp.asarray(fill(key, x), x.dtype) for key, x in batch.items()}
    params, buffers = split(axes_and_shapes(model)[1])
    params = jax.tree.map(lambda x: jnp.asarray(draw.normal(0, 0.3, x.shape).astype(jnp.float32)), params)
    return model, join(params, jax.tree.map(jnp.zeros_like, buffers)), batch


@pytest.mark.parametrize("name", [name for name in MODELS if name != "two towers, one set"])
def test_stacks_have_losses_and_buffers_of_their_own(name):
    """Losses are named by the stack, and each stack's buffers change by its own statistics."""
    model, weights, batch = case(name)

    def everything(weights, batch):
        out = model.apply(collections(weights), batch, method="loss")
        buffers = model.advance(weights["buffers"], out.statistics, jnp.int32(0), jax.random.key(0))
        return out, model.auxiliary_loss(out.statistics), buffers

    out, losses, buffers = once(everything, weights, batch)
    assert losses.keys() == {f"{prefix}{loss}" for prefix in PREFIXES[name] for loss in NAMES}
    assert {f"{prefix}input_square" for prefix in PREFIXES[name]} <= out.aux.keys()
    assert out.statistics.keys() == buffers.keys() == model.config.stacks().keys()
    for stack, of_stack in buffers.items():
        statistics = out.statistics[stack]["layers"]
        for branch, sums, in_branch in (
            ("attention", "keys", of_stack["layers"]["attention"]["mixer"]),
            ("mlp", "columns", of_stack["layers"]["mlp"]),
        ):
            total, tokens = np.asarray(statistics[branch][sums]), np.asarray(statistics[branch]["tokens"])
            average = 0.1 * total / tokens.reshape(-1, *(1,) * (total.ndim - 1))
            np.testing.assert_allclose(in_branch["average"], average, rtol=1e-5, atol=1e-7)
    if name == "seq2seq":
        np.testing.assert_array_equal(
            out.statistics["encoder"]["layers"]["mlp"]["tokens"], [batch["segment_ids"].sum()] * 4
        )
        decoder, alone = standalone_decoder(model, join(weights, buffers))
        assert jax.tree.structure(alone["buffers"]) == jax.tree.structure(buffers["decoder"])
        assert decoder.config.mixer == "centered"


@functools.cache
def run(name, plan, devices, accumulate):
    """`(metrics of each step, first gradients, last state)`, as `assert_runs_equal` compares them."""
    model, weights, batch = case(name)
    aux = ", ".join(f"{prefix}{loss}(2)" for prefix in PREFIXES[name] for loss in NAMES)
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, aux=aux, accumulate=accumulate)
    trainer = make_trainer(model, optimizer, plan, steps=2, devices=jax.devices()[:devices])
    state, metrics, gradients = trainer.init(jax.random.key(0), weights), [], None
    for _ in range(2):
        state, values = trainer.step(state, jax.device_put(batch, trainer.batch_sharding), jax.random.key(1))
        metrics.append({key: float(value) for key, value in values.items()})
        gradients = gradients or jax.device_get(optax.tree.get(state.opt_state, "mu"))
    return metrics, gradients, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("seq2seq", "zero3 x tensor"), ("two towers", "ring")])
def test_layouts_match_one_device(name, layout):
    """With accumulation, where the negatives of a dual encoder are those of a part on one device as well."""
    plan, devices = LAYOUTS[layout]
    assert_runs_equal(run(name, plan, devices, 2), run(name, Plan(), 1, 2), of_gradients=1e-5)


@pytest.mark.slow
def test_parts_of_one_set_of_negatives_match_the_whole_batch():
    """Losses of layers, buffers and gradients are those of the whole batch, as negatives are."""
    name, (plan, devices) = "two towers, one set", LAYOUTS["zero3 x tensor"]
    for actual in (run(name, Plan(), 1, 4), run(name, plan, devices, 2)):
        assert_runs_equal(actual, run(name, Plan(), 1, 1), of_gradients=1e-5)
