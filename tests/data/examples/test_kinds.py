"""Arrays of the batches of each kind, against direct constructions and the tokenizer of BERT."""

import numpy as np
import pytest

from hpnlp.data.examples import prepare_examples
from hpnlp.data.examples.kinds.unlabelled import Unlabelled, converted
from hpnlp.types import InputError
from tests.data.examples.records import KINDS, config, write

BOS, EOS, PAD = 256, 257, 258


def heldout_batch(tmp_path, kind, rows, **options):
    """The held-out batch of all rows."""
    write(tmp_path / "train.jsonl", KINDS[kind][0]())
    write(tmp_path / "test.jsonl", rows)
    paths = {"heldout_path": str(tmp_path / "test.jsonl")}
    examples = prepare_examples(config(kind, tmp_path / "train.jsonl", **paths, **options))
    return next(examples.heldout(batch_size=len(rows))), examples


def framed(*texts, width=40):
    """(tokens, segment ids, token types) of texts with bos, and eos after each."""
    ids, types = [BOS], [0]
    for i, text in enumerate(texts):
        ids += [*text.encode(), EOS]
        types += [i] * (len(text.encode()) + 1)
    rest = width - len(ids)
    return ids + [PAD] * rest, [1] * len(ids) + [0] * rest, types + [0] * rest


def test_classification_frames_a_text_or_a_pair(tmp_path):
    rows = [{"text": "böse", "second": "x", "label": "class 2"}, {"text": "a b", "second": "why", "label": "class 0"}]
    for kind, fields in (("classification", ["text"]), ("pair classification", ["text", "second"])):
        batch, examples = heldout_batch(tmp_path, kind, rows)
        expected = [framed(*(row[field] for field in fields)) for row in rows]
        for name, values in zip(("tokens", "segment_ids", "token_types"), zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(batch[name], values)
        np.testing.assert_array_equal(batch["positions"], np.tile(np.arange(40), (2, 1)))
        assert [examples.labels[i] for i in batch["labels"]] == [row["label"] for row in rows]
        assert batch["weights"].tolist() == [1, 1]
        for name, values in batch.items():
            assert values.dtype == (np.float32 if name == "weights" else np.int32)
            assert values.shape == ((2,) if name in ("labels", "weights") else (2, 40))


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((30, 3), (17, 3)),
        ((3, 30), (3, 17)),
        ((30, 40), (10, 10)),
        ((9, 30), (9, 11)),
        ((11, 9), (11, 9)),
        ((25, 10), (10, 10)),
    ],
)
def test_the_longer_text_of_a_pair_is_cut_first(tmp_path, lengths, kept):
    rows = [{"text": "a" * lengths[0], "second": "b" * lengths[1], "label": "class 1"}]
    batch, examples = heldout_batch(tmp_path, "pair classification", rows, seq_len=23)
    tokens, _, types = framed("a" * kept[0], "b" * kept[1], width=23)
    np.testing.assert_array_equal(batch["tokens"], [tokens])
    np.testing.assert_array_equal(batch["token_types"], [types])
    texts = [[row["text"], row["second"]] for row in KINDS["classification"][0]()] + [
        ["a" * lengths[0], "b" * lengths[1]]
    ]
    cut = sum(len(first) + len(second) > 20 for first, second in texts)
    assert f"{cut} examples cut, at data.seq_len=23" in examples.summary


def test_labels_of_words_stand_on_their_first_tokens(tmp_path):
    rows = [{"words": ["é", "a b", "cd"], "labels": ["odd", "even", "odd"]}]
    batch, examples = heldout_batch(tmp_path, "tagging", rows)
    np.testing.assert_array_equal(batch["tokens"], [framed("é a b cd")[0]])
    assert np.flatnonzero(batch["weights"][0]).tolist() == [1, 4, 8]
    assert [examples.labels[i] for i in batch["labels"][0, [1, 4, 8]]] == ["odd", "even", "odd"]
    assert batch["labels"].sum() == batch["labels"][0, [1, 4, 8]].sum()
    cut, _ = heldout_batch(tmp_path, "tagging", rows, seq_len=8)
    np.testing.assert_array_equal(cut["tokens"], [[BOS, *"é a b".encode(), EOS]])
    assert np.flatnonzero(cut["weights"][0]).tolist() == [1, 4]


@pytest.mark.parametrize("tokenizer", ["bytes", "words(60)", "words(60, by=whitespace)", "bpe(300)"])
def test_each_word_has_one_label_for_every_tokenizer(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", KINDS["tagging"][0]())
    examples = prepare_examples(config("tagging", tmp_path / "a.jsonl", tokenizer=tokenizer, seq_len=80))
    batch = next(examples.heldout(batch_size=60))
    stored = examples.stored["heldout"]
    for number in range(stored.count):
        words = stored.text(number, 0).decode().split(" ")
        places = np.flatnonzero(batch["weights"][number])
        assert len(places) == len(words)
        ends = [*places[1:], np.flatnonzero(batch["segment_ids"][number])[-1]]
        decoded = [
            examples.tokenizer.decode(batch["tokens"][number, i:end]).decode().strip()
            for i, end in zip(places, ends, strict=True)
        ]
        assert decoded == words
        names = [examples.labels[i] for i in batch["labels"][number, places]]
        assert names == ["odd" if len(word) % 4 else "even" for word in words]


def test_tokens_of_spaces_are_kept_where_other_tokens_contain_them(tmp_path):
    """The vocabulary has a token " a", but " " is a token of its own before z."""
    write(tmp_path / "train.jsonl", [{"words": ["a", "a", "b"], "labels": ["x", "x", "y"]}] * 30)
    write(tmp_path / "test.jsonl", [{"words": ["a", "z", "a"], "labels": ["x", "y", "x"]}])
    paths = {"heldout_path": str(tmp_path / "test.jsonl")}
    examples = prepare_examples(config("tagging", tmp_path / "train.jsonl", tokenizer="bpe(300)", **paths))
    ids = [examples.tokenizer.encode(text) for text in (b"a z", b" z", b" a")]
    assert list(map(len, ids)) == [3, 2, 1]
    batch = next(examples.heldout(batch_size=1))
    real = batch["tokens"][0][batch["segment_ids"][0] > 0]
    assert examples.tokenizer.decode(real).endswith(b"a z a") and batch["weights"].sum() == 3
    assert (examples.tokenizer.decode(real[np.flatnonzero(batch["weights"][0])])) == b"az a"


def test_targets_are_shifted_by_one(tmp_path):
    rows = [{"source": "12", "target": "one two"}, {"source": "7" * 50, "target": "x" * 30}]
    batch, examples = heldout_batch(tmp_path, "seq2seq", rows)
    np.testing.assert_array_equal(batch["tokens"], [framed("12")[0], [BOS, *b"7" * 38, EOS]])
    np.testing.assert_array_equal(batch["target_tokens"][0], [BOS, *b"one two", PAD, PAD, PAD, PAD])
    np.testing.assert_array_equal(batch["target_labels"][0], [*b"one two", EOS, PAD, PAD, PAD, PAD])
    np.testing.assert_array_equal(batch["target_tokens"][1], [BOS, *b"x" * 11])
    np.testing.assert_array_equal(batch["target_labels"][1], [*b"x" * 12])
    np.testing.assert_array_equal(batch["target_weights"], [[1] * 8 + [0] * 4, [1] * 12])
    np.testing.assert_array_equal(
        batch["target_positions"], np.tile(np.arange(12), (len(batch["target_segment_ids"]), 1))
    )
    assert "and data.target_len=12" in examples.summary


def test_pairs_have_a_sequence_each(tmp_path):
    batch, _ = heldout_batch(tmp_path, "pairs", [{"text": "ask", "pair": "told you"}])
    for prefix, text in (("", "ask"), ("pair_", "told you")):
        tokens, segments, _ = framed(text)
        np.testing.assert_array_equal(batch[f"{prefix}tokens"], [tokens])
        np.testing.assert_array_equal(batch[f"{prefix}segment_ids"], [segments])
        np.testing.assert_array_equal(batch[f"{prefix}positions"], [np.arange(40)] * len(batch[f"{prefix}positions"]))
    assert batch["weights"].tolist() == [1]


def test_hard_negatives_have_sequences_of_their_own(tmp_path):
    records = [{"text": "ask", "pair": "told you", "worse": "no", "worst": "none of it"}]
    path = write(tmp_path / "a.jsonl", [{**record, "worse": "no", "worst": "none"} for record in KINDS["pairs"][0]()])
    options = {"heldout_path": str(write(tmp_path / "b.jsonl", records)), "negative_fields": "worse, worst"}
    examples = prepare_examples(config("pairs", path, **options))
    batch = next(examples.heldout(batch_size=1))
    for prefix, text in (("", "ask"), ("pair_", "told you"), ("negative_1_", "no"), ("negative_2_", "none of it")):
        tokens, segments, _ = framed(text)
        np.testing.assert_array_equal(batch[f"{prefix}tokens"], [tokens])
        np.testing.assert_array_equal(batch[f"{prefix}segment_ids"], [segments])
    assert batch["weights"].tolist() == [1] and len(batch) == 4 * 3 + 1
    values = converted(examples.kind, {"text": "ask", "pair": "told you"})  # predictions need no negatives
    unlabelled = Unlabelled(examples.kind, examples.tokenizer, [values])
    of_pair = examples.kind.batch(unlabelled, [0], 1, examples.tokenizer, 40)
    assert of_pair.keys() == batch.keys()
    np.testing.assert_array_equal(of_pair["pair_tokens"], batch["pair_tokens"])


def test_distinct_tokens_stand_at_their_first_occurrences(tmp_path):
    batch, examples = heldout_batch(tmp_path, "pairs", [{"text": "attend", "pair": "abba"}], distinct=True)
    np.testing.assert_array_equal(batch["tokens"], [framed("atend")[0]])
    np.testing.assert_array_equal(batch["pair_tokens"], [framed("ab")[0]])
    assert examples.stored["heldout"].text(0, 0) == b"attend"


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_without_room_for_text_raise(tmp_path, kind):
    write(tmp_path / "a.jsonl", KINDS[kind][0]())
    least = 5 if kind == "pair classification" else 3
    prepare_examples(config(kind, tmp_path / "a.jsonl", seq_len=least))
    with pytest.raises(InputError, match=f"data.seq_len={least - 1} leaves no room for text: pass at least {least}"):
        prepare_examples(config(kind, tmp_path / "a.jsonl", seq_len=least - 1))
    if kind == "seq2seq":
        with pytest.raises(InputError, match="data.target_len=1 leaves no room for text and eos: pass at least 2"):
            prepare_examples(config(kind, tmp_path / "a.jsonl", target_len=1))
