"""The plan: sizes of the mesh axes, and the layout of each array."""

import math

import flax.linen as nn
import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.models.variables import logical_axes
from hpnlp.parallel.plan import AXES, PLANS, RULES, Plan
from hpnlp.types import InputError


def test_sizes_multiply_to_the_devices():
    for plan, devices, sizes in (
        (Plan(), 8, {"data": 8}),
        (Plan("single"), 8, {}),
        (Plan("zero3"), 8, {"fsdp": 8}),
        (Plan("expert"), 8, {"expert": 8}),
        (Plan("expert", expert=4, data=-1), 8, {"expert": 4, "data": 2}),
        (Plan("3d"), 8, {"data": 2, "tensor": 2, "pipeline": 2}),
        (Plan("zero1", tensor=2), 8, {"fsdp": 4, "tensor": 2}),
        (Plan(data=-1, fsdp=2, tensor=2), 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        (Plan("zero2", data=-1), 8, {"data": 8}),
        (Plan(data=3, fsdp=-1), 12, {"data": 3, "fsdp": 4}),
    ):
        assert plan.sizes(devices) == dict.fromkeys(AXES, 1) | sizes


def test_invalid_sizes_raise():
    for plan, message in (
        (Plan("zero4"), "unknown plan.name 'zero4': did you mean 'zero"),
        (Plan(data=3, tensor=2), "(data=3, tensor=2) does not divide 8 devices: 6 is the product"),
        (Plan(data=3, fsdp=3), "choose sizes whose product is 8."),
        (Plan(fsdp=3), "plan (data=-1, fsdp=3) does not divide 8 devices"),
        (Plan("tensor", tensor=16), "does not divide 8 devices: 16 is the product of the given sizes, more than there"),
        (Plan("single", tensor=2), "8, or set one of plan.pipeline, plan.data, plan.fsdp, plan.sequence, plan.tensor"),
        (Plan(data=-1, fsdp=-1), "sizes are at least 1, and one of them may be -1, for all"),
        (Plan(data=0), "sizes are at least 1"),
        (Plan(rounds=2), "plan.rounds=2 needs a pipeline, and plan.pipeline is 1: set plan.rounds=1, or plan.pipeline"),
        (Plan(recompute_stages=True), "plan.recompute_stages=True needs a pipeline, and plan.pipeline is 1: set"),
        (Plan(zero=3), "plan.zero=3 divides the training state over plan.fsdp, which is 1: set plan.fsdp=-1"),
        (Plan(microbatches=4), "plan.microbatches=4 needs a pipeline, and plan.pipeline is 1: set plan.microbatches=0"),
    ):
        with pytest.raises(InputError) as caught:
            plan.sizes(8)
        assert message in f"{caught.value}."


def test_mesh_has_every_axis():
    mesh = Plan(fsdp=2, tensor=2).mesh()
    assert dict(mesh.shape) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * len(AXES)
    assert Plan("single").mesh().size == Plan().mesh(jax.devices()[:1]).size == 1


def test_tables_name_axes_of_the_mesh():
    assert {axis for fields in PLANS.values() for axis in fields} <= {*AXES, "zero"}
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)


CONFIG = LMConfig(
    layers=2, dim=16, heads=4, mlp_dim=32, vocab=32, max_len=8, position="learned", tied=False, qkv_bias=True
)


def test_specs_of_arrays():
    layout = Plan(fsdp=2, zero=3, tensor=2, pipeline=2).layout(CONFIG.sizes())
    assert layout.spec("batch", "length") == PartitionSpec("fsdp", None)
    assert layout.sharding() == NamedSharding(layout.mesh, PartitionSpec())

    def divided(names, shape):
        return layout.state_spec(names, shape, divided=True)

    assert divided(("layers", "embed", "mlp"), (2, 16, 32)) == PartitionSpec("pipeline", "fsdp", "tensor")
    assert divided(("layers", "heads"), (2, 16)) == PartitionSpec("pipeline", "tensor")  # a bias
    assert divided(("layers", "hidden"), (2, 16)) == PartitionSpec("pipeline", None)
    assert divided(("vocab", "embed"), (32, 16)) == PartitionSpec(("pipeline", "tensor"), "fsdp")
    assert divided(("vocab", "embed"), (32, 15)) == PartitionSpec(
        ("pipeline", "tensor", "fsdp"), None
    )  # the other axis
    assert divided(("layers", "embed", "mlp"), (2, 16)) == PartitionSpec()  # of a rank that differs from the names
    assert divided(None, (7,)) == PartitionSpec()
    assert layout.state_spec(("vocab", "embed"), (32, 16), divided=False) == PartitionSpec(("pipeline", "tensor"), None)


def test_indivisible_models_raise():
    for plan, config, message in (
        (
            Plan("tensor"),
            LMConfig(dim=36, heads=4, mlp_dim=60, vocab=261, position="none"),
            "plan.tensor=8 divides none of model.heads=4, model.kv_heads=4, model.mlp_dim=60, model.vocab=261: make one a",
        ),
        (Plan("pipeline"), LMConfig(layers=12, vocab=264), "model.layers=12 does not divide into plan.pipeline=8"),
        (Plan("expert"), LMConfig(vocab=264), "plan.expert=8 divides the experts of layers, and the model has none"),
        (Plan("data", expert=4), LMConfig(vocab=264, mlp="top_k(6,2)"), "plan.expert=4 does not divide 6 experts"),
        (
            Plan("expert"),
            LMConfig(vocab=264, mlp="top_k(16,2)", form="block(mlp='switch(12)'),block"),
            "plan.expert=8 does not divide 4 experts (model.mlp='switch(12)' and model.mlp='top_k(16,2)')",
        ),
    ):
        with pytest.raises(InputError) as caught:
            plan.layout(config.sizes())
        assert message in str(caught.value)


def test_attention_is_divided_by_complete_groups_of_heads():
    sizes = LMConfig(dim=32, heads=4, kv_heads=1, vocab=64).sizes()
    assert Plan(tensor=2).layout(sizes).size("heads") == 1
    assert Plan(tensor=2).layout(sizes).size("mlp") == 2


def test_experts_are_divided_and_their_router_is_not():
    layout = Plan("zero3", expert=2).layout(LMConfig(vocab=64, mlp="top_k(6,2)").sizes())
    assert layout.spec("batch", "length") == PartitionSpec(("fsdp", "expert"), None)
    names, shape = ("layers", "experts", "embed", "mlp"), (2, 6, 16, 32)
    assert layout.state_spec(names, shape, divided=True) == PartitionSpec(None, "expert", "fsdp", None)
    assert layout.state_spec(("layers", "embed", "router"), (2, 16, 6), divided=False) == PartitionSpec(
        None, None, None
    )


def shapes_of(config):
    return jax.eval_shape(lambda: nn.meta.unbox(LM(config).init(jax.random.key(0), example_batch(1, 8))["params"]))


def test_every_matrix_is_divided():
    """Over fsdp 4 x tensor 2, all arrays but vectors are divided over eight devices, and positions over fsdp only."""
    layout, shapes = Plan(fsdp=4, tensor=2).layout(CONFIG.sizes()), shapes_of(CONFIG)
    specs = layout.state_specs(logical_axes(LM(CONFIG)), shapes, divided=True)
    for (path, leaf), spec in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(specs), strict=True):
        name = jax.tree_util.keystr(path)
        shards = leaf.size // math.prod(NamedSharding(layout.mesh, spec).shard_shape(leaf.shape))
        assert shards == (1 if "scale" in name else 2 if "bias" in name else 4 if "positions" in name else 8), name


def test_what_no_axis_divides_is_listed():
    config = LMConfig(
        layers=2, dim=15, heads=3, head_dim=5, kv_heads=3, mlp_dim=64, vocab=261, max_len=8, position="none"
    )
    names, shapes = logical_axes(LM(config)), shapes_of(config)
    listed = Plan(fsdp=2, zero=3, tensor=4).layout(config.sizes())
    undivided = " ".join(listed.undivided(names, shapes))
    assert (
        "embed.table (261, 15)" in undivided
        and "attention.q.kernel (2, 15, 15)" in undivided
        and "mlp" not in undivided
    )
    assert Plan().layout(config.sizes()).undivided(names, shapes) == []
