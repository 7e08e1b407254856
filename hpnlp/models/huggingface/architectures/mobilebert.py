"""MobileBERT (Sun et al. 2020): Blocks with a bottleneck, and embeddings of fewer features than the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hpnlp.models.huggingface.architectures.bert import MASKED, with_classes
from hpnlp.models.huggingface.config_values import checked_value, unsupported
from hpnlp.models.huggingface.family import Family, ModelConfig
from hpnlp.nn.blocks import block_kind
from hpnlp.nn.blocks.bottleneck_block import MAX_NETWORKS, BottleneckKind
from hpnlp.types import InputError

# normalization_type -> `model.norm`.
_NORMS = {"no_norm": "affine", "layer_norm": "layer"}
# Epsilon of those layer norms of transformers' MobileBERT that do not read layer_norm_eps.
_FIXED_EPS = 1e-5


def canonical_block(text: str) -> str:
    """Rewrites a block so that equal Blocks of MobileBERT have equal spec strings.

    Args:
      text: `model.block`.

    Returns:
      The spec string with all arguments; `text` itself for another block.
    """
    kind = block_kind(text)
    if not isinstance(kind, BottleneckKind):
        return text
    return f"bottleneck({kind.width}, {kind.networks}, shared={kind.shared})"


def read_block(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reads the block and its norms.

    Args:
      raw: Content of config.json, with the family's defaults.
      source: Name of the file, for error messages.

    Returns:
      The fields block, norm, norm_eps and embed_dim.

    Raises:
      InputError: A value is missing or invalid, or `bottleneck` has no such form.
    """
    width, networks, dim, embed_dim = (
        checked_value(raw, key, int, source)
        for key in ("intra_bottleneck_size", "num_feedforward_networks", "hidden_size", "embedding_size")
    )
    if networks > MAX_NETWORKS:
        raise InputError(f"{source}: num_feedforward_networks is {networks}: expected at most {MAX_NETWORKS}")
    heads = checked_value(raw, "num_attention_heads", int, source)
    if width % heads or dim % heads:
        raise InputError(
            f"{source}: num_attention_heads is {heads} with intra_bottleneck_size={width} and hidden_size={dim}: expected a "
            "divisor of both"
        )
    if embed_dim >= dim:
        raise InputError(f"{source}: embedding_size is {embed_dim} with hidden_size={dim}: expected less than that")
    reads_bottleneck = checked_value(raw, "use_bottleneck_attention", bool, source)
    if checked_value(raw, "key_query_shared_bottleneck", bool, source) == reads_bottleneck:
        raise unsupported(source, "key_query_shared_bottleneck", reads_bottleneck, [not reads_bottleneck])
    if raw["normalization_type"] not in tuple(_NORMS):
        raise unsupported(source, "normalization_type", raw["normalization_type"], _NORMS)
    eps = checked_value(raw, "layer_norm_eps", float, source)
    if raw["normalization_type"] == "layer_norm" and eps != _FIXED_EPS:
        # Some of the norms of transformers read layer_norm_eps, and the others have _FIXED_EPS.
        raise unsupported(source, "layer_norm_eps", eps, [_FIXED_EPS])
    return {
        "block": canonical_block(f"bottleneck({width}, {networks}, shared={not reads_bottleneck})"),
        "norm": _NORMS[raw["normalization_type"]],
        "norm_eps": eps,
        "embed_dim": embed_dim,
    }


def block_json(config: ModelConfig) -> dict[str, Any]:
    """Writes the block and its norms.

    Args:
      config: The model.

    Returns:
      Values of config.json. Settings that the family lacks are changed.
    """
    kind = block_kind(config.block)
    kind = kind if isinstance(kind, BottleneckKind) else BottleneckKind()
    return {
        "intra_bottleneck_size": kind.width,
        "num_feedforward_networks": kind.networks,
        "use_bottleneck_attention": not kind.shared,
        "key_query_shared_bottleneck": kind.shared,
        "normalization_type": "layer_norm" if config.norm == "layer" else "no_norm",
        "layer_norm_eps": _FIXED_EPS if config.norm == "layer" else config.norm_eps,
        # At least 1 and less than hidden_size, which is then at least 2.
        "embedding_size": min(config.embedding_size, max(config.dim - 1, 1)),
    }


def _trigram_remarks(raw: Mapping[str, Any]) -> list[str]:
    """Remarks on the embeddings."""
    if not raw.get("trigram_input", True):
        return []
    return [
        "trigram_input=true: in transformers the last token of a padded text also reads the embedding of padding, so that its "
        "result depends on the batch; hpnlp reads zeros after a text"
    ]


_LAYER = "mobilebert.encoder.layer.{}."


def _network(stored: str, network: str, norm: str) -> dict[str, tuple[str, ...]]:
    """The modules of a feed-forward network."""
    return {
        f"{_LAYER}{stored}intermediate.dense": (f"layers/{network}/up",),
        f"{_LAYER}{stored}output.dense": (f"layers/{network}/down",),
        f"{_LAYER}{stored}output.LayerNorm": (f"layers/{norm}",),
    }


def _modules() -> dict[str, tuple[str, ...]]:
    """The modules without those of a head; networks that a model lacks are left out when tensors are listed."""
    modules = {name.replace("bert.", "mobilebert.", 1): paths for name, paths in MASKED.modules.items()}
    modules = {name: paths for name, paths in modules.items() if ".layer." not in name or ".attention." in name}
    modules = {name: paths for name, paths in modules.items() if name.startswith("mobilebert.")}
    modules["mobilebert.embeddings.embedding_transformation"] = ("embed_projection",)
    for stored, module in (("input", "inner"), ("attention", "query_input")):
        modules[f"{_LAYER}bottleneck.{stored}.dense"] = (f"layers/{module}",)
        modules[f"{_LAYER}bottleneck.{stored}.LayerNorm"] = (f"layers/{module}_norm",)
    for index in range(MAX_NETWORKS - 1):
        modules |= _network(f"ffn.{index}.", f"inner_mlps_{index}", f"inner_mlp_norms_{index}")
    modules |= _network("", "mlp", "feed_norm")
    modules[f"{_LAYER}output.bottleneck.dense"] = ("layers/outer",)
    modules[f"{_LAYER}output.bottleneck.LayerNorm"] = ("layers/outer_norm",)
    return modules


_DEFAULTS = {
    "hidden_act": "relu",
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "embedding_size": 128,
    "trigram_input": True,
    "use_bottleneck": True,
    "intra_bottleneck_size": 128,
    "use_bottleneck_attention": False,
    "key_query_shared_bottleneck": True,
    "num_feedforward_networks": 4,
    "normalization_type": "no_norm",
    "classifier_activation": True,
    "tie_word_embeddings": True,
}
_MASKED = dataclasses.replace(
    MASKED,
    model_type="mobilebert",
    architecture="MobileBertForMaskedLM",
    fields={key: names for key, names in MASKED.fields.items() if key != "layer_norm_eps"}
    | {"trigram_input": ("trigram",)},
    read=read_block,
    write=block_json,
    remarks=_trigram_remarks,
    activations={"relu": "relu"},  # also that of the layer before the output layer
    fixed={key: value for key, value in MASKED.fixed.items() if key != "norm"} | {"transform": "relu_norm"},
    defaults=_DEFAULTS,
    accepted={"use_bottleneck": (True,), "classifier_activation": (True,), "tie_word_embeddings": (True,)},
    modules=_modules()
    | {
        "cls.predictions.transform.dense": ("transform/dense",),
        "cls.predictions.transform.LayerNorm": ("transform/norm",),
    },
    base="mobilebert.",
    tensors={"cls.predictions.bias": "output/bias", "cls.predictions.dense.weight": "head"},
    flipped=("cls.predictions.dense.weight",),
    ignored=r"\.position_ids$|^cls\.seq_relationship\.|^mobilebert\.pooler\.",
    renamed={},
)

# Name -> family.
MOBILEBERT_FAMILIES: dict[str, Family] = {
    "mobilebert": _MASKED,
    "mobilebert_classifier": with_classes(
        _MASKED, "MobileBertForSequenceClassification", "classification", "tanh", "mobilebert.pooler.dense"
    ),
    "mobilebert_tagger": with_classes(
        _MASKED, "MobileBertForTokenClassification", "tagging", ignored=r"\.position_ids$|^mobilebert\.pooler\."
    ),
}
