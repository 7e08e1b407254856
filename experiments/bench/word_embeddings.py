"""Measures skip-gram and CBOW with negative sampling against gensim's Word2Vec: words per second, and similarity of held-out
pairs.

    pip install gensim==4.4.0
    python experiments/bench/word_embeddings.py [--objectives=skip_gram,cbow] [--epochs=5] [--rounds=3] [--seeds=3]

The text is the docstrings and comments of the standard library, of whose sentences each tenth is held out. Both train 128
features, windows of 5, 5 noise words and subsampling at 1e-3, for the same number of passes and with as many threads as
there are cores; gensim reads the text from a file or from lists, and the faster one of the two counts. Times are of the
training without the vocabulary; those of hpnlp include subsampling and the division of the text, and not the compilation,
which "first_call" has.

Quality is measured on pairs of words within windows of held-out sentences: the rank correlation (Spearman) of the cosine of
two words with their pointwise mutual information, for pairs with at least 3 occurrences; and the share of held-out pairs
with a larger cosine than the pair of the same first word and a second word from another pair. The mean over seeds is reported.
"""

from __future__ import annotations

import functools
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from gensim.models import Word2Vec
from word_pairs import WINDOW, heldout_pairs, quality, read_sentences

from hpnlp import cli, measure
from hpnlp.training.processes.allocator import keep_freed_memory
from hpnlp.training.word2vec import Word2VecConfig, sentence_ids, train_word_vectors

DIM, NEGATIVES, SAMPLE = 128, 5, 1e-3
# Exact gradients of CBOW divide by the number of context words, which those of the C program and gensim do not.
RATES = {"skip_gram": 0.025, "cbow": 0.1}

FLAGS = flags.FLAGS
flags.DEFINE_list("objectives", ["skip_gram", "cbow"], "Objectives to measure.")
flags.DEFINE_integer("epochs", 5, "Passes over the text.")
flags.DEFINE_integer("rounds", 3, "Measurements of each function.")
flags.DEFINE_integer("seeds", 3, "Seeds of the quality.")
flags.DEFINE_integer("limit", 0, "Sentences to read, 0 for all.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


class Gensim:
    """Training by gensim, on ids as words."""

    def __init__(self, ids: np.ndarray, vocab: int, directory: str) -> None:
        ends = np.flatnonzero(ids < 0)
        self.vocab = vocab
        self.lists = [list(map(str, part[part >= 0].tolist())) for part in np.split(ids, ends)]
        self.file = str(Path(directory) / "text.txt")
        Path(self.file).write_text("\n".join(" ".join(words) for words in self.lists))

    def train(
        self, objective: str, form: str, seed: int = 1, threads: int = 0
    ) -> tuple[tuple[float, float], np.ndarray]:
        """`((seconds, CPU seconds) of the training, vectors [V, D])`."""
        model = Word2Vec(
            vector_size=DIM, window=WINDOW, negative=NEGATIVES, sample=SAMPLE, min_count=1, sg=int(objective == "skip_gram"),
            workers=threads or measure.environment()["cores"], epochs=FLAGS.epochs, seed=seed,
        )  # fmt: skip
        source: dict[str, Any] = {"corpus_file": self.file} if form == "file" else {"corpus_iterable": self.lists}
        model.build_vocab(**source)
        start = time.perf_counter(), time.process_time()
        totals = {"total_examples": model.corpus_count, "total_words": model.corpus_total_words}
        model.train(**source, **totals, epochs=FLAGS.epochs)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        vectors = np.zeros((self.vocab, DIM), np.float32)
        vectors[[int(word) for word in model.wv.index_to_key]] = model.wv.vectors
        return seconds, vectors


def ours(
    ids: np.ndarray, counts: np.ndarray, objective: str, seed: int = 0, threads: int = 0
) -> tuple[tuple[float, float], np.ndarray]:
    """`((seconds, CPU seconds) of the training, vectors [V, D])`."""
    config = Word2VecConfig(
        objective, DIM, WINDOW, float(NEGATIVES), subsample=SAMPLE, epochs=FLAGS.epochs,
        learning_rate=RATES[objective], seed=seed,
        workers=threads or measure.environment()["cores"],
    )  # fmt: skip
    start = time.perf_counter(), time.process_time()
    vectors, _ = train_word_vectors(ids, counts, config)
    return (time.perf_counter() - start[0], time.process_time() - start[1]), vectors


def rows_of(objective: str, ids: np.ndarray, counts: np.ndarray, pairs: Any, gensim: Gensim) -> list[dict[str, Any]]:
    """Rows of an objective: one for each form."""
    train = functools.partial(ours, ids, counts, objective)
    forms: dict[str, Callable[..., tuple[tuple[float, float], np.ndarray]]] = {
        "hpnlp": train,
        "hpnlp, 1 thread": functools.partial(train, threads=1),
        "gensim, file": functools.partial(gensim.train, objective, "file"),
        "gensim, lists": functools.partial(gensim.train, objective, "lists"),
        "gensim, file, 1 thread": functools.partial(gensim.train, objective, "file", threads=1),
    }
    first_call = train()[0][0]
    forms["hpnlp, 1 thread"]()
    seconds: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for index in range(FLAGS.rounds):
        for form in list(forms)[:: 1 if index % 2 == 0 else -1]:
            seconds[form].append(forms[form]()[0])
    words = FLAGS.epochs * int(counts.sum())
    rates = {form: [words / t for t, _ in times] for form, times in seconds.items()}
    best = [max(round_rates) for round_rates in zip(rates["gensim, file"], rates["gensim, lists"], strict=True)]
    rows = []
    for form, of_form in rates.items():
        ratio = statistics.median(rate / other for rate, other in zip(of_form, best, strict=True))
        row = {
            "objective": objective,
            "form": form,
            "words_per_second": statistics.median(of_form),
            "words_per_cpu_second": statistics.median(words / t for _, t in seconds[form]),
            "over_gensim": ratio,
        }
        if form in ("hpnlp", "gensim, file"):
            scores = [quality(forms[form](seed=seed + 1)[1], pairs) for seed in range(FLAGS.seeds)]
            row |= {name: statistics.mean(score[name] for score in scores) for name in scores[0]}
            row["spearman_by_seed"] = [score["spearman"] for score in scores]
            row["pair_accuracy_by_seed"] = [score["pair_accuracy"] for score in scores]
        rows.append(row | ({"first_call": first_call} if form == "hpnlp" else {}))
    return rows


def main(_: list[str]) -> None:
    cli.prepare_jax()
    keep_freed_memory()
    logging.getLogger("gensim").setLevel(logging.WARNING)
    sentences = read_sentences(FLAGS.limit)
    training = [words for number, words in enumerate(sentences) if number % 10]
    ids, words, counts = sentence_ids(training)
    known = {word: row for row, word in enumerate(words)}
    heldout = [[known[word] for word in words if word in known] + [-1] for words in sentences[::10]]
    pairs = heldout_pairs(np.concatenate(heldout), len(words))
    shape = {"words": int(counts.sum()), "vocab": len(words), "dim": DIM, "epochs": FLAGS.epochs}
    with tempfile.TemporaryDirectory() as directory:
        gensim = Gensim(ids, len(words), directory)
        rows = [shape | row for name in FLAGS.objectives for row in rows_of(name, ids, counts, pairs, gensim)]
    for row in rows:
        print(row)
    print(measure.write_result("word_embeddings", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
