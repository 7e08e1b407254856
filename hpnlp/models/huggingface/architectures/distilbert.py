"""DistilBERT (Sanh et al. 2019): the layers of BERT under other names, without types of tokens."""

from __future__ import annotations

import dataclasses

from hpnlp.models.huggingface.architectures.bert import MASKED, with_classes, without_head
from hpnlp.models.huggingface.family import Family

_MASKED = dataclasses.replace(
    MASKED,
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    fields={
        "dim": ("dim",),
        "n_layers": ("layers",),
        "n_heads": ("heads",),
        "hidden_dim": ("mlp_dim",),
        "vocab_size": ("vocab",),
        "max_position_embeddings": ("max_len",),
    },
    activation="activation",
    fixed=MASKED.fixed | {"norm_eps": 1e-12},
    defaults={"activation": "gelu", "sinusoidal_pos_embds": False, "tie_word_embeddings": True},
    # Sinusoidal positions are stored as a table, as learned ones are.
    accepted={"sinusoidal_pos_embds": (False, True), "tie_word_embeddings": (True,)},
    modules={
        "distilbert.embeddings.word_embeddings": ("embed",),
        "distilbert.embeddings.position_embeddings": ("positions",),
        "distilbert.embeddings.LayerNorm": ("embed_norm",),
        "distilbert.transformer.layer.{}.attention.q_lin": ("layers/attention/q",),
        "distilbert.transformer.layer.{}.attention.k_lin": ("layers/attention/k",),
        "distilbert.transformer.layer.{}.attention.v_lin": ("layers/attention/v",),
        "distilbert.transformer.layer.{}.attention.out_lin": ("layers/attention/out",),
        "distilbert.transformer.layer.{}.sa_layer_norm": ("layers/mix_norm",),
        "distilbert.transformer.layer.{}.ffn.lin1": ("layers/mlp/up",),
        "distilbert.transformer.layer.{}.ffn.lin2": ("layers/mlp/down",),
        "distilbert.transformer.layer.{}.output_layer_norm": ("layers/feed_norm",),
        "vocab_transform": ("transform/dense",),
        "vocab_layer_norm": ("transform/norm",),
    },
    base="distilbert.",
    tensors={"vocab_projector.bias": "output/bias"},
    copies={"vocab_projector.weight": "embed/table"},
    ignored=r"\.position_ids$",
    renamed={},
)

# Name -> family.
DISTILBERT_FAMILIES: dict[str, Family] = {
    "distilbert": _MASKED,
    "distilbert_classifier": with_classes(
        _MASKED, "DistilBertForSequenceClassification", "classification", "relu", "pre_classifier"
    ),
    "distilbert_tagger": with_classes(_MASKED, "DistilBertForTokenClassification", "tagging"),
    "distilbert_tower": without_head(_MASKED, "DistilBertModel"),
}
