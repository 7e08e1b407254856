"""BERT (Devlin et al. 2019): an Encoder that predicts masked words, labels of sequences, or labels of tokens."""

from __future__ import annotations

import dataclasses

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface.family import Family

_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_NORMS = {"norm": "layer", "norm_placement": "post", "embed_norm": True}

_MASKED = Family(
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
_ACTIVATIONS = {"gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
_SINGLE_LABEL = {"problem_type": (None, "single_label_classification")}


def _classifier(architecture: str, pooling: str, transform: str, task: str, ignored: str, loader: str) -> Family:
    """A family with the layers of BERT and an output layer over classes."""
    modules = {name: paths for name, paths in _MASKED.modules.items() if not name.startswith("cls.")}
    pooler = {"bert.pooler.dense": ("transform/dense",)} if transform == "tanh" else {}
    return dataclasses.replace(
        _MASKED,
        architecture=architecture,
        activations=_ACTIVATIONS,
        fixed=_MASKED.fixed | {"pooling": pooling, "transform": transform, "tied": False},
        defaults=_MASKED.defaults | {"problem_type": None, "id2label": None},
        accepted=_MASKED.accepted | _SINGLE_LABEL,
        modules=modules | pooler | {"classifier": ("head",)},
        tensors={"classifier.bias": "output/bias"},
        copies={},
        ignored=ignored,
        has_labels=True,
        task=task,
        loader=loader,
    )


BERT_FAMILIES = {
    "bert": _MASKED,
    "bert_classifier": _classifier(
        "BertForSequenceClassification",
        "first",
        "tanh",
        "classification",
        r"\.position_ids$",
        "AutoModelForSequenceClassification",
    ),
    "bert_tagger": _classifier(
        "BertForTokenClassification",
        "none",
        "none",
        "tagging",
        r"\.position_ids$|^bert\.pooler\.",
        "AutoModelForTokenClassification",
    ),
}
