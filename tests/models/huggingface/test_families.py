"""Settings of config.json become fields of LMConfig and back, or raise errors."""

import re

import pytest

from hpnlp.models.huggingface import convert, families
from hpnlp.models.lm import LMConfig
from tests.models.huggingface.checkpoints import GPT2, SMALL, assert_raises, assert_same, edit, make


def test_settings_that_do_not_change_the_function_are_ignored(llama, gpt2):
    for directory, harmless in (
        (llama, {"pretraining_tp": 2, "attention_dropout": 0.1, "use_cache": False, "torch_dtype": "bfloat16"}),
        (gpt2, {"reorder_and_upcast_attn": True, "resid_pdrop": 0.1, "task_specific_params": {"a": 1}, "n_ctx": 16}),
    ):
        before = convert.load(directory)[0]
        edit(directory, quantization_config=None, **harmless)
        assert convert.load(directory)[0] == before


def test_missing_settings_have_the_defaults_of_transformers(llama):
    """Checkpoints of Llama 1 have no settings for grouped queries, theta and biases."""
    absent = ["num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "rms_norm_eps"]
    edit(llama, absent=[*absent, "rope_theta", "rope_scaling", "rope_parameters", "hidden_act"])
    config, _ = convert.load(llama)
    assert (config.kv_head_count, config.head_size, config.rope_theta, config.tied) == (2, 4, 10000.0, False)


ROPE = {"rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 2.0}

LLAMA_REFUSALS = {
    "hidden_act": (
        {"hidden_act": "relu2"},
        'hidden_act="relu2" is not supported: choose a model with hidden_act="silu" or "swish" or "gelu_pytorch_tanh"',
    ),
    "activation_of_a_wrong_type": ({"hidden_act": ["silu"]}, r'hidden_act=\["silu"\] is not supported'),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config is not supported: dequantize"),
    "remote_code": (
        {"auto_map": {"AutoModel": "a.B"}},
        "auto_map is not supported: the model runs code from its checkpoint",
    ),
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
        "config.json: model_type='opt' is not supported: .* one of llama, mistral, .*, bert, roberta, distilbert, mobilebert$",
    ),
    "no_model_type": ({"model_type": None}, "model_type is missing or not a string: expected one of llama"),
    "window": ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0: expected a whole number"),
    "window_of_layers": (
        {"model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"] * 2},
        "layer_types=.* is not supported: expected 2 times sliding_attention, because sliding_window holds",
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
def test_unsupported_llama_settings_raise(name, llama):
    changes, message = LLAMA_REFUSALS[name]
    edit(llama, **changes)
    assert_raises(message, convert.load, llama)


GPT2_REFUSALS = {
    "activation": ({"activation_function": "tanh"}, 'activation_function="tanh" .*"gelu_new" or'),
    "layer_scale": ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
    "no_scale": ({"scale_attn_weights": False}, "scale_attn_weights=false is not supported"),
    "cross": ({"add_cross_attention": True}, "add_cross_attention=true is not supported"),
    "heads": ({"n_head": 3}, "config.json: model.dim=8 is not a multiple of model.heads=3"),
}


@pytest.mark.parametrize("name", GPT2_REFUSALS)
def test_unsupported_gpt2_settings_raise(name, gpt2):
    changes, message = GPT2_REFUSALS[name]
    edit(gpt2, **changes)
    assert_raises(message, convert.load, gpt2)


def test_missing_setting_raises(llama):
    edit(llama, absent=["intermediate_size"])
    assert_raises("intermediate_size is missing: add it", convert.load, llama)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "layer"}, "in llama, the nearest, norm is 'rms', not 'layer'"),
        ({"out_bias": True}, "no family of transformers has such a model"),
        ({"norm_placement": "post"}, "norm_placement is 'pre', not 'post'"),
        ({"output": "full(use_bias=True)"}, "output is 'full', not 'full.use_bias=True.'"),
        ({"position": "none"}, "position is 'rope', not 'none'"),
        ({"position": "none", "rope_scaling": "ntk(3)"}, "position is 'rope', not 'none'"),
        ({"rope_scaling": "ntk(3)", "rope_theta": 100.0}, "'ntk.3.' is not known .* rope_theta=900"),
        (GPT2 | {"mlp": "swiglu"}, "in gpt2, the nearest, mlp is 'gelu', not 'swiglu'"),
        (GPT2 | {"mlp": "gelu", "kv_heads": 1}, "in gpt2, the nearest, kv_heads is 2, not 1"),
        (GPT2 | {"mlp": "gelu", "head_dim": 6}, "heads of gpt2 have dim / heads = 8 / 2 features, and those of this"),
        ({"max_len": 0}, "config.max_len is 0: set it"),
    ],
)
def test_model_of_no_family_raises(fields, message, tmp_path):
    assert_raises(message, convert.save, *make(**fields), tmp_path / "a")
    assert not (tmp_path / "a").exists()


WINDOWS = {  # name -> (settings in the config.json of a model with four layers, model.mixer)
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
    config = LMConfig(**families.config_fields(raw, "config.json"))
    assert config.mixer == mixer
    back = families.config_fields(families.config_json(config), "config.json")
    assert back.get("mixer", "full") == mixer


def test_windows_longer_than_the_model_are_full_attention():
    """A family without windows can express such a model."""
    config, _ = make(**GPT2, mlp="gelu", mixer="window(15,0)")
    assert families.config_json(config)["model_type"] == "gpt2"
    config, _ = make(**GPT2, mlp="gelu", mixer="window(14,0)")
    assert_raises(r"mixer is 'full', not 'window\(14,0\)'", families.config_json, config)


@pytest.mark.parametrize("output", ["sampled(4)", "importance(4, sampler=uniform)"])
def test_sampled_softmax_is_saved_as_full_softmax(output, tmp_path):
    config, params = make(output=output, tied=False)
    convert.save(config, params, tmp_path / "a")
    loaded, same_params = convert.load(tmp_path / "a")
    assert loaded.output == "full"
    assert_same(params, same_params)


@pytest.mark.parametrize("output", ["nce(4)", "negative_sampling(4)", "margin", "adaptive", "hierarchical(balanced)"])
def test_other_output_layers_raise(output):
    config = LMConfig(**SMALL, output=output, tied=False)
    assert_raises(f"output is 'full', not {re.escape(repr(output))}", families.config_json, config)


def test_dynamic_rope_is_plain_up_to_max_len(llama):
    before = convert.load(llama)[0]
    edit(llama, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert convert.load(llama)[0] == before
    assert convert.remarks(llama) == [
        "rope_type=dynamic changes nothing up to 16 tokens; beyond, transformers scales RoPE and hpnlp does not"
    ]
