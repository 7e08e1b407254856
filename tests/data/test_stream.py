"""A corpus from files to batches: the split holds, every token comes, and batches resume, mix and shard to the bit."""

import dataclasses
import json
import re
import tempfile
import tracemalloc

import numpy as np
import pytest

from hpnlp.data import DataConfig, prepare, tokenizers
from hpnlp.data.ingest import place
from hpnlp.types import InputError


def config(path, **options) -> DataConfig:
    return DataConfig(**{"path": str(path), "seq_len": 32, "batch_size": 4, "heldout": 0.2, **options})


def take(batches, count: int) -> list[dict[str, np.ndarray]]:
    return [next(batches) for _ in range(count)]


def assert_equal(some: list[dict[str, np.ndarray]], others: list[dict[str, np.ndarray]]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def predicted(batches, tokenizer) -> bytes:
    """The text that batches in order predict."""
    return b"".join(tokenizer.decode(batch["labels"][batch["weights"] > 0]) for batch in batches)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Two sources whose text tells them apart, one nine times as long."""
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
}


@pytest.fixture(params=LAYOUTS)
def layout(request, mixture) -> DataConfig:
    return config(f"{mixture}/a,{mixture}/b", **LAYOUTS[request.param])


@pytest.mark.parametrize("count", [1, 4])
def test_batch(layout, count):
    batch = next(prepare(dataclasses.replace(layout, batch_size=count)).train(seed=0))
    assert set(batch) == {"tokens", "labels", "segment_ids", "positions", "weights"}
    for name, values in batch.items():
        assert values.shape == (count, 32)
        assert values.dtype == (np.float32 if name == "weights" else np.int32)


@pytest.mark.parametrize("steps", [0, 1, 60])
def test_resume(layout, steps):
    corpus = prepare(layout)
    batches = corpus.train(seed=3)
    take(batches, steps)
    state = json.loads(json.dumps(batches.get_state()))
    expected = take(batches, 4)
    resumed = prepare(layout).train(seed=3)
    take(resumed, 2)  # what it has read ahead must go
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert_equal(take(resumed, 4), expected)


def test_processes_share_a_batch(layout):
    corpus = prepare(layout)
    alone = corpus.train(seed=1)
    for count in (2, 4):
        shards = [corpus.train(seed=1, process_index=i, process_count=count) for i in range(count)]
        for shard in shards:
            shard.set_state(alone.get_state())  # of another number of processes
        together = [
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            for parts in zip(*(take(shard, 5) for shard in shards), strict=True)
        ]
        assert_equal(together, take(alone, 5))


def train_rows(corpus, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """The first `count` rows that training sees."""
    batches = take(corpus.train(seed=seed), -(-count // corpus.config.batch_size))
    return {name: np.concatenate([batch[name] for batch in batches])[:count] for name in batches[0]}


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_an_epoch_is_every_row_once_in_another_order_each_time(stories, packing):
    corpus = prepare(config(stories, packing=packing, batch_size=64))
    total = corpus.train_rows
    first, second = np.split(train_rows(corpus, 2 * total)["labels"], 2)
    other = train_rows(corpus, total, seed=1)["labels"]
    for rows in (second, other):
        assert sorted(first.tolist()) == sorted(rows.tolist())
        assert not np.array_equal(first, rows)
    assert len(np.unique(first, axis=0)) == total


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_training_text_is_all_but_the_held_out(stories, packing):
    corpus = prepare(config(stories, packing=packing, batch_size=64))
    rows = train_rows(corpus, corpus.train_rows)
    assert rows["weights"].sum() == corpus.train_tokens - corpus.train_documents  # all but bos
    texts = [path.read_bytes() for path in sorted(stories.iterdir())]
    held = [place(f"{i:02}.txt") < 0.2 for i in range(40)]
    assert corpus.read_heldout() == b"".join(text for text, is_held in zip(texts, held, strict=True) if is_held)
    assert corpus.train_tokens == sum(len(text) + 2 for text, is_held in zip(texts, held, strict=True) if not is_held)
    assert corpus.heldout_bytes == len(corpus.read_heldout())
    assert corpus.heldout_documents == sum(held) and corpus.train_documents == 40 - sum(held)


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_weights_are_shares_of_tokens(mixture, packing):
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
    some = [row.tobytes() for batch in corpus.heldout(batch_size=5, limit=2) for row in batch["tokens"]]
    assert len(some) == 10
    places = [everything.index(row) for row in some]
    assert places == [i * len(everything) // 10 for i in range(10)]
    assert len(list(corpus.heldout(batch_size=5, limit=10**6))) == -(-len(everything) // 5)


def test_held_out_documents_stay_when_data_is_added(stories, tmp_path):
    before = prepare(config(stories)).read_heldout()
    for path in stories.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert place("new.txt") >= 0.2
    (tmp_path / "new.txt").write_text("new")
    assert prepare(config(tmp_path)).read_heldout() == before


def test_heldout_cap_takes_a_sample(stories):
    everything = prepare(config(stories, heldout=0.5, heldout_bytes=0))
    some = prepare(config(stories, heldout=0.5, heldout_bytes=2000))
    assert 0 < some.heldout_bytes <= 2000 < everything.heldout_bytes
    assert some.train_tokens == everything.train_tokens  # what is over the cap is not trained on
    assert predicted(some.heldout(batch_size=4), some.tokenizer) == some.read_heldout()
    assert prepare(config(stories, heldout=0.5, heldout_bytes=1)).heldout_documents == 1


@pytest.mark.parametrize("heldout", [1e-9, 1 - 1e-9])
def test_small_corpus_holds_out_one_document(tmp_path, heldout):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 50)
    corpus = prepare(config(tmp_path, heldout=heldout))
    lowest = min(range(3), key=lambda i: place(f"{i}.txt"))
    assert corpus.read_heldout() == f"{lowest}".encode() * 50
    assert corpus.train_documents == 2


def test_heldout_path(stories, tmp_path):
    (tmp_path / "test.txt").write_text("held out " * 10)
    corpus = prepare(config(stories, heldout_path=str(tmp_path), heldout_bytes=5))
    assert corpus.train_documents == 40 and corpus.read_heldout() == b"held out " * 10


def test_what_is_held_out_is_not_trained_on(stories, tmp_path):
    (tmp_path / "link").symlink_to(stories, target_is_directory=True)
    for path in (stories / "1*.txt", tmp_path / "link" / "1*.txt"):
        corpus = prepare(config(stories, heldout_path=str(path)))
        assert (corpus.train_documents, corpus.heldout_documents) == (30, 10)
        assert "left out: 10 held out by data.heldout_path (10.txt, ...)" in corpus.summary
    with pytest.raises(InputError, match="adds no file .left out: 40 held out by data.heldout_path .00.txt, "):
        prepare(config(stories, heldout_path=str(stories)))


def test_prompts_carry_no_loss(tmp_path):
    rows = [{"ask": f"Q{i}? ", "say": f"A{i}. " * 9} for i in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = prepare(config(tmp_path, text_field="say", prompt_field="ask"))
    lines = {f"x.jsonl#{i}": row for i, row in enumerate(rows)}
    held = "".join(row["say"] for name, row in lines.items() if place(name) < 0.2).encode()
    assert held and corpus.read_heldout() == held
    assert predicted(corpus.heldout(batch_size=2), corpus.tokenizer) == held
    seen = np.concatenate([batch["tokens"].ravel() for batch in corpus.heldout(batch_size=2)])
    assert b"? A" in corpus.tokenizer.decode(seen)  # the prompt is read


@pytest.mark.parametrize("spec", ["words(60)", "bpe(300)"])
def test_vocabulary_is_counted_over_training_text_only(stories, spec):
    corpus = prepare(config(stories, tokenizer=spec))
    held = [place(f"{i:02}.txt") < 0.2 for i in range(40)]
    texts = [path.read_bytes() for path, is_held in zip(sorted(stories.iterdir()), held, strict=True) if not is_held]
    expected = tokenizers.build(spec, texts)
    assert corpus.tokenizer.vocab_size == expected.vocab_size
    for text in texts:
        np.testing.assert_array_equal(corpus.tokenizer.encode(text), expected.encode(text))
    if corpus.tokenizer.lossless:
        assert predicted(corpus.heldout(batch_size=2), corpus.tokenizer) == corpus.read_heldout()


def test_a_saved_tokenizer_finds_the_same_cache(stories, tmp_path, cache):
    corpus = prepare(config(stories, tokenizer="words(60)"))
    corpus.tokenizer.save(str(tmp_path / "tokenizer.json"))
    entries = sorted(cache.iterdir())
    for options in ({"tokenizer": tokenizers.load(str(tmp_path))}, {}):
        spec = "words(60)" if options else str(tmp_path / "tokenizer.json")
        again = prepare(config(stories, tokenizer=spec), **options)
        assert_equal(take(again.train(seed=0), 2), take(corpus.train(seed=0), 2))
    assert sorted(cache.iterdir()) == entries


def test_cache(tmp_path, cache):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text number {i} " * 5)
    calls = []

    def progress(what: str, done: int, total: int) -> None:
        assert 0 < done <= total
        calls.append(what)

    before = prepare(config(tmp_path), progress=progress)
    assert calls == ["tokenising"] * 20
    prepare(config(tmp_path, seq_len=16, packing="fit", batch_size=2), progress=progress)
    assert len(calls) == 20
    (tmp_path / "3.txt").write_text("other text")
    after = prepare(config(tmp_path), progress=progress)
    assert len(calls) == 40 and after.train_tokens != before.train_tokens
    prepare(config(tmp_path, heldout=0.5), progress=progress)
    prepare(config(tmp_path, cache=str(cache / "elsewhere")), progress=progress)
    assert len(calls) == 80


def test_state_of_other_data(stories, mixture, tmp_path):
    batches = prepare(config(stories)).train(seed=0)
    state = batches.get_state()
    with pytest.raises(InputError, match="of another corpus and held-out text: .*old data back"):
        prepare(config(mixture)).train(seed=0).set_state(state)
    (tmp_path / "other.txt").write_text("other text")
    options = [{"heldout_path": str(path)} for path in (stories / "00.txt", tmp_path / "other.txt")]
    scored, changed = (prepare(config(mixture, **some)) for some in options)
    state_then = scored.train(seed=0).get_state()
    with pytest.raises(InputError, match="of another held-out text: .*old data back"):
        changed.train(seed=0).set_state(state_then)
    del state_then["held-out text"]
    changed.train(seed=0).set_state(state_then)  # of before it was noted
    with pytest.raises(InputError, match="of another packing"):
        prepare(config(stories, packing="fit")).train(seed=0).set_state(state)
    for damaged in ({}, *({**state, "batches": value} for value in ("many", None, -1, 10**18))):
        with pytest.raises(InputError, match="damaged.*another checkpoint"):
            batches.set_state(damaged)
    with pytest.raises(InputError, match="version 2, expected 1"):
        batches.set_state({**state, "version": 2})


def test_pre_tokenised(tmp_path):
    texts = [f"document {i}" * 3 for i in range(30)]
    ids = [np.frombuffer(text.encode(), np.uint8).tolist() + [257] for text in texts]
    np.save(tmp_path / "x.npy", np.array(sum(ids, []), np.uint16))
    corpus = prepare(config(tmp_path))
    held = [place(f"x.npy#{i}" if i else "x.npy") < 0.2 for i in range(30)]
    held[0] = place("x.npy#0") < 0.2
    assert corpus.read_heldout() == "".join(t for t, is_held in zip(texts, held, strict=True) if is_held).encode()
    assert corpus.train_tokens + corpus.heldout_tokens == sum(map(len, ids)) + 30  # a bos each, no second eos


def test_memory_does_not_grow_with_the_text(tmp_path):
    line = "a line of text that is as long as any other\n"
    with open(tmp_path / "a.txt", "w") as file:
        file.writelines(line for _ in range(800_000))
    tracemalloc.start()
    corpus = prepare(config(tmp_path, heldout_bytes=0))
    next(corpus.train(seed=0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert corpus.train_tokens > 25e6
    assert peak < 15e6


def test_stdlib_is_the_same_every_time(tmp_path):
    one, other = (prepare(config("stdlib", heldout=0.02, cache=str(tmp_path / name))) for name in ("one", "other"))
    assert one.read_heldout() == other.read_heldout()
    assert_equal(take(one.train(seed=0), 3), take(other.train(seed=0), 3))
    assert one.train_documents > 300 and 5 < one.heldout_documents < 100
    assert "stdlib: " in one.summary and "held out; left out: 3 empty" in one.summary


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "data.seq_len=0: expected at least 1"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"heldout": 0.0}, "data.heldout=0.0: expected a fraction between 0 and 1"),
        ({"heldout": 1.0}, "pass data.heldout_path=PATH"),
        ({"heldout_bytes": -1}, "data.heldout_bytes=-1"),
        ({"packing": "fits"}, "unknown data.packing 'fits': did you mean 'fit'?"),
        ({"weights": (1.0, 1.0)}, "data.weights has 2 weights and data.path 1 sources"),
        ({"weights": (0.0,)}, "expected numbers over 0"),
        ({"weights": (-1.0,)}, "expected numbers over 0"),
        ({"weights": (float("nan"),)}, "expected numbers over 0"),
        ({"weights": (float("inf"),)}, "expected numbers over 0"),
        ({"weights": (1e300, 1e-300)}, "expected numbers over 0, 1e-100 to 1e100"),
        ({"tokenizer": "byts"}, "did you mean 'bytes'?"),
        ({"seq_len": 10**6}, "tokens to train on, and a row of data.seq_len=1000000 takes 1000001: add text"),
        ({"heldout_path": "nowhere"}, "data.heldout_path='nowhere' does not exist"),
    ],
)
def test_bad_config(stories, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        prepare(config(stories, **options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"process_count": 3}, "data.batch_size=4 is not a multiple of the 3 processes that share it: pass 6"),
        ({"process_index": 2, "process_count": 2}, "process_index=2: expected 0 to 1"),
        ({"seed": -1}, "seed=-1: expected at least 0"),
    ],
)
def test_bad_train(stories, arguments, message):
    with pytest.raises(InputError, match=message):
        prepare(config(stories)).train(**{"seed": 0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": 33}, "stride=33: expected 1 to data.seq_len=32"),
        ({"stride": 0}, "stride=0"),
        ({"limit": 0}, "limit=0"),
        ({"process_count": 3}, "batch_size=4 is not a multiple"),
    ],
)
def test_bad_heldout(stories, arguments, message):
    with pytest.raises(InputError, match=message):
        prepare(config(stories)).heldout(batch_size=4, **arguments)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, "holds no text"),
        ({"a.txt": b"", "b.txt": b"\0"}, "holds no text"),
        (
            {"a.txt": b"one document"},
            "data.path=.* holds one document, which cannot be both trained on and held out: add text, or pass",
        ),
        ({"a.txt": b"one", "b.txt": b"two"}, "tokens to train on"),
    ],
)
def test_no_text(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare(config(tmp_path))


def test_one_of_several_sources_without_text(stories, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="empty.txt' holds no text"):
        prepare(config(f"{stories},{tmp_path}/empty.txt"))


def test_full_temporary_directory(stories, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="cannot write temporary files: .*TMPDIR"):
        prepare(config(stories))


def test_weighted_source_without_training_text(tmp_path, stories):
    name = next(name for name in map("{}.txt".format, range(10**4)) if place(name) < 0.2)
    (tmp_path / name).write_text("held out whole")
    corpus = prepare(config(f"{stories},{tmp_path}", weights=(1.0, 1.0)))
    with pytest.raises(
        InputError, match="nothing to train on, as its only document was held out: pass data.heldout_path"
    ):
        corpus.train(seed=0)


@pytest.mark.parametrize("size", [2500, 200_000])
def test_lone_files_are_trained_on_and_held_out(tmp_path, stories, size):
    """Of text and of ids, also as sources with weights."""
    lines = b"".join(b"line %d of many\n" % i for i in range(20_000))[:size]
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_bytes(lines)
        np.save(tmp_path / f"{name}.npy", np.frombuffer(lines, np.uint8))
        for kind in ("txt", "npy"):
            corpus = prepare(config(tmp_path / f"{name}.{kind}", heldout=0.02))
            assert corpus.train_tokens > size / 2 and 0 < corpus.heldout_bytes < size / 2
    for kind in ("txt", "npy"):
        both = config(f"{tmp_path}/a.{kind},{tmp_path}/b.{kind}", weights=(1.0, 3.0), heldout=0.02)
        next(prepare(both).train(seed=0))


@pytest.mark.parametrize("spec", ["words(60)", "bpe(300)"])
def test_text_that_cannot_be_decoded(tmp_path, spec):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("plain text\n" * 9)
    (tmp_path / "bad.txt").write_bytes(b"x" * 20 + b"\xe9 as in Latin-1")
    message = re.escape(f"{tmp_path}/bad.txt: byte 20 (0xe9) is not UTF-8")
    with pytest.raises(InputError, match=message + ".*data.tokenizer=bytes"):
        prepare(config(tmp_path, tokenizer=spec))
    with pytest.raises(InputError, match=message):
        prepare(config(tmp_path), tokenizer=tokenizers.build(spec, [b"plain text"]))
    prepare(config(tmp_path))


def test_place_of_a_bad_byte_in_a_long_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 30_000 + b"\xff")
    with pytest.raises(InputError, match=r"a.txt: byte 210000 \(0xff\)"):
        prepare(config(tmp_path / "a.txt", tokenizer="words(60)"))


def test_ids_outside_the_vocabulary(tmp_path):
    ids = np.array([[5] * 9 + [257]] * 20, np.int64).ravel()
    ids[123] = 264
    np.save(tmp_path / "x.npy", ids)
    with pytest.raises(InputError, match="x.npy: id 264 at index 123 is outside the vocabulary of 264: pass data"):
        prepare(config(tmp_path))
    ids[123] = -1
    np.save(tmp_path / "x.npy", ids)
    with pytest.raises(InputError, match="id -1 at index 123"):
        prepare(config(tmp_path))
    with pytest.raises(InputError, match="from which no vocabulary can be made: pass data.tokenizer=PATH"):
        prepare(config(tmp_path, tokenizer="words(60)"))


@pytest.mark.parametrize(
    ("files", "heldout", "share"),
    [
        ({"a.txt": 100_000, "b.txt": 60_000}, 0.02, (0.002, 0.06)),
        ({"a.txt": 20_000, "b.txt": 0}, 0.1, (0.01, 0.2)),
        ({f"{i}.txt": 20_000 for i in range(10)}, 0.05, (0.005, 0.15)),
    ],
)
def test_few_large_files_are_split_inside(tmp_path, files, heldout, share):
    for name, size in files.items():
        (tmp_path / name).write_text("".join(f"{name} line {i:05}\n" for i in range(size // 17)))
    corpus = prepare(config(tmp_path, heldout=heldout))
    total = corpus.heldout_bytes + corpus.train_tokens
    assert share[0] < corpus.heldout_bytes / total < share[1] and "documents are taken whole" not in corpus.summary
    assert corpus.read_heldout().endswith(b"\n")


def test_summary_states_the_share_that_is_held_out(stories, tmp_path):
    assert re.search(r"11 documents, 4,396 bytes \(25 % of all\) held out", prepare(config(stories)).summary)
    capped = prepare(config(stories, heldout=0.5, heldout_bytes=2000)).summary
    assert re.search(r"bytes over data.heldout_bytes=2000 neither trained on nor evaluated", capped)
    assert "data.heldout_bytes=1 is less than this one document" in prepare(config(stories, heldout_bytes=1)).summary
    rows = "".join(json.dumps({"text": "a record " * 40}) + "\n" for _ in range(4))
    (tmp_path / "a.jsonl").write_text(rows)
    summary = prepare(config(tmp_path / "a.jsonl", heldout=0.02)).summary
    assert "data.heldout=0.02 takes 25 % from training, because documents are taken whole" in summary
    (tmp_path / "b.jsonl").write_text(rows)
    scored = prepare(config(tmp_path / "a.jsonl", heldout_path=str(tmp_path / "b.jsonl"))).summary
    assert "% of all" not in scored and "takes" not in scored


@pytest.mark.parametrize("tokenizer", ["bytes", "words(60)", "bpe(300)"])
def test_bad_lines_are_skipped(stories, tmp_path, tokenizer):
    lines = [json.dumps({"text": path.read_text("utf-8")}) for path in sorted(stories.iterdir())]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:20], "{cut", *lines[20:]]))
    with pytest.raises(
        InputError, match="x.jsonl, line 21: not JSON .*: mend or remove the line, or pass data.skip_bad_"
    ):
        prepare(config(tmp_path, tokenizer=tokenizer))
    corpus = prepare(config(tmp_path, tokenizer=tokenizer, skip_bad_lines=True))
    assert corpus.train_documents + corpus.heldout_documents == 40
    assert f"left out: 1 bad lines ({tmp_path}/x.jsonl, line 21)" in corpus.summary
    (tmp_path / "x.jsonl").write_text("{\n" * 9)
    with pytest.raises(InputError, match="holds no text .left out: 9 bad lines"):
        prepare(config(tmp_path, tokenizer=tokenizer, skip_bad_lines=True))
    (tmp_path / "x.txt").write_bytes(b"good line\n\xff bad line\n" * 400)
    corpus = prepare(config(tmp_path / "x.txt", tokenizer=tokenizer, skip_bad_lines=True))
    assert "left out: 400 bad lines" in corpus.summary and b"bad" not in corpus.read_heldout()


def test_utf16_in_a_directory_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99, "utf-16")
    with pytest.raises(InputError, match="holds no text .left out: 1 in UTF-16, to be converted by iconv -f UTF-16 -t"):
        prepare(config(tmp_path))
