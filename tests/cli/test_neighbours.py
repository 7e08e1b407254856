"""`hpnlp neighbours`; searches and files are tested in tests/retrieval/test_word_vectors.py."""

import json
import os

import matplotlib.image
import numpy as np
import pytest

from hpnlp.retrieval.word2vec_files import load_word2vec, save_word2vec
from hpnlp.retrieval.word_vectors import WordVectorTable
from hpnlp.training import config as configs
from hpnlp.training import loop

WORDS = ["king", "queen", "man", "woman", "apple"]


@pytest.fixture
def vectors(tmp_path):
    points = np.array([[3, 3, 0.5], [3, -3, 0.5], [0, 1, 0], [0, -1, 0], [0, 0, 2]])
    save_word2vec(WordVectorTable(WORDS, points), tmp_path / "vectors.bin")
    return f"--vectors={tmp_path / 'vectors.bin'}"


def test_neighbours_are_listed_drawn_and_saved(run, vectors, tmp_path):
    files = f"--draw={tmp_path / 'words.png'}", f"--save={tmp_path / 'vectors.txt'}"
    outcome = run("neighbours", "king", "king - man + woman", vectors, "--count=2", *files)
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.splitlines()[:2] == ["king", "  0.702  man"] and "king - man + woman\n  0." in outcome.out
    assert matplotlib.image.imread(tmp_path / "words.png").size
    assert load_word2vec(tmp_path / "vectors.txt").words == WORDS


def test_neighbour_without_each_word_is_printed(run, vectors):
    outcome = run("neighbours", "king woman", vectors, "--without_each")
    lines = outcome.out.splitlines()
    assert outcome.code == 0 and outcome.err == "" and lines[0] == "king woman" and len(lines) == 4
    assert lines[1] == "  0.928          rank 1  queen"
    assert lines[2].startswith("  0.702  -0.226  rank 1  without king, nearest queen")
    outcome = run("neighbours", "king woman", vectors, "--without_each", "--expected=man", "--format=jsonl")
    record = json.loads(outcome.out)
    assert (record["text"], record["neighbour"], record["nearest"]) == ("king woman", "man", "queen")
    for row in record["without"]:
        assert row["cosine_change"] == pytest.approx(row["cosine"] - record["cosine"])
        assert row["rank_change"] == row["rank"] - record["rank"]
    assert [row["word"] for row in record["without"]] == ["king", "woman"]
    record = json.loads(run("neighbours", "king", vectors, "--count=1", "--format=jsonl").out)
    assert record == {"text": "king", "neighbours": [{"word": "man", "cosine": pytest.approx(0.702, abs=1e-3)}]}


def test_invalid_arguments_raise(run, vectors):
    for argv, message in (
        ((), "no run: write hpnlp neighbours RUN WORD"),
        (("runs/words",), "no word: write hpnlp neighbours RUN WORD, or pass --draw or --save"),
        (("king", "--vectors=a", "--workdir=b"), "--vectors=a and --workdir=b both name word vectors: leave out one"),
        (("king", "--vectors=/no/such/file"), "cannot read /no/such/file (No such file or directory)"),
        (("king", "VECTORS", "--step=3"), "--step=3 has no effect with --vectors, a file without checkpoints: leave"),
        (("VECTORS", "--draw=x.png", "--count=3"), "--count=3 has no effect without a word: name one, or leave it out"),
        (("king", "VECTORS", "--expected=man"), "--expected=man has no effect without --without_each"),
        (("king man", "VECTORS", "--without_each", "--count=3"), "--count=3 has no effect with --without_each"),
        (("VECTORS", "--save=x", "--without_each"), "--without_each=True has no effect without a word"),
        (("king", "VECTORS", "--save=/no/such/place/a.bin"), "/no/such/place"),
    ):
        outcome = run("neighbours", *(vectors if argument == "VECTORS" else argument for argument in argv))
        assert outcome.code == 2 and outcome.err.count("\n") == 1 and message in outcome.err


@pytest.mark.slow
def test_words_of_a_run_have_neighbours(run, tmp_path):
    """The embedding of any task that embeds tokens is a table of vectors."""
    for task in ("lm", "word_embeddings"):
        config = configs.default(task)
        config.data.update(path=os.environ["HPNLP_TEST_TEXT"], tokenizer="words(60)", seq_len=16, batch_size=8)
        config.model.dim = 16
        config.train.update(steps=1)
        loop.train(configs.resolve(config), tmp_path / task)
        outcome = run("neighbours", tmp_path / task, "the", "--count=3")
        assert outcome.code == 0 and outcome.out.count("\n") == 4, outcome.err
        for argv in (("the",), (tmp_path / task, "the")):
            assert run("neighbours", *argv, f"--workdir={tmp_path / task}", "--count=3") == outcome
