"""`hpnlp convert` in both directions; the conversion of weights is tested in tests/models/test_convert.py."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

from hpnlp import cli
from hpnlp.cli import convert as command
from hpnlp.compress.files import write_weights
from hpnlp.compress.matrices import is_table, map_matrices
from hpnlp.compress.weights_file import WEIGHTS_FILE
from hpnlp.data import tokenizers
from hpnlp.jobs.compression.compress_run import compress_run
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface import convert
from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.weights import binarize_products, dense_tree, quantize
from hpnlp.training import config as configs
from hpnlp.training import run_directory as runs
from hpnlp.training.config_file import load_config
from hpnlp.training.files import contents
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.types import InputError
from tests.drawn import drawn_params
from tests.messages import raises
from tests.models.huggingface.checkpoints import make

EOS = None  # stands for the tokenizer's eos_id


def run(**options):
    """Runs the command in this process, and restores its flags and the compilation cache."""
    with pytest.MonkeyPatch.context() as patch, flagsaver.flagsaver():
        patch.setattr(cli, "prepare_jax", lambda: None)
        command.run(["hpnlp convert", *(f"--{name.rstrip('_')}={value}" for name, value in options.items())])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Hugging Face checkpoint with a BPE tokenizer and a generation_config.json."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tokenizers.build("bpe(270)", [b"the quick brown fox, the lazy dog\n" * 20])
    config = LMConfig(
        dim=8, heads=2, layers=2, mlp_dim=24, vocab=tokenizer.vocab_size + 2, max_len=32, rope_scaling="linear(2.0)"
    )
    params = jax.device_get(drawn_params(LM(config), 1.0))
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    convert.save(config, params, directory, texts=convert.TextSettings(**ids))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    return directory


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """The checkpoint converted to a run."""
    directory = tmp_path_factory.mktemp("runs") / "new" / "x"
    run(from_=checkpoint, to=directory)
    return directory


def test_buffers_are_converted_both_ways(checkpoint, tmp_path):
    """Those of routers, which choose experts by a bias."""
    fields = {"mlp": "bias_balanced(4,2,shared=1)", "qk_norm": True, "form": "block(mlp='swiglu'),block", "tied": False}
    config, weights = make(dim=8, vocab=272, max_len=32, **fields)
    convert.save(config, weights, tmp_path / "a", texts=convert.TextSettings(eos_id=5))
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(checkpoint / name, tmp_path / "a")
    run(from_=tmp_path / "a", to=tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(runs.load(tmp_path / "run").params), weights)
    run(from_=tmp_path / "run", to=tmp_path / "b")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_converted_run_can_be_read(checkpoint, converted):
    values = load_config(converted)
    assert values.model == convert.load(checkpoint)[0]
    vocabulary = runs.load_vocabulary(converted, values)
    assert vocabulary.tokenizer.vocab_size == values.model.vocab - 2
    runs.make_model(values, vocabulary)
    assert values.data.seq_len == values.model.max_len == 32  # no longer than the learned positions


def test_round_trip_reproduces_all_files(checkpoint, converted, tmp_path):
    run(from_=converted, to=tmp_path / "back")
    names = {path.name for path in checkpoint.iterdir()}
    assert names == {path.name for path in (tmp_path / "back").iterdir()}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (checkpoint / name).read_bytes(), name


def write_encoder(source, checkpoint, heads):
    """Writes a small encoder with labels, and the tokenizer of another checkpoint, in the Hugging Face layout."""
    tokenizer = tokenizers.load(str(checkpoint))
    fields = {"norm": "layer", "norm_placement": "post", "embed_norm": True, "position": "learned", "mlp": "gelu_exact"}
    fields |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "token_types": 2, "norm_eps": 1e-12}
    config = EncoderConfig(
        dim=8, heads=2, layers=1, mlp_dim=24, vocab=tokenizer.vocab_size, max_len=32, classes=2, **fields | heads
    )  # fmt: skip
    model = Encoder(config)
    params = jax.device_get(drawn_params(model, 0.5))
    ids = {"bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    convert.save(config, params, source, texts=convert.TextSettings(**ids, labels=("no", "yes")))
    tokenizer.save(str(source / "tokenizer.json"))


@pytest.mark.parametrize(
    ("task", "heads"),
    [("classification", {"pooling": "first", "transform": "tanh"}), ("tagging", {})],
    ids=["classification", "tagging"],
)
def test_classifiers_keep_the_names_of_their_classes(task, heads, checkpoint, tmp_path):
    source = tmp_path / "source"
    write_encoder(source, checkpoint, heads)
    run(from_=source, to=tmp_path / "run")
    values = load_config(tmp_path / "run")
    assert values.task == task and values.data.seq_len == 32
    assert runs.load_vocabulary(tmp_path / "run", values).labels == ("no", "yes")
    raises(r"is a converted model, and has no data", compress_run, tmp_path / "run", tmp_path / "small", "int8")
    run(from_=tmp_path / "run", to=tmp_path / "back")
    for name in ("config.json", "model.safetensors"):  # tokenizer.json frames texts as those of classifiers
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize(
    ("settings", "stated", "expected"),
    [
        ({"eos_token_id": [5, 6, 10**6, -1]}, 7, (5, 6)),  # the model has no such ids
        ({"eos_token_id": 5}, [7], (5,)),
        ({}, 7, (EOS,)),
        (None, [7, 8], (7, 8)),
        (None, None, (EOS,)),
    ],
)
def test_eos_ids_are_found(checkpoint, tmp_path, settings, stated, expected):
    """In generation_config.json, else in config.json, else in the tokenizer."""
    source = shutil.copytree(checkpoint, tmp_path / "source")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"eos_token_id": stated}))
    (source / "generation_config.json").unlink()
    if settings is not None:
        (source / "generation_config.json").write_text(json.dumps(settings))
    run(from_=source, to=tmp_path / "run")
    loaded = runs.load(tmp_path / "run")
    ids = loaded.eos_ids
    assert ids == tuple(loaded.tokenizer.eos_id if i is EOS else i for i in expected)


def test_generation_settings_that_are_not_applied_are_printed(checkpoint, tmp_path, capsys):
    source = shutil.copytree(checkpoint, tmp_path / "source")
    settings = {
        "repetition_penalty": 1.05,
        "num_beams": 1,
        "temperature": 0.6,
        "suppress_tokens": [3],
        "min_length": None,
    }
    (source / "generation_config.json").write_text(json.dumps(settings))
    run(from_=source, to=tmp_path / "run")
    remark = (
        "generation_config.json sets repetition_penalty=1.05, suppress_tokens=[3], which hpnlp generate does not apply"
    )
    assert f"{tmp_path / 'run'}: {remark}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_output_checkpoints_raise(converted, tmp_path, monkeypatch, name):
    copy, target = command._copy, tmp_path / "back"

    def copy_and_damage(*args):
        copy(*args)
        if (target / name).exists():
            (target / name).write_bytes((target / name).read_bytes()[:-100])

    monkeypatch.setattr(command, "_copy", copy_and_damage)
    raises(name, run, from_=converted, to=target)


def test_damaged_output_runs_raise(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpointer, "save_params", lambda self, params: None)
    raises("checkpoint 0 was written to .* and cannot be read back", run, from_=checkpoint, to=tmp_path / "run")


def test_compressed_models_are_written_as_the_numbers_that_they_represent(converted, tmp_path, capsys):
    source = tmp_path / "small"
    source.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(converted / name, source / name)
    small = map_matrices(lambda path, w: quantize(w, by_row=is_table(path)), runs.load(converted).params)
    write_weights(source / WEIGHTS_FILE, small, {"step": 3})
    run(from_=source, to=tmp_path / "to")
    assert "matrices that were int8 are written as the float32 numbers" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, convert.load(tmp_path / "to")[1], dense_tree(small))
    raises("already holds a compressed model", run, from_=tmp_path / "to", to=source)
    raises("compressed model and no checkpoints: leave out the step", run, from_=source, to=tmp_path / "again", step=1)
    signs = map_matrices(lambda path, w: w if is_table(path) else binarize_products(w), runs.load(converted).params)
    write_weights(source / WEIGHTS_FILE, signs, {"step": 3})
    raises(r"products of binary\(inputs=True\) take the signs of their", run, from_=source, to=tmp_path / "again")


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_tokenizers_that_autotokenizer_ignores_are_printed(tmp_path, capsys, qkv_bias):
    source = tmp_path / "run"
    model = LMConfig(dim=8, heads=2, layers=1, mlp_dim=24, vocab=264, max_len=32, qkv_bias=qkv_bias)
    checkpoints = Checkpointer(source)
    checkpoints.save_params(jax.device_get(drawn_params(LM(model), 1.0)))
    checkpoints.close()
    tokenizers.build("bytes").save(str(source / "tokenizer.json"))
    (source / "config.json").write_text(configs.to_json(configs.Config(model=model)))
    capsys.readouterr()
    run(from_=source, to=tmp_path / "to")
    remark = f"load this one with PreTrainedTokenizerFast.from_pretrained('{tmp_path / 'to'}') instead"
    assert (remark in capsys.readouterr().out) == qkv_bias


def test_tokenizers_that_cannot_be_exported_leave_no_checkpoint(converted, tmp_path, monkeypatch):
    def fail(*args):
        raise InputError("no such form")

    monkeypatch.setattr("hpnlp.data.tokenizers.export.export", fail)
    raises("no such form", run, from_=converted, to=tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_dtype_applies_to_tensors_of_the_checkpoint(converted, tmp_path):
    run(from_=converted, to=tmp_path / "back", dtype="bfloat16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    size = (tmp_path / "back" / "model.safetensors").stat().st_size
    run(from_=converted, to=tmp_path / "wide")
    assert size < 0.6 * (tmp_path / "wide" / "model.safetensors").stat().st_size


def test_dtype_applies_to_the_run(checkpoint, tmp_path):
    run(from_=checkpoint, to=tmp_path / "run", dtype="bfloat16")
    assert load_config(tmp_path / "run").model.dtype == "bfloat16"


def test_invalid_arguments_raise(checkpoint, converted, tmp_path):
    def check(message, **options):
        raises(message, run, **options)

    new = tmp_path / "new"
    check("no run: write hpnlp convert RUN --to=DIR or hpnlp convert DIR --to=RUN", to=new)
    check("--to=.* already holds a run: use an empty directory", from_=checkpoint, to=converted)
    check(
        r"config.json holds no run and .* \(Not a directory\): .* name another",
        from_=checkpoint / "config.json",
        to=new,
    )
    with contents.locked(tmp_path / "locked"):
        check("another process writes to .*locked", from_=checkpoint, to=tmp_path / "locked")
    check("--step=3: .* is a Hugging Face checkpoint, which has no steps: remove", from_=checkpoint, to=new, step=3)
    check(r"no checkpoint 7 in .* \(there: 0\)", from_=converted, to=new, step=7)
    check(r"--to '.*/\[proj\]/x': .* choose another one", from_=checkpoint, to=tmp_path / "[proj]" / "x")
    assert not (tmp_path / "[proj]").exists()
    for dtype in ("bf16", "int8"):
        check(f"--dtype={dtype}: expected float32, bfloat16, float16", from_=checkpoint, to=new, dtype=dtype)
        check(f"--dtype={dtype}: expected float32, bfloat16, float16", from_=converted, to=new, dtype=dtype)
    (tmp_path / "file").write_text("")
    for path in ("file", "file/x"):
        check("cannot write --to=.*: .*/file is not a directory", from_=checkpoint, to=tmp_path / path)
    (tmp_path / "loop").symlink_to("loop")
    check("cannot write --to=.*: .*/loop is not a directory", from_=checkpoint, to=tmp_path / "loop")
    with pytest.MonkeyPatch.context() as patch:  # root may write anywhere
        patch.setattr(os, "access", lambda path, mode: False)
        check("cannot write --to=.*: .* is read-only", from_=checkpoint, to=new)
    assert not new.exists()


def _directory(path):
    path.unlink(missing_ok=True)
    path.mkdir()


DAMAGES = {  # name -> (file, function that damages it, message)
    "no_config": ("config.json", Path.unlink, "config.json does not exist"),
    "unknown_family": (
        "config.json",
        lambda path: path.write_text('{"model_type": "opt"}'),
        "model_type='opt' is not supported: choose a model of one of llama, ",
    ),
    "no_tokenizer": ("tokenizer.json", Path.unlink, "cannot read the tokenizer .*tokenizer.json"),
    "tokenizer_config_directory": ("tokenizer_config.json", _directory, "tokenizer_config.json is not a file"),
    "binary_tokenizer_config": (
        "tokenizer_config.json",
        lambda path: path.write_bytes(b"\xff"),
        "cannot read .*tokenizer_config.json.*: mend or remove",
    ),
    "eos_that_is_no_id": (
        "generation_config.json",
        lambda path: path.write_text('{"eos_token_id": [5, "6"]}'),
        r"generation_config.json: eos_token_id is \[5, '6'\]: expected an id or a list of ids",
    ),
    "no_weights": ("model.safetensors", Path.unlink, "holds no model.safetensors"),
    "only_a_pickle": (
        "model.safetensors",
        lambda path: path.rename(path.with_name("pytorch_model.bin")),
        "holds only pytorch_model.bin, a pickle",
    ),
    "truncated_weights": (
        "model.safetensors",
        lambda path: path.write_bytes(path.read_bytes()[:-10]),
        "model.safetensors: .*; download it again",
    ),
    "missing_shard": (
        "model.safetensors",
        lambda path: (
            path.unlink(),
            path.with_name("model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        ),
        "b.safetensors does not exist: download it",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_raise(name, checkpoint, tmp_path):
    file, change, message = DAMAGES[name]
    source = shutil.copytree(checkpoint, tmp_path / "source")
    change(source / file)
    with pytest.raises(InputError, match=message) as caught:
        run(from_=source, to=tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_missing_or_foreign_tokenizers_raise(checkpoint, tmp_path):
    source = tmp_path / "source"
    convert.save(*convert.load(checkpoint), source)
    raises(r"cannot read the tokenizer .*source/tokenizer.json", run, from_=source, to=tmp_path / "run")
    tokenizers.build("bpe(280)", [b"the quick brown fox jumps over a lazy dog, again and again\n" * 20]).save(
        str(source / "tokenizer.json")
    )
    raises(r"config.json: vocab_size is \d+, and the tokenizer beside it has", run, from_=source, to=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.oracle
def test_transformers_reads_weights_and_tokenizer(converted, tmp_path):
    transformers = pytest.importorskip("transformers")
    run(from_=converted, to=tmp_path / "back")
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    tokenizer = runs.load(converted).tokenizer
    text = "the lazy fox\n"
    assert expected(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text.encode()).tolist()
    assert (expected.bos_token_id, expected.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
