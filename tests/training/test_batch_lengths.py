"""Tokens and FLOPs of batches of different lengths, and models and plans that cannot have them."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpnlp.parallel.plan import Plan
from hpnlp.tasks import TASKS
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.training.batch_lengths import BatchLengths, check_buckets, padding_of
from tests.messages import raises

DATA = SimpleNamespace(data=SimpleNamespace(seq_len=64, batch_size=4))


def test_tokens_and_flops_count_real_lengths():
    lengths = BatchLengths.restored({}, 2, DATA)
    for length, is_timed in ((16, False), (16, True), (32, False)):
        lengths.add(length, is_timed)
    again = BatchLengths.restored(lengths.record(), 5, DATA)
    assert again.steps == {64: 2, 16: 2, 32: 1} and again.tokens() == 4 * (128 + 32 + 32)
    assert again.timed_tokens() == 4 * (128 + 16)
    assert again.real_timed_tokens() == again.timed_tokens() and again.padding_share() == 0
    trainer = SimpleNamespace(flops_by_part=lambda examples, length: {"": 3 * length, "mixing": examples * length**2})
    flops = again.flops_by_part(trainer, 64)
    assert flops == pytest.approx({"": 3 * 192 / 5, "mixing": 4 * (2 * 64**2 + 2 * 16**2 + 32**2) / 5})
    assert again.flops_by_part(SimpleNamespace(flops_by_part=lambda examples, length: None), 64) is None
    assert BatchLengths.restored({}, 0, DATA).flops_by_part(trainer, 64) == {"": 192, "mixing": 4 * 64**2}


def test_padding_is_counted():
    batch = {"segment_ids": np.array([[1, 1, 0, 0], [1, 2, 2, 0]])}
    assert padding_of(batch) == 0.375 and padding_of({}) == 0
    lengths = BatchLengths.restored({}, 0, DATA)
    for length, is_timed, padding in ((16, False, 0.5), (16, True, 0.25), (32, True, 0.75)):
        lengths.add(length, is_timed, padding)
    again = BatchLengths.restored(lengths.record(), 3, DATA)
    assert again == lengths and again.real_timed_tokens() == 4 * (12 + 8)
    assert again.tokens() == 4 * 64 and again.padding_share() == (8 + 4 + 24) / 64


def test_models_and_plans_of_one_length_raise():
    for model, plan, message in (
        ({}, {"sequence": 2}, "data.buckets=2 makes .* plan.sequence=2 divides .* set data.buckets=1"),
        ({"mixer": "synthesizer_random"}, {}, "data.buckets=2 makes .* sequences of 16 tokens only"),
    ):
        values = {
            "task": "classification",
            "model": {"dim": 8, "heads": 2, **model},
            "data": {"seq_len": 16, "buckets": 2},
        }
        config = configs.resolve(values)
        layout = Plan(**plan).layout({}, 2)
        made = TASKS["classification"].model(config, Sizes(20, classes=3))
        raises(message, check_buckets, config, made, layout)
