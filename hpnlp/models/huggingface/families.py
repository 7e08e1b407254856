"""Hugging Face model families: their names for the sizes and the tensors of an LM.

FAMILIES is a plain table. `fields_of` reads a config.json through it and `config_json` writes one; `convert.py` moves the
tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpnlp.models.huggingface.config_values import checked_value, unsupported
from hpnlp.models.huggingface.rope_scaling import parse_scaling, read_rope, rope_json
from hpnlp.models.huggingface.sliding_windows import (
    WindowLayers,
    canonical_mixer,
    mixer_of,
    read_windows,
    windows_json,
)
from hpnlp.models.lm import LMConfig
from hpnlp.nn.output import OUTPUTS
from hpnlp.spec import build, parse_one, parse_period
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Family:
    """Names of one `model_type` for the fields of an LMConfig and for its parameters.

    Attributes:
      architecture: Class in transformers.
      fields: Key of config.json -> fields of LMConfig that it sets.
      activation: Key of the MLP's activation.
      activations: Value of that key -> LMConfig.mlp.
      fixed: Fields of LMConfig that have the same value in all models of the family.
      defaults: Values that transformers assumes for keys that config.json lacks; all other keys are required.
      accepted: Key -> values under which the family computes the same as LM.
      modules: Module of the checkpoint, with `{}` for the layer -> modules of LM that it concatenates on the last axis.
      base: First part of all names but the head's, which a checkpoint of the model without a head leaves out.
      transposed: True if matrices are stored as [out, in].
      windows: Layers that may have a sliding window.
    """

    architecture: str
    fields: dict[str, tuple[str, ...]]
    activation: str
    activations: dict[str, str]
    fixed: dict[str, Any]
    defaults: dict[str, Any]
    accepted: dict[str, tuple[Any, ...]]
    modules: dict[str, tuple[str, ...]]
    base: str
    transposed: bool
    windows: WindowLayers = WindowLayers.NONE


_LLAMA = Family(
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
        "gelu": "geglu_exact",
        "gelu_pytorch_tanh": "geglu",
        "gelu_new": "geglu",
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
        "lm_head": ("head",),
    },
    base="model.",
    transposed=True,
)


def _like_llama(architecture: str, *absent: str, windows: WindowLayers, **additions: dict[str, Any]) -> Family:
    """A family with the tensors of Llama, without the keys `absent` of config.json, and with `additions` to its tables."""
    fields = {key: names for key, names in _LLAMA.fields.items() if key not in absent}
    tables = {name: {**getattr(_LLAMA, name), **addition} for name, addition in additions.items()}
    return dataclasses.replace(_LLAMA, architecture=architecture, fields=fields, windows=windows, **tables)


# Defaults of the keys for windows in the families of Qwen.
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

# model_type -> family. A model that several families can express is written as the first of them.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _like_llama(
        "MistralForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows=WindowLayers.ALL,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
    ),
    "qwen2": _like_llama(
        "Qwen2ForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows=WindowLayers.SOME,
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32, **_QWEN_WINDOWS},
    ),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM",
        "mlp_bias",
        windows=WindowLayers.SOME,
        fixed={"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        fields={
            "n_embd": ("dim",),
            "n_layer": ("layers",),
            "n_head": ("heads",),
            "n_inner": ("mlp_dim",),
            "vocab_size": ("vocab",),
            "n_positions": ("max_len",),
            "layer_norm_epsilon": ("norm_eps",),
            "tie_word_embeddings": ("tied",),
        },
        activation="activation_function",
        activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu"},
        fixed={"norm": "layer", "position": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True},
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        accepted={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        modules={
            "transformer.wte": ("embed",),
            "transformer.wpe": ("positions",),
            "transformer.h.{}.ln_1": ("layers/mix_norm",),
            "transformer.h.{}.attn.c_attn": ("layers/attention/q", "layers/attention/k", "layers/attention/v"),
            "transformer.h.{}.attn.c_proj": ("layers/attention/out",),
            "transformer.h.{}.ln_2": ("layers/feed_norm",),
            "transformer.h.{}.mlp.c_fc": ("layers/mlp/up",),
            "transformer.h.{}.mlp.c_proj": ("layers/mlp/down",),
            "transformer.ln_f": ("final_norm",),
            "lm_head": ("head",),
        },
        base="transformer.",
        transposed=False,
    ),
}

# Keys that change the meaning of the weights in any family -> what the user can do about it.
REFUSED = {
    "quantization_config": "dequantize the model with transformers, save it again, and convert that",
    "auto_map": "the model runs code from its checkpoint; choose one that needs no trust_remote_code",
}

# Output layers that train on samples of the words and whose distribution is the softmax over all rows of the table.
FULL_SOFTMAX = ("full", "sampled", "importance")

# Fields of LMConfig that change how a model is trained or run, and not the function that it computes.
FREE = ("dropout", "dtype", "unroll")


def fields_of(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the fields of LMConfig from a config.json.

    Args:
      raw: Content of the file.
      source: Name of the file, for error messages.

    Returns:
      Name -> value of the fields that the file sets.

    Raises:
      InputError: The model_type is not in FAMILIES, a value is missing or invalid, or a setting makes the model compute
          something that LM does not.
    """
    family = family_of(raw, source)
    for key, fix in REFUSED.items():
        if key in raw and raw[key] is not None:
            raise InputError(f"{source}: {key} is not supported: {fix}")
    raw = {**family.defaults, **raw}
    for key, accepted in family.accepted.items():
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
        if any(value not in accepted for value in values):
            raise unsupported(source, key, raw[key], accepted[-1:])
    activation = raw[family.activation]
    if activation not in tuple(family.activations):
        raise unsupported(source, family.activation, activation, family.activations)
    fields = {**family.fixed, "mlp": family.activations[activation]}
    for key, names in family.fields.items():
        is_unset = key in family.defaults and raw[key] is None  # LMConfig derives the value of 0 from other fields
        value = 0 if is_unset else checked_value(raw, key, type(getattr(LMConfig, names[0])), source)
        fields |= dict.fromkeys(names, value)
    if family.windows is not WindowLayers.NONE:
        fields["mixer"] = mixer_of(read_windows(raw, family.windows, source))
    return fields | (read_rope(raw, source) if fields["position"] == "rope" else {})


def family_of(raw: Mapping[str, Any], source: str) -> Family:
    """Looks up the family of a config.json.

    Args:
      raw: Content of the file.
      source: Name of the file, for error messages.

    Returns:
      The family of its model_type.

    Raises:
      InputError: model_type is missing or not in FAMILIES.
    """
    if "model_type" not in raw or not isinstance(raw["model_type"], str):
        raise InputError(f"{source}: model_type is missing or not a string: expected one of {', '.join(FAMILIES)}")
    if raw["model_type"] not in FAMILIES:
        raise InputError(
            f"{source}: model_type={raw['model_type']!r} is not supported: choose a model of one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[raw["model_type"]]


def config_json(config: LMConfig) -> dict[str, Any]:
    """Writes the config.json of the first family that computes the same function.

    Args:
      config: The model. A sampled softmax is written as the full softmax over the same table.

    Returns:
      The values of config.json. If no family has the model's windows, windows of at least max_len tokens become full
      attention.

    Raises:
      InputError: No family has such a model; the message names the fields that differ in the most similar family.
    """
    for field in ("vocab", "max_len"):
        if getattr(config, field) < 1:
            raise InputError(f"config.{field} is {getattr(config, field)}: set it, because a checkpoint states it")
    layer = parse_one(config.output, "model.output")
    has_bias = layer.name == "full" and build(layer, OUTPUTS, "output layer", name=None).use_bias
    if layer.name in FULL_SOFTMAX and not has_bias:
        config = dataclasses.replace(config, output="full")
    differences: dict[str, dict[str, Any]] = {}
    short = dataclasses.replace(config, mixer=canonical_mixer(config.mixer, config.layers, config.max_len))
    for candidate in (config, short):
        fields = _function_fields({**dataclasses.asdict(candidate), "mlp_dim": candidate.mlp_size})
        for name, family in FAMILIES.items():
            raw = _express(candidate, name, family)
            expressed = _function_fields({**dataclasses.asdict(LMConfig()), **fields_of(raw, name)})
            differences[name] = {
                field: expressed.get(field) for field in fields if fields[field] != expressed.get(field)
            }
            if not differences[name]:
                return raw
    nearest = min(differences, key=lambda name: len(differences[name]))
    listed = ", ".join(f"{field} is {value!r}, not {fields[field]!r}" for field, value in differences[nearest].items())
    flags = " ".join(f"--config.model.{field}={value}" for field, value in differences[nearest].items())
    raise InputError(
        f"no family of transformers has such a model: in {nearest}, the nearest, {listed}: train one with {flags}"
    )


def _express(config: LMConfig, model_type: str, family: Family) -> dict[str, Any]:
    """The config.json of `config` in a family; settings that the family lacks are dropped or changed."""
    values = dataclasses.asdict(config)
    values |= {"kv_heads": config.kv_head_count, "head_dim": config.head_size, "mlp_dim": config.mlp_size}
    activation_of = {mlp: activation for activation, mlp in reversed(family.activations.items())}
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        family.activation: activation_of.get(config.mlp, next(iter(family.activations))),
        **{key: values[names[0]] for key, names in family.fields.items()},
        **{key: accepted[0] for key, accepted in family.accepted.items()},
        **windows_json(config.mixer, config.layers, family.windows),
        **(rope_json(config) if family.fixed["position"] == "rope" else {}),
    }


def _function_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide the function of a model, with one spelling for equal values."""
    fields = {name: value for name, value in fields.items() if name not in FREE}
    theta, scaling = fields.pop("rope_theta"), fields.pop("rope_scaling")
    if fields["position"] == "rope":
        fields |= {"rope_theta": theta, "rope_scaling": parse_scaling(scaling)}
    fields["mixer"] = canonical_mixer(fields["mixer"], fields["layers"])
    fields["form"] = ",".join(map(str, parse_period(fields["form"], "model.form")))
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    fields["head_dim"] = fields["head_dim"] or fields["dim"] // fields["heads"]
    return fields
