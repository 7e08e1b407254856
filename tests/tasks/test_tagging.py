"""Tagging: baselines by counting, and models that do not fit."""

import dataclasses
import json

from hpnlp.data.examples import TaggingConfig, prepare_examples
from hpnlp.tasks.labelled.tagging import TaggingBaselines, TaggingTask
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from tests.messages import raises

CONFIG = configs.resolve({"task": "tagging", "model": {"dim": 8, "heads": 2}, "data": {"seq_len": 8}})


def test_baselines_count_labels_of_tokens(tmp_path):
    """In training, a is mostly x and b always y; c occurs in the held-out lines only."""
    lines = {
        "train": [(["a", "a", "b"], ["x", "x", "y"]), (["a", "b", "a"], ["y", "y", "x"])],
        "heldout": [(["a", "b", "c"], ["x", "y", "y"]), (["a", "b"], ["y", "y"])],
    }
    for name, examples in lines.items():
        text = "\n".join(json.dumps({"words": words, "labels": labels}) for words, labels in examples)
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in lines}
    data = TaggingConfig(
        path=paths["train"], heldout_path=paths["heldout"], cache=str(tmp_path / "cache"), tokenizer="bytes"
    )
    # x and y occur three times each, and the first of equally frequent labels counts.
    assert TaggingBaselines(prepare_examples(data)).result() == {"majority_accuracy": 0.2, "token_accuracy": 0.6}


def test_models_that_do_not_fit_raise():
    pooled = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, pooling="mean", classes=3))
    raises("model.pooling='mean' makes one label of a text", lambda: TaggingTask().model(pooled, Sizes(20, classes=3)))
    assert TaggingTask().model(CONFIG, Sizes(20, classes=3)).config.classes == 3
