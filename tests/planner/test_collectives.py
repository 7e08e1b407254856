"""What a layout is said to cost is what the compiled program does, and what arrays on devices take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner.collectives import Collective, compiled_traffic, held_bytes, step_traffic, total, trace, traffic
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.step import make_trainer
from hpnlp.types import InputError
from tests.contracts import ONCE

B, T = 8, 16
CONFIG = LMConfig(layers=4, dim=32, heads=4, mlp_dim=64, vocab=264, max_len=T, unroll=0)
MESH = Plan(data=2, tensor=4).mesh()
LAYOUTS = {
    "data": Plan(),
    "zero1": Plan("zero1"),
    "zero2": Plan("zero2"),
    "zero3": Plan("zero3"),
    "data 2 x zero3 2 x tensor 2": Plan(data=2, fsdp=2, tensor=2),
    "data 2 x tensor 4": Plan(tensor=4),
    "data 2 x pipeline 4": Plan(pipeline=4),
    "3d": Plan("3d"),
    "data 2 x sequence 4": Plan(sequence=4),
    "data 4 x sequence 2": Plan(sequence=2),
    "data 4 x sequence 2, by heads": Plan(sequence=2, exchange="heads"),
    "sequence 2 x zero3 2 x tensor 2": Plan("zero3", sequence=2, tensor=2),
    "pipeline 2 x zero2 2 x tensor 2": Plan("zero2", pipeline=2, tensor=2),
    "data 4 x pipeline 2, two rounds": Plan(pipeline=2, rounds=2, microbatches=2),
}
FAST = ("zero2", "zero3", "3d")


@functools.cache
def trainer_of(plan, devices=None, config=CONFIG):
    return make_trainer(LM(config), OptimizerConfig(), plan, steps=10, devices=devices)


def compiled_step(trainer):
    with jax.set_mesh(trainer.layout.mesh):
        return trace(trainer, B, T).lower().compile(ONCE).as_text()


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_what_is_sent_is_what_was_said(name):
    trainer = trainer_of(LAYOUTS[name])
    said, found = step_traffic(trainer, trace(trainer, B, T).jaxpr), compiled_traffic(compiled_step(trainer))
    assert total(said) == pytest.approx(total(found), rel=0.02)
    for kind in ("reduce-scatter", "collective-permute", "all-to-all"):
        pair = [total(one for one in sent if one.kind == kind) for sent in (said, found)]
        assert pair[0] == pytest.approx(pair[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan("zero3"), Plan("zero1", tensor=2)], ids=["zero3", "zero1 4 x tensor 2"])
@pytest.mark.parametrize(("fields", "optimizer"), [({"residual": "reversible"}, "adamw"), ({"unroll": 1}, "muon")])
def test_what_other_steps_send_is_what_was_said(fields, optimizer, plan):
    """Branches by themselves, of which each takes its own parameters; and an update that wants whole matrices."""
    model = LM(dataclasses.replace(CONFIG, **fields))
    trainer = make_trainer(model, OptimizerConfig(optimizer), plan, steps=10)
    said, found = step_traffic(trainer, trace(trainer, B, T).jaxpr), compiled_traffic(compiled_step(trainer))
    assert total(said) == pytest.approx(total(found), rel=0.02)


@pytest.mark.parametrize("name", ["data", "zero1", "zero2", "zero3", "3d"])
def test_zero_sends_what_its_paper_says(name):
    """Of P bytes of parameters over N devices, data parallelism sends 2 P (N - 1) / N; stages 1, 2 and 3 as follows."""
    config = LMConfig(layers=8, dim=64, heads=4, mlp_dim=256, vocab=64, max_len=T, unroll=1, tied=False)
    trainer = trainer_of(LAYOUTS[name], None, config)
    size = sum(x.size for x in jax.tree.leaves(trainer.state_shapes.params)) * 4
    share = {"data": 2, "zero1": 3, "zero2": 2, "zero3": 3}.get(name)
    if share:
        assert total(step_traffic(trainer, trace(trainer, B, T).jaxpr)) == pytest.approx(share * size * 7 / 8, rel=0.02)
    assert held_bytes(trainer.state_shapes.params) == pytest.approx(
        {"zero3": size / 8, "3d": size / 4}.get(name, size), rel=0.02
    )


def bytes_a_parameter(zero, devices):
    """float32 parameters and Adam's two moments; of the stages of ZeRO, what each device has."""
    return {0: 12, 1: 4 + 8 / devices, 2: 4 + 8 / devices, 3: 12 / devices}[zero]


@pytest.mark.parametrize("devices", [8, 64, 512])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_is_divided_as_the_formula_says(zero, devices):
    """Over devices that are not there; the rest is norms, which stay whole."""
    config = LMConfig(layers=2, dim=512, heads=8, mlp_dim=1024, vocab=512, max_len=64, unroll=0)
    trainer = trainer_of(Plan("zero3", zero=zero), devices, config)
    shapes = trainer.state_shapes
    count = sum(x.size for x in jax.tree.leaves(shapes.params))
    vectors = sum(x.size for x in jax.tree.leaves(shapes.params) if min(x.shape) <= 2 and x.ndim == 2 or x.ndim == 1)
    expected = (count - vectors) * bytes_a_parameter(zero, devices) + 12 * vectors + 8  # and two counters
    assert held_bytes(shapes) == pytest.approx(expected, rel=0.005)
    if devices == 8 and zero == 3:
        state = trainer_of(Plan("zero3", zero=zero), None, config).init(jax.random.key(0))
        held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        assert held == held_bytes(shapes)


@pytest.mark.parametrize("fields", [{"output": "sampled(16)"}, {"dim": 36, "heads": 2, "vocab": 257}])
def test_a_table_that_is_not_gathered_twice(fields):
    """The loss is left to the compiler, or the table is not divided; else one of two gathers is taken off."""
    whole, other = (trainer_of(Plan("zero3"), 8, dataclasses.replace(CONFIG, **more)) for more in ({}, fields))
    least = [min(one.times for one in step_traffic(of, trace(of, B, T).jaxpr)) for of in (whole, other)]
    assert least[0] == -1 and least[1] > 0


def test_a_pipeline_sums_gradients_once():
    """However many microbatches there are."""
    trainers = [trainer_of(Plan(pipeline=2, microbatches=count)) for count in (1, 4)]
    sent = [step_traffic(trainer, trace(trainer, 16, T).jaxpr) for trainer in trainers]
    few, many = (total(one for one in some if one.axes == ("data",)) for some in sent)
    assert few == many > 0


@pytest.mark.parametrize(("mixer", "hops"), [("full", 8), ("window(4,0)", 2)])
def test_a_ring_sends_what_is_used(mixer, hops):
    """Keys and values to the next hop, not from the last; in the backward pass their gradients too, which then go home."""
    length = 64
    trainer = trainer_of(Plan("sequence"), None, dataclasses.replace(CONFIG, mixer=mixer, max_len=length, unroll=1))
    traced = trace(trainer, B, length)
    with jax.set_mesh(trainer.layout.mesh):
        text = traced.lower().compile(ONCE).as_text()
    size = B * length // 8 * CONFIG.dim * 4
    for sent in (step_traffic(trainer, traced.jaxpr), compiled_traffic(text)):
        arrays = sum(one.bytes / size for one in sent if one.kind == "collective-permute" and one.size >= size)
        assert arrays == CONFIG.layers * ((hops - 1) * (2 + 4) + 2)


def test_a_permutation_whose_first_device_keeps_its_own():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n %p = f32[4]{0} collective-permute(%x), source_target_pairs={PAIRS}\n}"
    found = [compiled_traffic(text.replace("PAIRS", pairs)) for pairs in ("{0,0},{1,2},{2,1}", "{0,0},{1,1}")]
    assert found == [[Collective("collective-permute", (), 2, 16)], []]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", 4),
        ("[2,4]<=[4,2]T(1,0)", 4),
        ("mesh['data'=4,'tensor'=2] {'tensor'}", 2),
        ("mesh['a'=1,'b'=2,'c'=4], device_ids=([4,2]T(1,0)) {'a','c'}", 4),
        ("mesh['data'=8] {'data':(2)4}", 4),
        ("{}", 8),
    ],
)
def test_groups_as_programs_write_them(groups, devices):
    text = (
        "HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8\n\nENTRY %main (x: f32[4]) -> f32[4] {\n"
    )
    text += " %s = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups=GROUPS, x=y\n}"
    assert compiled_traffic(text.replace("GROUPS", groups)) == [Collective("all-reduce", (), devices, 16)]


def test_groups_that_cannot_be_read_are_refused():
    text = "ENTRY %main (x: f32[4]) -> f32[4] {\n %s = f32[4]{0} all-reduce(%x), replica_groups=<8>\n}"
    with pytest.raises(InputError, match="replica_groups=<8>"):
        compiled_traffic(text)


def over(body, *shapes):
    run = jax.shard_map(
        body, mesh=MESH, in_specs=PartitionSpec("data", "tensor"), out_specs=PartitionSpec("data", "tensor")
    )
    traced = jax.jit(run).trace(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return traffic(traced.jaxpr, MESH.shape)


def test_loops_are_multiplied_out_and_branches_counted_once():
    def turn(carry, _):
        return jax.lax.ppermute(carry, "tensor", [(0, 1)]), None

    def body(x):
        x = jax.lax.scan(turn, x, None, length=5)[0]
        few = lambda x: jax.lax.ppermute(x, "data", [(0, 1)])  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, lambda x: few(few(x)), few, x)

    found = over(body, (4, 8))
    assert sorted(found, key=lambda one: one.axes) == [
        Collective("collective-permute", ("data",), 2, 2 * 2 * 4, 2),
        Collective("collective-permute", ("tensor",), 4, 2 * 2 * 4, 5),
    ]


def test_bytes_of_each_kind():
    sizes = {
        kind: Collective(kind, ("tensor",), 4, 1000).bytes
        for kind in ("all-reduce", "all-gather", "collective-permute")
    }
    assert sizes == {"all-reduce": 1500.0, "all-gather": 750.0, "collective-permute": 1000.0}


def test_what_nobody_reads_is_not_sent():
    """Compilers drop it, whether it stands by itself or in a loop."""

    def body(x):
        def turn(x, _):
            unread = jax.lax.all_gather(x, "tensor")
            return x + 0 * jax.lax.psum(x, "data") if unread.ndim else x, None

        jax.lax.all_gather(x, "data")
        return jax.lax.scan(turn, x, None, length=2)[0]

    assert over(body, (4, 8)) == [Collective("all-reduce", ("data",), 2, 2 * 2 * 4, 2)]


def test_a_loop_of_unknown_length_is_refused():
    def body(x):
        turn = lambda x: jax.lax.ppermute(x, "tensor", [(0, 1)])  # noqa: E731
        return jax.lax.while_loop(lambda x: x[0, 0] < 3, turn, x)

    with pytest.raises(
        InputError, match="collective-permute over .'tensor',. runs in a loop whose length is not known"
    ):
        over(body, (4, 8))
