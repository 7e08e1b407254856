"""Batches of a corpus: every token is read, and iterators resume, mix and shard bit for bit."""

import dataclasses
import json
import re

import numpy as np
import pytest

from hpnlp.data import DataConfig, prepare
from hpnlp.data.reading.split import hash_fraction
from hpnlp.types import InputError
from tests.data.batches import assert_equal, config, predicted, take
from tests.messages import raises


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two sources of different letters, one nine times as long as the other."""
    root = tmp_path_factory.mktemp("mixture")
    for name, character, count in (("a", "a", 30), ("b", "b", 270)):
        (root / name).mkdir()
        for i in range(count):
            (root / name / f"{i}.txt").write_text(character * 100)
    return root


LAYOUTS = {
    "concat": {"packing": "concat"},
    "fit": {"packing": "fit"},
    "concat mixed": {"packing": "concat", "weights": (1.0, 3.0)},
    "fit mixed": {"packing": "fit", "weights": (1.0, 3.0)},
    "stream": {"order": "stream"},
}


@pytest.fixture(params=LAYOUTS)
def layout(request, mixture) -> DataConfig:
    return config(f"{mixture}/a,{mixture}/b", **LAYOUTS[request.param])


@pytest.mark.parametrize("count", [1, 4])
def test_batch_has_the_documented_arrays(layout, count):
    batch = next(prepare(dataclasses.replace(layout, batch_size=count)).train(seed=0))
    assert set(batch) == {"tokens", "labels", "segment_ids", "positions", "weights"}
    for name, values in batch.items():
        assert values.shape == (count, 32)
        assert values.dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("steps", [0, 1, 60])
def test_resumed_iterator_returns_the_same_batches(layout, steps):
    corpus = prepare(layout)
    batches = corpus.train(seed=3)
    take(batches, steps)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 4)
    resumed = prepare(layout).train(seed=3)
    take(resumed, 2)  # read ahead, which set_state must discard
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_equal(take(resumed, 4), expected)


def test_processes_share_a_batch(layout):
    corpus = prepare(layout)
    alone = corpus.train(seed=1)
    for count in (2, 4):
        shards = [corpus.train(seed=1, process_index=i, process_count=count) for i in range(count)]
        for shard in shards:
            shard.set_state(alone.get_state())  # of an iterator with another number of processes
        together = [
            {name: np.concatenate([shard[name] for shard in batch]) for name in batch[0]}
            for batch in zip(*(take(shard, 5) for shard in shards), strict=True)
        ]
        assert_equal(together, take(alone, 5))


def train_rows(corpus, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The first `count` rows that training sees."""
    batches = take(corpus.train(seed=seed), -(-count // corpus.config.batch_size))
    return {name: np.concatenate([batch[name] for batch in batches])[:count] for name in batches[0]}


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_each_epoch_has_every_row_once_in_a_new_order(stories, packing):
    corpus = prepare(config(stories, packing=packing, batch_size=64))
    total = corpus.train_rows
    first, second = np.split(train_rows(corpus, 2 * total)["labels"], 2)
    other = train_rows(corpus, total, seed=1)["labels"]
    for rows in (second, other):
        assert sorted(first.tolist()) == sorted(rows.tolist())
        assert not np.array_equal(first, rows)
    assert len(np.unique(first, axis=0)) == total


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_training_text_is_all_but_the_heldout_text(stories, packing):
    corpus = prepare(config(stories, packing=packing, batch_size=64))
    rows = train_rows(corpus, corpus.train_rows)
    assert rows["weights"].sum() == corpus.train_tokens - corpus.train_documents  # all but bos
    texts = [path.read_bytes() for path in sorted(stories.iterdir())]
    held = [hash_fraction(f"{i:02}.txt") < 0.2 for i in range(40)]
    assert corpus.read_heldout() == b"".join(text for text, is_held in zip(texts, held, strict=True) if is_held)
    assert corpus.train_tokens == sum(len(text) + 2 for text, is_held in zip(texts, held, strict=True) if not is_held)
    assert corpus.heldout_bytes == len(corpus.read_heldout())
    assert corpus.heldout_documents == sum(held) and corpus.train_documents == 40 - sum(held)


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_weights_are_shares_of_training_tokens(mixture, packing):
    corpus = prepare(config(f"{mixture}/a,{mixture}/b", packing=packing, weights=(1.0, 3.0)))
    tokens = train_rows(corpus, 400)["tokens"]
    shares = [(tokens == ord(character)).sum() for character in "ab"]
    np.testing.assert_allclose(shares[0] / sum(shares), 0.25, rtol=0.03)


def test_without_weights_sources_mix_by_size(mixture):
    corpus = prepare(config(f"{mixture}/a,{mixture}/b", batch_size=64))
    tokens = train_rows(corpus, corpus.train_rows)["tokens"]
    shares = [(tokens == ord(character)).sum() for character in "ab"]
    np.testing.assert_allclose(shares[0] / sum(shares), 0.1, rtol=0.2)


@pytest.mark.parametrize("stride", [None, 5, 31])
@pytest.mark.parametrize("process_count", [1, 3])
def test_heldout_predicts_every_byte_once(stories, stride, process_count):
    corpus = prepare(config(stories, heldout=0.1))
    per_process = [
        list(corpus.heldout(batch_size=6, stride=stride, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert len({len(batches) for batches in per_process}) == 1
    in_order = [batch for batches in zip(*per_process, strict=True) for batch in batches]
    assert all(batch["tokens"].shape == (6 // process_count, 32) for batch in in_order)
    assert predicted(in_order, corpus.tokenizer) == corpus.read_heldout()
    targets = sum(batch["weights"].sum() for batch in in_order)
    assert targets == corpus.heldout_tokens - corpus.heldout_documents


def test_heldout_limit_spreads_over_the_text(stories):
    corpus = prepare(config(stories))
    everything = [row.tobytes() for batch in corpus.heldout(batch_size=1) for row in batch["tokens"]]
    limited = [row.tobytes() for batch in corpus.heldout(batch_size=5, limit=2) for row in batch["tokens"]]
    assert len(limited) == 10
    assert [everything.index(row) for row in limited] == [i * len(everything) // 10 for i in range(10)]
    assert len(list(corpus.heldout(batch_size=5, limit=10**6))) == -(-len(everything) // 5)


def test_prompts_carry_no_loss(tmp_path):
    rows = [{"ask": f"Q{i}? ", "say": f"A{i}. " * 9} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = prepare(config(tmp_path, text_field="say", prompt_field="ask"))
    lines = {f"x.jsonl#{i}": row for i, row in enumerate(rows)}
    held = "".join(row["say"] for name, row in lines.items() if hash_fraction(name) < 0.2).encode()
    assert held and corpus.read_heldout() == held
    assert predicted(corpus.heldout(batch_size=2), corpus.tokenizer) == held
    seen = np.concatenate([batch["tokens"].ravel() for batch in corpus.heldout(batch_size=2)])
    assert b"? A" in corpus.tokenizer.decode(seen)  # prompts are inputs


def test_states_of_other_data_raise(stories, mixture, tmp_path):
    batches = prepare(config(stories)).train(seed=0)
    state = batches.get_state()
    raises("of another corpus and held-out text", lambda: prepare(config(mixture)).train(seed=0).set_state(state))
    (tmp_path / "other.txt").write_text("other text")
    options = [{"heldout_path": str(path)} for path in (stories / "00.txt", tmp_path / "other.txt")]
    scored, changed = (prepare(config(mixture, **paths)) for paths in options)
    old_state = scored.train(seed=0).get_state()
    raises("of another held-out text: .*old data back", lambda: changed.train(seed=0).set_state(old_state))
    del old_state["held-out text"]
    changed.train(seed=0).set_state(old_state)  # as old versions saved it
    raises("of another packing", lambda: prepare(config(stories, packing="fit")).train(seed=0).set_state(state))
    for damaged in ({}, *({**state, "batches": value} for value in ("many", None, -1, 10**18))):
        raises("damaged.*another checkpoint", batches.set_state, damaged)
    raises("version 2, expected 1", batches.set_state, {**state, "version": 2})


def test_invalid_train_arguments_raise(stories):
    for arguments, message in (
        ({"process_count": 3}, "data.batch_size=4 is not a multiple of the 3 processes that share it: pass 6"),
        ({"process_index": 2, "process_count": 2}, "process_index=2: expected 0 to 1"),
        ({"seed": -1}, "seed=-1: expected at least 0"),
    ):
        raises(message, prepare(config(stories)).train, **{"seed": 0, **arguments})


def test_invalid_heldout_arguments_raise(stories):
    for arguments, message in (
        ({"stride": 33}, "stride=33: expected 1 to data.seq_len=32"),
        ({"stride": 0}, "stride=0"),
        ({"limit": 0}, "limit=0"),
        ({"process_count": 3}, "batch_size=4 is not a multiple"),
    ):
        raises(message, prepare(config(stories)).heldout, batch_size=4, **arguments)


def test_weighted_source_without_training_text_raises(tmp_path, stories):
    name = next(name for name in map("{}.txt".format, range(10**4)) if hash_fraction(name) < 0.2)
    (tmp_path / name).write_text("held out whole")
    corpus = prepare(config(f"{stories},{tmp_path}", weights=(1.0, 1.0)))
    raises("nothing to train on, as its only document was held out: pass data.heldout_path", corpus.train, seed=0)


def test_summary_states_the_heldout_share(stories, tmp_path):
    assert re.search(
        r"11 documents, 4,396 bytes, 4,4\d\d tokens \(25 % of all\) held out", prepare(config(stories)).summary
    )
    capped = prepare(config(stories, heldout=0.5, heldout_bytes=2000)).summary
    assert re.search(r"bytes over data.heldout_bytes=2000 neither trained on nor evaluated", capped)
    assert "data.heldout_bytes=1 is less than this one document" in prepare(config(stories, heldout_bytes=1)).summary
    rows = "".join(json.dumps({"text": "a record " * 40}) + "\n" for _ in range(4))
    (tmp_path / "a.jsonl").write_text(rows)
    summary = prepare(config(tmp_path / "a.jsonl", heldout=0.02)).summary
    assert "data.heldout=0.02 takes 25 % from training, because documents are taken whole" in summary
    assert "scores on a single document may differ from those on others: raise data.heldout" in summary
    (tmp_path / "b.jsonl").write_text(rows)
    scored = prepare(config(tmp_path / "a.jsonl", heldout_path=str(tmp_path / "b.jsonl"))).summary
    assert "% of all" not in scored and "takes" not in scored and "single document" not in scored


def streams(batches) -> dict[str, np.ndarray]:
    """The tokens of each example of consecutive batches, one after another: arrays [B, steps * T]."""
    return {name: np.concatenate([batch[name] for batch in batches], axis=1) for name in batches[0]}


def test_examples_of_a_stream_continue_from_batch_to_batch(stories):
    """More than a pass of each example: labels are the tokens that follow; positions and segments are those of documents."""
    corpus = prepare(config(stories, order="stream"))
    read = streams(take(corpus.train(seed=2), corpus.train_rows + 5))
    other = streams(take(corpus.train(seed=3), 1))
    assert not np.array_equal(other["tokens"], read["tokens"][:, :32])
    text = corpus.read_training_text(10**6)[0]
    for tokens, labels, ids, positions in zip(
        *(read[name] for name in ("tokens", "labels", "segment_ids", "positions")), strict=True
    ):
        real = ids > 0
        tokens, labels, ids, positions = (x[real] for x in (tokens, labels, ids, positions))
        assert sum(~real) < 32  # only the last sequence of the text is filled up
        follows = ids[1:] == ids[:-1]
        np.testing.assert_array_equal(labels[:-1][follows], tokens[1:][follows])
        np.testing.assert_array_equal(positions[1:], np.where(follows, positions[:-1] + 1, 0))
        np.testing.assert_array_equal(ids[1:][~follows], ids[:-1][~follows] + 1)  # never one that memory still holds
        decoded = corpus.tokenizer.decode(tokens)
        assert decoded[: len(text)] in text + text and len(decoded) > len(text)
    first_pass = take(corpus.train(seed=2), corpus.train_rows // 4)
    rows = np.concatenate([batch["labels"] for batch in first_pass])
    assert len(np.unique(rows, axis=0)) == len(rows)  # no sequence twice


@pytest.mark.parametrize(("batch_size", "limit"), [(4, None), (8, 2), (512, None)])
def test_heldout_streams_have_every_token_once(stories, batch_size, limit):
    corpus = prepare(config(stories, order="stream"))
    batches = list(corpus.heldout(batch_size=batch_size, limit=limit))
    shards = [
        list(corpus.heldout(batch_size=batch_size, limit=limit, process_index=i, process_count=2)) for i in (0, 1)
    ]
    together = [{name: np.concatenate([a[name], b[name]]) for name in a} for a, b in zip(*shards, strict=True)]
    assert_equal(together, batches)
    read = streams(batches)
    if limit is None:
        shuffled = prepare(config(stories)).heldout(batch_size=1)
        assert predicted([read], corpus.tokenizer) == predicted(shuffled, corpus.tokenizer) == corpus.read_heldout()
    else:
        assert len(batches) == limit and (read["weights"].sum(axis=1) > 0).all()
    follows = (read["segment_ids"][:, 1:] == read["segment_ids"][:, :-1]) & (read["segment_ids"][:, 1:] > 0)
    np.testing.assert_array_equal(np.diff(read["positions"])[follows], 1)
    raises("stride=8: sequences of data.order='stream' do not overlap", corpus.heldout, batch_size=4, stride=8)


@pytest.mark.parametrize("stride", [None, 5])
@pytest.mark.parametrize(("order", "limit"), [("shuffle", None), ("shuffle", 2), ("stream", None)])
def test_documents_of_heldout_sequences_have_their_first_scored_label(stories, stride, order, limit):
    corpus = prepare(config(stories, heldout=0.1, order=order))
    stride = None if order == "stream" else stride
    batches = list(corpus.heldout(batch_size=6, stride=stride, limit=limit))
    numbers = corpus.document_numbers(6, stride, limit)
    assert numbers.shape == (len(batches), 6) and len(np.unique(numbers)) > 3
    _, heldout = corpus.documents
    for batch, documents in zip(batches, numbers, strict=True):
        rows = zip(*(batch[name] for name in ("labels", "weights", "segment_ids")), documents, strict=True)
        for labels, weights, segments, number in rows:
            assert (number < 0) == (not weights.any())
            if number >= 0:
                first = segments[np.argmax(weights > 0)]
                scored = labels[(weights > 0) & (segments == first)].astype(np.int32).tobytes()
                assert scored in heldout.document(number).astype(np.int32).tobytes()


def test_orders_that_cannot_be_raise():
    for options, message in (
        ({"order": "stream", "packing": "fit"}, "data.packing='fit'.*set data.packing='concat'"),
        ({"order": "stream", "weights": (1.0, 2.0)}, r"data.weights=\(1.0, 2.0\).*set data.weights=\(\)"),
    ):
        raises(message, DataConfig, **options)


@pytest.mark.parametrize(("option", "name"), [("batch_size", "batch size"), ("seq_len", "sequence length")])
def test_a_stream_of_batches_of_another_shape_does_not_resume(stories, option, name):
    state = prepare(config(stories, order="stream")).train(seed=0).get_state()
    with pytest.raises(InputError, match=f"is of another {name}"):
        prepare(config(stories, order="stream", **{option: 8})).train(seed=0).set_state(state)
