"""Checkpoints of BERT that hpnlp has written; test_bert_oracle.py compares with transformers."""

import json
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.huggingface import convert
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
    convert.save(*make(**HEADS["classification"]), tmp_path / "classifier", labels=LABELS)
    return tmp_path / "classifier"


@pytest.mark.parametrize("task", HEADS)
def test_saved_encoder_loads_as_the_same(task, tmp_path):
    config, params = make(**HEADS[task])
    labels = LABELS if config.classes else None
    convert.save(config, params, tmp_path / "a", labels=labels)
    loaded, loaded_params = convert.load(tmp_path / "a")
    assert loaded == config and convert.family_in(tmp_path / "a").task == task
    assert_same(params, loaded_params)
    assert convert.labels(tmp_path / "a") == labels
    convert.save(loaded, loaded_params, tmp_path / "b", labels=labels)
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
        (
            {"architectures": ["BertForQuestionAnswering"]},
            "BertForQuestionAnswering'.* is not supported: load .* as Bert",
        ),
        ({"architectures": None}, "architectures=None is not supported"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label is .*: expected names of the classes by the ids 0, 1"),
        ({"id2label": {"0": "a", "1": "a"}}, "id2label is .*: expected a different name for each class"),
        (
            {"id2label": {"0": "a", "1": "b"}},
            r"classifier.weight has shape \(3, 8\), but config.json makes it \(2, 8\)",
        ),
    ],
)
def test_unsupported_settings_raise(changes, message, classifier):
    edit(classifier, **changes)
    assert_raises(message, convert.load, classifier)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "mean", "transform": "tanh"}, "in bert_classifier, the nearest, pooling is 'first', not 'mean'"),
        ({"norm_placement": "pre"}, "in bert_tagger, the nearest, norm_placement is 'post', not 'pre'"),
        ({"mlp": "swiglu"}, "mlp is 'gelu_exact', not 'swiglu'"),
        ({"token_types": 0}, "config.token_types is 0: set it, because a checkpoint states it"),
        ({"layers": 0}, "config.layers is 0: set it"),
        ({"mixer": "window(2)"}, re.escape("mixer is 'full', not 'window(2)'")),
        ({"mixer": "window(16,0)"}, re.escape("mixer is 'full', not 'window(16, 0)'")),  # of the length of the model
    ],
)
def test_encoders_of_no_family_raise(fields, message, tmp_path):
    assert_raises(message, convert.save, *make(classes=3, **fields), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_classes_have_the_names_of_transformers_by_default(tmp_path):
    convert.save(*make(**HEADS["tagging"]), tmp_path / "a")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["id2label"] == {
        str(i): f"LABEL_{i}" for i in range(3)
    }
