"""Labelled bags: ranks of left-out texts, and combinations of options that do not work."""

import json

import numpy as np

from hpnlp.data.examples import BagsConfig, prepare_examples
from hpnlp.tasks import TASKS
from hpnlp.tasks.labelled.labelled_bags import text_ranks
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.training import config as configs
from hpnlp.types import WordStats
from tests.messages import raises

STATS = WordStats(np.arange(30))


def test_invalid_combinations_raise():
    for values, sizes, message in (
        ({"optimizer.name": "adamw"}, Sizes(30, STATS, 3), "optimizer.name='adamw' divides them by their size, so"),
        ({"optimizer.name": "sgd"}, Sizes(30, None, 3), "needs the counts of the words, .* set data.tokenizer='words"),
        ({"model.vocab": 20}, Sizes(30, STATS, 3), "model.vocab=20 is less than the tokenizer's 30"),
        ({"model.max_texts": 2}, Sizes(30, STATS, 3), "model.max_texts=2 is less than data.max_texts=16: set it to 0"),
        ({"model.classes": 5}, Sizes(30, STATS, 3), "model.classes=5, but the data have 3 labels: set it to 0"),
    ):
        config = configs.default("labelled_bags")
        config.update_from_flattened_dict({"model.frequency_power": 1.0, "optimizer.name": "sgd"} | values)
        raises(message, TASKS["labelled_bags"].model, configs.resolve(config), sizes)


def test_ranks_leave_out_texts_of_the_same_label(tmp_path):
    """Vectors that point to the first letter of a text, and for contexts to that of the first text of the bag."""
    rows = [
        {"texts": ["a", "b", "a"], "label": "one"},
        {"texts": ["a", "a"], "label": "one"},
        {"texts": ["c", "a"], "label": "two"},
    ]
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths = {"path": str(tmp_path / "train.jsonl"), "heldout_path": str(tmp_path / "held.jsonl")}
    data = prepare_examples(BagsConfig(**paths, tokenizer="words(9)", seq_len=6, max_texts=3))

    def embed(batch):
        first = [
            [row[segment == n][:1] for n in (1, 2, 3)]
            for row, segment in zip(batch["tokens"], batch["segment_ids"], strict=True)
        ]
        exists = np.array([[len(ids) > 0 for ids in row] for row in first])
        texts = np.array([[np.eye(9)[ids[0]] if len(ids) else np.zeros(9) for ids in row] for row in first])
        return texts, np.repeat(texts[:, :1], 3, axis=1), exists

    ranks, places = text_ranks(data, embed, batch_size=2)
    assert places.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1]]
    # Of label one, only the "a" of label two is as similar as an "a"; the "b" ties with "c", too, at similarity 0.
    assert ranks.tolist() == [2, 3, 2, 2, 2, 1, 6]
