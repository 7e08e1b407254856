"""Configuration of a run: types, checks, and config.json."""

import json

import pytest
from ml_collections import ConfigDict

from hpnlp.training import config as configs
from hpnlp.training.config import Config, TrainConfig
from hpnlp.types import InputError
from tests.messages import raises


def test_default_resolves_to_the_dataclasses():
    assert configs.resolve(configs.default()) == Config()


def test_default_raises_on_unknown_fields_and_wrong_types():
    values = configs.default()
    with pytest.raises(AttributeError, match='Did you mean "dim" instead of "dims"?'):
        values.model.dims = 3
    with pytest.raises(TypeError, match="dim"):
        values.model.dim = "wide"
    with pytest.raises(TypeError, match="fsdp"):
        values.plan.fsdp = "all"  # None by default, and still an int


def test_json_round_trips():
    values = configs.default()
    values.data.weights = (0.25, 0.75)
    values.plan.fsdp = 2
    values.optimizer.learning_rate = 1 / 3
    resolved = configs.resolve(values)
    assert resolved.data.weights == (0.25, 0.75)
    assert configs.from_json(configs.to_json(resolved)) == resolved


def test_files_without_a_field_count_take_defaults():
    older = json.loads(configs.to_json(Config()))
    del older["train"]["sample"]
    del older["plan"]
    del older["fields"]
    assert configs.from_json(json.dumps(older)) == Config()


def test_fields_of_later_versions_take_defaults(monkeypatch):
    """A file of a version without `train.sample` has fewer fields, and the count of these."""
    older = json.loads(configs.to_json(Config()))
    del older["train"]["sample"]
    older["fields"] -= 1
    assert configs.from_json(json.dumps(older)) == Config()


@pytest.mark.parametrize("lost", ["model.residual", "optimizer.learning_rate", "train.init_from"])
def test_lost_fields_raise(lost):
    values = json.loads(configs.to_json(Config()))
    section, field = lost.split(".")
    del values[section][field]
    with pytest.raises(InputError, match=rf"config.json was written with \d+ fields and holds \d+: restore {lost}, or"):
        configs.from_json(json.dumps(values))
    del values["data"]
    raises(rf"restore .*data.path.*{lost}|restore .*{lost}.*data.path", lambda: configs.from_json(json.dumps(values)))


def test_differences_name_both_values():
    new = configs.resolve({"model": {"dim": 512}, "plan": {"tensor": 2}})
    assert configs.differences(Config(), Config()) == []
    assert configs.differences(Config(), new) == ["model.dim: 256 -> 512", "plan.tensor: None -> 2"]


def test_integers_become_floats():
    assert configs.resolve(ConfigDict({"optimizer": {"weight_decay": 0}})).optimizer.weight_decay == 0.0


def test_invalid_values_raise():
    for values, message in (
        ({"modle": {}}, "unknown config field modle: did you mean 'model'?"),
        ({"model": {"dims": 3}}, "unknown config field model.dims: did you mean 'dim'?"),
        ({"model": 3}, "config field model is 3: expected a section with dim, heads, "),
        ({"model": {"dim": 3.5}}, "config field model.dim=3.5 is of type float: expected int"),
        ({"model": {"dim": True}}, "config field model.dim=True is of type bool: expected int"),
        ({"model": {"tied": 1}}, "config field model.tied=1 is of type int: expected bool"),
        ({"plan": {"fsdp": "2"}}, "config field plan.fsdp='2' is of type str: expected int or NoneType"),
        ({"data": {"weights": ["a"]}}, "config field data.weights='a' is of type str: expected float"),
        ({"train": {"weights": "shared"}}, "train.weights='shared' keeps zeros and equal numbers of the weights"),
        ({"train": {"weights": "l1(0.5)"}, "optimizer": {"ema": 0.9}}, "optimizer.ema=0.9 with"),
        ({"train": {"weights": "group_lasso"}, "optimizer": {"average": "uniform"}}, "optimizer.average='uniform'"),
        ({"train": {"patience": 2}}, "train.patience=2 counts evaluations: set train.eval_every as well"),
        ({"train": {"eval_stride": 300}}, "train.eval_stride=300 is more than data.seq_len=256: choose 0"),
        ({"train": {"profile": "5:11", "steps": 10}}, "train.profile='5:11' goes beyond train.steps=10"),
        ({"optimizer": {"learning_rate": float("inf")}}, "optimizer.learning_rate=inf: expected a finite number"),
        ({"optimizer": {"schedule": "wsd(decay=1e999)"}}, "optimizer.schedule='wsd(decay=1e999)' is not a spec"),
        ({"optimizer": {"warmup": 10**12}}, "optimizer.warmup=1000000000000: expected at most 2147483647"),
        ({"train": {"seed": 2**64}}, "train.seed=18446744073709551616: expected at most 4294967295"),
        ({"train": {"steps": 10**10}}, "train.steps=10000000000: expected at most 1000000000"),
        ({"data": {"weights": [1.0, float("inf")]}}, "data.weights=(1.0, inf): expected numbers over 0"),
        ({"data": {"prompt_field": "text"}}, "data.prompt_field='text' is data.text_field, too, so that each text"),
        ({"data": {"batch_size": 10**8, "seq_len": 100}}, "are 10,000,000,000 tokens: expected at most 2,147,483,647"),
        ({"model": {"mixer": "full*1000000000"}}, "model.mixer='full*1000000000' names 1000000000 layers: expected at"),
        ({"model": {"dim": 100, "heads": 3}}, "model.dim=100 is not a multiple of model.heads=3"),
        ({"model": {"dtype": "fp16"}}, "unknown model.dtype 'fp16': did you mean 'float16'?"),
    ):
        with pytest.raises(InputError) as caught:
            configs.resolve(values)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_invalid_profile_raises():
    for profile in ("3", "3:", ":3", "0:3", "5:3", "a:b", "-1:3", "1:2:3"):
        raises(r'expected "first:last", steps from 1, as in "10:15"', TrainConfig, profile=profile)


def test_profile_range_is_parsed():
    assert TrainConfig().profile_range() == (0, 0)
    assert TrainConfig(profile="10:15").profile_range() == (10, 15)


def test_long_seeds_of_early_versions_are_cut_to_32_bits():
    text = configs.to_json(configs.resolve({})).replace('"seed": 0,', f'"seed": {2**40 + 7},', 1)
    sections = json.loads(text)
    assert sections["train"]["seed"] == 2**40 + 7
    assert configs.from_json(text).train.seed == 7
    raises("train.seed", configs.resolve, {"train": {"seed": 2**40 + 7}})


def test_damaged_json_raises():
    raises("config.json is not valid JSON .*: restore it", configs.from_json, '{"model": {')
    raises("it holds a list, not an object", configs.from_json, "[1, 2]")
