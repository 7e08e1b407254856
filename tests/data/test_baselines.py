"""Compressors on held-out text: xz after the training text, which a process compresses once."""

import gzip
import lzma
import os
import random

import pytest

from hpnlp.data import baselines
from hpnlp.data.stream import DataConfig, prepare

WORDS = [b"%x" % (7919 * i) for i in range(500)]


def text(seed, count):
    return b" ".join(random.Random(seed).choices(WORDS, k=count))


def test_xz_after_the_training_text_is_the_difference_of_two_sizes():
    training, heldout = text(0, 5000), text(1, 500)
    figures = baselines.measure(training, heldout)
    both, alone = (len(lzma.compress(x, preset=9 | lzma.PRESET_EXTREME)) for x in (training + heldout, training))
    assert figures["xz_trained_bits_per_byte"] == pytest.approx(8 * (both - alone) / len(heldout), abs=0.05)
    assert figures["gzip_bits_per_byte"] == 8 * len(gzip.compress(heldout, 9)) / len(heldout)
    size = len(lzma.compress(heldout, preset=9 | lzma.PRESET_EXTREME))
    assert figures["xz_bits_per_byte"] == pytest.approx(8 * size / len(heldout), abs=0.05)
    assert figures["xz_trained_bits_per_byte"] < 0.8 * figures["xz_bits_per_byte"]
    assert baselines.measure(None, heldout)["xz_trained_bits_per_byte"] is None


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


def test_large_corpora_are_compressed_once_by_a_process(corpus, monkeypatch):
    made, messages = corpus(), []
    expected = baselines.Baselines(made).result(messages.append)
    assert expected["xz_trained_share"] == 1.0 and not messages
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    priorities = []

    def setpriority(*args):  # by a user other than root
        priorities.append(args)
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", setpriority)
    running = baselines.Baselines(made)
    assert running._process is not None and not priorities and running.result() == expected
    assert priorities == [(os.PRIO_PROCESS, running._process.pid, os.getpriority(os.PRIO_PROCESS, 0))]
    again = baselines.Baselines(made)
    assert again._process is None and again.result() == expected


def test_unwritable_cache_does_not_prevent_the_result(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    expected = baselines.Baselines(corpus()).result()
    (tmp_path / "file").write_text("")
    running = baselines.Baselines(corpus("bpe(270)"))
    running._root, running._cached = str(tmp_path / "file" / "cache"), None
    running._start()
    assert running.result() == expected


def test_killed_process_loses_one_figure(corpus, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL_BYTES", 0)
    running = baselines.Baselines(corpus())
    running._process.kill()
    figures = running.result()
    assert figures["xz_trained_bits_per_byte"] is None and figures["xz_bits_per_byte"] > 0


def test_lossy_tokenizer_has_no_trained_figure(corpus):
    figures = baselines.Baselines(corpus("words(50)")).result()
    assert figures["xz_trained_bits_per_byte"] is None and figures["xz_bits_per_byte"] > 0
