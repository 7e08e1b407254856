"""RoBERTa (Liu et al. 2019): the layers of BERT, with positions that are counted from the id of padding plus one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpnlp.models.huggingface.architectures.bert import ACTIVATIONS, MASKED, with_classes, without_head
from hpnlp.models.huggingface.config_values import checked_value
from hpnlp.models.huggingface.family import Family, ModelConfig
from hpnlp.types import InputError


def read_positions(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the rows of the table of positions; the rows up to that of pad_token_id belong to no position.

    Args:
      raw: Content of config.json, with the family's defaults.
      source: Name of the file, for error messages.

    Returns:
      The fields max_len and position_offset.

    Raises:
      InputError: A value is missing or invalid.
    """
    rows, pad = checked_value(raw, "max_position_embeddings", int, source), raw["pad_token_id"]
    if type(pad) is not int or not 0 <= pad < rows - 1:
        raise InputError(
            f"{source}: pad_token_id is {pad!r} with max_position_embeddings={rows}: expected a whole number from 0 to "
            f"{rows - 2}, after which the rows of the positions begin: mend it"
        )
    return {"max_len": rows - pad - 1, "position_offset": pad + 1}


def positions_json(config: ModelConfig) -> dict[str, Any]:
    """Writes the rows of the table of positions.

    Args:
      config: The model.

    Returns:
      Values of config.json.
    """
    offset = max(config.position_offset, 1)
    return {"max_position_embeddings": config.max_len + offset, "pad_token_id": offset - 1}


def _module(name: str) -> str:
    """A module of BERT's layers in RoBERTa."""
    return name.replace("bert.", "roberta.", 1)


def _pair_remarks(raw: Mapping[str, Any]) -> list[str]:
    """Remarks on pairs of texts."""
    if raw.get("architectures") != ["RobertaForSequenceClassification"]:
        return []
    return [
        "between the texts of a pair, transformers' tokenizer of RoBERTa puts </s></s>, and hpnlp </s>: single texts are equal"
    ]


_MASKED = dataclasses.replace(
    MASKED,
    model_type="roberta",
    pads_before_positions=True,
    architecture="RobertaForMaskedLM",
    fields={key: names for key, names in MASKED.fields.items() if key != "max_position_embeddings"},
    read=read_positions,
    write=positions_json,
    remarks=_pair_remarks,
    activations=ACTIVATIONS,  # without that of the layer before the output layer, which is always the exact GELU
    defaults=MASKED.defaults | {"pad_token_id": 1},
    modules={_module(name): paths for name, paths in MASKED.modules.items() if name.startswith("bert.")}
    | {"lm_head.dense": ("transform/dense",), "lm_head.layer_norm": ("transform/norm",)},
    base="roberta.",
    tensors={"lm_head.bias": "output/bias"},
    copies={"lm_head.decoder.weight": "embed/table", "lm_head.decoder.bias": "output/bias"},
    ignored=r"\.position_ids$|^roberta\.pooler\.",
)

# Name -> family.
ROBERTA_FAMILIES: dict[str, Family] = {
    "roberta": _MASKED,
    "roberta_classifier": with_classes(
        _MASKED,
        "RobertaForSequenceClassification",
        "classification",
        "tanh",
        "classifier.dense",
        "classifier.out_proj",
        _MASKED.ignored,
    ),
    "roberta_tagger": with_classes(_MASKED, "RobertaForTokenClassification", "tagging", ignored=_MASKED.ignored),
    "roberta_tower": without_head(_MASKED, "RobertaModel"),
}
