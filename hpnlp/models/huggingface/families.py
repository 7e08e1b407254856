"""Hugging Face model families: what each calls the sizes and the tensors of an LM.

FAMILIES is a plain table. `fields_of` reads a config.json through it and `config_json` writes one; `convert.py` moves
the tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from hpnlp.models.lm import LMConfig
from hpnlp.nn.attention import ROPE_SCALINGS, alternation
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention import Window
from hpnlp.ops.attention.positions.rope import Scaling, frequencies
from hpnlp.spec import build, parse_one, shortened
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` spells an LMConfig and its parameters.

    architecture: the class in transformers. fields: key of config.json -> the fields of LMConfig that it sets.
    activation: the key of the MLP's activation, and activations: its values -> LMConfig.mlp. fixed: fields of LMConfig
    that all models of the family share. defaults: what transformers takes where config.json lacks a key; a key without
    one must be there. accepted: key -> the values under which the family computes what LM computes. modules: module of
    the checkpoint, with `{}` for the layer -> modules of ours, which it holds side by side on the last axis. base: the
    first part of every name but the head's, which a checkpoint of the headless model leaves out. transposed: matrices
    are stored [out, in]. windows: an entry of WINDOWS, the layers that may have a sliding window.
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
    windows: str = "none"


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


def _like_llama(architecture: str, *absent: str, windows: str = "none", **additions: dict[str, Any]) -> Family:
    """A family with Llama's layout: without the keys `absent` of config.json, with `additions` to its tables."""
    fields = {key: ours for key, ours in _LLAMA.fields.items() if key not in absent}
    tables = {name: {**getattr(_LLAMA, name), **addition} for name, addition in additions.items()}
    return dataclasses.replace(_LLAMA, architecture=architecture, fields=fields, windows=windows, **tables)


# Defaults of the keys that Qwen's families have for windows.
_SOME_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}

# model_type -> family. Of several that fit a model, the first is written.
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _like_llama(
        "MistralForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows="all",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "layer_types": None},
    ),
    "qwen2": _like_llama(
        "Qwen2ForCausalLM",
        "attention_bias",
        "mlp_bias",
        windows="some",
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32, **_SOME_WINDOWS},
    ),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM",
        "mlp_bias",
        windows="some",
        fixed={"qk_norm": True},
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_SOME_WINDOWS},
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

# Keys that change what the weights of any family mean, and what to do about them.
REFUSED = {
    "quantization_config": "dequantize the model with transformers, save it again, and convert that",
    "auto_map": "the model runs code of its own; choose one that needs no trust_remote_code",
}

# Layers of a family that may have a sliding window: none; all of them, where config.json names its size; or those that
# layer_types marks, or else those from max_window_layers on, where use_sliding_window is true.
WINDOWS = ("none", "all", "some")

# Output layers that are trained on samples of the words and whose distribution is the softmax over all rows of the table.
FULL_SOFTMAX = ("full", "sampled", "importance")

# rope_type -> (its name in LMConfig.rope_scaling, key -> field of Scaling, in the order of the name's arguments).
ROPE_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    # Dynamic NTK changes nothing up to max_position_embeddings: see `remarks`.
    "dynamic": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_length",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "original_max_position_embeddings": "original_length",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "truncate": "truncate",
            "attention_factor": "magnitude",
        },
    ),
}
# Keys that may be missing, and where they are numbers null: the function that Scaling comes from has transformers' values.
ROPE_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
# Keys that change the rotary embedding in a way that Scaling has no word for.
ROPE_REFUSED = ("mscale", "mscale_all_dim")

# Fields of LMConfig that change how a model is trained or run, and not what it computes.
FREE = ("dropout", "dtype", "unroll")

_EXPECTED = {int: "a whole number of at least 1", float: "a positive number", bool: "true or false"}


def fields_of(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The fields of LMConfig that a config.json sets.

    source: what to call it in errors. Raises InputError on a model_type that FAMILIES lacks, on missing and malformed
    values, and on every setting under which the model computes something that LM does not.
    """
    family = family_of(raw, source)
    for key, mend in REFUSED.items():
        if key in raw and raw[key] is not None:
            raise InputError(f"{source}: {key} is not supported: {mend}")
    raw = {**family.defaults, **raw}
    for key, accepted in family.accepted.items():
        values = raw[key] if isinstance(raw[key], list) else [raw[key]]
        if any(value not in accepted for value in values):
            raise _unsupported(source, key, raw[key], accepted[-1:])
    activation = raw[family.activation]
    if activation not in tuple(family.activations):
        raise _unsupported(source, family.activation, activation, family.activations)
    fields = {**family.fixed, "mlp": family.activations[activation]}
    for key, names in family.fields.items():
        left_open = key in family.defaults and raw[key] is None
        value = 0 if left_open else _checked(raw, key, type(getattr(LMConfig, names[0])), source)
        fields |= dict.fromkeys(names, value)
    if family.windows != "none":
        fields["mixer"] = _mixer(_windows(raw, family.windows, source))
    return fields | (_rope_fields(raw, source) if fields["position"] == "rope" else {})


def family_of(raw: Mapping[str, Any], source: str) -> Family:
    """The family that a config.json's model_type names; raises InputError with all of them where it names none."""
    if "model_type" not in raw or not isinstance(raw["model_type"], str):
        raise InputError(f"{source}: model_type is missing or not a string: expected one of {', '.join(FAMILIES)}")
    if raw["model_type"] not in FAMILIES:
        raise InputError(
            f"{source}: model_type={raw['model_type']!r} is not supported: choose a model of one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[raw["model_type"]]


def remarks(raw: Mapping[str, Any]) -> list[str]:
    """Differences from transformers that a user of the converted model should know of, one line each."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if given.get("rope_type", given.get("type")) != "dynamic":
        return []
    length = raw.get("max_position_embeddings")
    return [
        f"rope_type=dynamic changes nothing up to {length} tokens; beyond, transformers scales RoPE and hpnlp does not"
    ]


def exported(config: LMConfig) -> LMConfig:
    """The model of `config` as checkpoints state it: with the full softmax where the output layer only samples from it."""
    sampled = parse_one(config.output, "model.output").name in FULL_SOFTMAX
    return dataclasses.replace(config, output="full") if sampled else config


def config_json(config: LMConfig) -> dict[str, Any]:
    """The config.json of the first family that computes what `config` describes.

    Args:
        config: the model; sampled output layers count as the full softmax that their table is of.

    Returns:
        The values of config.json. A window that reaches all of max_len positions is left out where no family has it.

    Raises:
        InputError: No family has such a model; the message names the fields that differ in the nearest family.
    """
    for field in ("vocab", "max_len"):
        if getattr(config, field) < 1:
            raise InputError(f"config.{field} is {getattr(config, field)}: set it, for a checkpoint has to state it")
    config = exported(config)
    misfits: dict[str, dict[str, Any]] = {}
    short = dataclasses.replace(config, mixer=_canonical(config.mixer, config.layers, config.max_len))
    for spelled in (config, short):
        ours = _function({**dataclasses.asdict(spelled), "mlp_dim": spelled.mlp_size})
        for name, family in FAMILIES.items():
            raw = _spell(spelled, name, family)
            theirs = _function({**dataclasses.asdict(LMConfig()), **fields_of(raw, name)})
            misfits[name] = {field: theirs.get(field) for field in ours if ours[field] != theirs.get(field)}
            if not misfits[name]:
                return raw
    nearest = min(misfits, key=lambda name: len(misfits[name]))
    differing = ", ".join(f"{field} is {value!r}, not {ours[field]!r}" for field, value in misfits[nearest].items())
    flags = " ".join(f"--config.model.{field}={value}" for field, value in misfits[nearest].items())
    raise InputError(
        f"no family of transformers has such a model: in {nearest}, the nearest, {differing}: train one with {flags}"
    )


def _spell(config: LMConfig, model_type: str, family: Family) -> dict[str, Any]:
    """`config` in the family's words, as far as it has them."""
    values = dataclasses.asdict(config)
    values |= {"kv_heads": config.kv_head_count, "head_dim": config.head_size, "mlp_dim": config.mlp_size}
    known = {mlp: activation for activation, mlp in reversed(family.activations.items())}
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        family.activation: known[config.mlp] if config.mlp in known else next(iter(family.activations)),
        **{key: values[names[0]] for key, names in family.fields.items()},
        **{key: accepted[0] for key, accepted in family.accepted.items()},
        **_window_json(config, family.windows),
        **(_rope_json(config) if family.fixed["position"] == "rope" else {}),
    }


def _function(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that decide what a model computes, in one spelling."""
    fields = {name: value for name, value in fields.items() if name not in FREE}
    theta, scaling = fields.pop("rope_theta"), fields.pop("rope_scaling")
    if fields["position"] == "rope":
        fields |= {"rope_theta": theta, "rope_scaling": _scaling(scaling)}
    fields["mixer"] = _canonical(fields["mixer"], fields["layers"])
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    fields["head_dim"] = fields["head_dim"] or fields["dim"] // fields["heads"]
    return fields


def _scaling(text: str) -> Scaling:
    return build(parse_one(text, "model.rope_scaling"), ROPE_SCALINGS, "RoPE scaling")


def _windows(raw: Mapping[str, Any], which: str, source: str) -> list[int | None]:
    """The tokens that each layer sees, the query's own included; None for layers without a window."""
    layers = _checked(raw, "num_hidden_layers", int, source)
    slides = raw["sliding_window"] is not None and (which == "all" or _checked(raw, "use_sliding_window", bool, source))
    size = _checked(raw, "sliding_window", int, source) if slides else None
    first = raw["max_window_layers"] if which == "some" and slides else 0
    if type(first) is not int or first < 0:
        raise InputError(f"{source}: max_window_layers is {first!r}: expected a whole number of at least 0")
    kinds = {"full_attention": None, "sliding_attention": size}
    default = ["sliding_attention" if slides and layer >= first else "full_attention" for layer in range(layers)]
    types = default if raw["layer_types"] is None else raw["layer_types"]
    known = isinstance(types, list) and len(types) == layers and all(kind in tuple(kinds) for kind in types)
    if not known or (which == "all" and types != default) or (not slides and "sliding_attention" in types):
        expected = "full_attention or sliding_attention, the latter with a window"
        if which == "all":
            expected = f"{default[0]}, as sliding_window says for all layers of this family"
        raise InputError(
            f"{source}: layer_types={shortened(types, 80)} with sliding_window={json.dumps(size)} is not supported: expected "
            f"{layers} times {expected}"
        )
    return [kinds[kind] for kind in types]


def _window_json(config: LMConfig, which: str) -> dict[str, Any]:
    """The windows of `config` in the words of a family with WINDOWS entry `which`, as far as it has them."""
    sizes = _sizes(config.mixer, config.layers) or [None]
    found = set(sizes) - {None}
    size = found.pop() if len(found) == 1 else None
    if which == "all":
        return {"sliding_window": None if None in sizes else size}
    if which == "some" and size is None:
        return {"use_sliding_window": False, "layer_types": None}
    if which == "some":
        kinds = ["full_attention" if own is None else "sliding_attention" for own in sizes]
        first = kinds.index("sliding_attention")
        return {"use_sliding_window": True, "sliding_window": size, "max_window_layers": first, "layer_types": kinds}
    return {}


def _sizes(mixer: str, layers: int) -> list[int | None] | None:
    """The tokens that each layer sees, as in `_windows`; None where a mixer is neither full nor a window."""
    period = []
    for spec in alternation(mixer):
        pattern = build(spec, MIXERS, "mixer").pattern if spec.name == "window" else None
        if spec.name != "full" and not isinstance(pattern, Window):
            return None
        period.append(None if pattern is None else pattern.left + 1)
    return [period[layer % len(period)] for layer in range(layers)]


def _mixer(sizes: list[int | None]) -> str:
    """The spec string of layers that see so many tokens each: the shortest period, with its runs as repeats."""
    period = next(n for n in range(1, len(sizes) + 1) if all(own == sizes[i % n] for i, own in enumerate(sizes)))
    runs = [(own, len(list(run))) for own, run in itertools.groupby(sizes[:period])]
    names = ["full" if own is None else f"window({own - 1},0)" for own, _ in runs]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, (_, count) in zip(names, runs, strict=True))


def _canonical(mixer: str, layers: int, length: int | None = None) -> str:
    """One spelling for mixers of one meaning; windows that see `length` tokens or more become full attention."""
    sizes = _sizes(mixer, layers)
    if sizes is None:
        return mixer
    return _mixer([None if own is not None and length is not None and own >= length else own for own in sizes])


def _rope_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Theta and scaling: in rope_parameters since transformers 5, in rope_theta and rope_scaling before."""
    given = raw["rope_scaling"] or raw["rope_parameters"] or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise InputError(
            f"{source}: rope_parameters is {given!r}: expected one set of numbers, the same for every layer"
        )
    rope = {"type": "default", "original_max_position_embeddings": raw["max_position_embeddings"]}
    rope |= {key: raw[key] for key in ("rope_theta", "partial_rotary_factor")} | given
    rope |= {key: raw[key] for key in ("original_max_position_embeddings",) if key in raw}
    kind = rope["rope_type"] if "rope_type" in rope else rope["type"]
    if kind not in tuple(ROPE_TYPES):
        raise _unsupported(source, "rope_type", kind, ROPE_TYPES)
    if rope["partial_rotary_factor"] not in (None, 1.0):
        raise _unsupported(source, "partial_rotary_factor", rope["partial_rotary_factor"], [1.0])
    name, keys = ROPE_TYPES[kind]
    for key in ROPE_REFUSED:
        if key in rope and rope[key] is not None:
            raise _unsupported(source, key, rope[key], [None])
    arguments = []
    for key, field in keys.items():
        optional, wanted = key in ROPE_OPTIONAL, type(getattr(Scaling, field))
        if not optional or (key in rope and (rope[key] is not None or wanted is bool)):
            value = _checked(rope, key, wanted, source)
            arguments.append(f"{field}={value!r}" if optional else repr(value))
    return {
        "rope_theta": _checked(rope, "rope_theta", float, source),
        "rope_scaling": f"{name}({', '.join(arguments)})" if arguments else name,
    }


def _rope_json(config: LMConfig) -> dict[str, Any]:
    """Theta and scaling in both spellings, so that every version of transformers reads them."""
    scaling = _scaling(config.rope_scaling if config.position == "rope" else "none")
    if scaling.kind == "ntk":
        theta = frequencies(config.head_size, config.rope_theta, scaling)[1] ** (-config.head_size / 2)
        raise InputError(
            f"config.rope_scaling {config.rope_scaling!r} is not known to transformers: what it does to this model is "
            f"done as well by rope_theta={theta:.10g} with rope_scaling='none'"
        )
    kind = next(kind for kind, (name, _) in ROPE_TYPES.items() if name == scaling.kind)
    values = {"rope_type": kind, **{key: getattr(scaling, field) for key, field in ROPE_TYPES[kind][1].items()}}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if kind == "default" else values,
        "rope_parameters": {"rope_theta": config.rope_theta, **values},
    }


def _checked(raw: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    """`raw[key]` as a positive int or float, or a bool."""
    if key not in raw:
        raise InputError(f"{source}: {key} is missing: add it, or take the file from where the weights came from")
    value = float(raw[key]) if kind is float and type(raw[key]) is int else raw[key]
    if type(value) is not kind or (kind is not bool and not 0 < value < math.inf):
        raise InputError(f"{source}: {key} is {value!r}: expected {_EXPECTED[kind]}")
    return value


def _unsupported(source: str, key: str, value: Any, known: Iterable[Any]) -> InputError:
    mend = f"choose a model with {key}={' or '.join(map(json.dumps, known))}"
    return InputError(f"{source}: {key}={json.dumps(value)} is not supported: {mend}")
