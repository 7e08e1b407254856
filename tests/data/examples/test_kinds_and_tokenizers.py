"""Sequences of classification and tagging against the post-processor, the truncation and the word ids of `tokenizers`."""

import json
import random

import numpy as np
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.tokenizers.huggingface import HFTokenizer
from tests.data.examples.records import config, write

tokenizers = pytest.importorskip("tokenizers")

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "ab", "c", "##a", "##b", "##c", "##bc"]


@pytest.fixture(scope="module")
def inner():
    """A tokenizer of BERT's kind with a small vocabulary."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({token: i for i, token in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return made


def wrapped(inner):
    return HFTokenizer.parse(inner.to_str(), "tokenizer.json")


def text(draw, words):
    return " ".join("".join(draw.choices("abc", k=draw.randint(1, 5))) for _ in range(words))


@pytest.mark.parametrize("width", [7, 16])
@pytest.mark.parametrize("kind", ["classification", "pair classification"])
def test_texts_are_framed_and_cut_as_by_tokenizers(tmp_path, inner, kind, width):
    draw = random.Random(0)
    rows = [
        {"text": text(draw, draw.randint(1, 6)), "second": text(draw, draw.randint(1, 6)), "label": i % 2}
        for i in range(80)
    ]
    examples = prepare_examples(
        config(kind, write(tmp_path / "a.jsonl", rows), seq_len=width, heldout=0.5), tokenizer=wrapped(inner)
    )
    (batch,) = examples.heldout(batch_size=examples.heldout_examples)
    oracle = tokenizers.Tokenizer.from_str(inner.to_str())
    oracle.enable_truncation(width, strategy="longest_first")
    oracle.enable_padding(length=width, pad_id=0, pad_token="[PAD]")
    for number, texts in enumerate(examples.stored["heldout"].texts()):
        expected = oracle.encode(*(part.decode() for part in texts))
        np.testing.assert_array_equal(batch["tokens"][number], expected.ids)
        np.testing.assert_array_equal(batch["segment_ids"][number], expected.attention_mask)
        np.testing.assert_array_equal(batch["token_types"][number], expected.type_ids)


def test_labels_stand_on_the_first_tokens_of_words(tmp_path, inner):
    draw = random.Random(1)
    rows = [{"words": text(draw, draw.randint(1, 9)).split()} for _ in range(60)]
    rows = [{**row, "labels": [str(len(word)) for word in row["words"]]} for row in rows]
    path = write(tmp_path / "a.jsonl", rows)
    examples = prepare_examples(config("tagging", path, seq_len=20, heldout=0.5), tokenizer=wrapped(inner))
    (batch,) = examples.heldout(batch_size=examples.heldout_examples)
    oracle = tokenizers.Tokenizer.from_str(inner.to_str())
    oracle.enable_truncation(20)
    for number, (joined,) in enumerate(examples.stored["heldout"].texts()):
        words = joined.decode().split()
        expected = oracle.encode(words, is_pretokenized=True)
        ids = [-1 if i is None else i for i in expected.word_ids]
        is_first = [i >= 0 and ids.index(i) == place for place, i in enumerate(ids)]
        np.testing.assert_array_equal(batch["tokens"][number, : len(ids)], expected.ids)
        np.testing.assert_array_equal(batch["weights"][number, : len(ids)], is_first)
        labels = batch["labels"][number, : len(ids)][is_first]
        assert [examples.labels[label] for label in labels] == [
            str(len(words[i])) for i, first in zip(ids, is_first, strict=True) if first
        ]
    assert json.loads(inner.to_str())["truncation"] is None
