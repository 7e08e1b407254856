"""Config fields that have no effect because of other fields."""

import json

import pytest

from hpnlp.tasks import TASKS
from hpnlp.training import config as configs
from hpnlp.training import optim
from hpnlp.training.config import Config
from hpnlp.training.starts import unused_fields
from hpnlp.types import InputError


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Files by name, for the {name}s in the fields below."""
    root = tmp_path_factory.mktemp("data")
    (root / "text.txt").write_text("a line\n" * 50)
    (root / "records.jsonl").write_text("\n".join(json.dumps({"text": "a", "question": "b"}) for _ in range(50)))
    return {"text": root / "text.txt", "records": root / "records.jsonl"}


def make(fields, paths):
    values = configs.default(fields.get("task", "lm"))
    values.update_from_flattened_dict(
        {name: value.format(**paths) if isinstance(value, str) else value for name, value in fields.items()}
    )
    return configs.resolve(values)


@pytest.mark.parametrize("task", TASKS)
def test_defaults_pass(task):
    unused_fields.check(Config(task=task))
    assert unused_fields.remarks(Config(task=task)) == []


def test_fields_without_effect_raise(paths):
    for fields, message in (
        ({"train.min_delta": 0.1}, "train.min_delta=0.1 has no effect, because train.eval_every=0 evaluates"),
        ({"train.eval_batches": 3}, "train.eval_batches=3 has no effect, because train.eval_every=0"),
        ({"train.patience": 3, "train.eval_every": 20, "train.steps": 80}, "train.patience=3 has no effect, because"),
        ({"task": "classification", "train.sample": 100}, "train.sample=100 has no effect, because"),
        ({"optimizer.scaling": "sqrt"}, "optimizer.scaling='sqrt' has no effect, because optimizer.base_batch=0"),
        ({"optimizer.average": "uniform(start=1000)", "train.steps": 1000}, "has no effect, because the average does"),
        ({"optimizer.average": "ntasgd(2)", "train.steps": 40, "train.eval_every": 10}, "the average does not begin"),
        ({"optimizer.skip_nonfinite": False, "optimizer.loss_scale": 8.0}, "optimizer.skip_nonfinite=False has"),
        ({"optimizer.momentum": 0.9}, "optimizer.momentum=0.9 has no effect, because optimizer.name='adamw' does not"),
        ({"optimizer.name": "sgd", "optimizer.b2": 0.9}, "optimizer.b2=0.9 has no effect, because"),
        ({"optimizer.schedule": "rsqrt(100)", "optimizer.final": 0.0}, "optimizer.final=0.0 has no effect, because"),
        ({"data.path": "{text}", "data.heldout_path": "{text}", "data.heldout": 0.3}, "data.heldout=0.3 has no effect"),
        ({"task": "labelled_bags", "data.group_field": "module"}, "data.group_field='module' has no effect, because"),
        ({"data.path": "{text}", "data.text_field": "body"}, "has no files of records (JSONL, JSON, Parquet): leave"),
        ({"data.weights": (2.0,)}, "data.weights=(2.0,) has no effect, because data.path='stdlib' is one source"),
        ({"model.position": "learned", "model.rope_theta": 5e5}, "model.rope_theta=500000.0 has no effect, because"),
        ({"model.position": "none", "model.rope_scaling": "linear(2)"}, "model.rope_scaling='linear(2)' has no effect"),
        ({"model.max_len": 128, "data.seq_len": 256}, "model.max_len=128 has no effect, because"),
        ({"task": "seq2seq", "model.target_len": 64}, "model.target_len=64 has no effect, because"),
        (
            {"task": "labelled_bags", "data.positives": "topics(5)", "data.label_field": "module"},
            "data.label_field='module' has no effect, because data.positives='topics(5)' takes topics in place of labels",
        ),
        ({"task": "labelled_bags", "model.temperature": 0.2}, "model.temperature=0.2 has no effect, because"),
        ({"task": "rnn_lm", "model.variational": True}, "model.variational=True has no effect, because it"),
        ({"task": "rnn_lm", "model.cells": "gru(16)", "model.layer_dropout": 0.2}, "model.layer_dropout=0.2 has no"),
        ({"task": "dual_encoder", "model.loss": "cosine", "model.temperature": 0.1}, "model.temperature=0.1 has no"),
        ({"task": "dual_encoder", "model.loss": "triplet", "model.symmetric": False}, "model.symmetric=False has no"),
        ({"task": "dual_encoder", "model.margin": 0.3}, "model.margin=0.3 has no effect, because"),
        ({"task": "labelled_bags", "model.loss": "softmax", "model.margin": 0.3}, "model.margin=0.3 has no effect"),
        (
            {"task": "word_embeddings", "model.subsample": 0.0, "model.subsample_form": "paper"},
            "model.subsample_form='paper' has no effect, because model.subsample=0 drops no word",
        ),
        ({"task": "dual_encoder", "data.grade_field": "grade"}, "data.grade_field='grade' has no effect, because"),
        ({"task": "dual_encoder", "model.negatives": "part"}, "model.negatives='part' has no effect, because"),
        ({"plan.zero": 2}, "plan.zero=2 has no effect, because it is about the training state that is divided over"),
        ({"plan.exchange": "heads"}, "plan.exchange='heads' has no effect, because it is about sequences that are"),
    ):
        with pytest.raises(InputError) as error:
            unused_fields.check(make(fields, paths))
        assert message in str(error.value)
        assert str(error.value) in unused_fields.remarks(make(fields, paths))


def test_fields_with_effect_pass(paths):
    for fields in (
        {"train.min_delta": 0.1, "train.eval_every": 10},
        {"train.patience": 3, "train.eval_every": 20, "train.steps": 81},
        {"train.eval_batches": 0},
        {"task": "classification", "train.sample": 0},
        {"optimizer.average": "uniform(start=999)"},
        {"optimizer.average": "ntasgd(2)", "train.steps": 41, "train.eval_every": 10},
        {"optimizer.name": "muon", "optimizer.momentum": 0.9, "optimizer.adam_learning_rate": 0.1, "optimizer.b1": 0.8},
        {"optimizer.schedule": "wsd", "optimizer.final": 0.0},
        {"data.path": "{text},{records}", "data.prompt_field": "question", "data.weights": (1.0, 2.0)},
        {"data.path": "{records}", "data.heldout_path": "{text}", "data.heldout": 0.0},
        {"model.form": "block(position=none),block", "model.rope_theta": 5e5},
        {"model.max_len": 512},
        {"model.mixer": "linformer(8)", "task": "classification", "model.max_len": 128},
        {"plan.fsdp": -1, "plan.data": 1, "plan.zero": 2},
        {"plan.name": "zero1", "plan.zero": 3},
        {"plan.zero": 0},
    ):
        unused_fields.check(make(fields, paths))


def test_optimizers_of_users_read_their_fields(monkeypatch):
    monkeypatch.setitem(optim.OPTIMIZERS, "heavy", lambda c, rate: optim.optax.sgd(rate, momentum=c.b1))
    unused_fields.check(configs.resolve({"optimizer": {"name": "heavy", "b1": 0.5}}))
    with pytest.raises(InputError, match=r"optimizer.b2=0.5 has no effect, because optimizer.name='heavy'"):
        unused_fields.check(configs.resolve({"optimizer": {"name": "heavy", "b2": 0.5}}))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model.mixer": "fnet", "task": "classification", "model.heads": 8}, "model.heads=8 has no effect, because"),
        ({"task": "classification", "model.max_len": 512}, "model.max_len=512 has no effect, because"),
        ({"task": "classification", "model.layers": 0, "model.mlp": "gelu"}, "model.mlp='gelu' has no effect"),
        ({"distill.losses": "regression_only"}, "distill.losses='regression_only' has no effect, because there is no"),
    ],
)
def test_common_fields_of_sweeps_are_printed(fields, line, paths):
    config = make(fields, paths)
    unused_fields.check(config)
    (remark,) = unused_fields.remarks(config)
    assert remark.startswith(line)
    if "model.max_len" in fields:
        assert not unused_fields.remarks(make({**fields, "model.max_len": 256}, paths))
        assert not unused_fields.remarks(make({**fields, "model.position": "learned"}, paths))
