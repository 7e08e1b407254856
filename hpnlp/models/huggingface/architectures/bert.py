"""BERT (Devlin et al. 2019): an Encoder that predicts masked words or labels of texts or tokens, or a DualEncoder."""

from __future__ import annotations

import dataclasses
import re

from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface.family import Family
from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig

_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_NORMS = {"norm": "layer", "norm_placement": "post", "embed_norm": True}

MASKED = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    fields={
        "hidden_size": ("dim",),
        "num_hidden_layers": ("layers",),
        "num_attention_heads": ("heads",),
        "intermediate_size": ("mlp_dim",),
        "vocab_size": ("vocab",),
        "max_position_embeddings": ("max_len",),
        "type_vocab_size": ("token_types",),
        "layer_norm_eps": ("norm_eps",),
    },
    activation="hidden_act",
    activations={"gelu": "gelu_exact"},  # also that of the layer before the output layer
    fixed=_BIASES | _NORMS | {"position": "learned", "pooling": "none", "transform": "gelu_norm", "tied": True},
    defaults={
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    accepted={
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    modules={
        "bert.embeddings.word_embeddings": ("embed",),
        "bert.embeddings.position_embeddings": ("positions",),
        "bert.embeddings.token_type_embeddings": ("token_types",),
        "bert.embeddings.LayerNorm": ("embed_norm",),
        "bert.encoder.layer.{}.attention.self.query": ("layers/attention/q",),
        "bert.encoder.layer.{}.attention.self.key": ("layers/attention/k",),
        "bert.encoder.layer.{}.attention.self.value": ("layers/attention/v",),
        "bert.encoder.layer.{}.attention.output.dense": ("layers/attention/out",),
        "bert.encoder.layer.{}.attention.output.LayerNorm": ("layers/mix_norm",),
        "bert.encoder.layer.{}.intermediate.dense": ("layers/mlp/up",),
        "bert.encoder.layer.{}.output.dense": ("layers/mlp/down",),
        "bert.encoder.layer.{}.output.LayerNorm": ("layers/feed_norm",),
        "cls.predictions.transform.dense": ("transform/dense",),
        "cls.predictions.transform.LayerNorm": ("transform/norm",),
    },
    base="bert.",
    transposed=True,
    tensors={"cls.predictions.bias": "output/bias"},
    copies={"cls.predictions.decoder.weight": "embed/table", "cls.predictions.decoder.bias": "output/bias"},
    # Numbers of positions, and the head of pretraining that predicts the next sentence.
    ignored=r"\.position_ids$|^cls\.seq_relationship\.|^bert\.pooler\.",
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    model=Encoder,
    config=EncoderConfig,
    task="masked_lm",
    loader="AutoModelForMaskedLM",
)
ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
# Task -> (pooling, class of transformers that loads the checkpoint).
_TASKS = {
    "classification": ("first", "AutoModelForSequenceClassification"),
    "tagging": ("none", "AutoModelForTokenClassification"),
}


def with_classes(
    masked: Family,
    architecture: str,
    task: str,
    transform: str = "none",
    dense: str = "",
    head: str = "classifier",
    ignored: str = r"\.position_ids$",
) -> Family:
    """A family with the layers of another one and an output layer over classes.

    Args:
      masked: The family that predicts masked words.
      architecture: Class in transformers.
      task: "classification" of texts, or "tagging" of tokens.
      transform: Layer before the output layer, as `EncoderConfig.transform`.
      dense: Module of that layer in the checkpoint, if there is one.
      head: Module of the output layer in the checkpoint.
      ignored: Regular expression of tensors that the model does not compute with.

    Returns:
      The family.
    """
    pooling, loader = _TASKS[task]
    modules = {name: paths for name, paths in masked.modules.items() if name.startswith(masked.base)}
    return dataclasses.replace(
        masked,
        architecture=architecture,
        activations=ACTIVATIONS,
        fixed=masked.fixed | {"pooling": pooling, "transform": transform, "tied": False},
        defaults=masked.defaults | {"problem_type": None, "id2label": None},
        accepted=masked.accepted | {"problem_type": (None, "single_label_classification")},
        modules=modules | ({dense: ("transform/dense",)} if dense else {}),
        tensors={f"{head}.weight": "head", f"{head}.bias": "output/bias"},
        copies={},
        ignored=ignored,
        has_labels=True,
        task=task,
        loader=loader,
    )


# Fields of a dual encoder that decide its function and are stated by config.json.
_OF_TOWERS = {"shared", "token_types", *(field.name for field in dataclasses.fields(BackboneConfig))}


def without_head(masked: Family, architecture: str) -> Family:
    """A family with the layers of another one and no head, whose models make a vector of a text.

    Args:
      masked: The family that predicts masked words.
      architecture: Class in transformers.

    Returns:
      The family.
    """
    of_heads = ("pooling", "transform", "tied")
    modules = {name: paths for name, paths in masked.modules.items() if name.startswith(masked.base)}
    return dataclasses.replace(
        masked,
        architecture=architecture,
        activations=ACTIVATIONS,
        fixed={name: value for name, value in masked.fixed.items() if name not in of_heads} | {"shared": True},
        modules={name: tuple(f"tower/{path}" for path in paths) for name, paths in modules.items()},
        omits_base=True,
        free=tuple(field.name for field in dataclasses.fields(DualEncoderConfig) if field.name not in _OF_TOWERS),
        tensors={},
        copies={},
        ignored=rf"\.position_ids$|^{re.escape(masked.base)}pooler\.|^(cls|lm_head|vocab_[a-z_]+)\.",
        model=DualEncoder,
        config=DualEncoderConfig,
        task="dual_encoder",
        loader="AutoModel",
    )


# Name -> family.
BERT_FAMILIES = {
    "bert": MASKED,
    "bert_classifier": with_classes(
        MASKED, "BertForSequenceClassification", "classification", "tanh", "bert.pooler.dense"
    ),
    "bert_tagger": with_classes(
        MASKED, "BertForTokenClassification", "tagging", ignored=r"\.position_ids$|^bert\.pooler\."
    ),
    "bert_tower": without_head(MASKED, "BertModel"),
}
