"""Hugging Face model families: their names for the sizes and the tensors of language models and encoders.

FAMILIES is a plain table. `config_fields` reads a config.json through it and `config_json` writes one; `convert.py` moves the
tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hpnlp.models.huggingface.architectures.bert import BERT_FAMILIES
from hpnlp.models.huggingface.architectures.distilbert import DISTILBERT_FAMILIES
from hpnlp.models.huggingface.architectures.experts import EXPERT_FAMILIES
from hpnlp.models.huggingface.architectures.llama import LLAMA_FAMILIES
from hpnlp.models.huggingface.architectures.mobilebert import MOBILEBERT_FAMILIES, canonical_block
from hpnlp.models.huggingface.architectures.roberta import ROBERTA_FAMILIES
from hpnlp.models.huggingface.config_values import checked_value, unsupported
from hpnlp.models.huggingface.family import Family, ModelConfig
from hpnlp.models.huggingface.networks import model_networks, network_fields
from hpnlp.models.huggingface.rope_scaling import parse_scaling, read_rope, rope_json
from hpnlp.models.huggingface.sliding_windows import (
    WindowLayers,
    canonical_mixer,
    read_windows,
    window_mixer,
    windows_json,
)
from hpnlp.nn.feed_forward.canonical import canonical_mlp
from hpnlp.nn.output import OUTPUTS
from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.spec import build, parse_one, parse_period
from hpnlp.types import InputError

# Name -> family. A model that several families can express is written as the first of them.
FAMILIES: dict[str, Family] = {
    **LLAMA_FAMILIES,
    **EXPERT_FAMILIES,
    "gpt2": Family(
        model_type="gpt2",
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
        },
        tensors={"lm_head.weight": "head"},
        base="transformer.",
        transposed=False,
    ),
    **BERT_FAMILIES,
    **ROBERTA_FAMILIES,
    **DISTILBERT_FAMILIES,
    **MOBILEBERT_FAMILIES,
}

# Model types without a family -> why their models cannot be converted.
REFUSED_TYPES = {
    "deepseek_v3": "its attention projects keys and values through latent vectors (MLA), as no mixer here does; dots1 has the "
    "same experts",
}

# Keys that change the meaning of the weights in any family -> what the user can do about it.
REFUSED = {
    "quantization_config": "dequantize the model with transformers, save it again, and convert that",
    "auto_map": "the model runs code from its checkpoint; choose one that needs no trust_remote_code",
}

# Output layers that train on samples of the words and whose distribution is the softmax over all rows of the table.
FULL_SOFTMAX = ("full", "sampled", "importance")

# Fields that change how a model is trained or run, and not the function that it computes.
FREE = ("dropout", "dtype", "unroll")


def config_fields(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the fields of a model's config from a config.json.

    Args:
      raw: Content of the file.
      source: Name of the file, for error messages.

    Returns:
      Name -> value of the fields that the file sets.

    Raises:
      InputError: The family is not in FAMILIES, a value is missing or invalid, or a setting makes the model compute something
          that hpnlp's does not.
    """
    family = find_family(raw, source)
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
        is_unset = key in family.defaults and raw[key] is None  # the config derives the value of 0 from other fields
        value = 0 if is_unset else checked_value(raw, key, type(getattr(family.config, names[0])), source)
        fields |= dict.fromkeys(names, value)
    fields |= family.read(raw, source)
    if family.has_labels:
        fields["classes"] = len(class_names(raw, source))
    if family.windows is not WindowLayers.NONE:
        fields["mixer"] = window_mixer(read_windows(raw, family.windows, source))
    return fields | (read_rope(raw, source) if fields["position"] == "rope" else {})


def find_family(raw: Mapping[str, Any], source: str) -> Family:
    """Looks up the family of a config.json.

    Args:
      raw: Content of the file.
      source: Name of the file, for error messages.

    Returns:
      The family of its model_type, and of its architecture where several have that model_type.

    Raises:
      InputError: model_type is missing, or FAMILIES has no such family.
    """
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES.values()))
    if "model_type" not in raw or not isinstance(raw["model_type"], str):
        raise InputError(f"{source}: model_type is missing or not a string: expected one of {known}")
    families = [family for family in FAMILIES.values() if family.model_type == raw["model_type"]]
    if not families:
        reason = f" ({REFUSED_TYPES[raw['model_type']]})" if raw["model_type"] in REFUSED_TYPES else ""
        raise InputError(
            f"{source}: model_type={raw['model_type']!r} is not supported{reason}: choose a model of one of {known}"
        )
    if len(families) == 1:
        return families[0]
    names = raw.get("architectures")
    for family in families:
        if names == [family.architecture]:
            return family
    listed = " or ".join(family.architecture for family in families)
    raise InputError(
        f"{source}: architectures={names!r:.80} is not supported: load the model with transformers as {listed}, save it again, "
        "and convert that"
    )


def config_json(config: ModelConfig, labels: Sequence[str] | None = None) -> dict[str, Any]:
    """Writes the config.json of the first family that computes the same function.

    Args:
      config: The model. A sampled softmax is written as the full softmax over the same table.
      labels: Names of the classes; None for those that transformers gives to classes.

    Returns:
      The values of config.json. If no family has the model's windows, windows of at least max_len tokens become full
      attention.

    Raises:
      InputError: No family has such a model; the message names the layers that differ in width, or the fields that differ in
        the most similar family.
    """
    for field in ("vocab", "max_len", "layers"):
        if getattr(config, field) < 1:
            raise InputError(f"config.{field} is {getattr(config, field)}: set it, because a checkpoint states it")
    families = {
        name: family for name, family in FAMILIES.items() if _field_names(family.config) == _field_names(config)
    }
    if not families:
        raise InputError(
            f"no family of transformers has a model of {type(config).__name__}: convert an LM, an Encoder or a DualEncoder"
        )
    _check_widths(config)
    config = dataclasses.replace(_with_full_softmax(config), **network_fields(model_networks(config), config.form))
    differences: dict[str, dict[str, tuple[Any, Any]]] = {}
    candidates = [config]
    if config.mask == Causal():
        short = canonical_mixer(config.mixer, config.layers, config.max_len)
        candidates.append(dataclasses.replace(config, mixer=short))
    for candidate in candidates:
        of_candidate = {**dataclasses.asdict(candidate), "mlp_dim": candidate.mlp_size}
        for name, family in families.items():
            fields = _function_fields(of_candidate, config.mask, family.free)
            raw = _express(candidate, family, labels)
            values = {**dataclasses.asdict(family.config()), **config_fields(raw, name)}
            expressed = _function_fields(values, config.mask, family.free)
            differences[name] = {
                field: (expressed.get(field), value) for field, value in fields.items() if value != expressed.get(field)
            }
            if not differences[name]:
                return raw
    nearest = min(differences, key=lambda name: (len(differences[name]), _differs_in_network(differences[name])))
    if set(differences[nearest]) == {"head_dim"}:
        raise InputError(
            f"no family of transformers has such a model: heads of {nearest} have dim / heads = {config.dim} / {config.heads} "
            f"features, and those of this model {config.head_size}: set model.head_dim=0 before training, or leave heads(...) "
            "out of the recipe"
        )
    listed = ", ".join(
        f"{field} is {of_family!r}, not {value!r}" for field, (of_family, value) in differences[nearest].items()
    )
    flags = " ".join(f"--model.{field}={of_family}" for field, (of_family, _) in differences[nearest].items())
    raise InputError(
        f"no family of transformers has such a model: in {nearest}, the nearest, {listed}: train one with {flags}"
    )


def _differs_in_network(differences: Mapping[str, tuple[Any, Any]]) -> bool:
    """Whether the feed-forward networks have different names."""
    return len({parse_one(mlp, "model.mlp").name for mlp in differences.get("mlp", ())}) > 1


def _check_widths(config: ModelConfig) -> None:
    """Raises InputError if layers differ in the sizes that pruning changes, with the layers of each size."""
    forms = config.forms()
    differing = []
    for name, sizes in {
        "heads": [form.heads for form in forms],
        "kv_heads": [form.kv_head_count for form in forms],
        "mlp_dim": [form.mlp_size for form in forms],
    }.items():
        by_size: dict[int, list[int]] = {}
        for layer in range(config.layers):
            by_size.setdefault(sizes[layer % len(sizes)], []).append(layer)
        # Families have one width for layers with experts, and one for others.
        has_other_networks = name == "mlp_dim" and len({form.mlp for form in forms}) >= len(by_size)
        if len(by_size) > 1 and not has_other_networks:
            listed = ", ".join(f"{size} in layers {' '.join(map(str, layers))}" for size, layers in by_size.items())
            differing.append(f"{name} is {listed}")
    if differing:
        raise InputError(
            f"no family of transformers has layers of different widths: {'; '.join(differing)}: keep the same share of each "
            "layer, with heads(...) and mlp(...) without across_layers=True"
        )


def class_names(raw: Mapping[str, Any], source: str) -> list[str]:
    """Names of the classes in a config.json.

    Args:
      raw: Content of the file.
      source: Name of the file, for error messages.

    Returns:
      The names, in the order of their ids; of two classes if the file has none, as in transformers.

    Raises:
      InputError: id2label is no table of different names for the ids 0, 1, ...
    """
    names = raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    ids = [str(i) for i in range(len(names))]
    if not isinstance(names, dict) or sorted(names, key=str) != sorted(ids):
        raise InputError(
            f"{source}: id2label is {names!r:.80}: expected names of the classes by the ids 0, 1, ...: mend it"
        )
    labels = [names[i] for i in ids]
    if not all(isinstance(label, str) for label in labels) or len(set(labels)) < len(labels):
        raise InputError(f"{source}: id2label is {names!r:.80}: expected a different name for each class: mend it")
    return labels


def _with_full_softmax(config: Any) -> Any:
    """The config, with the full softmax in place of an output layer that estimates it."""
    if not config.output:
        return config  # dual encoders have no output layer
    layer = parse_one(config.output, "model.output")
    if layer.name not in FULL_SOFTMAX:
        return config
    if layer.name != "full":
        return dataclasses.replace(config, output="full")
    full = build(layer, OUTPUTS, "output layer", name=None)
    if full.use_bias:
        return config
    return dataclasses.replace(config, output="full" if full.cap is None else f"full(soft_cap={full.cap!r})")


def _field_names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _express(config: ModelConfig, family: Family, labels: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of `config` in a family; settings that the family lacks are dropped or changed."""
    values = dataclasses.asdict(config)
    values |= {"kv_heads": config.kv_head_count, "head_dim": config.head_size, "mlp_dim": config.mlp_size}
    activation_of = {mlp: activation for activation, mlp in reversed(family.activations.items())}
    names: dict[str, Any] = {}
    if family.has_labels:
        labels = labels or [f"LABEL_{i}" for i in range(max(2, values["classes"]))]
        id2label = {str(i): label for i, label in enumerate(labels)}
        names = {"id2label": id2label, "label2id": {label: int(i) for i, label in id2label.items()}}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        family.activation: activation_of.get(config.mlp, next(iter(family.activations))),
        **{key: _size_of_one(values[names[0]]) for key, names in family.fields.items()},
        **{key: accepted[0] for key, accepted in family.accepted.items()},
        **names,
        **family.write(config),
        **windows_json(config.mixer, config.layers, family.windows),
        **(rope_json(config) if family.fixed["position"] == "rope" else {}),
    }


def _size_of_one(value: object) -> Any:
    """The value of a field, with 1 for a size of 0, which no config.json has."""
    return 1 if type(value) is int and value == 0 else value


def _function_fields(fields: dict[str, Any], mask: AnyMask, free: Sequence[str]) -> dict[str, Any]:
    """The fields that decide the function of a model under its mask, without `free`, with one spelling for equal values."""
    fields = {name: value for name, value in fields.items() if name not in (*FREE, *free)}
    theta, scaling = fields.pop("rope_theta"), fields.pop("rope_scaling")
    if fields["position"] == "rope":
        fields |= {"rope_theta": theta, "rope_scaling": parse_scaling(scaling)}
    fields["mixer"] = ",".join(map(str, parse_period(fields["mixer"], "model.mixer")))
    if mask == Causal():  # without which windows also differ in the tokens that follow
        fields["mixer"] = canonical_mixer(fields["mixer"], fields["layers"])
    fields["mlp"] = canonical_mlp(fields["mlp"])
    fields["block"] = canonical_block(fields["block"])
    fields["form"] = ",".join(map(str, parse_period(fields["form"], "model.form")))
    fields["kv_heads"] = fields["kv_heads"] or fields["heads"]
    fields["head_dim"] = fields["head_dim"] or fields["dim"] // fields["heads"]
    return fields
