"""Traits that a mixer does not claim raise an error when a model is made, and not later."""

import dataclasses
import math
import types

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp.data import DataConfig
from hpnlp.models.decode import Generation
from hpnlp.models.decoding.beam_search import beam_search
from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.exact import ExactMixer
from hpnlp.ops.attention import Full, Window
from hpnlp.parallel.plan import Plan
from hpnlp.tasks import TASKS
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training.config import Config
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError, MixerTraits
from tests.fixed_and_drawing_mixers import token_mixer
from tests.messages import raises

LANGUAGE_MODEL = TASKS["lm"]
SIZES = {"vocab": 8, "dim": 8, "heads": 2, "layers": 2}


@pytest.fixture
def mixer(monkeypatch):
    """`mixer(trait=False)` makes an entry "other" of MIXERS with these traits."""

    def define(**claims):
        traits = dataclasses.replace(MixerTraits(), **claims)
        other = types.new_class("Other", (ExactMixer,), {}, lambda body: body.update(traits=traits, __annotations__={}))
        monkeypatch.setitem(MIXERS, "other", lambda **extra: other(Full(), **extra))

    return define


def test_language_models_need_causal_mixers(mixer):
    for trait in ("causal", "prefix_consistent"):
        mixer(**{trait: False})
        raises("model.mixer='full,other': other lets tokens depend on later", LMConfig, mixer="full,other", **SIZES)


def test_packed_data_need_mixers_that_isolate_segments(mixer):
    mixer(isolates_segments=False)
    with pytest.raises(InputError, match="model.mixer='other' mixes documents that share a sequence"):
        LANGUAGE_MODEL.model(Config(model=LMConfig(mixer="other", **SIZES)), Sizes(8))


def test_samples_and_generation_need_mixers_that_decode(mixer):
    mixer(decodes=False)
    config = Config(model=LMConfig(mixer="other", **SIZES))
    raises("train.sample=.*set train.sample=0", lambda: LANGUAGE_MODEL.model(config, Sizes(8)))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample=0))
    model = LANGUAGE_MODEL.model(config, Sizes(8))
    raises("model.mixer='other' cannot decode", Generation, model, None, [np.array([1])], tokens=1)


def test_mixers_without_heads_are_not_divided_by_sequence():
    with pytest.raises(InputError, match="a mixer without heads needs whole ones: set plan.sequence=1"):
        make_trainer(LM(LMConfig(mixer="conv", **SIZES)), OptimizerConfig(), Plan("sequence"), steps=1)


def test_convolutions_raise_for_masks_that_they_cannot_have():
    raises(
        "mixer 'conv.129.': width=129: expected at least 1, at most 128, such as 4",
        LMConfig,
        mixer="conv(129)",
        **SIZES,
    )
    for name in ("conv", "convolution"):
        raises("a convolution cannot apply the mask Window", MIXERS[name]().within, Window(3, 0))


def test_rates_of_dropout_outside_of_the_unit_interval_raise():
    for entry in MIXERS.values():
        for rate in (-0.1, 1.0, math.nan):
            raises(f"dropout={rate}: expected .*at least 0.*, less than 1", entry, dropout=rate)
    raises("sets dropout, but one rate holds for the whole", LMConfig, mixer="window(4,0),full(dropout=0.1)", **SIZES)


def test_options_of_projections_raise_without_projections():
    for name in ("qk_norm", "joint_qk_norm", "qkv_bias", "out_bias"):
        raises(
            f"model.{name}=True has no effect, because model.mixer='conv'",
            LMConfig,
            mixer="conv",
            **SIZES,
            **{name: True},
        )


def test_mixers_of_a_fixed_length_are_initialised_at_the_models_length_and_refuse_others(monkeypatch):
    monkeypatch.setitem(MIXERS, "tokens", token_mixer)
    fields = {"mixer": "tokens,full", **SIZES}
    model = LM(LMConfig(**fields, max_len=6))
    shapes = nn.meta.unbox(jax.eval_shape(lambda: model.init(jax.random.key(0), model.example_batch(1, 2))))
    assert shapes["params"]["layers"]["0_tokens"]["attention"]["mixer"]["pairs"].shape == (1, 6, 6)

    def apply(length):
        return jax.eval_shape(lambda weights: model.apply(weights, model.example_batch(1, length)).sum, shapes)

    assert apply(6).shape == ()
    raises("'tokens,full' mixes sequences of model.max_len=6 tokens only, .* have 5", apply, 5)
    raises("model.mixer='tokens,full' cannot decode", Generation, model, None, [np.array([1])], tokens=1)
    raises("model.mixer='tokens,full' cannot decode", beam_search, model, None, [np.array([1])], tokens=1, eos_id=0)
    with pytest.raises(InputError, match="model.max_len=0: model.mixer='tokens,full' mixes sequences of one length"):
        jax.eval_shape(lambda: LM(LMConfig(**fields)).init(jax.random.key(0), model.example_batch(1, 6)))
    config = Config(model=LMConfig(**fields, max_len=6), data=DataConfig(seq_len=8))
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, sample=0))
    raises("data.seq_len=8, model.max_len=6: .* one length", lambda: LANGUAGE_MODEL.model(config, Sizes(8)))
