"""Runs that start from the body of a model of another task: embeddings, layers and final norm, with a new head."""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpnlp.cli import experiment
from hpnlp.compress.files import write_weights
from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.data import tokenizers
from hpnlp.data.examples import save_labels
from hpnlp.models import variables
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LMConfig
from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig
from hpnlp.models.pairs.tower import Tower
from hpnlp.models.seq2seq import Seq2SeqModel, Seq2SeqModelConfig
from hpnlp.nn.pooling import Pooling
from hpnlp.ops.weights import dense_tree, quantize
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.classification import ClassifierConfig
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.run_directory import load
from hpnlp.training.starts import warm_start
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests import tiny
from tests.drawn import drawn
from tests.messages import raises

BERT = {"norm": "layer", "norm_placement": "post", "embed_norm": True, "qkv_bias": True, "out_bias": True}
BERT |= {"mlp_bias": True, "mlp": "gelu", "position": "learned", "max_len": 8, "token_types": 2}
SIZES = {"dim": 8, "heads": 2, "layers": 2, "mlp_dim": 12, "vocab": 20}
TEXT = np.arange(6) < np.array([[6], [4]])
BATCH = {
    "tokens": jnp.arange(12, dtype=jnp.int32).reshape(2, 6),
    "segment_ids": jnp.asarray(TEXT, jnp.int32),
    "positions": jnp.tile(jnp.arange(6, dtype=jnp.int32), (2, 1)),
}


def weights_of(model):
    """Drawn weights, with buffers."""
    return drawn(variables.axes_and_shapes(model)[1], 0.3)


def source_of(directory, config, task="masked_lm"):
    return warm_start.StartSource(directory, task, config, Vocabulary(tokenizers.build("bytes")), "bytes", True)


def started(monkeypatch, source, weights, model, task):
    """Weights of a model that starts from a source, and the phrase on their origin."""
    run = types.SimpleNamespace(params=weights, step=7)
    monkeypatch.setattr(warm_start.runs, "load", lambda directory, plan: run)
    warm_start.check_task(task, source)
    assert source.check_model(model.config, task=task) == ""
    trainer = make_trainer(model, OptimizerConfig(), Plan("single"), steps=1)
    return source.load_params(trainer, Plan("single"), task, jax.random.key(1), model.config)


def states(model, weights):
    """Hidden states `[B, T, D]` of an Encoder, or of the encoder of a Seq2SeqModel."""
    applied = variables.collections(weights)
    if isinstance(model, Seq2SeqModel):
        return jax.jit(lambda weights: model.apply(weights, BATCH, method="encode")[0].states)(applied)
    return jax.jit(lambda weights: model.apply(weights, BATCH, True, method="states")[0])(applied)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    "fields",
    [
        BERT,
        pytest.param({}, id="rope", marks=pytest.mark.slow),
        pytest.param({"mixer": "performer(6),full"}, id="buffers", marks=pytest.mark.slow),
    ],
)
def test_hidden_states_of_a_classifier_are_those_of_the_source(tmp_path, monkeypatch, fields):
    source, model = Encoder(EncoderConfig(**SIZES, **fields)), Encoder(ClassifierConfig(**SIZES, **fields, classes=3))
    of_source = weights_of(source)
    weights, origin = started(monkeypatch, source_of(tmp_path, source.config), of_source, model, task="classification")
    np.testing.assert_array_equal(states(model, weights), states(source, of_source))
    names = "embed, embed_norm, layers, positions, token_types" if fields == BERT else "embed, final_norm, layers"
    assert origin == f"{tmp_path}, step 7 (copied: {names}; initialised: head, output), with its tokenizer"
    assert weights["head"].shape == (3, 8)
    assert np.abs(weights["head"]).max() < 0.2 and np.any(weights["head"])  # an initial one


@pytest.mark.slow
def test_both_towers_of_a_dual_encoder_start_from_a_masked_language_model(tmp_path, monkeypatch):
    source = Encoder(EncoderConfig(**SIZES, **BERT))
    model = DualEncoder(DualEncoderConfig(**SIZES, **BERT, shared=False, learn_temperature=True))
    of_source = weights_of(source)
    weights, origin = started(monkeypatch, source_of(tmp_path, source.config), of_source, model, task="dual_encoder")
    h = states(source, of_source)
    expected = Pooling("mean").apply({}, h, BATCH["segment_ids"], jnp.zeros((2, 6), jnp.int32))
    for name in ("tower", "pair_tower"):
        tower = Tower(model.config.tower())
        pooled, _ = tower.apply({"params": weights[name]}, BATCH, jnp.arange(2), True, method="pooled")
        np.testing.assert_allclose(pooled, expected, rtol=1e-6)
    assert origin == f"{tmp_path}, step 7 (copied: pair_tower, tower; initialised: log_scale), with its tokenizer"


@pytest.mark.parametrize(
    ("fields", "share"),
    [(BERT, True), pytest.param({}, True, marks=pytest.mark.slow), pytest.param(BERT, False, marks=pytest.mark.slow)],
)
def test_encoder_of_seq2seq_starts_from_a_masked_language_model(tmp_path, monkeypatch, fields, share):
    """The decoder is new, but for an embedding that it shares. The first token type becomes part of the positions."""
    source = Encoder(EncoderConfig(**SIZES, **fields))
    of_decoder = {name: value for name, value in fields.items() if name != "token_types"}
    sizes = SIZES | {"layers": 1, "encoder_layers": 2, "target_len": 8}
    model = Seq2SeqModel(Seq2SeqModelConfig(**sizes, **of_decoder, share_embeddings=share))
    of_source = weights_of(source)
    weights, origin = started(monkeypatch, source_of(tmp_path, source.config), of_source, model, task="seq2seq")
    np.testing.assert_allclose(states(model, weights)[TEXT], states(source, of_source)[TEXT], rtol=1e-5, atol=1e-6)
    embedding = weights["embed"] if share else weights["encoder"]["embed"]
    np.testing.assert_array_equal(embedding["table"], of_source["embed"]["table"])
    if not share:
        assert np.any(weights["decoder"]["embed"]["table"] != of_source["embed"]["table"])
    copied = "embed, encoder" if share else "encoder"
    assert origin == f"{tmp_path}, step 7 (copied: {copied}; initialised: decoder), with its tokenizer"


@pytest.mark.slow
def test_classifier_starts_from_the_tower_of_a_dual_encoder(tmp_path, monkeypatch):
    source = DualEncoder(DualEncoderConfig(**SIZES, shared=False))
    model = Encoder(ClassifierConfig(**SIZES, classes=3, token_types=2))
    of_source = weights_of(source)
    weights, _ = started(
        monkeypatch, source_of(tmp_path, source.config, "dual_encoder"), of_source, model, "classification"
    )
    for name in ("embed", "layers", "final_norm"):
        assert_same(weights[name], of_source["tower"][name])
    types_table = weights["token_types"]["table"]
    assert not np.any(types_table[0]) and np.any(types_table[1])  # single texts are read as before


@pytest.mark.slow
def test_experts_of_a_classifier_start_as_copies_of_mlps(tmp_path, monkeypatch):
    source = Encoder(EncoderConfig(**SIZES))
    model = Encoder(ClassifierConfig(**SIZES | {"mlp": "top_k(4,2)"}, classes=3))
    of_source = weights_of(source)
    weights, origin = started(monkeypatch, source_of(tmp_path, source.config), of_source, model, "classification")
    assert "initialised: head, output; MLPs became experts in 2 layers)" in origin
    np.testing.assert_allclose(states(model, weights)[TEXT], states(source, of_source)[TEXT], rtol=1e-4, atol=1e-5)


def test_other_bodies_raise(tmp_path):
    for of_source, task, model, message in (
        ({}, "classification", {"dim": 16}, r"model.dim is 16, in the source"),
        ({"embed_dim": 4}, "dual_encoder", {}, r"model.embed_dim is 0, in the source"),
        ({"token_types": 2}, "classification", {}, r"model.token_types is 0, in the source"),
        ({}, "seq2seq", {"encoder_layers": 1}, r"model.encoder_layers is 1, in the source"),
    ):
        kinds = {"classification": ClassifierConfig, "dual_encoder": DualEncoderConfig, "seq2seq": Seq2SeqModelConfig}
        source = source_of(tmp_path, EncoderConfig(**SIZES, **of_source))
        config = kinds.get(task, EncoderConfig)(**SIZES | model)
        with pytest.raises(InputError, match=message) as caught:
            source.check_model(config, task=task)
        assert "\n" not in str(caught.value)


def test_models_without_a_fitting_body_raise(tmp_path):
    source = source_of(tmp_path, LMConfig(**SIZES), "lm")
    message = "task='lm', and this config has task='classification', .* or a body of task='classification' or 'tagging'"
    raises(message, warm_start.check_task, "classification", source)
    raises("name a run of the same task$", warm_start.check_task, "rnn_lm", source)


@pytest.mark.parametrize(
    ("fields", "length", "message"),
    [
        ({}, 16, ""),
        ({"position": "learned", "max_len": 8}, 8, ""),
        ({"position": "learned", "max_len": 8}, 4, ""),
        ({"position": "learned", "max_len": 8}, 16, "8 learned positions, and data.seq_len=16: set --data.seq_len=8"),
        ({"mixer": "synthesizer_random()", "max_len": 8}, 8, ""),
    ],
)
def test_sequences_longer_than_learned_positions_raise(tmp_path, fields, length, message):
    source = source_of(tmp_path, EncoderConfig(**SIZES, **fields))
    values = configs.default("classification")
    values.data.update(path="x", seq_len=length)
    if not message:
        return warm_start.check_length(configs.resolve(values), source)
    raises(message, lambda: warm_start.check_length(configs.resolve(values), source))


# Runs.

MASKED = {"layers": 1, "dim": 16, "heads": 2, "mlp_dim": 32, "position": "learned"}


def begun_run(directory, task, tokenizer="bytes", **model):
    """A directory with the config and tokenizer of a run that has begun."""
    values = configs.default(task)
    values.data.update(path="x", tokenizer=tokenizer, seq_len=16)
    values.model.update(model)
    directory.mkdir()
    (directory / "config.json").write_text(configs.to_json(configs.resolve(values)))
    tokenizers.build("bytes").save(str(directory / "tokenizer.json"))
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    return directory


def test_fields_that_no_flag_sets_are_those_of_the_source(tmp_path, capsys):
    source = begun_run(tmp_path / "source", "masked_lm", **MASKED, dropout=0.1)
    flag = f"--train.init_from={source}"
    values = experiment.read("classification/texts", [flag, "--model.heads=4"])
    model = {name: values.model[name] for name in (*MASKED, "vocab", "max_len")}
    assert model == MASKED | {"heads": 4, "vocab": 265, "max_len": 16}  # of 264 ids and a mask; learned positions
    assert (values.data.tokenizer, values.model.pooling, values.model.dropout) == ("bytes", "max", 0.3)
    printed = capsys.readouterr().err
    assert f"hpnlp: {source}: data.tokenizer=bytes, " in printed and "model.layers=1" in printed
    target = experiment.read("seq2seq/numbers", [flag])
    plain = experiment.read("seq2seq/numbers")
    assert (target.model.encoder_layers, target.model.dim) == (1, 16)
    assert (target.model.layers, target.model.mixer) == (plain.model.layers, plain.model.mixer)
    experts = experiment.read("tagging/stdlib", [flag, "--model.mlp=top_k(4,2)"])
    assert (experts.model.mlp, experts.model.mlp_dim) == ("top_k(4,2)", 32)


def test_a_source_of_the_same_task_sets_the_whole_model(tmp_path):
    source = begun_run(tmp_path / "source", "classification", layers=1, dim=16, heads=2, pooling="first", classes=2)
    save_labels(("a", "b"), str(source))
    values = experiment.read("classification/texts", [f"--train.init_from={source}"])
    assert (values.model.layers, values.model.dim, values.model.pooling, values.model.classes) == (1, 16, "first", 0)
    assert (values.model.vocab, values.data.tokenizer) == (0, "bytes")


def test_a_recurrent_source_of_the_same_task_sets_the_model(tmp_path):
    source = begun_run(tmp_path / "source", "rnn_lm", cells="gru(6)", tied=False, embed_dim=4)
    values = experiment.read("", ["--task=rnn_lm", f"--train.init_from={source}", "--model.embed_dim=5"])
    model = values.model
    assert (model.cells, model.tied, model.embed_dim, model.vocab) == ("gru(6)", False, 5, 0)
    assert values.data.tokenizer == "bytes"
    tuned = experiment.read(f"lm/finetune:{source}")
    assert (tuned.model.cells, tuned.data.seq_len) == ("gru(6)", 512)


@pytest.mark.parametrize(("task", "file"), [("realm", "documents.npz"), ("tagging", "labels.json")])
def test_sources_without_a_file_of_the_vocabulary_raise(tmp_path, task, file):
    with pytest.raises(InputError, match=f"source has no {file}: put back the one that the run was trained with"):
        warm_start.find(begun_run(tmp_path / "source", task))


def test_begun_run_keeps_its_fields_without_the_source(tmp_path):
    source = begun_run(tmp_path / "source", "masked_lm", **MASKED)
    overrides = [f"--train.init_from={source}"]
    values = experiment.read("classification/texts", overrides)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(configs.to_json(configs.resolve(values)))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    shutil.rmtree(source)
    again = experiment.read("classification/texts", overrides, str(run))
    assert again.to_dict() == values.to_dict()


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    values = configs.for_task(tiny.get_config(), "masked_lm")
    values.data.tokenizer = "bytes"
    values.model.update(max_len=16, **MASKED)
    values.train.update(steps=2)
    workdir = tmp_path_factory.mktemp("bodies") / "masked"
    loop.train(configs.resolve(values), workdir)
    return workdir


def classifier(directory, source, *flags):
    """Config of a classifier, as commands read it."""
    lines = [json.dumps({"text": text, "label": text}) for text in ("ab", "ba") * 20]
    (directory / "examples.jsonl").write_text("\n".join(lines))
    fields = {"data.path": directory / "examples.jsonl", "data.seq_len": 16, "data.batch_size": 8}
    fields |= {"data.heldout": 0.2, "data.linear_baselines": False, "optimizer.warmup": 0, "train.steps": 1}
    fields |= {"optimizer.learning_rate": 0.0, "optimizer.weight_decay": 0.0, "plan.name": "single"}
    fields |= {"train.eval_every": 0, "train.init_from": source}
    overrides = [f"--{name}={value}" for name, value in fields.items()]
    return configs.resolve(experiment.read("classification/texts", [*overrides, *flags]))


@pytest.mark.slow
def test_layers_go_on_and_the_head_is_new(pretrained, tmp_path, capsys):
    loop.train(classifier(tmp_path, pretrained), tmp_path / "run")
    out = capsys.readouterr().out
    assert f"starting from {pretrained}, step 2 (copied: " in out and "; initialised: head, output), with its" in out
    before, after = (load(directory).params for directory in (pretrained, tmp_path / "run"))
    for name in ("embed", "positions", "layers", "final_norm"):
        assert_same(after[name], before[name])
    assert after["head"].shape == (2, 16)


@pytest.mark.slow
def test_other_layers_raise(pretrained, tmp_path):
    with pytest.raises(InputError, match=r"model\.dim is 8, in the source 16"):
        loop.train(classifier(tmp_path, pretrained, "--model.dim=8"), tmp_path / "run")


@pytest.mark.slow
def test_student_starts_from_a_compressed_body_and_resumes_without_it(pretrained, tmp_path, capsys):
    """The teacher has the labels, and some texts have none."""
    run, small = load(pretrained), tmp_path / "small"
    small.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(pretrained / name, small / name)
    quantized = map_matrices(lambda path, w: quantize(w, by_row=is_table(path)), run.params)
    write_weights(small / WEIGHTS_FILE, quantized, {"step": run.step})
    loop.train(classifier(tmp_path, pretrained), tmp_path / "teacher")
    capsys.readouterr()
    flags = ["--data.unlabelled=True", f"--distill.teacher={tmp_path / 'teacher'}", "--distill.losses=hinton"]
    config = classifier(tmp_path, small, *flags)
    with (tmp_path / "examples.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"text": "abba", "label": None}))
    loop.train(config, tmp_path / "run")
    assert f"starting from {small}, step 2 (copied: embed, final_norm, layers, positions;" in capsys.readouterr().out
    student = load(tmp_path / "run")
    assert_same(student.params["layers"], dense_tree(quantized)["layers"])
    assert student.vocabulary.labels == load(tmp_path / "teacher").vocabulary.labels
    shutil.rmtree(small)
    loop.train(config, tmp_path / "run")
    assert capsys.readouterr().out.startswith("going on from step 1: ")
