"""Collectives of training steps: read from the jaxpr, beside those of the compiled program and of formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner.collectives import Collective, compiled_traffic, step_traffic, total, trace, traffic
from hpnlp.planner.memory import held_bytes
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from tests.contracts import ONCE
from tests.messages import raises

B, T = 8, 16
CONFIG = LMConfig(layers=4, dim=32, heads=4, mlp_dim=64, vocab=264, max_len=T, unroll=0)
MESH = Plan(data=2, tensor=4).mesh()
LAYOUTS = {
    "data": Plan(),
    "zero1": Plan("zero1"),
    "zero2": Plan("zero2"),
    "zero3": Plan("zero3"),
    "data 2 x zero3 2 x tensor 2": Plan(data=2, fsdp=2, tensor=2),
    "data 2 x pipeline 4": Plan(pipeline=4),
    "3d": Plan("3d"),
    "data 2 x sequence 4": Plan(sequence=4),
    "data 4 x sequence 2, by heads": Plan(sequence=2, exchange="heads"),
    "sequence 2 x zero3 2 x tensor 2": Plan("zero3", sequence=2, tensor=2),
    "data 4 x pipeline 2, two rounds": Plan(pipeline=2, rounds=2, microbatches=2),
}
FAST = ("zero3", "3d")


@functools.cache
def trainer_of(plan, devices=None, config=CONFIG):
    return make_trainer(LM(config), OptimizerConfig(), plan, steps=10, devices=devices)


def compiled_step(trainer):
    with jax.set_mesh(trainer.layout.mesh):
        return trace(trainer, B, T).lower().compile(ONCE).as_text()


def planned_and_compiled(trainer):
    return step_traffic(trainer, trace(trainer, B, T).jaxpr), compiled_traffic(compiled_step(trainer))


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_collectives_match_the_compiled_program(name):
    planned, compiled = planned_and_compiled(trainer_of(LAYOUTS[name]))
    assert total(planned) == pytest.approx(total(compiled), rel=0.02)
    for kind in ("reduce-scatter", "collective-permute", "all-to-all"):
        totals = [total(c for c in collectives if c.kind == kind) for collectives in (planned, compiled)]
        assert totals[0] == pytest.approx(totals[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan("zero3"), Plan("zero1", tensor=2)], ids=["zero3", "zero1 4 x tensor 2"])
@pytest.mark.parametrize(("fields", "optimizer"), [({"residual": "reversible"}, "adamw"), ({"unroll": 1}, "muon")])
def test_collectives_of_reversible_layers_and_of_muon_match_the_compiled_program(fields, optimizer, plan):
    """Reversible branches gather their own parameters; Muon's update needs whole matrices."""
    model = LM(dataclasses.replace(CONFIG, **fields))
    trainer = make_trainer(model, OptimizerConfig(optimizer), plan, steps=10)
    planned, compiled = planned_and_compiled(trainer)
    assert total(planned) == pytest.approx(total(compiled), rel=0.02)


@pytest.mark.parametrize("name", ["data", "zero1", "zero2", "zero3", "3d"])
def test_traffic_of_zero_matches_its_paper(name):
    """With P bytes of parameters on N devices, data parallelism sends 2 P (N - 1) / N bytes, and ZeRO `share` P (N - 1) / N."""
    config = LMConfig(layers=8, dim=64, heads=4, mlp_dim=256, vocab=64, max_len=T, unroll=1, tied=False)
    trainer = trainer_of(LAYOUTS[name], None, config)
    size = sum(x.size for x in jax.tree.leaves(trainer.state_shapes.params)) * 4
    share = {"data": 2, "zero1": 3, "zero2": 2, "zero3": 3}.get(name)
    if share:
        assert total(step_traffic(trainer, trace(trainer, B, T).jaxpr)) == pytest.approx(share * size * 7 / 8, rel=0.02)
    assert held_bytes(trainer.state_shapes.params) == pytest.approx(
        {"zero3": size / 8, "3d": size / 4}.get(name, size), rel=0.02
    )


def bytes_per_parameter(zero, devices):
    """float32 parameters and Adam's two moments on each device, under each stage of ZeRO."""
    return {0: 12, 1: 4 + 8 / devices, 2: 4 + 8 / devices, 3: 12 / devices}[zero]


@pytest.mark.parametrize(("zero", "devices"), [(0, 8), (1, 8), (1, 512), (2, 64), (3, 8), (3, 512)])
def test_state_bytes_match_formula(zero, devices):
    """For devices that need not exist. Norms are not divided."""
    config = LMConfig(layers=2, dim=512, heads=8, mlp_dim=1024, vocab=512, max_len=64, unroll=0)
    trainer = trainer_of(Plan("zero3", zero=zero), devices, config)
    shapes = trainer.state_shapes
    count = sum(x.size for x in jax.tree.leaves(shapes.params))
    vectors = sum(x.size for x in jax.tree.leaves(shapes.params) if min(x.shape) <= 2 and x.ndim == 2 or x.ndim == 1)
    expected = (count - vectors) * bytes_per_parameter(zero, devices) + 12 * vectors + 8  # two counters
    assert held_bytes(shapes) == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("fields", [{"output": "sampled(16)"}, {"dim": 36, "heads": 2, "vocab": 257}])
def test_second_gather_of_a_table_is_not_counted(fields):
    """Neither where the compiler shards the loss, nor where the table is not divided; elsewhere one of two is taken off."""
    trainers = [trainer_of(Plan("zero3"), 8, dataclasses.replace(CONFIG, **changes)) for changes in ({}, fields)]
    fewest = [min(c.times for c in step_traffic(trainer, trace(trainer, B, T).jaxpr)) for trainer in trainers]
    assert fewest[0] == -1 and fewest[1] > 0


def exchanged_bytes(collectives):
    return total(collective for collective in collectives if collective.kind == "all-to-all")


def exchanging_trainer(plan, mlp):
    return trainer_of(plan, None, dataclasses.replace(CONFIG, mlp=mlp, layers=2, mlp_dim=16))


def test_exchange_of_experts_matches_formula():
    """Assignments travel to their experts and back, forward and backward. Buffers for all are min(S, E / k) times as large."""
    mean, most = (exchanging_trainer(Plan("expert"), mlp) for mlp in ("top_k(8,2,exchange_capacity=1.0)", "top_k(8,2)"))
    limited, unlimited = (exchanged_bytes(step_traffic(t, trace(t, B, T).jaxpr)) for t in (mean, most))
    layers, assignments, item_bytes = 2, 2 * B * T // 8, 4
    assert limited == pytest.approx(layers * 4 * assignments * CONFIG.dim * item_bytes * 7 / 8, rel=0.01)
    assert unlimited == pytest.approx(4 * limited)
    experts = {name: x for name, x in mean.state_shapes.params["layers"]["mlp"].items() if name != "router"}
    assert held_bytes(experts) == item_bytes * sum(x.size for x in jax.tree.leaves(experts)) // 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [Plan("expert"), Plan("zero3", expert=4), Plan("zero3", expert=2, tensor=2, remat="full")]
)
def test_exchange_of_experts_matches_the_compiled_program(plan):
    planned, compiled = planned_and_compiled(exchanging_trainer(plan, "top_k(8,2)"))
    assert exchanged_bytes(planned) == pytest.approx(exchanged_bytes(compiled), rel=0.001)
    assert total(planned) == pytest.approx(total(compiled), rel=0.02)


def test_pipeline_sums_gradients_once():
    trainers = [trainer_of(Plan(pipeline=2, microbatches=count)) for count in (1, 4)]
    steps = [step_traffic(trainer, trace(trainer, 16, T).jaxpr) for trainer in trainers]
    single, several = (total(c for c in collectives if c.axes == ("data",)) for collectives in steps)
    assert single == several > 0


@pytest.mark.parametrize(
    ("mixer", "hops", "compiles"), [("full", 8, False), pytest.param("window(4,0)", 2, True, marks=pytest.mark.slow)]
)
def test_ring_sends_only_visible_keys(mixer, hops, compiles):
    """Keys and values go to the next hop, but not from the last; in the backward pass their gradients too, and then home."""
    length = 64
    trainer = trainer_of(Plan("sequence"), None, dataclasses.replace(CONFIG, mixer=mixer, max_len=length, unroll=1))
    traced = trace(trainer, B, length)
    counted = [step_traffic(trainer, traced.jaxpr)]
    if compiles:
        with jax.set_mesh(trainer.layout.mesh):
            counted.append(compiled_traffic(traced.lower().compile(ONCE).as_text()))
    size = B * length // 8 * CONFIG.dim * 4
    for collectives in counted:
        permutes = (c for c in collectives if c.kind == "collective-permute" and c.size >= size)
        arrays = sum(c.bytes / size for c in permutes)
        assert arrays == CONFIG.layers * ((hops - 1) * (2 + 4) + 2)


def test_permutation_counts_unless_all_devices_keep_their_shard():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n %p = f32[4]{0} collective-permute(%x), source_target_pairs={PAIRS}\n}"
    collectives = [compiled_traffic(text.replace("PAIRS", pairs)) for pairs in ("{0,0},{1,2},{2,1}", "{0,0},{1,1}")]
    assert collectives == [[Collective("collective-permute", (), 2, 16)], []]


def test_replica_groups_are_read():
    for groups, devices in (
        ("{{0,2,4,6},{1,3,5,7}}", 4),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['data'=4,'tensor'=2] {'tensor'}", 2),
        ("mesh['data'=8] {'data':(2)4}", 4),
        ("{}", 8),
    ):
        text = "HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
        text += " %s = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups=GROUPS, x=y\n}"
        assert compiled_traffic(text.replace("GROUPS", groups)) == [Collective("all-reduce", (), devices, 16)]


def test_unknown_replica_groups_raise():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n %s = f32[4]{0} all-reduce(%x), replica_groups=<8>\n}"
    raises("replica_groups=<8>", compiled_traffic, text)


def traffic_of(body, *shapes):
    """Collectives of a function inside `shard_map`."""
    run = jax.shard_map(
        body, mesh=MESH, in_specs=PartitionSpec("data", "tensor"), out_specs=PartitionSpec("data", "tensor")
    )
    traced = jax.jit(run).trace(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return traffic(traced.jaxpr, MESH.shape)


def test_loops_multiply_and_the_largest_branch_counts():
    def iteration(carry, _):
        return jax.lax.ppermute(carry, "tensor", [(0, 1)]), None

    def send(x):
        return jax.lax.ppermute(x, "data", [(0, 1)])

    def body(x):
        x = jax.lax.scan(iteration, x, None, length=5)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: send(send(x)), send, x)

    collectives = traffic_of(body, (4, 8))
    assert sorted(collectives, key=lambda collective: collective.axes) == [
        Collective("collective-permute", ("data",), 2, 2 * 2 * 4, 2),
        Collective("collective-permute", ("tensor",), 4, 2 * 2 * 4, 5),
    ]


def test_bytes_of_each_kind():
    sizes = {
        kind: Collective(kind, ("tensor",), 4, 1000).bytes
        for kind in ("all-reduce", "all-gather", "collective-permute")
    }
    assert sizes == {"all-reduce": 1500.0, "all-gather": 750.0, "collective-permute": 1000.0}


def test_unused_collectives_do_not_count():
    """Compilers remove them, in loops too."""

    def body(x):
        def iteration(x, _):
            unread = jax.lax.all_gather(x, "tensor")
            return x + 0 * jax.lax.psum(x, "data") if unread.ndim else x, None

        jax.lax.all_gather(x, "data")
        return jax.lax.scan(iteration, x, None, length=2)[0]

    assert traffic_of(body, (4, 8)) == [Collective("all-reduce", ("data",), 2, 2 * 2 * 4, 2)]


def test_collective_in_loop_of_unknown_length_raises():
    def body(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: jax.lax.ppermute(x, "tensor", [(0, 1)]), x)

    raises("collective-permute over .'tensor',. runs in a loop whose length is not known", traffic_of, body, (4, 8))
