"""Warm start: a run starts from the parameters and tokenizer of another run or of a Hugging Face directory."""

import dataclasses
import functools
import json
import shutil
import types

import jax
import numpy as np
import pytest

from hpnlp.cli import experiment
from hpnlp.data import tokenizers
from hpnlp.models import variables
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.pairs.documents import blank_documents
from hpnlp.models.pairs.dual_encoder import DualEncoderConfig
from hpnlp.models.pairs.realm import Realm, RealmConfig
from hpnlp.models.seq2seq import Seq2SeqModelConfig
from hpnlp.parallel.plan import Plan
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import loop
from hpnlp.training.config import resolve, to_json
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.run_directory import load
from hpnlp.training.starts import warm_start
from hpnlp.training.trainer import make_trainer
from hpnlp.types import InputError
from tests import tiny
from tests.drawn import drawn_params
from tests.messages import raises

FINETUNE = "experiments/lm/finetune.py"
# A learning rate of 0 leaves parameters unchanged, to the last bit.
STILL = {"optimizer__learning_rate": 0.0, "optimizer__weight_decay": 0.0, "train__steps": 1}


def train(workdir, **overrides):
    return loop.train(tiny.make(**{"train__eval_every": 0, "plan__name": "single"} | overrides), workdir)


@pytest.fixture(scope="module")
def words(tmp_path_factory, quick_compiler):
    """A run with a trained vocabulary, averaged parameters, and a best checkpoint that is not the last one."""
    workdir = tmp_path_factory.mktemp("source") / "words"
    fields = {"data__tokenizer": "words(40)", "optimizer__ema": 0.5, "train__eval_every": 4, "train__eval_batches": 1}
    train(workdir, **fields, train__min_delta=0.0)
    return workdir


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory in the Hugging Face layout."""
    directory = tmp_path_factory.mktemp("source") / "hf"
    tokenizer = tokenizers.build("bpe(270)", [b"the quick brown fox, the lazy dog\n" * 20])
    config = LMConfig(dim=16, heads=2, layers=2, mlp_dim=32, vocab=272, max_len=32)
    params = jax.device_get(drawn_params(LM(config), 0.3))
    convert.save(
        config, params, directory, texts=convert.TextSettings(bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id)
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def finetuned(source, **overrides):
    values = experiment.read(f"{FINETUNE}:{source}", [])
    small = {"data.path": tiny.get_config().data.path, "data.seq_len": 16, "train.sample": 0, "train.eval_every": 0}
    small["plan.name"] = "single"
    values.update_from_flattened_dict(small | {name.replace("__", "."): value for name, value in overrides.items()})
    return resolve(values)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "plan",
    [
        {"plan__name": "zero3"},
        pytest.param(
            {"plan__name": "data", "plan__tensor": 2, "plan__offload_parameters": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_starts_from_parameters_and_tokenizer_of_a_run(words, tmp_path, capsys, plan):
    """Under another layout than the source's; the first line of output names the source."""
    source = load(words)
    result = loop.train(finetuned(words, **STILL, **plan), tmp_path / "run")
    assert_same(result.params, source.params)
    assert (
        result.dataset.tokenizer.encode(b"the lazy dog").tolist() == source.tokenizer.encode(b"the lazy dog").tolist()
    )
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"starting from {words}, step {source.step}, with its tokenizer: 0.0")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["step"] == 1


def test_experts_start_as_copies_of_the_mlps_of_a_run(words, tmp_path, capsys):
    mlp = load(words).params["layers"]["mlp"]
    result = loop.train(finetuned(words, **STILL, model__mlp="top_k(4,2)"), tmp_path / "run")
    experts = result.params["layers"]["mlp"]
    for name in ("gate", "up", "down"):
        copies = np.broadcast_to(mlp[name]["kernel"][:, None], experts[name].shape)
        np.testing.assert_array_equal(experts[name], copies)
    assert np.unique(experts["router"]).size > 16
    assert "with its tokenizer" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_starts_from_a_hugging_face_directory(checkpoint, tmp_path, capsys):
    config, params = convert.read(checkpoint)
    result = loop.train(finetuned(checkpoint, **STILL, plan__name="zero3"), tmp_path / "run")
    assert_same(result.params, params)
    assert dataclasses.replace(result.model.config, max_len=32) == config
    assert capsys.readouterr().out.startswith(
        f"starting from {checkpoint}, a Hugging Face checkpoint, with its tokenizer"
    )
    assert load(tmp_path / "run").tokenizer.vocab_size == result.dataset.tokenizer.vocab_size


def test_resumed_run_does_not_need_the_source(words, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(words, source)
    config = finetuned(source, train__steps=2, train__checkpoint_every=1, optimizer__learning_rate=1e-2)
    first = loop.train(config, tmp_path / "run")
    shutil.rmtree(source)
    capsys.readouterr()
    again = loop.train(config, tmp_path / "run")
    assert capsys.readouterr().out.startswith("going on from step 2: ")
    assert_same(again.params, first.params)


def test_run_without_a_checkpoint_starts_from_the_source_again(words, tmp_path, capsys):
    config = finetuned(words, **STILL)
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    tokenizers.build("words(30)", [b"another tokenizer of an attempt before it"]).save(str(run / "tokenizer.json"))
    (run / "config.json").write_text(to_json(config))
    result = loop.train(config, run)
    assert (run / "tokenizer.json").read_bytes() == (words / "tokenizer.json").read_bytes()
    assert capsys.readouterr().out.startswith(f"starting from {words}, step ")
    assert_same(result.params, load(words).params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train__init_from": "no/such"}, "train.init_from=no/such is not a directory: name a run's workdir, or a"),
        ({"data__tokenizer": "bytes"}, "data.tokenizer='bytes' is not the tokenizer .*: set --data.tokenizer=.*json"),
        (
            {"model__layers": 1, "model__mlp": "gelu", "model__mixer": "window(4,0)", "model__dtype": "bfloat16"},
            r"has another model \(model.mixer is 'window\(4,0\)', in the source 'full'; model.mlp is 'gelu', in the source "
            r"'swiglu'; model.layers is 1, in the source 2\): set --model.mixer=full --model.mlp=swiglu "
            r"--model.layers=2; fields that no flag sets, hpnlp train takes from there; with --accept_changes",
        ),
        ({"model__vocab": 64}, r"\(model.vocab is 64, in the source 23\)"),
    ],
)
def test_sources_that_do_not_fit_raise(words, tmp_path, fields, message):
    with pytest.raises(InputError, match=message) as caught:
        train(tmp_path / "run", **{"data__tokenizer": "words(40)", "train__init_from": str(words)} | fields)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_accept_changes_allows_models_with_equal_shapes(words, tmp_path, capsys):
    fields = {"data__tokenizer": "words(40)", "train__init_from": str(words), "plan__name": "single"} | STILL
    config = tiny.make(**fields, train__eval_every=0, model__mixer="window(4,0)")
    result = loop.train(config, tmp_path / "run", accept_changes=True)
    assert (
        "with its tokenizer (model.mixer is 'window(4,0)', in the source 'full'): "
        in capsys.readouterr().out.splitlines()[0]
    )
    assert_same(result.params, load(words).params)
    with pytest.raises(InputError, match=r"does not fit this model: params\['embed'\]\['table'\] is \[23, 16\] in the"):
        loop.train(tiny.make(**fields, model__dim=32), tmp_path / "wide", accept_changes=True)


def test_incomplete_sources_raise(words, checkpoint, tmp_path):
    for name, source, message in (
        ("tokenizer.json", words, "has no tokenizer.json: put back"),
        ("config.json", words, "has checkpoints and no config.json"),
        ("tokenizer.json", checkpoint, "cannot read the tokenizer"),
        ("config.json", checkpoint, "config.json does not exist: download it again"),
    ):
        copy = tmp_path / f"{source.name}-{name}"
        shutil.copytree(source, copy)
        (copy / name).unlink()
        raises(message, warm_start.find, copy)
    with pytest.raises(InputError, match="no checkpoint"):
        shutil.copytree(words, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
        train(tmp_path / "run", data__tokenizer="words(40)", train__init_from=str(tmp_path / "empty"))


@pytest.mark.slow
def test_converted_run_trains_with_its_tokenizer(checkpoint, tmp_path, capsys):
    """The workdir holds the model as a checkpoint of step 0."""
    config, params = convert.read(checkpoint)
    run = tmp_path / "run"
    checkpoints = Checkpointer(run)
    checkpoints.save_params(params)
    checkpoints.close()
    shutil.copy(checkpoint / "tokenizer.json", run / "tokenizer.json")
    (run / "config.json").write_text(to_json(resolve({"model": dataclasses.asdict(config)})))
    raises("data.tokenizer='bytes' is not", lambda: loop.train(finetuned(run, **STILL, data__tokenizer="bytes"), run))
    with pytest.raises(InputError, match="holds a converted model, .* and train.init_from=.* names another"):
        loop.train(finetuned(checkpoint, **STILL, data__tokenizer=str(run / "tokenizer.json")), run)
    result = loop.train(finetuned(run, **STILL), run)
    assert "starting from the converted model of" in capsys.readouterr().out
    assert_same(result.params, params)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_nonfinite_parameters_raise(checkpoint, tmp_path, value):
    config, params = convert.read(checkpoint)
    params["layers"]["mix_norm"]["scale"][1, 3] = value
    checkpoints = Checkpointer(tmp_path / "run")
    checkpoints.save_params(params)
    checkpoints.close()
    shutil.copy(checkpoint / "tokenizer.json", tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(to_json(resolve({"model": dataclasses.asdict(config)})))
    with pytest.raises(
        InputError, match=r"checkpoint 0 of .*: params\['layers'\]\['mix_norm'\]\['scale'\] holds NaN or inf"
    ):
        loop.train(finetuned(tmp_path / "run", **STILL), tmp_path / "tuned")


@pytest.mark.parametrize("fields", [{}, pytest.param({"refresh": "every"}, marks=pytest.mark.slow)])
def test_index_of_the_documents_of_a_run_is_not_copied(tmp_path, monkeypatch, fields):
    sizes = {"dim": 8, "heads": 2, "layers": 1, "tower_layers": 0, "vocab": 20, "candidates": 2}
    model = Realm(RealmConfig(**sizes | fields), blank_documents(3, 4))
    trainer, key = make_trainer(model, OptimizerConfig(), Plan("single"), steps=1), jax.random.key(1)
    expected = jax.tree.map(lambda leaf: np.full(leaf.shape, 2, np.float32), trainer.state_shapes.params)
    encoded = {name: np.ones(shape) for name, shape in {"index": (3, 8), "age": (1,), "position": (1,)}.items()}
    run = types.SimpleNamespace(params=variables.join(expected, encoded), step=7)
    monkeypatch.setattr(warm_start.runs, "load", lambda directory, plan: run)
    source = warm_start.StartSource(
        tmp_path, "realm", RealmConfig(**sizes), Vocabulary(tokenizers.build("bytes")), "", True
    )
    params, buffers = variables.split(source.load_params(trainer, Plan("single"), "realm", key)[0])
    assert_same(params, expected)
    assert_same(buffers, trainer.init(key).buffers)


@pytest.mark.slow
def test_towers_of_a_search_go_on_from_those_of_a_dual_encoder(tmp_path, monkeypatch):
    sizes = {"dim": 8, "heads": 2, "layers": 1, "vocab": 20, "shared": False}
    model = Realm(RealmConfig(**sizes), blank_documents(8, 4))
    trainer, key = make_trainer(model, OptimizerConfig(), Plan("single"), steps=1), jax.random.key(1)
    shapes = trainer.state_shapes.params
    towers = {"tower": shapes["tower"], "pair_tower": shapes["document_tower"]}
    towers = jax.tree.map(lambda leaf: np.full(leaf.shape, 2, np.float32), towers)
    run = types.SimpleNamespace(params=towers | {"log_scale": np.ones(1)}, step=7)
    monkeypatch.setattr(warm_start.runs, "load", lambda directory, plan: run)
    params, origin = dual_encoder(tmp_path, **sizes).load_params(trainer, Plan("single"), "realm", key, model.config)
    assert origin == (
        f"{tmp_path}, step 7 (copied: document_tower, tower; initialised: empty_similarity, reader), with its tokenizer"
    )
    towers = {"tower": towers["tower"], "document_tower": towers["pair_tower"]}
    initial = trainer.init(key)
    assert_same(params, {**initial.params, **towers, "buffers": initial.buffers})


@pytest.mark.parametrize("fields", [{}, {"tied": True}])
def test_reader_of_a_search_goes_on_from_a_masked_language_model(tmp_path, monkeypatch, fields):
    """The first forward pass of a text alone equals the source's, unless the output layer is another one."""
    sizes = {"dim": 8, "heads": 2, "layers": 1, "vocab": 20}
    encoder, model = Encoder(EncoderConfig(**sizes)), Realm(RealmConfig(**sizes | fields), blank_documents(8, 4))
    trainer, key = make_trainer(model, OptimizerConfig(), Plan("single"), steps=1), jax.random.key(1)
    of_source = drawn_params(encoder, 0.3)
    run = types.SimpleNamespace(params=of_source, step=7)
    monkeypatch.setattr(warm_start.runs, "load", lambda directory, plan: run)
    source = warm_start.StartSource(
        tmp_path, "masked_lm", encoder.config, Vocabulary(tokenizers.build("bytes")), "", True
    )
    warm_start.check_task("realm", source)
    assert source.check_model(model.config, task="realm") == ""
    params, origin = source.load_params(trainer, Plan("single"), "realm", key, model.config)
    of_output = ["reader.head, ", "reader.output, "] if not fields else ["", ""]
    copied = "reader.embed, reader.final_norm, {}reader.layers, {}".format(*of_output).rstrip(", ")
    new = "reader.output, reader.token_types" if fields else "reader.token_types"
    assert origin == (
        f"{tmp_path}, step 7 (copied: {copied}; initialised: empty_similarity, {new}, tower), with its tokenizer"
    )
    ones = np.ones((2, 6), np.int32)
    batch = {
        "tokens": np.arange(12, dtype=np.int32).reshape(2, 6),
        "segment_ids": ones,
        "positions": ones.cumsum(1) - 1,
    }
    method = "vectors" if fields else "logits"  # hidden states, or those after the output layer
    expected, reader = (
        jax.jit(functools.partial(module.apply, method=method))({"params": weights}, batch)
        for module, weights in ((encoder, of_source), (Encoder(model.config.reader()), params["reader"]))
    )
    np.testing.assert_allclose(reader, expected, rtol=1e-6)
    initial = trainer.init(key)
    assert_same(params["tower"], initial.params["tower"])
    assert np.any(params["reader"]["token_types"]["table"][1])
    with pytest.raises(InputError, match="model.layers is 2, in the source 1"):
        source.check_model(dataclasses.replace(model.config, layers=2), task="realm")


def dual_encoder(directory, **fields):
    config = DualEncoderConfig(**fields, learn_temperature=True)
    return warm_start.StartSource(directory, "dual_encoder", config, Vocabulary(tokenizers.build("bytes")), "", True)


def test_other_towers_than_those_of_a_dual_encoder_raise(tmp_path):
    sizes = {"dim": 8, "heads": 2, "layers": 1, "vocab": 20}
    source = dual_encoder(tmp_path, **sizes, shared=False)
    warm_start.check_task("realm", source)
    assert source.check_model(RealmConfig(**sizes, shared=False), task="realm") == ""
    for fields, message in (
        ({"shared": True}, "model.shared=False, and this model model.shared=True: set --model.shared=False"),
        ({"shared": False, "pooling": "max"}, "model.pooling is 'max', in the source 'mean'"),
        ({"shared": False, "vocab": 21}, "model.vocab is 21, in the source 20"),
    ):
        with pytest.raises(InputError, match=message):
            source.check_model(RealmConfig(**sizes | fields), task="realm")
    raises("holds a model of task='dual_encoder'", warm_start.check_task, "lm", source)


def test_target_length_matters_to_learned_positions_only(tmp_path):
    def check(position):
        models = [
            Seq2SeqModelConfig(dim=8, heads=2, vocab=20, max_len=8, target_len=n, position=position) for n in (8, 12)
        ]
        vocabulary = Vocabulary(tokenizers.build("bytes"))
        return warm_start.StartSource(tmp_path, "seq2seq", models[1], vocabulary, "", True).check_model(models[0])

    assert check("rope") == ""
    raises("model.target_len is 8, in the source 12", check, "learned")
