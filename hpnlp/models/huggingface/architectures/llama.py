"""Llama (Touvron et al. 2023) and families with its tensors: Mistral, Qwen and Gemma."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpnlp.models.huggingface.config_values import checked_value
from hpnlp.models.huggingface.family import Family, ModelConfig
from hpnlp.models.huggingface.sliding_windows import (
    WindowLayers,
    parse_windows,
    read_windows,
    window_mixer,
    windows_json,
)
from hpnlp.nn.output import OUTPUTS
from hpnlp.spec import build, parse_one

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={
        "hidden_size": ("dim",),
        "num_hidden_layers": ("layers",),
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("kv_heads",),
        "head_dim": ("head_dim",),
        "intermediate_size": ("mlp_dim",),
        "vocab_size": ("vocab",),
        "max_position_embeddings": ("max_len",),
        "rms_norm_eps": ("norm_eps",),
        "tie_word_embeddings": ("tied",),
        "attention_bias": ("qkv_bias", "out_bias"),
        "mlp_bias": ("mlp_bias",),
    },
    activation="hidden_act",
    activations={
        "silu": "swiglu",
        "swish": "swiglu",
        "gelu_pytorch_tanh": "geglu",
        "gelu_new": "geglu",
        "gelu": "geglu_exact",
    },
    fixed={"norm": "rms", "position": "rope"},
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "partial_rotary_factor": None,
    },
    accepted={},
    modules={
        "model.embed_tokens": ("embed",),
        "model.layers.{}.input_layernorm": ("layers/mix_norm",),
        "model.layers.{}.self_attn.q_proj": ("layers/attention/q",),
        "model.layers.{}.self_attn.k_proj": ("layers/attention/k",),
        "model.layers.{}.self_attn.v_proj": ("layers/attention/v",),
        "model.layers.{}.self_attn.o_proj": ("layers/attention/out",),
        "model.layers.{}.self_attn.q_norm": ("layers/attention/q_norm",),
        "model.layers.{}.self_attn.k_norm": ("layers/attention/k_norm",),
        "model.layers.{}.post_attention_layernorm": ("layers/feed_norm",),
        "model.layers.{}.mlp.gate_proj": ("layers/mlp/gate",),
        "model.layers.{}.mlp.up_proj": ("layers/mlp/up",),
        "model.layers.{}.mlp.down_proj": ("layers/mlp/down",),
        "model.norm": ("final_norm",),
    },
    tensors={"lm_head.weight": "head"},
    base="model.",
    transposed=True,
)


def like_llama(
    model_type: str, architecture: str, *absent: str, windows: WindowLayers, **additions: dict[str, Any]
) -> Family:
    """A family with the tensors of Llama, without the keys `absent` of config.json, and with `additions` to its tables."""
    tables: dict[str, Any] = {name: {**getattr(LLAMA, name), **addition} for name, addition in additions.items()}
    fields = {key: names for key, names in tables.get("fields", LLAMA.fields).items() if key not in absent}
    tables |= {"model_type": model_type, "architecture": architecture, "fields": fields, "windows": windows}
    return dataclasses.replace(LLAMA, **tables)


# Norms multiply by 1 + weight, and embeddings by the square root of hidden_size.
_GEMMA = {"norm": "rms_zero_centered", "embed_scale": True}
# The first releases of Gemma 1 name the approximation by tanh "gelu", and transformers reads it so there.
_GEMMA_ACTIVATIONS = {"gelu": "geglu"}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bidirectional_attention": None,
}

# Defaults of the keys for windows in the families of Qwen.
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


def _read_caps(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the fields mixer and output of Gemma 2: windows, the scale of queries, and caps of scores and logits."""
    caps = {
        key: None if raw[key] is None else checked_value(raw, key, float, source)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    }
    options = {}
    if (cap := caps["attn_logit_softcapping"]) is not None:
        options["soft_cap"] = cap
    if (scalar := checked_value(raw, "query_pre_attn_scalar", int, source)) != raw["head_dim"]:
        options["scale"] = scalar**-0.5
    cap = caps["final_logit_softcapping"]
    return {
        "mixer": window_mixer(read_windows(raw, WindowLayers.ALTERNATING, source), options),
        "output": "full" if cap is None else f"full(soft_cap={cap!r})",
    }


def _caps_json(config: ModelConfig) -> dict[str, Any]:
    """Writes what `_read_caps` reads; the number of layers and settings that the family lacks are changed."""
    options = parse_windows(config.mixer, config.layers)[1]
    output = parse_one(config.output, "model.output")
    cap = build(output, OUTPUTS, "output layer", name=None).cap if output.name == "full" else None
    scale = options.get("scale", config.head_size**-0.5)
    return {
        **windows_json(config.mixer, config.layers, WindowLayers.ALTERNATING),
        "attn_logit_softcapping": options.get("soft_cap"),
        "final_logit_softcapping": cap,
        "query_pre_attn_scalar": max(round(scale**-2), 1),
    }


_GEMMA2 = dataclasses.replace(
    like_llama(
        "gemma2",
        "Gemma2ForCausalLM",
        "mlp_bias",
        windows=WindowLayers.NONE,
        fixed=_GEMMA | {"norm_placement": "sandwich"},
        defaults=_GEMMA_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "layer_types": None,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        accepted={"use_bidirectional_attention": (None, False)},
        modules={
            "model.layers.{}.post_attention_layernorm": ("layers/mix_result_norm",),
            "model.layers.{}.pre_feedforward_layernorm": ("layers/feed_norm",),
            "model.layers.{}.post_feedforward_layernorm": ("layers/feed_result_norm",),
        },
    ),
    activation="hidden_activation",
    read=_read_caps,
    write=_caps_json,
)

# Name -> family.
LLAMA_FAMILIES = {
    "llama": LLAMA,
    "mistral": like_llama(
        "mistral",
        "MistralForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows=WindowLayers.ALL,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
    ),
    "qwen2": like_llama(
        "qwen2",
        "Qwen2ForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows=WindowLayers.SOME,
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS},
    ),
    "qwen3": like_llama(
        "qwen3",
        "Qwen3ForCausalLM",
        "mlp_bias",
        windows=WindowLayers.SOME,
        fixed={"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS},
    ),
    "gemma": like_llama(
        "gemma",
        "GemmaForCausalLM",
        "mlp_bias",
        windows=WindowLayers.NONE,
        activations=_GEMMA_ACTIVATIONS,
        fixed=_GEMMA,
        defaults=_GEMMA_DEFAULTS | {"num_key_value_heads": 16},
        accepted={"use_bidirectional_attention": (None, False)},
    ),
    "gemma2": _GEMMA2,
}
