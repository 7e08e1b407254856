"""RoPE settings in config.json and in `LMConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.huggingface.config_values import checked_value, unsupported
from hpnlp.nn.attention import ROPE_SCALINGS
from hpnlp.ops.attention.positions.rope import Scaling, frequencies
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError

# rope_type -> (name in LMConfig.rope_scaling, key -> field of Scaling, in the order of the arguments of that name).
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
# Keys that may be missing, and numbers among them null: the defaults of Scaling are those of transformers.
_OPTIONAL = ("beta_fast", "beta_slow", "truncate", "attention_factor")
# Keys that change the rotary embedding in a way that Scaling cannot express.
_REFUSED = ("mscale", "mscale_all_dim")


def parse_scaling(text: str) -> Scaling:
    """Parses a spec string.

    Args:
      text: `LMConfig.rope_scaling`.

    Returns:
      The scaling.
    """
    return build(parse_one(text, "model.rope_scaling"), ROPE_SCALINGS, "RoPE scaling")


def read_rope(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads theta and scaling, which are in rope_parameters since transformers 5, in rope_theta and rope_scaling before.

    Args:
      raw: Content of config.json, with the family's defaults.
      source: Name of the file, for error messages.

    Returns:
      The fields rope_theta and rope_scaling of LMConfig.

    Raises:
      InputError: A value is missing, invalid or unsupported.
    """
    rope = _merge_spellings(raw, source)
    kind = rope["rope_type"] if "rope_type" in rope else rope["type"]
    if kind not in tuple(ROPE_TYPES):
        raise unsupported(source, "rope_type", kind, ROPE_TYPES)
    if rope["partial_rotary_factor"] not in (None, 1.0):
        raise unsupported(source, "partial_rotary_factor", rope["partial_rotary_factor"], [1.0])
    for key in _REFUSED:
        if key in rope and rope[key] is not None:
            raise unsupported(source, key, rope[key], [None])
    name, keys = ROPE_TYPES[kind]
    arguments = []
    for key, field in keys.items():
        is_optional, value_type = key in _OPTIONAL, type(getattr(Scaling, field))
        if not is_optional or (key in rope and (rope[key] is not None or value_type is bool)):
            value = checked_value(rope, key, value_type, source)
            arguments.append(f"{field}={value!r}" if is_optional else repr(value))
    return {
        "rope_theta": checked_value(rope, "rope_theta", float, source),
        "rope_scaling": f"{name}({', '.join(arguments)})" if arguments else name,
    }


def _merge_spellings(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The RoPE settings of both spellings, with defaults, in one dictionary."""
    settings = raw["rope_scaling"] or raw["rope_parameters"] or {}
    if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
        raise InputError(
            f"{source}: rope_parameters is {settings!r}: expected one set of numbers, the same for every layer"
        )
    rope = {"type": "default", "original_max_position_embeddings": raw["max_position_embeddings"]}
    rope |= {key: raw[key] for key in ("rope_theta", "partial_rotary_factor")} | settings
    return rope | {key: raw[key] for key in ("original_max_position_embeddings",) if key in raw}


def rope_json(config: BackboneConfig) -> dict[str, Any]:
    """Writes theta and scaling in both spellings, so that every version of transformers reads them.

    Args:
      config: The model.

    Returns:
      Values of config.json.

    Raises:
      InputError: transformers lacks the scaling; the message names an equivalent theta.
    """
    scaling = parse_scaling(config.rope_scaling if config.position == "rope" else "none")
    if scaling.kind == "ntk":
        theta = frequencies(config.head_size, config.rope_theta, scaling)[1] ** (-config.head_size / 2)
        raise InputError(
            f"config.rope_scaling {config.rope_scaling!r} is not known to transformers: set rope_theta={theta:.10g} with "
            "rope_scaling='none', which is the same function"
        )
    kind = next(kind for kind, (name, _) in ROPE_TYPES.items() if name == scaling.kind)
    values = {"rope_type": kind, **{key: getattr(scaling, field) for key, field in ROPE_TYPES[kind][1].items()}}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if kind == "default" else values,
        "rope_parameters": {"rope_theta": config.rope_theta, **values},
    }


def rope_remarks(raw: Mapping[str, Any]) -> list[str]:
    """Describes differences between the RoPE of transformers and of `LM`.

    Args:
      raw: Content of config.json.

    Returns:
      One line per difference.
    """
    settings = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if settings.get("rope_type", settings.get("type")) != "dynamic":
        return []
    length = raw.get("max_position_embeddings")
    return [
        f"rope_type=dynamic changes nothing up to {length} tokens; beyond, transformers scales RoPE and hpnlp does not"
    ]
