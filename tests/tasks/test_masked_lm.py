"""Masked language modelling: sizes of the model, and configs that do not fit."""

import dataclasses

import pytest

from hpnlp.tasks.masked_lm import MaskedDataConfig, MaskedLanguageModel
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.types import InputError
from tests.messages import raises

TASK = MaskedLanguageModel()
CONFIG = configs.resolve({"task": "masked_lm", "model": {"dim": 8, "heads": 2}, "data": {"seq_len": 8}})


def test_model_has_an_id_for_the_mask():
    assert TASK.model(CONFIG, Sizes(20)).config.vocab == 21
    planned = dataclasses.replace(CONFIG, data=MaskedDataConfig(tokenizer="words(100)"))
    assert TASK.model(planned, TASK.planned_sizes(planned)).config.vocab == 101
    limited = dataclasses.replace(planned, model=dataclasses.replace(CONFIG.model, vocab=64))
    assert TASK.model(limited, TASK.planned_sizes(limited)).config.vocab == 64


def test_models_that_do_not_fit_raise():
    for section, field, value, message in (
        ("model", "pooling", "mean", "model.pooling='mean': task='masked_lm' predicts tokens: set it to 'none'"),
        ("model", "classes", 3, "model.classes=3: task='masked_lm' predicts tokens: set it to 0"),
        ("model", "vocab", 20, "model.vocab=20 is less than the tokenizer's 21"),
        ("train", "eval_stride", 4, "train.eval_stride=4 is for language models"),
    ):
        changed = dataclasses.replace(getattr(CONFIG, section), **{field: value})
        with pytest.raises(InputError, match=message):
            TASK.model(dataclasses.replace(CONFIG, **{section: changed}), Sizes(20))


def test_invalid_masks_raise():
    for fields, message in (
        ({"mask_rate": 0.0}, "data.mask_rate=0.0: expected a probability"),
        ({"mask_span": 0.5}, "data.mask_span=0.5: expected a mean length"),
        ({"prompt_field": "ask"}, "data.prompt_field='ask': masked tokens are predicted in prompts as well"),
    ):
        raises(message, MaskedDataConfig, **fields)
