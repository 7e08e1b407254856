"""Plots of words and of the efficiency of mixers."""

import itertools

import matplotlib
import numpy as np
import pytest

from hpnlp.report import comparison_plots, word_plots

matplotlib.use("Agg")


def test_texts_of_words_do_not_overlap(tmp_path, monkeypatch):
    points = np.random.default_rng(0).normal(size=(80, 2))
    points[79] = 1000, 1000  # a frequent word that is far from all others
    words, groups = [f"word{number}" for number in range(80)], ["a"] * 6 + ["b - c"] * 4 + [""] * 70
    boxes, figures = {}, []

    def place(figure, texts):
        place_texts(figure, texts)
        kept = [text for text in texts if text.figure is not None]
        boxes.update({text.get_text(): text.get_window_extent() for text in kept})
        figures.append(figure)

    place_texts = word_plots.place_texts
    monkeypatch.setattr(word_plots, "place_texts", place)
    word_plots.plot_words(points, words, groups, tmp_path / "words.png")
    assert (tmp_path / "words.png").stat().st_size > 1000
    assert set(words[:10]) <= boxes.keys() and 20 < len(boxes) < 80 and "word79" not in boxes
    grey = words[10:]
    assert not any(boxes[a].overlaps(boxes[b]) for a, b in itertools.permutations(boxes, 2) if b in grey)
    axes = figures[0].axes[0]
    low, high = points[:10].min(0), points[:10].max(0)
    assert axes.get_xlim()[0] < low[0] and high[0] < axes.get_xlim()[1] < 10
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b - c", "frequent words"]


def test_words_without_groups_are_drawn(tmp_path):
    word_plots.plot_words(np.zeros((3, 2)), ["a", "a_b", "$c$"], [""] * 3, tmp_path / "words.png")
    assert (tmp_path / "words.png").stat().st_size > 1000


@pytest.mark.parametrize("mixers", [("full", "linear"), ("linear",)])
def test_lengths_without_full_attention_are_drawn(tmp_path, mixers):
    rows = [{"mixer": mixer, "length": 64, "steps_per_second": 2.0, "peak_memory_bytes": 10} for mixer in mixers]
    rows.append({"mixer": "linear", "length": 128, "steps_per_second": 1.0, "peak_memory_bytes": 20})
    comparison_plots.plot_efficiency(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
