"""The fixtures of experiments/advise: valid configs, known techniques, units whose removal is free, and one measurement."""

import dataclasses
import importlib
import json
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp import tasks
from hpnlp.advise import AdviseSettings, Goal, Needs, Technique, techniques
from hpnlp.advise.candidate import Candidate
from hpnlp.compress.recipe import parse_recipe
from hpnlp.cost.paired_times import Ratio, Verdict
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.training.config import resolve
from tests.contracts import once
from tests.tiny import quick_compiler, text, xla_cache  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1]
HERE = ROOT / "experiments" / "advise"
NAMES = ("planted_texts", "growth", "fixtures", "exhaustive", "regret", "advise_tables")


@pytest.fixture(scope="module")
def modules():
    """Name -> module of experiments/advise, and the one with their table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "experiments" / "bench"))
        patch.syspath_prepend(str(HERE))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in (*NAMES, "result_plots"):
        sys.modules.pop(name, None)


def test_configs_are_valid_and_techniques_exist(modules):
    fixtures = modules["fixtures"].FIXTURES
    assert len({fixture.name for fixture in fixtures}) == len(fixtures)
    for fixture in fixtures:
        config = resolve(fixture.make_config(Path("data.jsonl")))
        tasks.make_model(config, tasks.find(config.task).planned_sizes(config))
        listed = [t for t in fixture.techniques or techniques(4) if fixture.settings.goal in t.goals]
        assert {t.name for t in listed}.issuperset([*fixture.winners, *fixture.decoys]), fixture.name
        assert set(fixture.winners).isdisjoint(fixture.decoys)


def test_texts_fill_sequences_and_contain_letters_of_their_class(modules, tmp_path):
    modules["planted_texts"].write_labelled(tmp_path / "texts.jsonl", 200, 16, 254, long=0.1)
    records = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    lengths = np.array([len(record["text"]) for record in records])
    assert lengths.max() == 254 and (lengths < 46).mean() > 0.8
    assert all(set(record["text"]) & set("abcd") == {record["label"]} for record in records)
    modules["planted_texts"].write_chain(tmp_path / "chain.txt", 100)
    lines = (tmp_path / "chain.txt").read_text().split()
    pairs = [line[i : i + 2] for line in lines for i in range(len(line) - 1)]
    assert len(lines) == 100 and len(set(pairs)) > 12
    most = sorted((pairs.count(pair) for pair in set(pairs)), reverse=True)[:12]
    assert sum(most) / len(pairs) == pytest.approx(0.9 + 0.1 / 12, abs=0.02)


def test_added_units_leave_the_outputs_as_they_are_and_are_the_ones_that_go(modules):
    config = LMConfig(dim=8, heads=2, layers=2, vocab=16, max_len=8, mlp="gelu", mlp_dim=12)
    weights = nn.meta.unbox(once(LM(config).init, jax.random.key(0), example_batch(1, 8)))["params"]
    tokens = jnp.arange(16).reshape(2, 8)

    def logits(config, weights):
        return jax.jit(lambda w: LM(config).apply({"params": w}, tokens, method="logits"))(weights)

    expected = logits(config, weights)
    wide, wide_weights = modules["growth"].AddColumns(width=96, text="").compress(config, weights, None)
    assert wide.mlp_dim == 96
    np.testing.assert_allclose(logits(wide, wide_weights), expected, atol=1e-4)
    deep, deep_weights = modules["growth"].AddLayers(count=2, text="").compress(config, weights, None)
    assert deep.layers == 4
    np.testing.assert_allclose(logits(deep, deep_weights), expected, atol=1e-4)
    (stage,) = parse_recipe("layers(2)")
    again, again_weights = stage.compress(deep, deep_weights, None)
    assert again.layers == 2
    jax.tree.map(np.testing.assert_array_equal, again_weights, weights)


def test_entries_beyond_their_bound_and_the_table_of_rows(modules):
    entry = modules["exhaustive"].Entry
    name = Candidate(("int8",), "int8")
    fast, unsure = (Ratio(0.4, 0.35, high, Verdict.FASTER) for high in (0.45, 0.55))
    assert entry(name, fast, bound=2.0).exceeds_bound and not entry(name, unsure, bound=2.0).exceeds_bound
    assert entry(name, fast, is_kept=True).is_good and not entry(name, fast).is_good
    row = {
        "fixture": "one", "goal": "latency", "recommended": "int8", "best": "int8 + bf16", "regret": 0.2, "is_winner": True,
        "decoys": [], "is_covered": True, "is_slower": False, "not_attributed": 0.05, "bounds": 3, "bounds_exceeded": [],
        "ratio": [0.5, 0.4, 0.6], "exhaustive_ratio": [0.5, 0.4, 0.6], "best_ratio": [0.4, 0.3, 0.5], "advise_seconds": 60.0,
        "exhaustive_seconds": 120.0, "baseline_seconds": 0.01, "workload": "the loss of 1 sequence",
    }  # fmt: skip
    nothing = {**row, "fixture": "two", "recommended": None, "ratio": None, "exhaustive_ratio": None, "best": None}
    nothing |= {"best_ratio": None, "regret": 0.0, "is_winner": False, "is_covered": None, "not_attributed": None}
    lines = dict(modules["advise_tables"].advise([row, nothing]))
    assert lines["fixtures whose planted answer was recommended, and no decoy"] == "1 of 2"
    assert lines["fixtures with a regret of at most 10 %"] == "1 of 2"
    assert lines["recommendations that are slower than the model as it is"] == "0 of 1"
    assert "int8" in modules["regret"].summary([row, nothing])


def in_this_process(command, environment, log):
    """Runs a trial or a training without a process of its own, which would take seconds to start."""
    (module,) = re.findall(r"(\S+) as module", command[2])
    importlib.import_module(module).main(Path(command[-1]))
    return 0


@pytest.mark.slow
def test_a_fixture_is_measured_and_an_interrupted_one_goes_on(modules, tmp_path):
    module = modules["regret"]
    sampled, sgd = {"model.output": "sampled(64)"}, {"optimizer.name": "sgd"}
    table = tuple(
        Technique(f"{field}={value}", "Training", (Goal.TRAINING,), Needs.TRAINING, changes={field: value})
        for changes in (sampled, sgd)
        for field, value in changes.items()
    )
    fields = {
        "data.seq_len": 16,
        "data.batch_size": 4,
        "model.cells": "gru(8)",
        "model.vocab": 32_768,
        "train.steps": 4,
    }
    fixture = modules["fixtures"].Fixture(
        "tiny",
        "a vocabulary",
        "rnn_lm",
        {**fields, "model.tied": False, "data.heldout_bytes": 5000},
        lambda path: modules["planted_texts"].write_chain(path, 200),
        AdviseSettings(Goal.TRAINING, seconds=120.0, train_seconds=2.0),
        ("model.output=sampled(64)",),
        ("optimizer.name=sgd",),
        techniques=table,
    )
    directory = tmp_path / "tiny"
    row = module.measured(fixture, directory, dataclasses.replace(module.TRIAL, changes={}), in_this_process)
    assert {entry["name"] for entry in row["entries"]} >= {technique.name for technique in table}
    assert row["regret"] <= 1 and row["advise_seconds"] > 0 and not row["errors"]
    assert (directory / "advise" / "advise.md").exists() and len(list((directory / "exhaustive").glob("arm-*"))) > 1
    before = json.loads((directory / module.SECONDS).read_text())
    assert module.measured(fixture, directory, module.TRIAL) == json.loads((directory / module.ROW).read_text())
    assert json.loads((directory / module.SECONDS).read_text()) == before
