"""The plan: sizes of the mesh's axes, and where each array lies on them."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpnlp.models.lm import LM, LMConfig, axes_of, example_batch
from hpnlp.parallel import plan as planning
from hpnlp.parallel.plan import AXES, PLANS, RULES, Plan
from hpnlp.types import InputError


@pytest.mark.parametrize(
    ("plan", "devices", "sizes"),
    [
        (Plan(), 8, (8, 1, 1)),
        (Plan(), 1, (1, 1, 1)),
        (Plan("fsdp"), 8, (1, 8, 1)),
        (Plan("tensor"), 8, (1, 1, 8)),
        (Plan("fsdp", tensor=2), 8, (1, 4, 2)),
        (Plan(data=-1, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (Plan("fsdp", data=-1), 8, (8, 1, 1)),
        (Plan(data=2, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (Plan(data=3, fsdp=-1), 12, (3, 4, 1)),
    ],
)
def test_sizes(plan, devices, sizes):
    assert plan.sizes(devices) == dict(zip(AXES, sizes, strict=True))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("fsdb"), "unknown plan 'fsdb': did you mean 'fsdp'?"),
        (Plan(data=3), "plan (data=3, fsdp=1, tensor=1) does not divide 8 devices: 3 is the product"),
        (Plan(fsdp=3), "plan (data=-1, fsdp=3, tensor=1) does not divide 8 devices"),
        (Plan(tensor=16), "does not divide 8 devices: 16 is the product"),
        (Plan(data=-1, fsdp=-1), "sizes are at least 1, and one of them may be -1"),
        (Plan(data=0), "sizes are at least 1"),
        (Plan(tensor=-2), "sizes are at least 1"),
    ],
)
def test_sizes_that_do_not_fit(plan, message):
    with pytest.raises(InputError) as caught:
        plan.sizes(8)
    assert message in str(caught.value)


def test_mesh_has_every_axis_for_the_compiler_to_place():
    mesh = Plan(fsdp=2, tensor=2).mesh()
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert dict(Plan().mesh(jax.devices()[:1]).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_tables_know_the_same_axes():
    assert all(tuple(sizes) == AXES for sizes in PLANS.values())
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)


def test_partition_spec():
    assert planning.partition_spec(("batch", "length")) == PartitionSpec(("data", "fsdp"), None)
    assert planning.partition_spec(("layers", "embed", "mlp")) == PartitionSpec(None, "fsdp", "tensor")
    assert planning.partition_spec((None, "vocab"), 2) == PartitionSpec(None, "tensor")
    assert planning.partition_spec(("embed", "mlp"), 1) == PartitionSpec()  # of another rank than its names


def test_sharding_without_names_is_replicated():
    mesh = Plan("fsdp").mesh()
    assert planning.sharding(mesh) == NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan("tensor"), "model.heads=4 does not divide over plan.tensor=8: make model.heads a multiple of 8"),
        (Plan(data=2, tensor=4), "model.kv_heads=2 does not divide over plan.tensor=4"),
        (Plan("fsdp"), "model.dim=36 does not divide over plan.fsdp=8: make model.dim a multiple of 8"),
    ],
)
def test_model_that_does_not_divide(plan, message):
    config = LMConfig(dim=36, heads=4, kv_heads=2, head_dim=8, mlp_dim=64, vocab=264)
    planning.check(Plan().mesh(), config.sizes())
    with pytest.raises(InputError) as caught:
        planning.check(plan.mesh(), config.sizes())
    assert message in str(caught.value)


def test_every_parameter_of_the_model_is_split():
    """Over fsdp 4 x tensor 2, all but the norms' scales lie on eight devices; what does not divide is named."""
    config = LMConfig(layers=2, dim=16, heads=2, mlp_dim=32, vocab=32, max_len=8, position="learned", tied=False)
    mesh, model = Plan(fsdp=4, tensor=2).mesh(), LM(config)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), example_batch(1, 8))["params"]))
    shardings = planning.tree_shardings(mesh, axes_of(model), shapes)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        name, parts = jax.tree_util.keystr(path), leaf.size // math.prod(sharding.shard_shape(leaf.shape))
        assert parts == (1 if "scale" in name else 4 if "positions" in name else 8), name


def test_parameter_that_does_not_divide_is_named():
    mesh = Plan("fsdp").mesh()
    axes, shapes = {"kernel": ("embed", "mlp")}, {"kernel": jax.ShapeDtypeStruct((12, 4), jnp.float32)}
    with pytest.raises(
        InputError, match=r"parameter \['kernel'\] of shape \(12, 4\) has a dimension 12 .* plan.fsdp=8"
    ):
        planning.tree_shardings(mesh, axes, shapes)
