"""Compressors on held-out text: xz after the training text, which a process compresses once."""

import gzip
import json
import lzma
import random
import subprocess
import sys
import time

import pytest

from hpnlp.data import baselines
from hpnlp.data.stream import DataConfig, prepare

WORDS = [b"%x" % (7919 * i) for i in range(500)]


def text(seed, count):
    return b" ".join(random.Random(seed).choices(WORDS, k=count))


def test_xz_after_the_training_text_is_the_difference_of_two_sizes():
    training, heldout = text(0, 5000), text(1, 500)
    *_, figures = baselines.measure(training, heldout)
    both, alone = (len(lzma.compress(x, preset=9 | lzma.PRESET_EXTREME)) for x in (training + heldout, training))
    assert figures["xz_trained_bits_per_byte"] == pytest.approx(8 * (both - alone) / len(heldout), abs=0.05)
    assert figures["gzip_bits_per_byte"] == 8 * len(gzip.compress(heldout, 9)) / len(heldout)
    size = len(lzma.compress(heldout, preset=9 | lzma.PRESET_EXTREME))
    assert figures["xz_bits_per_byte"] == pytest.approx(8 * size / len(heldout), abs=0.05)
    assert figures["xz_trained_bits_per_byte"] < 0.8 * figures["xz_bits_per_byte"]
    (alone,) = baselines.measure(b"", heldout)
    assert alone["xz_trained_bits_per_byte"] is None


def test_ever_longer_ends_of_the_training_text_are_measured(monkeypatch):
    monkeypatch.setattr(baselines, "_FIRST_BYTES", 1000)
    monkeypatch.setattr(baselines, "_OTHERS", {})
    training = text(0, 2000)
    figures = list(baselines.measure(training, text(1, 300)))
    assert [item["xz_trained_bytes"] for item in figures] == [0, 1000, 4000, len(training)] and len(training) < 16000
    assert figures[1]["xz_trained_bits_per_byte"] > figures[3]["xz_trained_bits_per_byte"]
    assert [item["is_complete"] for item in figures] == [False, False, False, True]
    last = list(baselines.measure(training[-4000:], text(1, 300)))[2]
    assert figures[2] == {**last, "is_complete": False}


def test_ppmd_reads_the_training_text_first():
    training, heldout = text(0, 5000), text(1, 500)
    *_, figures = baselines.measure(training, heldout)
    assert figures["is_complete"]
    alone = 8 * baselines._ppmd_bytes(b"", heldout) / len(heldout)
    assert figures["ppmd_trained_bits_per_byte"] < 0.8 * alone
    both, first = (baselines._ppmd_bytes(b"", x) for x in (training + heldout, training))
    assert figures["ppmd_trained_bits_per_byte"] == pytest.approx(8 * (both - first) / len(heldout), abs=0.05)
    (alone,) = baselines.measure(b"", heldout)
    assert alone["is_complete"] and alone["ppmd_trained_bits_per_byte"] is None


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_bytes(text(i, 300))

    def make(tokenizer="bytes"):
        return prepare(
            DataConfig(
                str(tmp_path / "text"), tokenizer=tokenizer, seq_len=16, heldout=0.2, cache=str(tmp_path / "cache")
            )
        )

    return make


def test_training_text_is_read_from_the_end(corpus):
    made = corpus()
    everything, share = made.read_training_text(1 << 30)
    assert share == 1.0 and len(everything) == made.train_tokens - 2 * made.train_documents
    assert corpus("bpe(300)").read_training_text(1 << 30) == (everything, 1.0)
    end, share = made.read_training_text(2500)
    assert end == everything[-2500:] and share == pytest.approx(2500 / len(everything), rel=0.01)


def wait(running):
    """Waits until the measurement is complete, and returns it."""
    running._starting.join()
    if running._process is not None:
        running._process.wait()
    return running


def test_large_corpora_are_compressed_once_by_a_process(corpus, monkeypatch):
    made, messages = corpus(), []
    expected = baselines.Baselines(made).result(messages.append)
    assert expected["xz_trained_share"] == 1.0
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    running = wait(baselines.Baselines(made))
    assert running._process is not None and running.result(messages.append) == expected and not messages
    again = baselines.Baselines(made)
    assert again._process is None and again.result() == expected


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_unfinished_measurements_are_cut(corpus, monkeypatch, lines):
    """A process that would compress for minutes does not hold up the result."""
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    monkeypatch.setattr(baselines, "_PATIENCE", 0.1)
    made, messages = corpus(), []
    everything, _ = made.read_training_text(1 << 30)
    figures = {**dict.fromkeys(baselines.NAMES, 3.0), "xz_trained_bytes": 0, "is_complete": False}
    written = [figures, {**figures, "xz_trained_bytes": len(everything) // 4}][:lines]
    code = "import json, sys, time\nfor line in json.loads(sys.argv[1]): print(json.dumps(line), flush=True)\n"
    popen = subprocess.Popen
    process = [sys.executable, "-c", f"{code}print('unfinished', end='', flush=True)\ntime.sleep(600)"]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **how: popen([*process, json.dumps(written)], **how))
    running = baselines.Baselines(made)
    running._starting.join()
    while b"unfinished" not in running._printed:
        time.sleep(0.01)
        running._figures()
    result = running.result(messages.append)
    assert running._process.poll() is not None and len(messages) == 1
    assert result["gzip_bits_per_byte"] == (3.0 if lines else None)
    assert result["xz_trained_share"] == pytest.approx(0.25 if lines == 2 else 0.0, rel=0.01)
    assert ("more was not compressed in time" if lines else "not measured in time") in messages[0]
    monkeypatch.undo()
    assert baselines.Baselines(made)._cached is None


def test_unwritable_cache_does_not_prevent_the_result(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    expected = wait(baselines.Baselines(corpus())).result()
    (tmp_path / "file").write_text("")
    running = wait(baselines.Baselines(corpus("bpe(270)")))
    running._root, running._cached = str(tmp_path / "file" / "cache"), None
    assert running.result() == expected


def test_killed_process_loses_figures(corpus, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    monkeypatch.setattr(baselines, "measure", None)
    running = baselines.Baselines(corpus())
    running._starting.join()
    running._process.kill()
    assert running.result()["xz_trained_bits_per_byte"] is None


def test_lossy_tokenizer_has_no_trained_figure(corpus):
    figures = baselines.Baselines(corpus("words(50)")).result()
    assert figures["xz_trained_bits_per_byte"] is None and figures["xz_bits_per_byte"] > 0
