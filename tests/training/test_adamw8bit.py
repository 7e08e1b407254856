"""AdamW with 8-bit moments: losses as with AdamW, a quarter of the memory, on any layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.dynamic_quantization import Quantized
from hpnlp.parallel.plan import Plan
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.optim import OptimizerConfig, make_optimizer
from hpnlp.training.optimizers import sparse_rows
from hpnlp.training.trainer import make_trainer
from tests.contracts import ONCE
from tests.training import test_sparse_rows
from tests.training.test_step import KEY, LAYOUTS, ONE, Run, batch_of, host, initial_state, trainer_of


def run_of(layout=ONE, name="adamw8bit", **changes):
    """`(trainer, initial state)`, with the parameters of `initial_state`."""
    trainer = trainer_of(*layout, name=name, **changes)
    state = jax.device_get(trainer_of(name=name, **changes).init(jax.random.key(0), initial_state().params))
    return trainer, jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes))


def steps(trainer, state, count, first=0):
    """`(state, losses)` after `count` steps."""
    losses = []
    for seed in range(first, first + count):
        put = jax.device_put(batch_of(seed), trainer.batch_sharding)
        state, metrics = trainer.step(state, put, KEY)
        losses.append(float(metrics["loss"]))
    return state, np.array(losses)


def quantized_moments(state):
    """Path of a parameter -> its moment in 8 bits; of both moments, the second one."""
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=lambda node: isinstance(node, Quantized))
    return {sparse_rows.keys(path): leaf for path, leaf in leaves if isinstance(leaf, Quantized)}


def test_moments_take_two_bytes_per_number():
    model = LMConfig(layers=4, dim=256, heads=4, vocab=264)
    shapes = make_trainer(LM(model), OptimizerConfig("adamw8bit"), Plan("single"), steps=9).state_shapes
    numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes.params))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.opt_state))
    assert 2.0 < held / numbers < 2.2
    assert all(path[-1] == "kernel" for path in quantized_moments(shapes))  # the embedding table keeps float32 moments


@pytest.mark.slow
def test_step_needs_less_memory_than_adamw():
    """Six bytes per number are saved, and the conversion to float32 and back does not need them again."""
    model = LMConfig(layers=4, dim=64, heads=2, mlp_dim=2048, vocab=264, unroll=1)

    def memory_bytes(name):
        trainer = make_trainer(LM(model), OptimizerConfig(name), Plan("single"), steps=9)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of(0))
        with jax.set_mesh(trainer.layout.mesh):
            lowered = trainer.step.jitted.lower(trainer.state_shapes, batch, jax.eval_shape(lambda: KEY))
        memory = lowered.compile(ONCE).memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    assert memory_bytes("adamw") - memory_bytes("adamw8bit") > 5 * model.non_embedding_parameters()


@pytest.mark.slow
def test_losses_match_adamw():
    """Over 60 steps the losses are within 1 % of AdamW's, and fall by a third."""
    adamw = Run(trainer_of())
    losses = [steps(*run, 60)[1] for run in ((adamw.trainer, adamw.state), run_of())]
    assert losses[0][-1] < 0.67 * losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.01)
    assert abs(losses[1] - losses[0]).max() > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp 4 x tensor 2", "3d"])
def test_layouts_match_one_device(layout):
    """Few codes differ, by rounding at a bin's edge; codes and scales are sharded."""
    state, losses = steps(*run_of(LAYOUTS[layout]), 4)
    expected, expected_losses = steps(*run_of(), 4)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    assert len(quantized_moments(state)) == 3
    for path, actual in quantized_moments(state).items():
        other = quantized_moments(expected)[path]
        assert np.mean(np.asarray(actual.codes) != np.asarray(other.codes)) < 0.02
        np.testing.assert_allclose(actual.scales, other.scales, rtol=1e-3)
        spec = actual.codes.sharding.spec
        assert actual.codes.addressable_shards[0].data.size <= actual.codes.size / 4
        assert tuple(actual.scales.sharding.spec) == tuple(spec[:2])


@pytest.mark.slow
def test_checkpoint_restores_on_another_layout(tmp_path):
    trainer, state = run_of(LAYOUTS["fsdp 4 x tensor 2"])
    state, _ = steps(trainer, state, 2)
    before = host(state)
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(state, {}, {"best": None, "bad_evals": 0, "seconds": {}})
    checkpoints.wait()
    other = trainer_of(name="adamw8bit")
    actual, _, _ = checkpoints.restore(other.state_shapes)
    checkpoints.close()
    for old, new in zip(before, host(actual), strict=True):
        assert old.dtype == new.dtype and old.tobytes() == new.tobytes()
    assert np.isfinite(steps(other, actual, 1, 2)[1]).all()


@pytest.mark.slow
def test_rows_outside_of_the_batch_stay_unchanged():
    first, after = (test_sparse_rows.run(count, name="adamw8bit", rows=True)[1] for count in (0, 2))
    same = [
        (new == old).all(axis=1)
        for new, old in zip(quantized_moments(after)["head",], quantized_moments(first)["head",], strict=True)
    ]
    moved = (after.params["head"] != first.params["head"]).any(axis=1)
    assert 64 <= moved.sum() < test_sparse_rows.VOCAB
    assert all(waited[~moved].all() for waited in same) and not same[1][moved].any()


def test_update_is_bounded_where_the_second_moment_underflows():
    """A gradient of 1e-4 of its row's largest, which then ends: its second moment is below the smallest 8-bit level."""
    gradient = np.ones((64, 64), np.float32)
    gradient[:, 0] = 1e-4
    config = OptimizerConfig("adamw8bit", 1.0, schedule="constant", warmup=0, weight_decay=0.0, clip_norm=0.0, b2=0.999)
    optimizer = make_optimizer(config, 9)
    params = {"kernel": jnp.zeros((64, 64))}
    state, moved = optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):
        for g in (gradient, gradient, np.where(gradient < 1, 0, gradient)):
            updates, state = optimizer.update({"kernel": jnp.asarray(g)}, state, params)
            moved.append(float(jnp.abs(updates["kernel"]).max()))
    assert max(moved) < 2.0
    assert isinstance(optax.tree.get(state, "nu")["kernel"], Quantized)
