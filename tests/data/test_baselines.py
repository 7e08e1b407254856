"""Compressors on held-out text: xz that has seen the training text, in the background and once."""

import gzip
import lzma
import random

import pytest

from hpnlp.data import baselines
from hpnlp.data.stream import DataConfig, prepare

WORDS = [b"%x" % (7919 * i) for i in range(500)]


def text(seed, count):
    return b" ".join(random.Random(seed).choices(WORDS, k=count))


def test_xz_after_the_training_text_is_the_difference_of_two_files():
    training, heldout = text(0, 5000), text(1, 500)
    found = baselines.measure(training, heldout)
    whole, alone = (len(lzma.compress(x, preset=9 | lzma.PRESET_EXTREME)) for x in (training + heldout, training))
    assert found["xz_trained_bits_per_byte"] == pytest.approx(8 * (whole - alone) / len(heldout), abs=0.05)
    assert found["gzip_bits_per_byte"] == 8 * len(gzip.compress(heldout, 9)) / len(heldout)
    size = len(lzma.compress(heldout, preset=9 | lzma.PRESET_EXTREME))
    assert found["xz_bits_per_byte"] == pytest.approx(8 * size / len(heldout), abs=0.05)
    assert found["xz_trained_bits_per_byte"] < 0.8 * found["xz_bits_per_byte"]
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


def test_training_text_is_read_from_its_end(corpus):
    made = corpus()
    whole, share = made.read_training_text(1 << 30)
    assert share == 1.0 and len(whole) == made.train_tokens - 2 * made.train_documents
    assert corpus("bpe(300)").read_training_text(1 << 30) == (whole, 1.0)
    end, share = made.read_training_text(2500)
    assert end == whole[-2500:] and share == pytest.approx(2500 / len(whole), rel=0.01)


def test_large_corpora_are_compressed_beside_the_training_and_once(corpus, monkeypatch):
    made, said = corpus(), []
    expected = baselines.Baselines(made).result(said.append)
    assert expected["xz_trained_share"] == 1.0 and not said
    monkeypatch.setattr(baselines, "_SMALL", 0)
    running = baselines.Baselines(made)
    assert running._process is not None and running.result() == expected
    again = baselines.Baselines(made)
    assert again._process is None and again.result() == expected


def test_figures_are_returned_where_the_cache_cannot_be_written(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL", 0)
    expected = baselines.Baselines(corpus()).result()
    (tmp_path / "file").write_text("")
    running = baselines.Baselines(corpus("bpe(270)"))
    running._root, running._known = str(tmp_path / "file" / "cache"), None
    running._start()
    assert running.result() == expected


def test_a_killed_compressor_costs_one_figure(corpus, monkeypatch):
    monkeypatch.setattr(baselines, "_SMALL", 0)
    running = baselines.Baselines(corpus())
    running._process.kill()
    found = running.result()
    assert found["xz_trained_bits_per_byte"] is None and found["xz_bits_per_byte"] > 0


def test_lossy_tokenizers_have_no_text_to_give(corpus):
    found = baselines.Baselines(corpus("words(50)")).result()
    assert found["xz_trained_bits_per_byte"] is None and found["xz_bits_per_byte"] > 0
