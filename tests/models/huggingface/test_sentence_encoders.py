"""Checkpoints of models without a head, and the files of sentence-transformers beside them."""

import json
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from hpnlp.models.huggingface import convert, sentence_files
from hpnlp.models.huggingface.families import FAMILIES
from hpnlp.models.pairs.dual_encoder import DualEncoder, DualEncoderConfig
from tests.models.huggingface.checkpoints import assert_raises, assert_same, edit, edit_tensors
from tests.models.huggingface.test_encoders import BERT

# Family -> the fields in which its models differ from BERT.
MODELS = {
    "bert": {"pooling": "first"},
    "roberta": {"position_offset": 2, "token_types": 1, "norm_eps": 1e-5, "pooling": "max"},
    "distilbert": {"token_types": 0},
}


def make(**fields):
    """(config, random parameters)."""
    model = DualEncoder(DualEncoderConfig(**BERT | fields))
    shapes = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, 2))["params"]))
    rng = np.random.default_rng(0)
    return model.config, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.fixture
def bert(tmp_path):
    convert.save(*make(), tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("name", MODELS)
def test_saved_dual_encoder_loads_as_the_same(name, tmp_path):
    config, params = make(**MODELS[name])
    convert.save(config, params, tmp_path / "a", texts=convert.TextSettings(seq_len=9))
    loaded, loaded_params = convert.load(tmp_path / "a")
    assert loaded == config and convert.family_in(tmp_path / "a") is FAMILIES[f"{name}_tower"]
    assert sentence_files.max_length(tmp_path / "a", 16) == 9 and convert.remarks(tmp_path / "a") == []
    assert_same(params, loaded_params)
    convert.save(loaded, loaded_params, tmp_path / "b", texts=convert.TextSettings(seq_len=9))
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 5
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_fields_of_training_are_not_part_of_a_checkpoint(tmp_path):
    of_losses = {"temperature": 0.5, "learn_temperature": True, "symmetric": False, "negatives": "part"}
    for name, fields in (("a", of_losses), ("b", {"loss": "softmax", "classes": 3}), ("c", {"loss": "cosine"})):
        config, params = make(**fields)
        convert.save(config, params, tmp_path / name)
        loaded, loaded_params = convert.load(tmp_path / name)
        assert loaded == make()[0]
        assert_same({"tower": params["tower"]}, loaded_params)


def test_names_and_heads_of_models_with_a_head_are_read(bert):
    """As where a masked language model was trained further, whose name config.json keeps."""
    before = convert.load(bert)

    def change(tensors):
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["bert.pooler.dense.weight"] = tensors["cls.predictions.bias"] = np.zeros((2, 2), np.float32)

    edit(bert, architectures=["BertForMaskedLM"])
    edit_tensors(bert, change)
    after = convert.load(bert)
    assert before[0] == after[0]
    assert_same(before[1], after[1])


def edit_pooling(directory, **changes):
    path = directory / sentence_files.POOLING / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pooling_mode": "cls"}, "first"),  # of newer versions, in place of the keys for each mode
        ({"pooling_mode": ["max"]}, "max"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "first"),
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token=True and pooling_mode_mean_tokens=True is not supp"),
        ({"pooling_mode_mean_tokens": False}, "no pooling_mode is not supported"),
        (
            {"pooling_mode": "lasttoken"},
            "pooling_mode='lasttoken' is not supported: .* one of the modes cls, mean, max",
        ),
        ({"pooling_mode": ["cls", "mean"]}, r"pooling_mode=\['cls', 'mean'\] is not supported"),
        ({"include_prompt": False}, "include_prompt=False is not supported"),
    ],
)
def test_pooling_is_that_of_the_directory(changes, expected, bert):
    edit_pooling(bert, **changes)
    if expected in ("first", "max"):
        assert convert.load_config(bert).pooling == expected
    else:
        assert_raises(expected, convert.load, bert)


def module(name, path):
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{name}"}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            [module("Transformer", ""), module("Pooling", "1_Pooling"), module("Dense", "2")],
            "Dense in '2' are not supp",
        ),
        ([module("Transformer", "0_Transformer"), module("Pooling", "1_Pooling")], "Transformer in '0_Transformer'"),
        ([module("Transformer", "")], "modules Transformer in '' are not supported"),
        ([], "modules none are not supported"),
        ([{"path": ""}], "has no type and path: download"),
        ({}, "holds a JSON dict: expected an array"),
    ],
)
def test_other_modules_raise(modules, message, bert):
    (bert / sentence_files.MODULES).write_text(json.dumps(modules))
    assert_raises(message, convert.load, bert)


@pytest.mark.parametrize(
    ("settings", "of_tokenizer", "expected"),
    [
        ({"max_seq_length": 9}, 12, 9),
        ({"max_seq_length": 99}, 12, 16),
        ({"max_seq_length": None}, 12, 12),
        ({}, 1e30, 16),
        ({}, None, 16),
        ({"max_seq_length": "9"}, 12, "max_seq_length is '9': expected a number of tokens"),
        ({"max_seq_length": 9, "do_lower_case": True}, 12, "do_lower_case=true is not supported"),
    ],
)
def test_texts_are_cut_where_sentence_transformers_cuts_them(settings, of_tokenizer, expected, tmp_path):
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": of_tokenizer}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"truncation": {"max_length": 5}}))
    if isinstance(expected, int):
        assert sentence_files.max_length(tmp_path, 16) == expected
    else:
        assert_raises(expected, sentence_files.max_length, tmp_path, 16)


def test_differences_from_sentence_transformers_are_remarked(bert):
    (bert / sentence_files.SETTINGS).write_text(json.dumps({"prompts": {"a": "query: "}, "default_prompt_name": "a"}))
    assert re.search("begins each text with 'query: ': put it before", *convert.remarks(bert))
    (bert / sentence_files.SETTINGS).unlink()
    (bert / sentence_files.MODULES).write_text(json.dumps([module("Transformer", ""), module("Pooling", "1_Pooling")]))
    assert re.search("vectors have length 1, and those of sentence-transformers keep theirs", *convert.remarks(bert))
    (bert / sentence_files.MODULES).unlink()
    assert convert.load_config(bert).pooling == "mean"
    assert re.search("there is no modules.json, which names the pooling", *convert.remarks(bert))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "attention"}, "model.pooling='attention' has no counterpart in sentence-transformers: .*first"),
        ({"shared": False}, "in bert_tower, the nearest, shared is True, not False: train one"),
        ({"norm_placement": "pre"}, "in bert_tower, the nearest, norm_placement is 'post', not 'pre'"),
    ],
)
def test_dual_encoders_of_no_family_raise(fields, message, tmp_path):
    assert_raises(message, convert.save, *make(**fields), tmp_path / "a")
    assert not (tmp_path / "a").exists()
