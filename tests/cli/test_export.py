"""`hpnlp export`: files of a run that other programs call, and errors."""

import json
import runpy
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from hpnlp.jobs.export import served_predict
from hpnlp.jobs.held_out import Agreement
from hpnlp.training import config as configs
from hpnlp.training import loop
from hpnlp.training.run_directory import load
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tiny.copy_run(tmp_path_factory.mktemp("exported") / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("symbolic_sizes")
def test_exported_runs_compute_the_logits_of_the_run(run, trained, tmp_path):
    target = tmp_path / "model.stablehlo"
    outcome = run("export", trained, f"--to={target}", "--length=8")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "a function of tokens, int32 [B, 8], to logits" in outcome.out
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 8)).astype(jnp.int32))
    loaded = load(trained)
    expected = loaded.model.apply({"params": loaded.params}, tokens, method="logits")
    logits = jax.export.deserialize(bytearray(target.read_bytes())).call(tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("symbolic_sizes")
def test_an_encoder_is_exported_with_its_segments(run, tmp_path):
    values = configs.for_task(tiny.get_config(), "masked_lm")
    values.train.update(steps=1)
    loop.train(configs.resolve(values), tmp_path / "run")
    target = tmp_path / "model.stablehlo"
    outcome = run("export", tmp_path / "run", f"--to={target}", "--length=8")
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "a function of tokens and segment_ids, int32 [B, 8], to logits" in outcome.out
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 100, (2, 8)).astype(jnp.int32))
    segments = jnp.asarray(np.arange(8) < np.array([[8], [5]]), jnp.int32)
    loaded = load(tmp_path / "run")
    batch = {**loaded.model.example_batch(2, 8), "tokens": tokens, "segment_ids": segments}
    batch["positions"] = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))
    expected = loaded.model.apply({"params": loaded.params}, batch, method="logits")
    logits = jax.export.deserialize(bytearray(target.read_bytes())).call(tokens, segments)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.oracle
def test_onnx_files_compute_the_logits_of_the_run(run, trained, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    target = tmp_path / "model.onnx"
    outcome = run("export", trained, f"--to={target}", "--format=onnx", "--length=8", "--batch=2")
    assert outcome.code == 0 and "a function of tokens, int32 [2, 8], to logits" in outcome.out, outcome
    tokens = np.random.default_rng(0).integers(0, 100, (2, 8)).astype(np.int32)
    session = runtime.InferenceSession(target, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"tokens": tokens})
    loaded = load(trained)
    expected = loaded.model.apply({"params": loaded.params}, jnp.asarray(tokens), method="logits")
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=1e-5)


def test_labels_of_an_export_are_compared_with_those_of_the_run():
    run = [("a", 0.9), ("b", 0.6), ("a", 0.7)]
    agreement = Agreement.of(run, [("a", 0.75), ("a", 0.51), ("a", 0.7)])
    assert (agreement.count, agreement.differing, agreement.largest) == (3, 1, pytest.approx(0.15))
    assert agreement.describe(2).startswith(
        "1 of 3 labels of 2 held-out texts differ from the run's; probabilities differ"
    )
    same = Agreement.of(run, run).describe(2)
    assert same == "ids and labels of 2 held-out texts are those of the run; probabilities differ by at most 0"


def test_invalid_flags_raise(run, trained, tmp_path):
    for flags, message in (
        ([], "--to is required"),
        (["--to=nowhere/x.onnx"], "--to=nowhere/x.onnx: expected a file in a directory that exists"),
        (["--to={dir}/x.stablehlo", "--platforms=gpu"], "platform 'gpu': expected one of cpu, cuda"),
        (["--to={dir}/x.onnx", "--format=stablehlo"], "x.onnx is named as a file of the format onnx"),
        (["--to={dir}/x.stablehlo", "--format=onnx"], "of the format stablehlo, and --format=onnx"),
        (["--to={dir}/x.onnx", "--platforms=cpu"], "--platforms is for files of the format stablehlo"),
        (["--to={dir}/nowhere/x"], "does not exist: make it first"),
        (["--to={dir}/x"], "is for classifiers and taggers, and the run is of task='lm': pass --to=model.onnx"),
    ):
        outcome = run("export", trained, *(flag.format(dir=tmp_path) for flag in flags))
        assert outcome.code == 2 and message in outcome.err, outcome
        assert not (tmp_path / "x").exists()


def test_script_of_exported_directories_has_help(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["predict.py", "--help"])
    with pytest.raises(SystemExit) as stop:  # before the model is read, which is not beside the script here
        runpy.run_path(served_predict.__file__, run_name="__main__")
    assert not stop.value.code and "one text in each line" in capsys.readouterr().out


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Script of a directory whose model reads two tokens, and gives the first label 1/2."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0, "a": 1}, ""))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    record = {
        "format": "onnx",
        "model": "x",
        "labels": ["x", "y"],
        "inputs": ["tokens"],
        "texts": ["text"],
        "pad_id": 0,
    }
    (tmp_path / "export.json").write_text(json.dumps(record | {"max_len": 2, "length": 0, "batch": 0}))
    session = types.SimpleNamespace(run=lambda names, feeds: [np.zeros((len(feeds["tokens"]), 2))])
    runtime = types.SimpleNamespace(InferenceSession=lambda *args, **options: session)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    return shutil.copy(served_predict.__file__, tmp_path / "predict.py")


def test_script_of_exported_directories_counts_texts_that_are_cut(served, monkeypatch, capsys):
    for texts, message in ((["a a", "a a a"], "1 of 2 texts were cut after 2 tokens\n"), (["a a"], "")):
        monkeypatch.setattr("sys.argv", ["predict.py", *texts])
        runpy.run_path(str(served), run_name="__main__")
        out, err = capsys.readouterr()
        assert [json.loads(line)["text"] for line in out.splitlines()] == texts and err == message


def test_script_of_exported_directories_refuses_one_text_in_place_of_a_list(served):
    script = runpy.run_path(str(served))
    assert script["Model"] is script["ServedModel"]  # the name in earlier exports
    model = script["ServedModel"](served.parent)
    with pytest.raises(ValueError, match=r"'a a' is one text: pass a list of texts, \['a a'\]"):
        model.predict("a a")
