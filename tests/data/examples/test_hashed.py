"""Texts of hashed words: arrays of a batch, texts that are cut or empty, and configs that do not fit."""

import json

import numpy as np

from hpnlp.data.examples import HashedTextsConfig, prepare_examples
from tests import projection_reference as reference
from tests.messages import raises

TEXTS = ["Für alle Fälle", "one", "a b c d e f"]


def config(tmp_path, texts=TEXTS, **fields):
    lines = [json.dumps({"text": text, "label": "xy"[number % 2]}) for number, text in enumerate(texts)]
    for name in ("train", "held"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {"path": str(tmp_path / "train.jsonl"), "heldout_path": str(tmp_path / "held.jsonl")}
    return HashedTextsConfig(**paths, **{"seq_len": 4, "batch_size": 4, "cache": str(tmp_path / "cache")} | fields)


def test_batches_have_the_hashes_of_the_first_words(tmp_path):
    examples = prepare_examples(config(tmp_path))
    assert "2 examples cut, at data.seq_len=4" in examples.summary
    (batch,) = examples.heldout(batch_size=4)
    assert batch["tokens"].shape == (4, 4, 4) and batch["tokens"].dtype == np.int32
    assert batch["segment_ids"].sum(axis=1).tolist() == [3, 1, 4, 0] and batch["weights"].tolist() == [1, 1, 1, 0]
    for row, text in enumerate(TEXTS):
        expected = [reference.murmur(word.encode()) for word in text.lower().split()[:4]]
        np.testing.assert_array_equal(batch["tokens"][row, : len(expected)].view(np.uint32), expected)
    assert not batch["tokens"][batch["segment_ids"] == 0].any()


def test_batches_of_similar_lengths_are_as_wide_as_their_words(tmp_path):
    batches = prepare_examples(config(tmp_path, ["a " * 7, "b " * 90] * 8, seq_len=64, buckets=2)).train(seed=0)
    shapes = {next(batches)["tokens"].shape for _ in range(8)}
    assert shapes == {(4, 8, 4), (4, 64, 4)}


def test_texts_without_words_raise_or_are_left_out(tmp_path):
    texts = [*TEXTS, " \t"]
    raises("has a text without tokens", lambda: prepare_examples(config(tmp_path, texts)))
    assert prepare_examples(config(tmp_path, texts, skip_bad_lines=True)).train_examples == 3


def test_a_text_of_a_million_words_is_cut(tmp_path):
    examples = prepare_examples(config(tmp_path, ["a b " * 500_000, "c"]))
    (batch,) = examples.heldout(batch_size=2)
    assert batch["segment_ids"].sum(axis=1).tolist() == [4, 1]


def test_configs_that_do_not_fit_raise(tmp_path):
    raises("a ByteTokenizer gives no hashes of words", lambda: prepare_examples(config(tmp_path, tokenizer="bytes")))
    raises("data.pair_field='other': projection networks read single texts", config, tmp_path, pair_field="other")
