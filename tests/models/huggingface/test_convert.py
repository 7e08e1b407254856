"""Checkpoints that hpnlp has written, intact and damaged; test_convert_oracle.py compares with transformers."""

import json
import os
import re
import resource
import shutil
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hpnlp.models.huggingface import convert
from hpnlp.models.huggingface.families import FAMILIES
from hpnlp.models.lm import LM, example_batch
from tests.models.huggingface.checkpoints import GPT2, assert_raises, assert_same, edit, edit_tensors, make

# name -> (fields of LMConfig, the family that has such a model)
MODELS = {
    "llama": ({"kv_heads": 1, "tied": False}, "llama"),
    "llama_biases": ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "llama"),
    "llama_linear": ({"rope_scaling": "linear(2)", "head_dim": 6, "norm_eps": 1e-4}, "llama"),
    "llama_llama3": ({"rope_scaling": "llama3(8.0, 1.0, 4.0, length=8)", "rope_theta": 500.0}, "llama"),
    "llama_yarn": ({"rope_scaling": "yarn(4, 8)"}, "llama"),
    "llama_yarn_with_all_arguments": (
        {"rope_scaling": "yarn(4, 8, beta_fast=3, beta_slow=0.5, truncate=False, magnitude=1.5)"},
        "llama",
    ),
    "qwen2": ({"qkv_bias": True}, "qwen2"),
    "qwen3": ({"qk_norm": True, "qkv_bias": True, "out_bias": True}, "qwen3"),
    "mistral": ({"mixer": "window(3,0)"}, "mistral"),
    "qwen2_window": ({"mixer": "full,window(3,0)", "qkv_bias": True}, "qwen2"),
    "llama_gelu": ({"mlp": "geglu"}, "llama"),
    "llama_gelu_exact": ({"mlp": "geglu_exact"}, "llama"),
    "gemma": ({"mlp": "geglu", "norm": "rms_zero_centered", "embed_scale": True}, "gemma"),
    "gemma2": (
        {
            "mlp": "geglu",
            "norm": "rms_zero_centered",
            "embed_scale": True,
            "norm_placement": "sandwich",
            "mixer": "window(3,0,soft_cap=50.0,scale=0.25),full(soft_cap=50.0,scale=0.25)",
            "output": "full(soft_cap=30.0)",
        },
        "gemma2",
    ),
    "gpt2": (GPT2 | {"mlp": "gelu"}, "gpt2"),
    "gpt2_relu": (GPT2 | {"mlp": "relu", "tied": False}, "gpt2"),
}


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_loads_as_the_same(name, tmp_path):
    fields, family = MODELS[name]
    config, params = make(**fields)
    convert.save(config, params, tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert raw["model_type"] == family
    assert raw["architectures"] == [FAMILIES[family].architecture]
    config_a, params_a = convert.load(tmp_path / "a")
    assert_same(params, params_a)

    convert.save(config_a, params_a, tmp_path / "b")
    assert convert.load(tmp_path / "b")[0] == config_a
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_gpt2_layout(gpt2):
    """Queries, keys and values are concatenated in one matrix that is stored as [in, out]."""
    tensors = load_file(gpt2 / "model.safetensors")
    attention = convert.load(gpt2)[1]["layers"]["attention"]
    for leaf, suffix in (("kernel", "weight"), ("bias", "bias")):
        params = np.concatenate([attention[name][leaf][1] for name in "qkv"], axis=-1)
        np.testing.assert_array_equal(params, tensors[f"transformer.h.1.attn.c_attn.{suffix}"])


def test_llama_layout(llama):
    """Matrices are stored as [out, in]."""
    _, params = convert.load(llama)
    tensors = load_file(llama / "model.safetensors")
    kernel = params["layers"]["mlp"]["gate"]["kernel"][1]
    assert kernel.shape == (8, 24)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_proj.weight"], kernel.T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float16_and_bfloat16_are_widened(dtype, tmp_path):
    config, params = make()
    convert.save(config, params, tmp_path / "a", dtype=dtype)
    _, loaded = convert.load(tmp_path / "a")
    assert_same(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype(np.float32), params), loaded)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(("fields", "dtype"), [({}, "float32"), (GPT2 | {"mlp": "gelu"}, "bfloat16")], ids=str)
def test_loaded_parameters_are_read_by_compiled_functions(fields, dtype, tmp_path):
    """Arguments are not copied to the device in each call, and a function that closes over them may index them."""
    convert.save(*make(**fields), tmp_path / "a", dtype=dtype)
    config, params = convert.load(tmp_path / "a", dtype)
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    model, batch = LM(config), example_batch(2, 4)

    def loss(params, batch):
        return model.apply({"params": params}, batch, method="loss").sum

    compiled = jax.jit(loss)
    expected = loss(params, batch)
    np.testing.assert_allclose(compiled(params, batch), expected, rtol=2e-2 if dtype != "float32" else 1e-5)
    np.testing.assert_array_equal(jax.jit(lambda batch: loss(params, batch))(batch), compiled(params, batch))
    with jax.transfer_guard_host_to_device("disallow"):
        compiled(params, batch)
    assert compiled._cache_size() == 1


def test_large_models_are_split_into_shards(tmp_path):
    config, params = make()
    convert.save(config, params, tmp_path / "a", shard_bytes=1000)
    files = sorted(tmp_path.glob("a/*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "a" / convert.INDEX).read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 1000 or len(tensors) == 1
    assert_same(params, convert.load(tmp_path / "a")[1])


def test_boxed_device_parameters_are_saved(tmp_path):
    config, params = make()
    boxed = jax.tree.map(lambda leaf: nn.LogicallyPartitioned(jnp.asarray(leaf), (None,) * leaf.ndim), params)
    convert.save(config, boxed, tmp_path / "a")
    assert_same(params, convert.load(tmp_path / "a")[1])


def test_special_ids_are_saved(tmp_path):
    convert.save(*make(), tmp_path / "a", texts=convert.TextSettings(bos_id=3, eos_id=4))
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (3, 4)


def test_buffers_are_ignored(gpt2):
    before = convert.load(gpt2)[1]
    mask = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8),
        "transformer.h.0.attn.masked_bias": np.ones(()),
    }
    edit_tensors(gpt2, lambda tensors: tensors.update(mask))
    assert_same(before, convert.load(gpt2)[1])


def test_names_of_a_model_without_head_load(gpt2, llama):
    for directory, base in ((gpt2, "transformer."), (llama, "model.")):
        before = convert.load(directory)[1]
        tensors = {
            name.removeprefix(base): tensor for name, tensor in load_file(directory / "model.safetensors").items()
        }
        save_file(tensors, directory / "model.safetensors")
        assert_same(before, convert.load(directory)[1])


def test_tied_head_may_be_stored_if_equal(gpt2):
    before = convert.load(gpt2)[1]
    edit_tensors(gpt2, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"]}))
    assert_same(before, convert.load(gpt2)[1])
    edit_tensors(gpt2, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["transformer.wte.weight"]}))
    assert_raises("lm_head.weight differs .* set tie_word_embeddings to false", convert.load, gpt2)


PICKLE = "a pickle, which can run code .* save_pretrained writes safetensors"
PARTLY = "model.safetensors: .*; download it again"
INDEX = "expected a weight_map of tensors to files in its directory"


def tensors_with(name, value):
    return lambda directory: edit_tensors(directory, lambda tensors: tensors.update({name: value}))


def with_file(name, content):
    return lambda directory: (directory / name).write_bytes(content)


def cut(length):
    return lambda directory: os.truncate(path := directory / "model.safetensors", length % path.stat().st_size)


# What damages a checkpoint, and the message.
DAMAGES = (
    (lambda d: (d / "config.json").unlink(), "config.json does not exist: download it"),
    (with_file("config.json", b"{"), "config.json: .*; download"),
    (with_file("config.json", b"\xff"), "utf-8"),
    (with_file("config.json", b"[]"), "list"),
    (lambda d: (d / "model.safetensors").unlink(), "holds no model.safetensors: download it too"),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), PICKLE),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin.index.json"), PICKLE),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model-00001-of-00002.bin"), PICKLE),
    *((cut(length), PARTLY) for length in (0, 4, 100, -1)),
    (with_file("model.safetensors", b"no tensors here" * 100), PARTLY),
    (
        lambda d: edit(d, num_hidden_layers=3),
        "lacks 9 tensors that config.json requires, model.layers.2.input_layernorm",
    ),
    (lambda d: edit(d, num_hidden_layers=1), "holds 9 tensors that the model of config.json lacks, model.layers.1"),
    (
        lambda d: edit(d, intermediate_size=32),
        r"gate_proj.weight has shape \(24, 8\), but config.json makes it \(32, 8\)",
    ),
    (
        tensors_with("model.norm.weight", np.ones(8, np.int8)),
        "model.norm.weight is stored as I8: expected F32, F16 or BF16",
    ),
)
OF_SHARDS = (
    (lambda d: next(d.glob("model-00002*")).unlink(), "model-00002-of-.*safetensors does not exist: download it"),
    *((with_file(convert.INDEX, json.dumps(x).encode()), INDEX) for x in ({}, {"weight_map": {}}, {"weight_map": []})),
    *(
        (with_file(convert.INDEX, json.dumps({"weight_map": {"a": x}}).encode()), INDEX)
        for x in (1, "../b.safetensors")
    ),
)


def test_damaged_checkpoints_raise(tmp_path):
    convert.save(*make(), tmp_path / "whole")
    convert.save(*make(), tmp_path / "shards", shard_bytes=1000)
    for source, damages in (("whole", DAMAGES), ("shards", OF_SHARDS)):
        for number, (damage, message) in enumerate(damages):
            directory = shutil.copytree(tmp_path / source, tmp_path / f"{source}{number}")
            damage(directory)
            assert_raises(message, convert.load, directory)
    assert_raises("org/name is not a directory: download", convert.load, tmp_path / "org/name")


def test_invalid_arguments_raise(tmp_path):
    config, params = make()
    assert_raises("unknown dtype 'bf16': did you mean 'bfloat16'", convert.save, config, params, tmp_path, dtype="bf16")
    assert_raises(
        "params are not of config: layers/mlp/down/kernel, ", convert.save, make(mlp_dim=32)[0], params, tmp_path
    )


def test_files_have_the_same_mode(tmp_path):
    convert.save(*make(), tmp_path / "a", shard_bytes=1000)
    assert len({path.stat().st_mode for path in (tmp_path / "a").iterdir()}) == 1


def test_missing_package_raises(llama, monkeypatch):
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert_raises(re.escape("pip install safetensors"), convert.load, llama)
    assert_raises(re.escape("pip install safetensors"), convert.save, *make(), llama)


def test_existing_checkpoint_is_not_overwritten(llama):
    before = (llama / "model.safetensors").read_bytes()
    assert_raises("config.json exists: name an empty directory", convert.save, *make(), llama)
    (llama / "config.json").unlink()
    assert_raises("model.safetensors exists: name an empty directory", convert.save, *make(), llama)
    assert (llama / "model.safetensors").read_bytes() == before


def test_unwritable_directory_raises(tmp_path):
    (tmp_path / "file").write_text("")
    assert_raises(
        "file/a: .*; free some space, or name a directory that can be", convert.save, *make(), tmp_path / "file/a"
    )


def test_failed_write_leaves_no_config(tmp_path):
    """A directory with config.json is complete: config.json is written last."""
    config, params = make()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert_raises("a: .*; free some space", convert.save, config, params, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "a" / "config.json").exists()


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", np.inf), ("float16", -np.inf)])
def test_tensors_that_are_not_finite_raise(dtype, value, tmp_path):
    config, params = make()
    convert.save(config, params, tmp_path / "intact", dtype=dtype)
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    edit_tensors(
        tmp_path / "intact", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__setitem__((0, 2), value)
    )
    message = r"model.layers.1.mlp.up_proj.weight.* holds NaN or infinity, 1 of 192 numbers"
    assert_raises(message, convert.load, tmp_path / "intact")
    kernel[1, 0, 2] = value
    assert_raises(message, convert.save, config, params, tmp_path / "new", dtype=dtype)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("bfloat16", np.finfo(np.float32).max)])
def test_overflow_in_the_dtype_raises(dtype, value, tmp_path):
    config, params = make()
    params["final_norm"]["scale"][3] = value
    message = rf"model.norm.weight.* holds {value:.4g}, which is infinite in {dtype}: choose dtype .*float32".replace(
        "+", "[+]"
    )
    assert_raises(message, convert.save, config, params, tmp_path / "new", dtype=dtype)
    convert.save(config, params, tmp_path / "wide")
    assert_raises(message, convert.load, tmp_path / "wide", dtype)
    assert_same(params, convert.load(tmp_path / "wide")[1])
