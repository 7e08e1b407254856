"""Checkpoints of encoders that hpnlp has written; test_encoders_oracle.py compares with transformers."""

import dataclasses
import json
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface import convert
from hpnlp.models.huggingface.architectures.mobilebert import canonical_block
from hpnlp.models.huggingface.families import FAMILIES
from tests.models.huggingface.checkpoints import assert_raises, assert_same, edit, edit_tensors

BERT = {"dim": 8, "heads": 2, "layers": 2, "vocab": 12, "max_len": 16, "mlp_dim": 24, "token_types": 2}
BERT |= {"norm": "layer", "norm_eps": 1e-12, "norm_placement": "post", "embed_norm": True, "position": "learned"}
BERT |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "mlp": "gelu_exact"}
# Task -> the fields of its heads.
HEADS = {
    "masked_lm": {"transform": "gelu_norm", "tied": True},
    "classification": {"pooling": "first", "transform": "tanh", "classes": 3},
    "tagging": {"classes": 3},
}
# Task -> the last part of the names of its families.
SUFFIXES = {"masked_lm": "", "classification": "_classifier", "tagging": "_tagger"}
MOBILEBERT = {
    "block": "bottleneck(4, 3, shared=True)",
    "norm": "affine",
    "mlp": "relu",
    "embed_dim": 5,
    "trigram": True,
}
# Name, which begins with the model type -> its fields, and those that differ for a task.
MODELS = {
    "bert": ({}, {}),
    "roberta": ({"position_offset": 2, "token_types": 1, "norm_eps": 1e-5}, {}),
    "distilbert": ({"token_types": 0}, {"classification": {"transform": "relu"}}),
    "mobilebert": (MOBILEBERT, {"masked_lm": {"transform": "relu_norm"}}),
    "mobilebert_layer_norm": (
        MOBILEBERT | {"block": "bottleneck(4,1,shared=False)", "norm": "layer", "norm_eps": 1e-5, "trigram": False},
        {"masked_lm": {"transform": "relu_norm"}},
    ),
}
LABELS = ("noun", "verb", "other")


def make(**fields):
    """(config, random parameters)."""
    model = Encoder(EncoderConfig(**BERT | fields))
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, 2))["params"]))
    rng = np.random.default_rng(0)
    return model.config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.fixture
def masked(tmp_path):
    convert.save(*make(**HEADS["masked_lm"]), tmp_path / "masked")
    return tmp_path / "masked"


@pytest.fixture
def classifier(tmp_path):
    convert.save(*make(**HEADS["classification"]), tmp_path / "classifier", texts=convert.TextSettings(labels=LABELS))
    return tmp_path / "classifier"


# Each family with a head, and each head with a family.
FIRST = [("bert", "masked_lm"), ("mobilebert", "tagging"), ("mobilebert_layer_norm", "masked_lm")]
FIRST += [("roberta", "classification"), ("distilbert", "tagging")]


@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param(name, task, marks=[] if (name, task) in FIRST else pytest.mark.slow)
        for name in MODELS
        for task in HEADS
    ],
)
def test_saved_encoder_loads_as_the_same(name, task, tmp_path):
    fields, of_task = MODELS[name]
    config, params = make(**HEADS[task] | fields | of_task.get(task, {}))
    labels = LABELS if config.classes else None
    convert.save(config, params, tmp_path / "a", texts=convert.TextSettings(labels=labels))
    loaded, loaded_params = convert.load(tmp_path / "a")
    config = dataclasses.replace(config, block=canonical_block(config.block))
    assert loaded == config and convert.family_in(tmp_path / "a") is FAMILIES[name.split("_")[0] + SUFFIXES[task]]
    assert_same(params, loaded_params)
    assert convert.labels(tmp_path / "a") == labels
    convert.save(loaded, loaded_params, tmp_path / "b", texts=convert.TextSettings(labels=labels))
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_old_names_and_the_head_of_pretraining_are_read(masked):
    """As in the first checkpoints of BERT."""
    before = convert.load(masked)[1]

    def change(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)
        tensors["cls.seq_relationship.weight"] = tensors["bert.pooler.dense.bias"] = np.zeros((2, 8), np.float32)
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].copy()

    edit_tensors(masked, change)
    assert_same(before, convert.load(masked)[1])
    edit_tensors(masked, lambda tensors: tensors["cls.predictions.decoder.weight"].__imul__(2))
    assert_raises(
        "cls.predictions.decoder.weight differs from embed/table, which it should equal", convert.load, masked
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, 'position_embedding_type="relative_key" is not supported'),
        ({"is_decoder": True}, "is_decoder=true is not supported: choose a model with is_decoder=false"),
        ({"hidden_act": "silu"}, 'hidden_act="silu" is not supported'),
        ({"problem_type": "regression"}, 'problem_type="regression" is not supported'),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering'.* is not supported: load"),
        ({"architectures": None}, "architectures=None is not supported"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label is .*: expected names of the classes by the ids 0, 1"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label is .*: expected a different name for each class"),
        ({"id2label": {"0": "a", "1": "b"}}, r"classifier.weight has shape \(3, 8\), but config.json makes it"),
    ],
)
def test_unsupported_settings_raise(changes, message, classifier):
    edit(classifier, **changes)
    assert_raises(message, convert.load, classifier)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bottleneck": False}, "use_bottleneck=false is not supported: choose a model with use_bottleneck=true"),
        ({"use_bottleneck_attention": True}, "key_query_shared_bottleneck=true is not supported"),
        ({"num_feedforward_networks": 17}, "num_feedforward_networks is 17: expected at most 16"),
        ({"num_feedforward_networks": 2}, "holds 12 tensors that the model of config.json lacks, .*layer.0.ffn.1"),
        ({"num_feedforward_networks": 4}, "lacks 12 tensors that config.json requires, .*layer.0.ffn.2"),
        ({"embedding_size": 8}, "embedding_size is 8 with hidden_size=8: expected less"),
        ({"normalization_type": "rms_norm"}, 'normalization_type="rms_norm" is not supported'),
        ({"normalization_type": "layer_norm"}, "layer_norm_eps=1e-12 is not supported: .* layer_norm_eps=1e-05"),
        ({"intra_bottleneck_size": 5}, "config.json: num_attention_heads is 2 with intra_bottleneck_size=5"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3 with intra_bottleneck_size=.* expected a divisor"),
        ({"intra_bottleneck_size": 6}, r"shape .*, but config.json makes it"),
    ],
)
def test_unsupported_settings_of_mobilebert_raise(changes, message, tmp_path):
    convert.save(*make(**HEADS["tagging"] | MOBILEBERT), tmp_path / "a")
    edit(tmp_path / "a", **changes)
    assert_raises(message, convert.load, tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": None}, "pad_token_id is None with max_position_embeddings=18: expected a whole number"),
        ({"pad_token_id": 17}, "pad_token_id is 17 with max_position_embeddings=18"),
        ({"max_position_embeddings": 20}, r"position_embeddings.weight has shape \(18, 8\), but .* makes it \(20, 8\)"),
        ({"hidden_act": "silu"}, 'hidden_act="silu" is not supported'),
    ],
)
def test_unsupported_settings_of_roberta_raise(changes, message, tmp_path):
    convert.save(*make(**MODELS["roberta"][0], **HEADS["tagging"]), tmp_path / "a")
    edit(tmp_path / "a", **changes)
    assert_raises(message, convert.load, tmp_path / "a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "mean", "transform": "tanh"}, "in bert_classifier, the nearest, pooling is 'first', not 'mean'"),
        ({"norm_placement": "pre"}, "in bert_tagger, the nearest, norm_placement is 'post', not 'pre'"),
        ({"mlp": "swiglu"}, "mlp is 'gelu_exact', not 'swiglu'"),
        ({"token_types": 0, "mlp": "relu", "norm_eps": 1e-5}, "in bert_tagger, the nearest, token_types is 1, not 0"),
        ({"token_types": 0, "norm_eps": 1e-5}, "token_types is 1, not 0"),
        ({"layers": 0}, "config.layers is 0: set it"),
        ({"mixer": "window(2)"}, re.escape("mixer is 'full', not 'window(2)'")),
        ({"mixer": "window(16,0)"}, re.escape("mixer is 'full', not 'window(16, 0)'")),  # of the length of the model
    ],
)
def test_encoders_of_no_family_raise(fields, message, tmp_path):
    assert_raises(message, convert.save, *make(classes=3, **fields), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_differences_from_transformers_are_remarked(tmp_path):
    convert.save(*make(**HEADS["classification"] | MODELS["roberta"][0]), tmp_path / "a")
    convert.save(*make(**HEADS["tagging"] | MODELS["mobilebert"][0]), tmp_path / "b")
    convert.save(*make(**HEADS["tagging"]), tmp_path / "c")
    assert re.search("between the texts of a pair", *convert.remarks(tmp_path / "a"))
    assert re.search("the last token of a padded text", *convert.remarks(tmp_path / "b"))
    assert convert.remarks(tmp_path / "c") == []


def test_classes_have_the_names_of_transformers_by_default(tmp_path):
    convert.save(*make(**HEADS["tagging"]), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["id2label"] == {
        str(i): f"LABEL_{i}" for i in range(3)
    }
