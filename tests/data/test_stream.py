"""`prepare`: the split into training and held-out text, the vocabulary, the cache, and errors."""

import json
import re
import tempfile
import tracemalloc

import numpy as np
import pytest

from hpnlp.data import prepare, tokenizers
from hpnlp.data.reading.split import hash_fraction
from hpnlp.data.stream import find_sources
from tests.data.batches import assert_equal, config, predicted, take
from tests.messages import raises


def test_heldout_documents_stay_when_data_is_added(stories, tmp_path):
    before = prepare(config(stories)).read_heldout()
    for path in stories.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert hash_fraction("new.txt") >= 0.2
    (tmp_path / "new.txt").write_text("new")
    assert prepare(config(tmp_path)).read_heldout() == before


def test_heldout_bytes_limits_the_heldout_text(stories):
    everything = prepare(config(stories, heldout=0.5, heldout_bytes=0))
    limited = prepare(config(stories, heldout=0.5, heldout_bytes=2000))
    assert 0 < limited.heldout_bytes <= 2000 < everything.heldout_bytes
    assert limited.train_tokens == everything.train_tokens  # documents over the limit are not trained on
    assert predicted(limited.heldout(batch_size=4), limited.tokenizer) == limited.read_heldout()
    assert prepare(config(stories, heldout=0.5, heldout_bytes=1)).heldout_documents == 1


def test_vocabulary_of_a_large_corpus_is_made_from_a_sample(stories, monkeypatch):
    sizes = [len(text) for text in find_sources(config(stories)).training_texts("bpe(300)", lambda *_: None)]
    monkeypatch.setattr(tokenizers, "training_bytes", lambda spec: sum(sizes) // 3)
    sample = [len(text) for text in find_sources(config(stories)).training_texts("bpe(300)", lambda *_: None)]
    assert 0.1 < len(sample) / len(sizes) < 0.6


@pytest.mark.parametrize("heldout", [1e-9, 1 - 1e-9])
def test_small_corpus_holds_out_one_document(tmp_path, heldout):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * 50)
    corpus = prepare(config(tmp_path, heldout=heldout))
    lowest = min(range(3), key=lambda i: hash_fraction(f"{i}.txt"))
    assert corpus.read_heldout() == f"{lowest}".encode() * 50
    assert corpus.train_documents == 2


def test_heldout_path_is_held_out_completely(stories, tmp_path):
    (tmp_path / "test.txt").write_text("held out " * 10)
    corpus = prepare(config(stories, heldout_path=str(tmp_path), heldout_bytes=5))
    assert corpus.train_documents == 40 and corpus.read_heldout() == b"held out " * 10


def test_files_of_heldout_path_are_not_trained_on(stories, tmp_path):
    (tmp_path / "link").symlink_to(stories, target_is_directory=True)
    for path in (stories / "1*.txt", tmp_path / "link" / "1*.txt"):
        corpus = prepare(config(stories, heldout_path=str(path)))
        assert (corpus.train_documents, corpus.heldout_documents) == (30, 10)
        assert "left out: 10 held out by data.heldout_path (10.txt, ...)" in corpus.summary
    message = (
        "data.heldout_path='.*' holds all files of the training data, data.path='.*': pass other files as data.heldout"
    )
    raises(f"^{message}", lambda: prepare(config(stories, heldout_path=str(stories))))


@pytest.mark.parametrize("spec", ["words(60)", "bpe(300)"])
def test_vocabulary_is_made_from_training_text_only(stories, spec):
    corpus = prepare(config(stories, tokenizer=spec))
    held = [hash_fraction(f"{i:02}.txt") < 0.2 for i in range(40)]
    texts = [path.read_bytes() for path, is_held in zip(sorted(stories.iterdir()), held, strict=True) if not is_held]
    expected = tokenizers.build(spec, texts)
    assert corpus.tokenizer.vocab_size == expected.vocab_size
    for text in texts:
        np.testing.assert_array_equal(corpus.tokenizer.encode(text), expected.encode(text))
    if corpus.tokenizer.lossless:
        assert predicted(corpus.heldout(batch_size=2), corpus.tokenizer) == corpus.read_heldout()


def test_saved_tokenizer_finds_the_same_cache_entry(stories, tmp_path, cache):
    corpus = prepare(config(stories, tokenizer="words(60)"))
    corpus.tokenizer.save(str(tmp_path / "tokenizer.json"))
    entries = sorted(cache.iterdir())
    for options in ({"tokenizer": tokenizers.load(str(tmp_path))}, {}):
        spec = "words(60)" if options else str(tmp_path / "tokenizer.json")
        again = prepare(config(stories, tokenizer=spec), **options)
        assert_equal(take(again.train(seed=0), 2), take(corpus.train(seed=0), 2))
    assert sorted(cache.iterdir()) == entries


def test_cache_is_keyed_by_content_and_split(tmp_path, cache):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text number {i} " * 5)
    calls = []

    def progress(step: str, done: int, total: int) -> None:
        assert 0 < done <= total
        calls.append(step)

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


def test_ids_are_split_and_framed(tmp_path):
    texts = [f"document {i}" * 3 for i in range(30)]
    ids = [np.frombuffer(text.encode(), np.uint8).tolist() + [257] for text in texts]
    np.save(tmp_path / "x.npy", np.array(sum(ids, []), np.uint16))
    corpus = prepare(config(tmp_path))
    held = [hash_fraction(f"x.npy#{i}" if i else "x.npy") < 0.2 for i in range(30)]
    held[0] = hash_fraction("x.npy#0") < 0.2
    assert corpus.read_heldout() == "".join(t for t, is_held in zip(texts, held, strict=True) if is_held).encode()
    assert corpus.train_tokens + corpus.heldout_tokens == sum(map(len, ids)) + 30  # one bos per document, no second eos


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
    first, second = (prepare(config("stdlib", heldout=0.02, cache=str(tmp_path / name))) for name in ("a", "b"))
    assert first.read_heldout() == second.read_heldout()
    assert_equal(take(first.train(seed=0), 3), take(second.train(seed=0), 3))
    assert first.train_documents > 300 and 5 < first.heldout_documents < 100
    assert "stdlib: " in first.summary and "held out; left out: 3 empty" in first.summary


def test_invalid_configs_raise(stories):
    for options, message in (
        ({"heldout": 1.0}, "pass data.heldout_path=PATH"),
        ({"packing": "fits"}, "unknown data.packing 'fits': did you mean 'fit'?"),
        ({"weights": (1.0, 1.0)}, "data.weights has 2 weights and data.path 1 sources"),
        ({"weights": (float("inf"),)}, "expected numbers over 0"),
        ({"tokenizer": "byts"}, "did you mean 'bytes'?"),
        ({"seq_len": 10**6}, "tokens to train on, and a sequence of data.seq_len=1000000 takes 1000001: add text"),
        ({"heldout_path": "nowhere"}, "data.heldout_path='nowhere' does not exist"),
    ):
        raises(re.escape(message), lambda options=options: prepare(config(stories, **options)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b""}, "holds no text"),
        ({"a.txt": b"one document"}, "data.path=.* holds one document, which cannot be both trained on and held out"),
        ({"a.txt": b"one", "b.txt": b"two"}, "tokens to train on"),
    ],
)
def test_too_little_text_raises(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    raises(message, lambda: prepare(config(tmp_path)))


def test_empty_source_among_several_raises(stories, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    raises("empty.txt' holds no text", lambda: prepare(config(f"{stories},{tmp_path}/empty.txt")))


def test_unwritable_temporary_directory_raises(stories, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    raises("cannot write temporary files: .*TMPDIR", lambda: prepare(config(stories)))


@pytest.mark.parametrize("size", [2500, 200_000])
def test_single_files_are_split(tmp_path, stories, size):
    """Files of text and of ids, alone and as sources with weights."""
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
def test_invalid_utf8_raises(tmp_path, spec):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("plain text\n" * 9)
    (tmp_path / "bad.txt").write_bytes(b"x" * 20 + b"\xe9 as in Latin-1")
    message = re.escape(f"{tmp_path}/bad.txt: byte 20 (0xe9) is not UTF-8")
    raises(message + ".*data.tokenizer=bytes", lambda: prepare(config(tmp_path, tokenizer=spec)))
    raises(message, lambda: prepare(config(tmp_path), tokenizer=tokenizers.build(spec, [b"plain text"])))
    prepare(config(tmp_path))


def test_error_names_the_byte_of_a_long_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a line\n" * 30_000 + b"\xff")
    raises(r"a.txt: byte 210000 \(0xff\)", lambda: prepare(config(tmp_path / "a.txt", tokenizer="words(60)")))


def test_ids_outside_the_vocabulary_raise(tmp_path):
    ids = np.array([[5] * 9 + [257]] * 20, np.int64).ravel()
    ids[123] = 264
    np.save(tmp_path / "x.npy", ids)
    raises("x.npy: id 264 at index 123 is outside the vocabulary of 264: pass data", lambda: prepare(config(tmp_path)))
    ids[123] = -1
    np.save(tmp_path / "x.npy", ids)
    raises("id -1 at index 123", lambda: prepare(config(tmp_path)))
    raises("from which no vocabulary can be made", lambda: prepare(config(tmp_path, tokenizer="words(60)")))


@pytest.mark.parametrize(
    ("files", "heldout", "share"),
    [
        ({"a.txt": 100_000, "b.txt": 60_000}, 0.02, (0.002, 0.06)),
        ({"a.txt": 20_000, "b.txt": 0}, 0.1, (0.01, 0.2)),
        ({f"{i}.txt": 20_000 for i in range(10)}, 0.05, (0.005, 0.15)),
    ],
)
def test_few_large_files_are_cut(tmp_path, files, heldout, share):
    for name, size in files.items():
        (tmp_path / name).write_text("".join(f"{name} line {i:05}\n" for i in range(size // 17)))
    corpus = prepare(config(tmp_path, heldout=heldout))
    total = corpus.heldout_bytes + corpus.train_tokens
    assert share[0] < corpus.heldout_bytes / total < share[1] and "documents are taken whole" not in corpus.summary
    assert corpus.read_heldout().endswith(b"\n")


@pytest.mark.parametrize("tokenizer", ["bytes", "words(60)"])
def test_skip_bad_lines_leaves_them_out(stories, tmp_path, tokenizer):
    lines = [json.dumps({"text": path.read_text("utf-8")}) for path in sorted(stories.iterdir())]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines[:20], "{cut", *lines[20:]]))
    raises("x.jsonl, line 21: not JSON .*: mend or remove", lambda: prepare(config(tmp_path, tokenizer=tokenizer)))
    corpus = prepare(config(tmp_path, tokenizer=tokenizer, skip_bad_lines=True))
    assert corpus.train_documents + corpus.heldout_documents == 40
    assert f"left out: 1 bad lines ({tmp_path}/x.jsonl, line 21)" in corpus.summary
    (tmp_path / "x.jsonl").write_text("{\n" * 9)
    raises("holds no text .left out: 9", lambda: prepare(config(tmp_path, tokenizer=tokenizer, skip_bad_lines=True)))
    (tmp_path / "x.txt").write_bytes(b"good line\n\xff bad line\n" * 400)
    corpus = prepare(config(tmp_path / "x.txt", tokenizer=tokenizer, skip_bad_lines=True))
    assert "left out: 400 bad lines" in corpus.summary and b"bad" not in corpus.read_heldout()


def test_utf16_of_a_walk_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 99, "utf-16")
    raises("holds no text .left out: 1 in UTF-16, to be converted by iconv -f", lambda: prepare(config(tmp_path)))
