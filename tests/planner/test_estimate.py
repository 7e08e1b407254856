"""What a plan says of a step: its temporaries beside the compiler's, its operations, time and what would make it fit."""

import dataclasses
import functools
import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hpnlp import measure
from hpnlp.cli import experiment
from hpnlp.data import tokenizers
from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import LMConfig, example_batch
from hpnlp.parallel.plan import AXES, Plan
from hpnlp.planner import DEVICES, Device, costs, render, search
from hpnlp.planner.collectives import Collective, held_bytes, trace
from hpnlp.planner.compiled import compile_step
from hpnlp.planner.devices import USABLE
from hpnlp.planner.estimate import gradient_bytes, model_of, parts_of, state_bytes, trainer_of
from hpnlp.planner.jaxpr_cost import read
from hpnlp.training.config import Config, resolve
from hpnlp.training.optim import OptimizerConfig
from hpnlp.types import InputError
from tests.contracts import ONCE

MODEL = LMConfig(layers=6, dim=64, heads=4, mlp_dim=192, vocab=264, unroll=1)
CONFIG = Config(model=MODEL, data=DataConfig(seq_len=128, batch_size=16), plan=Plan("single"))
SMALL = Device({"float32": 1e12, "bfloat16": 2e12}, 80e6, 1e11, 4, 1e10, 1e9, 1e9)


def planned(plan, devices=8, **fields):
    return costs(dataclasses.replace(CONFIG, plan=plan, **fields), devices)


def of(function, *shapes, **options):
    return read(jax.jit(function).trace(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr, **options)


def test_arrays_between_products_are_not_kept():
    """(x w), its exp twice read, and the last product; sums of them are made on the way."""
    found = of(lambda x, w: jnp.sin(x @ w + 1.0) @ w, (8, 4), (4, 4))
    assert found.peak == 2 * 8 * 4 * 4  # the sine takes the place of the first product
    assert found.flops == 2 * 2 * 8 * 4 * 4
    assert of(lambda x: x * 2 + 1, (8,)).peak == 8 * 4
    assert of(lambda x: x * 2 + 1, (8,), donated=True).peak == 0


def test_loops_keep_what_they_stack_and_carry():
    def run(x, w):
        return lax.scan(lambda x, _: (x @ w, x), x, None, length=10)

    found = of(run, (8, 4), (4, 4))
    assert found.flops == 10 * 2 * 8 * 4 * 4
    assert found.peak == pytest.approx((10 + 2) * 8 * 4 * 4, rel=0.1)
    branches = of(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x), (4, 4))
    assert branches.flops == 2 * 2 * 4**3


def test_turns_side_by_side_are_not_stacked():
    """What a loop hands on of each turn is there once where all turns are written out, whatever is computed from it."""

    def run(x, w, unroll):
        turns, back = lax.scan(lambda x, _: (x @ w, (x, jnp.cos(x) * 2, x + 1)), x, None, length=10, unroll=unroll)
        return lax.scan(lambda y, own: (y @ w + sum(own), None), turns, back, length=10, unroll=unroll, reverse=True)[0]

    stacked, apart = (of(functools.partial(run, unroll=unroll), (64, 4), (4, 4)) for unroll in (1, 10))
    assert apart.flops == stacked.flops
    one = 64 * 4 * 4
    assert stacked.peak >= 30 * one
    assert 10 * one <= apart.peak <= 14 * one


def test_a_roofline_is_that_of_each_operation():
    found = of(lambda x, w: x @ w, (8, 4), (4, 4))
    moved = (8 * 4 + 4 * 4 + 8 * 4) * 4
    assert found.seconds({"float32": 1.0}, 1e9, False) == 2 * 8 * 4 * 4
    assert found.seconds({"float32": 1e9}, 1.0, False) == moved


def test_products_take_the_time_of_their_operands():
    half, whole = jax.ShapeDtypeStruct((4, 4), "bfloat16"), jax.ShapeDtypeStruct((4, 4), "float32")
    found = read(jax.jit(lambda x, y: (x @ x, y @ y @ y)).trace(half, whole).jaxpr)
    assert found.flops_by_dtype == {"float32": 2 * 2 * 4**3, "bfloat16": 2 * 4**3}
    assert found.seconds({"float32": 1.0, "bfloat16": 2.0}, 1e9, False) == 2 * 2 * 4**3 + 4**3


@pytest.mark.parametrize("remat", ["none", "full", "names(mixed)", "dots"])
def test_activations_are_what_the_compiler_allocates(remat):
    config = dataclasses.replace(CONFIG, plan=Plan("single", remat=remat))
    trainer = trainer_of(config, jax.devices()[:1])
    traced = trace(trainer, 16, 128)
    with jax.set_mesh(trainer.layout.mesh):
        found = traced.lower().compile(ONCE).memory_analysis().temp_size_in_bytes
    said = read(traced.jaxpr, parts_of(trainer), donated=True).peak
    assert said == pytest.approx(found, rel=0.2)


def test_each_policy_keeps_less():
    policies = ("none", "names(projected,hidden)", "full")
    kept = [planned(Plan("single", remat=remat), 1).memory["activations"] for remat in policies]
    assert kept == sorted(kept, reverse=True) and kept[-1] < kept[0] / 3


def test_work_is_that_of_all_devices():
    """FLOPs of a device, times the devices, are those of the whole step, where nothing is idle or made twice."""
    alone = planned(Plan("single"), 1)
    trainer = trainer_of(CONFIG, 1)
    batch, key = jax.eval_shape(lambda: example_batch(16, 128)), jax.eval_shape(lambda: jax.random.key(0))
    assert alone.program.flops == measure.count_flops(trainer.step.jitted, trainer.state_shapes, batch, key)
    for plan in (Plan("data"), Plan("zero3"), Plan("data", data=2, tensor=4)):
        assert planned(plan).program.flops * 8 == pytest.approx(alone.program.flops, rel=0.02)


def test_memory_falls_with_what_is_shared_out():
    whole, third = planned(Plan("data")), planned(Plan("zero3"))
    for name in ("parameters", "optimizer", "gradients"):
        assert third.memory[name] < whole.memory[name] / 6
    assert third.memory["activations"] < 1.5 * whole.memory["activations"]
    state = trainer_of(dataclasses.replace(CONFIG, plan=Plan("zero3")), 8).state_shapes
    assert third.memory["parameters"] == held_bytes(state.params)


def test_bubble():
    assert planned(Plan("data", pipeline=2, data=4, microbatches=4)).bubble == pytest.approx(1 / 5)
    found = planned(Plan("data", pipeline=2, data=4, microbatches=4, rounds=3))
    assert found.bubble == pytest.approx(1 / 13)
    seconds = found.seconds(DEVICES["h100"])
    assert seconds["bubble"] == pytest.approx((seconds["bubble"] + seconds["compute"]) / 13)


def test_links_of_a_mesh():
    """8 neighbours on fast links; a ring that leaves them uses the network card of each device on its way."""
    device, sizes = DEVICES["h100"], dict.fromkeys(AXES, 1) | {"data": 4, "fsdp": 4, "tensor": 4}
    assert device.bandwidth(("tensor",), sizes) == 450e9
    assert device.bandwidth(("fsdp",), sizes) == 50e9 * 2
    assert device.bandwidth(("data",), sizes) == 50e9
    assert device.bandwidth(("fsdp", "tensor"), sizes) == 50e9 * 8
    sent = Collective("all-reduce", ("data",), 4, 10**9, 2)
    assert device.seconds(sent, sizes) == pytest.approx(2 * 1.5 * 1e9 / 50e9)


def test_the_smallest_change_that_fits(monkeypatch):
    found = planned(Plan("data"), data=DataConfig(seq_len=128, batch_size=256))
    assert not found.fits(SMALL)
    flags, other = search.mended(found, SMALL, lambda done, of: None)
    assert other.fits(SMALL) and flags == "'--config.plan.remat=names(mixed)'"
    monkeypatch.setattr(search, "REMATS", ("none",))  # all changes and their pairs will be tried: fewer of them
    small, seen = planned(Plan("data"), devices=2), []
    tiny = dataclasses.replace(SMALL, memory=1e5)
    assert search.mended(small, tiny, lambda done, of: seen.append((done, of))) is None
    assert [done for done, _ in seen] == list(range(seen[0][1]))


def test_what_fits_with_the_state_on_the_host_alone():
    config = dataclasses.replace(CONFIG, data=DataConfig(seq_len=16, batch_size=1))
    found = costs(config, 1)
    resting = Plan("single", remat="full", offload_optimizer=True, offload_parameters=True)
    least = costs(dataclasses.replace(config, plan=resting), 1)
    flags, other = search.mended(
        found, dataclasses.replace(SMALL, memory=1.01 * least.bytes / USABLE), lambda done, of: None
    )
    assert other.config.plan == resting and other.bytes == least.bytes
    assert all(f"--config.plan.{name}" in flags for name in ("remat=full", "offload_optimizer", "offload_parameters"))
    layers = sum(x.size * 4 for x in jax.tree.leaves(trainer_of(config, 1).state_shapes.params["layers"]))
    assert found.hosted == 0 and least.hosted == pytest.approx(layers + found.memory["optimizer"], rel=0.01)
    said = [
        render.table(one, SMALL, "small").partition("of the state, on the host")[2].split()[:1]
        for one in (found, least)
    ]
    assert said == [[], [f"{least.hosted / 1e9:.3f}"]]


def test_a_ranking_says_what_it_leaves_out():
    found = costs(
        dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1, output="nce(16)", tied=False)), 1
    )
    found = dataclasses.replace(found, devices=2)
    said = render.ranking([found] * 23, DEVICES["h100"], found.config.plan).splitlines()
    assert said[20:23] == [
        said[20],
        "and 3 more that fit",
        "not counted: what the compiler sends for the loss of nce(16)",
    ]


def test_a_fit_that_the_plan_is_not_exact_enough_for_is_told():
    found = planned(Plan("data"))
    temporaries = found.bytes - sum(found.memory[name] for name in ("parameters", "optimizer"))

    def said(spare):
        """Of a device that has room for so much more than the temporaries."""
        device = dataclasses.replace(SMALL, memory=(found.bytes + spare * temporaries) / USABLE)
        together = next(line for line in render.table(found, device, "small").splitlines() if "can be used" in line)
        return together.partition("can be used: ")[2], render.ranking([found], device, found.config.plan)

    assert said(-0.01)[0] == "IT DOES NOT FIT" and said(0.21)[0] == "it fits"
    line, ranking = said(0.1)
    assert line.startswith(f"it fits; {0.1 * temporaries / 1e9:.3g} GB are left, and temporaries may take ")
    assert f"{0.2 * temporaries / 1e9:.3g} GB more than planned: compile it first (--depth=compiled)" in line
    assert "%  tight\n" in ranking and "tight: " in ranking and "tight" not in said(0.21)[1]


def test_a_picture_says_where_the_memory_ends(tmp_path):
    found = planned(Plan("data"))
    for share, told in ((0.5, ""), (10, r" \(above\)")):
        device = dataclasses.replace(SMALL, memory=share * found.bytes / USABLE)
        drawn = render.draw(found, device, "small", tmp_path / "plan.svg").read_text("utf-8")
        assert re.search(f"<!-- small can hold: {share * found.bytes / 1e9:.4g}{told} -->", drawn)


@pytest.mark.parametrize(("file", "device"), [("plan", "h100"), ("plan_tpu", "v5p")])
def test_a_plan_is_doubted_by_as_much_as_compiled_steps_were_off(file, device):
    rows = json.loads(Path(f"experiments/results/{file}-cpu.json").read_text("utf-8"))["rows"]
    most = max(1 / (1 + row["temporaries off"]) - 1 for row in rows if "temporaries off" in row)
    assert most <= DEVICES[device].unplanned


def test_search_ranks_what_fits():
    config = dataclasses.replace(
        CONFIG, model=dataclasses.replace(MODEL, layers=2, heads=2), data=DataConfig(seq_len=32, batch_size=2)
    )
    told = []
    found = search.ranked(config, 2, SMALL, lambda done, of: told.append((done, of)))
    seconds = [one.total_seconds(SMALL) for one in found]
    assert seconds == sorted(seconds) and all(one.fits(SMALL) for one in found)
    assert {search.named(one).split(",")[0] for one in found} == {
        "data 2",
        "fsdp 2",
        "tensor 2",
        "pipeline 2",
        "sequence 2",
    }
    assert told[-1] == (len(found), len(found))


def test_search_keeps_what_it_does_not_choose():
    plan = Plan(pipeline=2, rounds=2, exchange="heads", offload_optimizer=True)
    config = dataclasses.replace(CONFIG, plan=plan)
    model = dataclasses.replace(MODEL, layers=2, heads=2)
    found = search.ranked(dataclasses.replace(config, model=model), 2, DEVICES["h100"], lambda done, of: None)
    kept = {(one.config.plan.offload_optimizer, one.config.plan.exchange, one.config.plan.rounds) for one in found}
    assert kept == {(True, "heads", 1)}


@pytest.mark.parametrize(
    "own",
    [
        Plan("3d", tensor=4, fsdp=-1, zero=2, rounds=2, microbatches=4, recompute_stages=True),
        Plan(sequence=2, exchange="heads", remat="full", offload_optimizer=True),
    ],
)
def test_the_flags_of_a_ranking_make_the_first_of_the_configs_own(own):
    model = dataclasses.replace(MODEL, layers=1)
    first = Plan("zero1", 1, 1, 2, 1, 1, 1, zero=1, exchange=own.exchange, remat="names(mixed)")
    ranked = dataclasses.replace(CONFIG, model=model, plan=first)
    told = render.ranking([costs(ranked, 2)], DEVICES["h100"], own).partition("the first: ")[2]
    before = [f"--config.plan.{name}={value}" for name, value in dataclasses.asdict(own).items() if value is not None]
    values = experiment.read("experiments/lm/bytes.py", [*before, *shlex.split(told)])
    made = resolve(values)
    assert costs(made, 2).zero == 1 and made.plan.sizes(2) == first.sizes(2)
    assert dataclasses.replace(made.plan, **first.sizes(2), zero=1) == first


@pytest.mark.parametrize(
    ("sizes", "zero", "told"),
    [
        ({"fsdp": 8}, 2, "--config.plan.name=zero2"),
        ({"data": 8}, 0, "--config.plan.name=data"),
        ({"fsdp": 4, "tensor": 2}, 3, "--config.plan.name=zero3 --config.plan.tensor=2"),
        ({"tensor": 8}, 0, "--config.plan.name=tensor"),
        ({"pipeline": 2, "sequence": 4}, 0, "--config.plan.name=pipeline --config.plan.sequence=4"),
    ],
)
def test_what_a_search_finds_is_named_by_what_it_is(sizes, zero, told):
    layers = dataclasses.replace(MODEL, layers=2, heads=8)
    config = dataclasses.replace(CONFIG, model=layers, plan=Plan("3d"))
    asked = dict.fromkeys(AXES, 1) | sizes
    plan = next(p for p in search._plans(config, 8) if p.sizes(8) == asked and p.zero == zero)
    found = costs(dataclasses.replace(config, plan=plan), 8)
    assert render.ranking([found], DEVICES["h100"], config.plan).partition("the first: ")[2] == told
    made = resolve(experiment.read("experiments/lm/bytes.py", told.split())).plan
    assert made.sizes(8) == plan.sizes(8)


def test_search_where_no_plan_is_at_fault():
    wrong = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, output="sampled(0)", tied=False))
    with pytest.raises(InputError) as alone:
        costs(wrong, 1)
    with pytest.raises(InputError) as found:
        search.ranked(wrong, 2, DEVICES["h100"], lambda done, of: None)
    assert str(found.value) == str(alone.value)


def test_search_where_the_batch_divides_under_no_plan():
    config = dataclasses.replace(CONFIG, optimizer=dataclasses.replace(CONFIG.optimizer, accumulate=2))
    with pytest.raises(InputError, match=r"over 14 devices by no plan that is searched: make it a multiple of 14,"):
        search.ranked(config, 14, DEVICES["h100"], lambda done, of: None)


def test_compiled_beside_planned():
    found = planned(Plan("data", data=2, fsdp=2, tensor=2, zero=3))
    made = compile_step(found, "compiled", "h100")
    assert made.arguments == pytest.approx(held_bytes(trainer_of(found.config, 8).state_shapes), rel=0.05)
    assert made.sent is not None
    assert sum(one.bytes for one in made.sent) == pytest.approx(sum(one.bytes for one in found.sent), rel=0.02)


def test_vocabulary_without_data():
    bare = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab=0))

    def size(text):
        return model_of(dataclasses.replace(bare, data=DataConfig(tokenizer=text))).config.vocab

    assert (size("bytes"), size("words(3000)"), size("bpe(4096)")) == (tokenizers.build("bytes").vocab_size, 3000, 4096)
    for text in ("words", "words()", "bpe"):
        with pytest.raises(InputError, match=r"tokenizer '(words|bpe)' takes .* missing a required argument"):
            size(text)


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [
        ({"vocab": 10}, "bytes", "model.vocab=10 is less than the tokenizer's 264: set it to 0"),
        ({"vocab": 200}, "bpe(4096)", "model.vocab=200 is less than the tokenizer's 259"),
        ({"max_len": 64, "position": "learned"}, "bytes", "data.seq_len=128 is longer than model.max_len=64 learned"),
        ({}, "words(2)", "tokenizer size 2: expected a number of ids, 5 to 16777216"),
        ({}, "words(3000, by=lines)", "unknown split of words by 'lines'"),
    ],
)
def test_what_training_refuses_is_not_planned(model, tokenizer, message):
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, **{"vocab": 0} | model),
        data=dataclasses.replace(CONFIG.data, tokenizer=tokenizer),
    )
    with pytest.raises(InputError, match=re.escape(message)):
        costs(config, 1)


def test_a_vocabulary_smaller_than_a_tokenizer_may_become_is_planned():
    """Which text it is trained on decides whether training refuses it."""
    model = dataclasses.replace(MODEL, layers=1, vocab=300)
    assert costs(Config(model, DataConfig(tokenizer="words(3000)", seq_len=16, batch_size=8)), 1).parameters > 0


@pytest.mark.parametrize("output", ["class(by=mass)", "hierarchical(similar)", "sampled(64,unigram)"])
def test_output_layers_that_ask_how_words_are_used(output):
    model = dataclasses.replace(MODEL, layers=1, vocab=0, tied=False, output=output)
    config = Config(model=model, data=DataConfig(tokenizer="words(500)", seq_len=16, batch_size=8))
    assert costs(config, 8).program.flops > 0
    with pytest.raises(InputError, match=re.escape("words(...)")):
        costs(dataclasses.replace(config, data=DataConfig(seq_len=16, batch_size=8)), 8)


def test_optimizers_count_by_their_state():
    two, one = (planned(Plan("single"), 1, optimizer=OptimizerConfig(name=name)).memory for name in ("adamw", "lion"))
    assert two["optimizer"] == pytest.approx(2 * one["optimizer"], rel=0.01)


def test_learning_rates_for_a_batch_cost_nothing():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1))
    plain, scaled = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(base_batch=rows)), 1) for rows in (0, 32)
    )
    assert (scaled.memory, scaled.sent) == (plain.memory, plain.sent)


def test_rows_have_gradients_of_their_own():
    model = dataclasses.replace(MODEL, layers=1, vocab=20000, tied=False, output="sampled(16)")
    config = dataclasses.replace(CONFIG, model=model, data=DataConfig(seq_len=16, batch_size=4))
    whole, rows = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(rows=some)), 1) for some in (False, True)
    )
    table, dense = 20000 * 64 * 4, 4 * model.non_embedding_parameters()
    # All tokens' rows, and of the output's those of all labels and 16 samples.
    assert rows.memory["gradients"] == pytest.approx(dense + (64 + 64 + 16) * 64 * 4, rel=0.01)
    assert rows.memory["gradients"] + rows.memory["activations"] == rows.program.peak < table
    assert whole.memory["gradients"] > 2 * table
    freed = state_bytes(whole.config, 1) - state_bytes(rows.config, 1)
    assert freed == whole.memory["gradients"] - rows.memory["gradients"]


@pytest.mark.parametrize(("plan", "width"), [(Plan("zero2"), 8), (Plan("zero3"), 8), (Plan(tensor=8), 64)])
def test_gradients_of_rows_are_what_the_compiler_makes(plan, width):
    """A device's part of the model's dimension, of all rows; no gradient of a table."""
    model = LMConfig(layers=1, dim=64, heads=8, mlp_dim=192, vocab=8000, unroll=1, tied=False, output="sampled(64)")
    config = Config(model, DataConfig(seq_len=32, batch_size=16), OptimizerConfig(rows=True), plan=plan)
    trainer = trainer_of(config, jax.devices())
    tables = sum(trainer.rows_trained(16, 32).values()) * width * 4
    whole = trainer.state_shapes.params if plan.name == "data" else trainer.part_shapes
    rest = {name: part for name, part in whole.items() if name not in ("embed", "head")}
    assert gradient_bytes(trainer, 16, 32) == held_bytes(rest) + tables
    with jax.set_mesh(trainer.layout.mesh):
        text = trace(trainer, 16, 32).lower().compile(ONCE).as_text()
    made = {(int(rows), int(columns)) for rows, columns in re.findall(r"= f32\[(\d+),(\d+)\]\S* add\(", text)}
    assert (32 * 16, width) in made and (32 * 16 + 64, width) in made
    assert not any(rows in (1000, 8000) for rows, _ in made)


def test_sums_of_accumulated_gradients_are_as_divided_as_these():
    """A part of the batch needs no more than all of it, and the sums no more than the gradients."""
    config = dataclasses.replace(CONFIG, plan=Plan("zero3"), data=DataConfig(seq_len=16, batch_size=16))
    whole, parts = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(accumulate=count)), 8) for count in (1, 2)
    )
    assert parts.program.peak <= whole.program.peak + whole.memory["gradients"]


def test_an_update_that_may_be_skipped_counts():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1))
    always, fine = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(skip_nonfinite=skip)), 1) for skip in (False, True)
    )
    assert fine.program.bytes == pytest.approx(always.program.bytes, rel=0.01)


@pytest.mark.parametrize(
    ("plan", "optimizer", "told"),
    [
        (Plan("zero3"), OptimizerConfig("muon"), ""),
        (Plan(), OptimizerConfig(rows=True), "optimizer.rows, the loss of nce(16)\n"),
    ],
)
def test_what_is_not_counted_is_told(plan, optimizer, told):
    fields = {"tied": False, "output": "nce(16)"} if optimizer.rows else {}
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1, **fields), optimizer=optimizer)
    said = render.table(costs(dataclasses.replace(config, plan=plan), 8), DEVICES["h100"], "h100")
    assert said.partition("not counted: what the compiler sends for ")[2].partition("  ")[0] == told


def test_what_rests_on_the_host():
    """It is not in the device's memory, and comes and goes over the host's link."""
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=2))
    there, away = (
        costs(dataclasses.replace(config, plan=Plan("single", offload_optimizer=away)), 1) for away in (False, True)
    )
    assert there.program.hosted == 0 and "host" not in there.seconds(DEVICES["h100"])
    assert there.memory["optimizer"] > 8 * there.parameters and "optimizer" not in away.memory
    assert away.program.hosted == pytest.approx(there.memory["optimizer"], rel=0.01)
    kept, sent = (planned(Plan("single", remat=remat), 1) for remat in ("names(hidden)", "offload(hidden)"))
    hidden = 6 * 16 * 128 * 2 * 192 * 4  # two products in float32, of each token and layer
    assert sent.program.hosted == pytest.approx(2 * hidden, rel=0.01)
    assert kept.memory["activations"] - sent.memory["activations"] == pytest.approx(hidden, rel=0.3)
    shared = planned(Plan("zero3", remat="offload(hidden)"))
    assert shared.program.hosted == pytest.approx(2 * hidden / 8, rel=0.01)


@pytest.mark.parametrize(("plan", "count"), [(Plan("single"), 1), (Plan("zero1"), 4)])
def test_layers_that_rest_on_the_host(plan, count):
    """They come for the forward pass, the backward pass and the update, and their gradients for the norm and the update."""
    layers = 6
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=layers))
    here, away = (
        costs(dataclasses.replace(config, plan=dataclasses.replace(plan, offload_parameters=on)), count)
        for on in (False, True)
    )
    size = 4 * model_of(config).config.non_embedding_parameters()
    # Parameters come three times and go once, gradients go once and come twice: none is kept from the forward pass.
    assert away.program.hosted == pytest.approx(7 * size, rel=0.01)
    assert here.memory["parameters"] - away.memory["parameters"] == pytest.approx(size, rel=0.01)
