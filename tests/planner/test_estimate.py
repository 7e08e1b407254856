"""Costs of a training step on one device: FLOPs, bubble, bandwidths; and the configs that can be planned."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from hpnlp import measure
from hpnlp.data import tokenizers
from hpnlp.data.stream import DataConfig
from hpnlp.models.lm import example_batch
from hpnlp.parallel.plan import AXES, Plan
from hpnlp.planner import DEVICES, costs
from hpnlp.planner.collectives import Collective
from hpnlp.planner.estimate import planned_model, planned_trainer
from hpnlp.training.config import Config
from hpnlp.training.optim import OptimizerConfig
from hpnlp.types import InputError
from tests.messages import raises
from tests.planner.common import CONFIG, MODEL, planned


def test_flops_of_all_devices_add_up():
    """The devices together do the FLOPs of one device, where none is idle and nothing is computed twice."""
    single = planned(Plan("single"), 1)
    trainer = planned_trainer(CONFIG, 1)
    batch, key = jax.eval_shape(lambda: example_batch(16, 128)), jax.eval_shape(lambda: jax.random.key(0))
    assert single.program.flops == measure.count_flops(trainer.step.jitted, trainer.state_shapes, batch, key)
    for plan in (Plan("data"), Plan("zero3"), Plan("data", data=2, tensor=4)):
        assert planned(plan).program.flops * 8 == pytest.approx(single.program.flops, rel=0.02)


def test_bubble_matches_formula():
    assert planned(Plan("data", pipeline=2, data=4, microbatches=4)).bubble == pytest.approx(1 / 5)
    estimate = planned(Plan("data", pipeline=2, data=4, microbatches=4, rounds=3))
    assert estimate.bubble == pytest.approx(1 / 13)
    seconds = estimate.seconds(DEVICES["h100"])
    assert seconds["bubble"] == pytest.approx((seconds["bubble"] + seconds["compute"]) / 13)


def test_bandwidth_of_mesh_axes():
    """8 devices are joined by fast links; a ring that leaves them uses the network card of each device on its way."""
    device, sizes = DEVICES["h100"], dict.fromkeys(AXES, 1) | {"data": 4, "fsdp": 4, "tensor": 4}
    assert device.collective_bandwidth(("tensor",), sizes) == 450e9
    assert device.collective_bandwidth(("fsdp",), sizes) == 50e9 * 2
    assert device.collective_bandwidth(("data",), sizes) == 50e9
    assert device.collective_bandwidth(("fsdp", "tensor"), sizes) == 50e9 * 8
    collective = Collective("all-reduce", ("data",), 4, 10**9, 2)
    assert device.seconds(collective, sizes) == pytest.approx(2 * 1.5 * 1e9 / 50e9)


@pytest.mark.parametrize(("file", "device"), [("plan", "h100"), ("plan_tpu", "v5p")])
def test_temporaries_error_covers_the_measured_errors(file, device):
    rows = json.loads(Path(f"experiments/results/{file}-cpu.json").read_text("utf-8"))["rows"]
    largest = max(1 / (1 + row["temporaries off"]) - 1 for row in rows if "temporaries off" in row)
    assert largest <= DEVICES[device].temporaries_error


def test_vocabulary_is_known_without_data():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab=0))

    def size(text):
        return planned_model(dataclasses.replace(config, data=DataConfig(tokenizer=text))).config.vocab

    assert (size("bytes"), size("words(3000)"), size("bpe(4096)")) == (tokenizers.build("bytes").vocab_size, 3000, 4096)
    for text in ("words", "words()", "bpe"):
        raises(r"tokenizer '(words|bpe)' takes .* missing a required argument", size, text)


def test_configs_that_training_rejects_raise():
    for model, tokenizer, message in (
        ({"vocab": 10}, "bytes", "model.vocab=10 is less than the tokenizer's 264: set it to 0"),
        ({"vocab": 200}, "bpe(4096)", "model.vocab=200 is less than the tokenizer's 259"),
        ({"max_len": 64, "position": "learned"}, "bytes", "data.seq_len=128 is longer than model.max_len=64 learned"),
        ({}, "words(2)", "tokenizer size 2: expected a number of ids, 5 to 16777216"),
        ({}, "words(3000, by=lines)", "unknown split of words by 'lines'"),
    ):
        config = dataclasses.replace(
            CONFIG,
            model=dataclasses.replace(MODEL, **{"vocab": 0} | model),
            data=dataclasses.replace(CONFIG.data, tokenizer=tokenizer),
        )
        raises(re.escape(message), costs, config, 1)


def test_vocabulary_below_the_largest_tokenizer_is_planned():
    """Whether training accepts it depends on the text that the tokenizer is trained on."""
    model = dataclasses.replace(MODEL, layers=1, vocab=300)
    assert costs(Config(model, DataConfig(tokenizer="words(3000)", seq_len=16, batch_size=8)), 1).parameters > 0


@pytest.mark.parametrize("output", ["class(by=mass)", "hierarchical(similar)", "sampled(64,unigram)"])
def test_output_layers_with_word_frequencies_are_planned(output):
    model = dataclasses.replace(MODEL, layers=1, vocab=0, tied=False, output=output)
    config = Config(model=model, data=DataConfig(tokenizer="words(500)", seq_len=16, batch_size=8))
    assert costs(config, 8).program.flops > 0
    with pytest.raises(InputError, match=re.escape("words(...)")):
        costs(dataclasses.replace(config, data=DataConfig(seq_len=16, batch_size=8)), 8)


def test_learning_rate_scaling_costs_nothing():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1))
    plain, scaled = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(base_batch=size)), 1) for size in (0, 32)
    )
    assert (scaled.memory, scaled.collectives) == (plain.memory, plain.collectives)


def test_skippable_update_counts_like_an_update():
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, layers=1))
    always, skippable = (
        costs(dataclasses.replace(config, optimizer=OptimizerConfig(skip_nonfinite=skip)), 1) for skip in (False, True)
    )
    assert skippable.program.bytes == pytest.approx(always.program.bytes, rel=0.01)
