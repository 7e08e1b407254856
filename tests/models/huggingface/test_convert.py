"""Checkpoints of our own making, whole and damaged. What transformers makes of them: test_convert_oracle.py."""

import json
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

from hpnlp.models.huggingface import convert, families
from hpnlp.models.huggingface.families import FAMILIES
from hpnlp.models.lm import LM, LMConfig, example_batch
from hpnlp.types import InputError

SMALL = {"dim": 8, "heads": 2, "layers": 2, "vocab": 12, "max_len": 16, "mlp_dim": 24}
GPT2 = {"norm": "layer", "position": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True}

# name -> (fields of LMConfig, the family that has such a model)
MODELS = {
    "llama": ({"kv_heads": 1, "tied": False}, "llama"),
    "llama_biases": ({"qkv_bias": True, "out_bias": True, "mlp_bias": True}, "llama"),
    "llama_linear": ({"rope_scaling": "linear(2)", "head_dim": 6, "norm_eps": 1e-4}, "llama"),
    "llama_llama3": ({"rope_scaling": "llama3(8.0, 1.0, 4.0, length=8)", "rope_theta": 500.0}, "llama"),
    "llama_yarn": ({"rope_scaling": "yarn(4, 8)"}, "llama"),
    "llama_yarn_of_own_numbers": (
        {"rope_scaling": "yarn(4, 8, beta_fast=3, beta_slow=0.5, truncate=False, magnitude=1.5)"},
        "llama",
    ),
    "qwen2": ({"qkv_bias": True}, "qwen2"),
    "qwen3": ({"qk_norm": True, "qkv_bias": True, "out_bias": True}, "qwen3"),
    "mistral": ({"mixer": "window(3,0)"}, "mistral"),
    "qwen2_window": ({"mixer": "full,window(3,0)", "qkv_bias": True}, "qwen2"),
    "llama_gelu": ({"mlp": "geglu"}, "llama"),
    "llama_gelu_exact": ({"mlp": "geglu_exact"}, "llama"),
    "gpt2": (GPT2 | {"mlp": "gelu"}, "gpt2"),
    "gpt2_relu": (GPT2 | {"mlp": "relu", "tied": False}, "gpt2"),
}


def make(**fields):
    """`(config, random parameters)`."""
    config = LMConfig(**SMALL | fields)
    shapes = jax.eval_shape(lambda: nn.meta.unbox(LM(config).init(jax.random.key(0), example_batch(1, 2))["params"]))
    rng = np.random.default_rng(0)
    return config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two whole checkpoints; tests damage copies."""
    directory = tmp_path_factory.mktemp("whole")
    convert.save(*make(tied=False), directory / "llama")
    convert.save(*make(**GPT2, mlp="gelu"), directory / "gpt2")
    return directory


@pytest.fixture
def llama(whole, tmp_path):
    return shutil.copytree(whole / "llama", tmp_path / "llama")


@pytest.fixture
def gpt2(whole, tmp_path):
    return shutil.copytree(whole / "gpt2", tmp_path / "gpt2")


def edit(directory, absent=(), **changes):
    """Changes config.json."""
    raw = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if key not in absent}))


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


def refused(pattern, call, *args, **options):
    with pytest.raises(InputError, match=pattern) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, tmp_path):
    fields, family = MODELS[name]
    config, params = make(**fields)
    convert.save(config, params, tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert raw["model_type"] == family
    assert raw["architectures"] == [FAMILIES[family].architecture]
    config_a, params_a = convert.load(tmp_path / "a")
    same(params, params_a)

    convert.save(config_a, params_a, tmp_path / "b")
    assert convert.load(tmp_path / "b")[0] == config_a
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_gpt2_layout(gpt2):
    """Queries, keys and values stand side by side in one matrix that is stored [in, out]."""
    _, params = convert.load(gpt2)
    tensors = load_file(gpt2 / "model.safetensors")
    attention = params["layers"]["attention"]
    for part in ("kernel", "bias"):
        ours = np.concatenate([attention[name][part][1] for name in "qkv"], axis=-1)
        theirs = tensors[f"transformer.h.1.attn.c_attn.{'weight' if part == 'kernel' else part}"]
        np.testing.assert_array_equal(ours, theirs)


def test_llama_layout(llama):
    """Matrices are stored [out, in]."""
    _, params = convert.load(llama)
    tensors = load_file(llama / "model.safetensors")
    kernel = params["layers"]["mlp"]["gate"]["kernel"][1]
    assert kernel.shape == (8, 24)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_proj.weight"], kernel.T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_widened(dtype, tmp_path):
    config, params = make()
    convert.save(config, params, tmp_path / "a", dtype=dtype)
    _, loaded = convert.load(tmp_path / "a")
    same(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)).astype(np.float32), params), loaded)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}


def test_shards(tmp_path):
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
    same(params, convert.load(tmp_path / "a")[1])


def test_parameters_may_be_on_a_device_and_boxed(tmp_path):
    config, params = make()
    boxed = jax.tree.map(lambda leaf: nn.LogicallyPartitioned(jnp.asarray(leaf), (None,) * leaf.ndim), params)
    convert.save(config, boxed, tmp_path / "a")
    same(params, convert.load(tmp_path / "a")[1])


def test_ids_of_special_tokens_are_the_tokenizers(tmp_path):
    convert.save(*make(), tmp_path / "a", bos_id=3, eos_id=4)
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"]) == (3, 4)


# What does not change the function is no reason to refuse a checkpoint.


def test_harmless_settings(llama, gpt2):
    for directory, harmless in (
        (llama, {"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False, "torch_dtype": "bfloat16"}),
        (gpt2, {"reorder_and_upcast_attn": True, "resid_pdrop": 0.1, "task_specific_params": {"a": 1}, "n_ctx": 16}),
    ):
        before = convert.load(directory)[0]
        edit(directory, quantization_config=None, **harmless)
        assert convert.load(directory)[0] == before


def test_values_that_config_json_leaves_out(llama):
    """Llama 1 knew neither grouped queries nor another theta nor biases."""
    absent = ["num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "rms_norm_eps"]
    edit(llama, absent=[*absent, "rope_theta", "rope_scaling", "rope_parameters", "hidden_act"])
    config, _ = convert.load(llama)
    assert (config.kv_head_count, config.head_size, config.rope_theta, config.tied) == (2, 4, 10000.0, False)


def test_buffers_are_passed_over(gpt2):
    before = convert.load(gpt2)[1]
    mask = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8),
        "transformer.h.0.attn.masked_bias": np.ones(()),
    }
    edit_tensors(gpt2, lambda tensors: tensors.update(mask))
    same(before, convert.load(gpt2)[1])


def test_names_of_the_headless_model(gpt2, llama):
    for directory, base in ((gpt2, "transformer."), (llama, "model.")):
        before = convert.load(directory)[1]
        tensors = {
            name.removeprefix(base): tensor for name, tensor in load_file(directory / "model.safetensors").items()
        }
        save_file(tensors, directory / "model.safetensors")
        same(before, convert.load(directory)[1])


def test_a_tied_head_may_be_stored_twice(gpt2):
    before = convert.load(gpt2)[1]
    edit_tensors(gpt2, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"]}))
    same(before, convert.load(gpt2)[1])
    edit_tensors(gpt2, lambda tensors: tensors.update({"lm_head.weight": 2 * tensors["transformer.wte.weight"]}))
    refused("lm_head.weight differs .* set tie_word_embeddings to false", convert.load, gpt2)


# Settings that change the function: refused, by name.

ROPE = {"rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 2.0}

LLAMA_REFUSALS = {
    "hidden_act": (
        {"hidden_act": "relu2"},
        'hidden_act="relu2" is not supported: choose a model with hidden_act="silu" or "swish" or "gelu"',
    ),
    "activation_of_a_wrong_type": ({"hidden_act": ["silu"]}, r'hidden_act=\["silu"\] is not supported'),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is not supported: dequantize"),
    "own_code": ({"auto_map": {"AutoModel": "a.B"}}, "auto_map is not supported: the model runs code of its own"),
    "longrope": ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, 'rope_type="longrope" .*"llama3" or "yarn"'),
    "mscale": ({"rope_scaling": YARN | {"mscale": 1.0}}, "mscale=1.0 is not supported: .* with mscale=null"),
    "truncate": ({"rope_scaling": YARN | {"truncate": None}}, "truncate is None: expected true or false"),
    "partial_rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    "rope_a_layer": ({"rope_parameters": {"full_attention": ROPE}}, "expected one set of numbers"),
    "rope_a_number": ({"rope_parameters": 2.0}, "rope_parameters is 2.0: expected one set of numbers"),
    "rope_lacks": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope_of_a_wrong_type": ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2': expected a positive"),
    "theta": ({"rope_parameters": None, "rope_theta": -1.0}, "rope_theta is -1.0: expected a positive number"),
    "string": ({"hidden_size": "8"}, "hidden_size is '8': expected a whole number"),
    "float": ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0: expected a whole number"),
    "bool": ({"vocab_size": True}, "vocab_size is True: expected a whole number"),
    "zero": ({"vocab_size": 0}, "vocab_size is 0: expected a whole number of at least 1"),
    "not_a_bool": ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no': expected true or false"),
    "not_finite": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan: expected a positive number"),
    "does_not_divide": ({"num_key_value_heads": 3}, "config.json: .* does not divide"),
    "opt": (
        {"model_type": "opt"},
        "config.json: model_type='opt' is not supported: .* one of llama, mistral, qwen2, qwen3, gpt2$",
    ),
    "no_model_type": ({"model_type": None}, "model_type is missing or not a string: expected one of llama"),
    "window": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0: expected a whole number"),
    "window_of_layers": (
        {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2},
        "layer_types=.* is not supported: expected 2 times sliding_attention, as sliding_window says",
    ),
    "window_flag": (
        {"model_type": "qwen2", "use_sliding_window": 1},
        "use_sliding_window is 1: expected true or false",
    ),
    "window_first": (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
        "max_window_layers is None: expected a whole number of at least 0",
    ),
    "window_without_size": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types=.* with sliding_window=null is not supported",
    ),
    "window_of_another_kind": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types=.*chunked_attention.* is not supported",
    ),
    "window_of_another_length": ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "expected 2 times"),
}


@pytest.mark.parametrize("name", LLAMA_REFUSALS)
def test_llama_that_is_refused(name, llama):
    changes, message = LLAMA_REFUSALS[name]
    edit(llama, **changes)
    refused(message, convert.load, llama)


GPT2_REFUSALS = {
    "activation": ({"activation_function": "tanh"}, 'activation_function="tanh" .*"gelu_new" or'),
    "layer_scale": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
    "no_scale": ({"scale_attn_weights": False}, "scale_attn_weights=false is not supported"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention=true is not supported"),
    "heads": ({"n_head": 3}, "config.json: model.dim=8 is not a multiple of model.heads=3"),
}


@pytest.mark.parametrize("name", GPT2_REFUSALS)
def test_gpt2_that_is_refused(name, gpt2):
    changes, message = GPT2_REFUSALS[name]
    edit(gpt2, **changes)
    refused(message, convert.load, gpt2)


def test_missing_setting(llama):
    edit(llama, absent=["intermediate_size"])
    refused("intermediate_size is missing: add it", convert.load, llama)


# Files that are missing or damaged.


def test_no_directory(tmp_path):
    refused("org/name is not a directory: download", convert.load, tmp_path / "org/name")


def test_no_config(llama):
    (llama / "config.json").unlink()
    refused("config.json does not exist: download it", convert.load, llama)


@pytest.mark.parametrize(
    ("text", "message"), [(b"{", "config.json: .*; download"), (b"\xff", "utf-8"), (b"[]", "list")]
)
def test_config_that_is_no_json_object(text, message, llama):
    (llama / "config.json").write_bytes(text)
    refused(message, convert.load, llama)


def test_no_weights(llama):
    (llama / "model.safetensors").unlink()
    refused("holds no model.safetensors: download it too", convert.load, llama)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"]
)
def test_pickle_is_never_read(name, llama):
    (llama / "model.safetensors").rename(llama / name)
    refused("a pickle, which can run code .* save_pretrained writes safetensors", convert.load, llama)


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_truncated_weights(length, llama):
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:length])
    refused("model.safetensors: .*; download it again", convert.load, llama)


def test_garbage(llama):
    (llama / "model.safetensors").write_bytes(b"no tensors here" * 100)
    refused("model.safetensors: .*; download it again", convert.load, llama)


def test_missing_tensors(llama):
    edit(llama, num_hidden_layers=3)
    refused("lacks 9 tensors that config.json asks for, model.layers.2.input_layernorm", convert.load, llama)


def test_surplus_tensor(llama):
    edit(llama, num_hidden_layers=1)
    refused("holds 9 tensors that the model of config.json lacks, model.layers.1", convert.load, llama)


def test_wrong_shape(llama):
    edit(llama, intermediate_size=32)
    refused(
        r"layers.0.mlp.gate_proj.weight has shape \(24, 8\), but config.json makes it \(32, 8\)", convert.load, llama
    )


def test_quantized_tensor(llama):
    edit_tensors(llama, lambda tensors: tensors.update({"model.norm.weight": np.ones(8, np.int8)}))
    refused("model.norm.weight is stored as I8: expected F32, F16 or BF16", convert.load, llama)


def sharded(tmp_path):
    convert.save(*make(), tmp_path / "a", shard_bytes=1000)
    return tmp_path / "a"


def test_missing_shard(tmp_path):
    directory = sharded(tmp_path)
    next(directory.glob("model-00002*")).unlink()
    refused("model-00002-of-.*safetensors does not exist: download it", convert.load, directory)


@pytest.mark.parametrize(
    "index",
    [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b.safetensors"}}],
)
def test_bad_index(index, tmp_path):
    directory = sharded(tmp_path)
    (directory / convert.INDEX).write_text(json.dumps(index))
    refused("expected a weight_map of tensors to files beside it", convert.load, directory)


def test_the_package_is_missing(llama, monkeypatch):
    for name in ("safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    refused(re.escape("pip install safetensors"), convert.load, llama)
    refused(re.escape("pip install safetensors"), convert.save, *make(), llama)


# What cannot be saved.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "layer"}, "in llama, the nearest, norm is 'rms', not 'layer'"),
        ({"out_bias": True}, "no family of transformers has such a model"),
        ({"position": "none"}, "position is 'rope', not 'none'"),
        ({"position": "none", "rope_scaling": "ntk(3)"}, "position is 'rope', not 'none'"),
        (
            {"rope_scaling": "ntk(3)", "rope_theta": 100.0},
            "'ntk.3.' is not known .* rope_theta=900 with rope_scaling='none'",
        ),
        (GPT2 | {"mlp": "swiglu"}, "in gpt2, the nearest, mlp is 'gelu', not 'swiglu'"),
        (GPT2 | {"mlp": "gelu", "kv_heads": 1}, "in gpt2, the nearest, kv_heads is 2, not 1"),
        (GPT2 | {"mlp": "gelu", "head_dim": 6}, "in gpt2, the nearest, head_dim is 4, not 6"),
        ({"max_len": 0}, "config.max_len is 0: set it"),
    ],
)
def test_a_model_that_no_family_has(fields, message, tmp_path):
    refused(message, convert.save, *make(**fields), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_parameters_of_another_config(tmp_path):
    config, _ = make()
    _, params = make(mlp_dim=32)
    refused("params are not of config: layers/mlp/down/kernel, ", convert.save, config, params, tmp_path / "a")


def test_unknown_dtype(tmp_path):
    refused("unknown dtype 'bf16': did you mean 'bfloat16'", convert.save, *make(), tmp_path / "a", dtype="bf16")


def test_a_checkpoint_is_not_overwritten(llama):
    before = (llama / "model.safetensors").read_bytes()
    refused("config.json exists: name an empty directory", convert.save, *make(), llama)
    (llama / "config.json").unlink()
    refused("model.safetensors exists: name an empty directory", convert.save, *make(), llama)
    assert (llama / "model.safetensors").read_bytes() == before


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refused("file/a: .*; free some space, or name a directory that can be", convert.save, *make(), tmp_path / "file/a")


def test_a_write_that_fails_leaves_no_config(tmp_path):
    """A directory that looks whole must be whole: config.json comes last."""
    config, params = make()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        refused("a: .*; free some space", convert.save, config, params, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "a" / "config.json").exists()


# Windows.

WINDOWS = {  # name -> (what config.json says of four layers, model.mixer)
    "mistral": ({"model_type": "mistral", "sliding_window": 5}, "window(4,0)"),
    "mistral_default": ({"model_type": "mistral"}, "window(4095,0)"),
    "mistral_without": ({"model_type": "mistral", "sliding_window": None}, "full"),
    "qwen_unused": ({"model_type": "qwen2", "sliding_window": 5, "max_window_layers": 0}, "full"),
    "qwen_upper": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
        "full*3,window(4,0)",
    ),
    "qwen_null": (
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": None, "max_window_layers": None},
        "full",
    ),
    "qwen_all": ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, "window(4095,0)"),
    "qwen_none": ({"model_type": "qwen3", "use_sliding_window": True}, "full"),
    "qwen_types": (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 1,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
        "full,window(0,0)",
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_sliding_windows_become_mixers(name):
    changes, mixer = WINDOWS[name]
    sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    raw = sizes | {"intermediate_size": 24, "vocab_size": 12, "max_position_embeddings": 16} | changes
    config = LMConfig(**families.fields_of(raw, "config.json"))
    assert config.mixer == mixer
    back = families.fields_of(families.config_json(config), "config.json")
    assert back.get("mixer", "full") == mixer


def test_windows_longer_than_the_model_are_full_attention():
    """A family without windows has such a model all the same."""
    config, _ = make(**GPT2, mlp="gelu", mixer="window(15,0)")
    assert families.config_json(config)["model_type"] == "gpt2"
    config, _ = make(**GPT2, mlp="gelu", mixer="window(14,0)")
    refused(r"mixer is 'full', not 'window\(14,0\)'", families.config_json, config)


# Numbers that are none.


@pytest.mark.parametrize(("dtype", "value"), [("float32", np.nan), ("bfloat16", np.inf), ("float16", -np.inf)])
def test_tensors_that_are_not_finite_are_refused(dtype, value, tmp_path):
    config, params = make()
    convert.save(config, params, tmp_path / "whole", dtype=dtype)
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    edit_tensors(
        tmp_path / "whole", lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].__setitem__((0, 2), value)
    )
    message = r"model.layers.1.mlp.up_proj.weight.* holds NaN or infinity, 1 of 192 numbers"
    refused(message, convert.load, tmp_path / "whole")
    kernel[1, 0, 2] = value
    refused(message, convert.save, config, params, tmp_path / "new", dtype=dtype)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 1e5), ("bfloat16", np.finfo(np.float32).max)])
def test_numbers_that_overflow_in_the_dtype_are_refused(dtype, value, tmp_path):
    config, params = make()
    params["final_norm"]["scale"][3] = value
    message = rf"model.norm.weight.* holds {value:.4g}, which is infinite in {dtype}: choose dtype .*float32".replace(
        "+", "[+]"
    )
    refused(message, convert.save, config, params, tmp_path / "new", dtype=dtype)
    convert.save(config, params, tmp_path / "wide")
    refused(message, convert.load, tmp_path / "wide", dtype)
    same(params, convert.load(tmp_path / "wide")[1])


# Output layers.


@pytest.mark.parametrize("output", ["sampled(4)", "importance(4, sampler=uniform)"])
def test_sampled_softmax_is_saved_as_the_full_one(output, tmp_path):
    config, params = make(output=output, tied=False)
    convert.save(config, params, tmp_path / "a")
    loaded, same_params = convert.load(tmp_path / "a")
    assert loaded.output == "full"
    same(params, same_params)


@pytest.mark.parametrize("output", ["nce(4)", "negative_sampling(4)", "margin", "adaptive", "hierarchical(balanced)"])
def test_other_output_layers_are_refused(output):
    config = LMConfig(**SMALL, output=output, tied=False)
    refused(f"output is 'full', not {re.escape(repr(output))}", families.config_json, config)


def test_dynamic_rope_is_plain_up_to_the_models_length(llama):
    before = convert.load(llama)[0]
    edit(llama, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert convert.load(llama)[0] == before
    assert convert.remarks(llama) == [
        "rope_type=dynamic changes nothing up to 16 tokens; beyond, transformers scales RoPE and hpnlp does not"
    ]
