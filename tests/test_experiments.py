"""Experiment files: every member of every sweep is a valid config, and those with large vocabularies train."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from hpnlp.cli import experiment
from hpnlp.data.reading import sources
from hpnlp.data.stream import prepare
from hpnlp.data.tokenizers import word_similarity
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import resolve
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer
from tests.messages import raises
from tests.tiny import quick_compiler, text, xla_cache  # noqa: F401  (fixtures)

ROOT = Path(__file__).parents[1] / "experiments"
WORDS = str(ROOT / "softmax" / "words.py")
LAYERS, LARGE = experiment.load(WORDS).LAYERS, experiment.load(WORDS).LARGE
# As small as possible; layers with 2048 frequent words need a larger vocabulary.
TINY = {
    "data.tokenizer": "words(2100, by=whitespace)",
    "data.seq_len": 8,
    "data.batch_size": 8,
    "data.heldout_bytes": 2000,
    "model.layers": 1,
    "model.dim": 16,
    "model.heads": 2,
    "train.steps": 2,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A substitute for the standard library: twelve files with 2197 words of three letters in their docstrings."""
    root = tmp_path_factory.mktemp("library")
    words = ["".join(letters) for letters in itertools.product("abcdefghijklm", repeat=3)]
    for i in range(12):
        (root / f"m{i}.py").write_text(f'"""{" ".join(words[i % 3 :])}"""\nx{i} = {i}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
        patch.setattr(word_similarity, "CONTEXTS", 50)  # the order of words takes seconds with 1000
        yield root


def config_of(path, overrides):
    return resolve(experiment.read(path, [f"--config.{name}={value}" for name, value in overrides.items()]))


@pytest.mark.parametrize(
    "path",
    [
        "lm/mixers.py",
        "lm/sizes.py",
        "moe/bytes.py",
        "lm/segment_memory.py",
        "lm/memory_lengths.py",
        "lra/lra.py",
        "classification/distill.py",
        "classification/unlabelled.py",
    ],
)
def test_members_of_sweeps_resolve(path):
    for member in experiment.load(str(ROOT / path)).get_sweep():
        config_of(str(ROOT / path), member)


def test_studies_of_scaling_laws_resolve(monkeypatch):
    path = str(ROOT / "scaling" / "bytes.py")
    module = experiment.load(path)
    monkeypatch.setattr(type(module.get_study()), "_check_text", lambda self, values, runs: None)  # reads all texts
    counts = {"full": 20, "rates": 6, "tiny": 11}
    for name, count in counts.items():
        members = module.get_sweep(name)
        assert len(members) == count
        config = config_of(f"{path}:{name}", members[-1])
        assert config.optimizer.warmup <= 0.02 * config.train.steps and config.optimizer.schedule == "wsd(0.2)"
    rates = [member["optimizer.learning_rate"] for member in module.get_sweep("rates")]
    assert rates[:3] == [factor * rates[1] for factor in (0.5, 1.0, 2.0)]
    assert sum(run.flops for run in module.get_study().runs(module.get_config())) < 1e15


def test_forms_of_the_awd_lstm_resolve(library):
    path = str(ROOT / "lm" / "awd_lstm.py")
    module = experiment.load(path)
    for form in module.FORMS:
        assert "words-docs-" in config_of(f"{path}:{form}", {}).data.path
    recipe = config_of(path, {})
    for member in module.get_sweep()[1:]:
        assert config_of(path, member) != recipe


@pytest.mark.parametrize("which", ["docs", "code", "whitespace"])
def test_configs_of_every_corpus_make_models(library, which):
    config = config_of(f"{WORDS}:{which}", {})
    assert config.data.batch_size * config.data.seq_len == 2048 and not config.model.tied
    assert f"words-{which}-" in config.data.path and "by=whitespace" in config.data.tokenizer
    members = experiment.load(WORDS).get_sweep(which)
    assert [member["model.output"] for member in members].count("full") == 1
    vocabulary = Vocabulary(prepare(config.data).tokenizer)
    assert all(make_model(config_of(f"{WORDS}:{which}", member), vocabulary) for member in members)


def make_layer_trainer(layer):
    """The corpus, and the trainer of a model with this output layer on one device."""
    config = config_of(WORDS, TINY | experiment.load(WORDS).member(layer))
    corpus = prepare(config.data)
    model = make_model(config, Vocabulary(corpus.tokenizer))
    return corpus, make_trainer(model, config.optimizer, config.plan, steps=2, devices=jax.devices()[:1])


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_has_a_trainer(library, layer):
    assert make_layer_trainer(layer)[1].state_shapes.params["embed"]["table"].shape == (2100, 16)


@pytest.mark.slow
def test_two_steps_give_finite_losses(library):
    corpus, trainer = make_layer_trainer("sampled(1024)")
    key = jax.random.key(0)
    state, batches = trainer.init(key), corpus.train(seed=0)
    for _ in range(2):
        state, metrics = trainer.step(state, next(batches), key)
        assert 0 < metrics["loss"] < 2 * math.log(2100) and metrics["skipped"] == 0
    batches.close()


def test_equal_time_sweep_scales_steps_by_measured_times(tmp_path):
    module = experiment.load(WORDS)
    module.TIMES = tmp_path / "steps_{}.json"
    raises(r"steps_docs.json: run python experiments/softmax/steps.py --only=docs first", module.get_sweep, "docs-time")
    raises("unknown corpus 'doc': did you mean 'docs'", module.get_sweep, "doc")
    rows = [{"output": layer, "ratios": {"time over full": 1.0 if layer == "full" else 0.3}} for layer in LAYERS]
    (tmp_path / "steps_docs.json").write_text(json.dumps({"rows": rows}))
    steps = {member["model.output"]: member["train.steps"] for member in module.get_sweep("docs-time")}
    assert steps["full"] == 400 and steps["binary_ecc(2048)"] == 1333 and steps.keys() == set(LARGE)


@pytest.mark.slow
def test_large_batch_benchmark_writes_all_rules(library, tmp_path):
    bench = [sys.executable, str(ROOT / "bench" / "large_batch.py"), "--optimizers=lamb", "--tokens=1024", "--seeds=2"]
    command = [*bench, f"--path={library}/*.py", f"--out={tmp_path}"]
    subprocess.run(command, cwd=ROOT.parent, check=True, capture_output=True)
    (path,) = tmp_path.glob("large_batch-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["rule"] for row in rows] == ["small", "none", "sqrt", "linear"]
    small, *large = rows
    assert small["loss"] == pytest.approx(sum(small["losses"]) / 2) and small["over_small"] == 1.0
    assert small["losses"][0] == min(loss for _, loss in small["tried"])
    assert [row["learning_rate"] / small["learning_rate"] for row in large] == pytest.approx([1, 4, 16])
    assert all(row["steps"] * row["batch"] == small["steps"] * small["batch"] for row in large)


@pytest.mark.slow
def test_nearest_pair_benchmark_extrapolates_the_cross_encoder(tmp_path):
    sizes = ["--sentences=70", "--pairs=50", "--layers=1", "--dim=32", "--rounds=1"]
    bench = [sys.executable, str(ROOT / "bench" / "nearest_pair.py"), *sizes, f"--out={tmp_path}"]
    subprocess.run(bench, cwd=ROOT.parent, check=True, capture_output=True)
    (path,) = tmp_path.glob("nearest_pair-*.json")
    dual, cross = json.loads(path.read_text())["rows"]
    assert dual["pairs"] == dual["measured_pairs"] == cross["pairs"] == 70 * 69 // 2 and cross["measured_pairs"] == 50
    assert dual["seconds"] == pytest.approx(dual["encode_seconds"] + dual["search_seconds"])
    assert cross["seconds"] == pytest.approx(cross["measured_seconds"][0] * 2415 / 50)


def test_members_of_word_embeddings_have_trainers(library):
    path = str(ROOT / "embeddings" / "words.py")
    members = experiment.load(path).get_sweep("all")
    assert len(members) == 6
    for member in members:
        config = config_of(f"{path}:all", member)
        model = make_model(config, Vocabulary(prepare(config.data).tokenizer))
        trainer = make_trainer(model, config.optimizer, config.plan, steps=2, devices=jax.devices()[:1])
        assert trainer.state_shapes.params["embed"]["table"].shape[1] == 128
