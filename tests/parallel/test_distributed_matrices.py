"""Functions of complete matrices where devices hold shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.parallel.distributed_matrices import apply_to_matrices
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.optimizers.muon import scale_by_muon
from hpnlp.training.trainer import make_trainer
from tests.drawn import drawn_state

MESH = Plan(pipeline=2, fsdp=2, tensor=2).mesh()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 4, 6), P(None, "fsdp", "tensor")),
        ((8, 4, 6), P("pipeline", "fsdp", "tensor")),
        ((6, 8, 6), P("pipeline", ("tensor", "fsdp"), None)),
        ((3, 4, 8), P(None, None, ("fsdp", "tensor"))),
        ((4, 4, 8), P("pipeline")),
        ((1, 4, 6), P(None, "fsdp", "tensor")),
        ((4, 6), P(("tensor", "fsdp"))),
        ((4, 6), P("tensor", "fsdp")),
        ((3, 4, 6), P()),
        ((2, 3, 4, 8), P(None, None, "fsdp", "tensor")),
        ((2, 4, 4, 6), P("pipeline", "fsdp", None, "tensor")),
        ((2, 1, 3, 4, 8), P("pipeline", None, None, ("fsdp", "tensor"))),
    ],
)
def test_function_sees_complete_matrices_in_place(shape, spec):
    """The function depends on every entry of a matrix and on its index."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    def function(x):
        reversed_x = x[..., ::-1, ::-1]
        return reversed_x * jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) - jnp.cumsum(x, axis=-1)

    sharding = NamedSharding(MESH, spec)
    result = jax.jit(
        lambda x: apply_to_matrices(function, x, MESH, spec), in_shardings=sharding, out_shardings=sharding
    )(x)
    np.testing.assert_allclose(result, function(x), rtol=1e-6, atol=1e-6)


def test_devices_divide_a_stack():
    shapes = []

    def function(x):
        shapes.append(x.shape)
        return x

    for spec in (P(None, "fsdp"), P(None, "fsdp", "tensor"), P("pipeline", "fsdp", "tensor")):
        jax.eval_shape(
            lambda x, spec=spec: apply_to_matrices(function, x, MESH, spec),
            jax.ShapeDtypeStruct((6, 4, 8), jnp.float32),
        )
    assert shapes == [(3, 4, 8), (2, 4, 8), (1, 4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan("zero3"), Plan("3d")])
def test_muon_updates_equal_those_of_one_device(plan):
    model = LM(LMConfig(layers=2, dim=64, heads=4, vocab=64, max_len=16, unroll=1))
    batch = dict(example_batch(8, 16))
    batch["tokens"] = batch["labels"] = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)
    updates = []
    for each_plan in (Plan("single"), plan):
        trainer = make_trainer(model, OptimizerConfig("muon", learning_rate=0.02, warmup=0), each_plan, steps=10)
        before = drawn_state(trainer.state_shapes)
        state = jax.device_put(before, jax.tree.map(lambda leaf: leaf.sharding, trainer.state_shapes))
        for _ in range(2):
            state, _ = trainer.step(state, jax.device_put(batch, trainer.batch_sharding), jax.random.key(2))
        updates.append(
            jax.tree.map(lambda new, old: np.asarray(new) - old, jax.device_get(state.params), before.params)
        )
    for a, b in zip(*map(jax.tree.leaves, updates), strict=True):
        assert np.linalg.norm(a) > 0
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a)


def test_all_leading_axes_belong_to_the_stack():
    """Muon of [L, E, A, B] over devices updates each matrix like Muon of that matrix on one device."""
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 8)), jnp.float32)
    spec = P("pipeline", None, "fsdp", "tensor")
    divided = scale_by_muon(0.9, 1e-8, lambda path, function, x: apply_to_matrices(function, x, MESH, spec))
    single = scale_by_muon(0.9, 1e-8)
    tree = {"kernel": jax.device_put(grads, NamedSharding(MESH, spec))}
    updates = jax.jit(divided.update)(tree, divided.init(tree))[0]["kernel"]
    each = [[single.update(x, single.init(x))[0] for x in row] for row in grads]
    np.testing.assert_allclose(updates, jnp.stack([jnp.stack(row) for row in each]), rtol=1e-4, atol=1e-5)
