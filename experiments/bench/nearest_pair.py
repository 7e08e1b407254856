"""Measures the search for the most similar pair of many sentences by a dual encoder and by a cross-encoder.

    python experiments/bench/nearest_pair.py [--sentences=10000] [--pairs=2000] [--rounds=5]

The dual encoder encodes all sentences, and an exact index finds the best other sentence of each. The cross-encoder would read
all N (N - 1) / 2 pairs: it reads a random sample, and its time is extrapolated to all pairs. Both have an encoder of the same
config, and are timed from text to result. The weights are random: they decide which pair is found, but not the time. The
sentences are distinct ones of docstrings of Python's standard library. Unless the search finds the largest of all cosines,
nothing is reported.

Reimers and Gurevych 2019, "Sentence-BERT" (arXiv 1908.10084), abstract: the most similar pair of 10,000 sentences takes about
65 hours with BERT, and about 5 seconds with Sentence-BERT.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags

import hpnlp
from hpnlp import cli, measure
from hpnlp.data import tokenizers
from hpnlp.data.examples.generated.standard_library import docstrings
from hpnlp.data.reading import sources
from hpnlp.jobs.predictor import Predictor
from hpnlp.retrieval import Index
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training import config as configs
from hpnlp.training import run_directory as runs
from hpnlp.training.config_file import write_config
from hpnlp.training.files.checkpoint import Checkpointer
from hpnlp.types import Tokenizer

RESULTS = Path(__file__).parents[1] / "results"
WORDS = 4, 40  # smallest and largest number of words of a sentence
BATCH, QUERIES = 64, 1024  # texts or pairs of a batch of the models, and queries of a search
LABELS = "0", "1"

FLAGS = flags.FLAGS
flags.DEFINE_integer("sentences", 10_000, "Number of sentences, N.", lower_bound=2)
flags.DEFINE_integer("pairs", 2000, "Number of pairs that the cross-encoder reads.", lower_bound=1)
flags.DEFINE_integer("layers", 4, "Layers of the encoder.")
flags.DEFINE_integer("dim", 128, "Width of the encoder, of which each head has 32.")
flags.DEFINE_integer("rounds", 5, "Measurements of each part; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def read_sentences(count: int) -> list[str]:
    """Distinct sentences of docstrings of the standard library, in a random order."""
    (source,) = sources.find("stdlib", "data.path")
    texts = (" ".join(record["text"].split()) for record in docstrings(source.files))
    sentences = dict.fromkeys(sentence for text in texts for sentence in re.split(r"(?<=[.!?]) ", text))
    chosen = [sentence for sentence in sentences if WORDS[0] <= len(sentence.split()) <= WORDS[1]]
    if len(chosen) < count:
        sys.exit(f"--sentences={count}: the standard library has {len(chosen)}")
    return random.Random(0).sample(chosen, count)


def save_run(directory: Path, task: str, tokenizer: Tokenizer, **fields: Any) -> Predictor:
    """The model of a run of random weights, which is written to a directory and read as users read it."""
    config, labels = configs.default(task), LABELS if task == "classification" else None
    config.data.update(tokenizer="bytes", seq_len=256)  # the tokenizer is written beside the config
    if labels:
        config.data.pair_field = "pair"
    config.model.update(
        layers=FLAGS.layers, dim=FLAGS.dim, heads=FLAGS.dim // 32, mlp_dim=4 * FLAGS.dim, vocab=tokenizer.vocab_size,
        dropout=0.0, token_types=2, pooling="mean", **fields,
    )  # fmt: skip
    values, vocabulary = configs.resolve(config), Vocabulary(tokenizer, labels)
    model = runs.make_model(values, vocabulary)
    params = nn.meta.unbox(model.init(jax.random.key(0), model.example_batch(1, 8))["params"])
    checkpoints = Checkpointer(directory)
    checkpoints.save_params(jax.tree.map(np.asarray, params))
    checkpoints.close()
    vocabulary.save(directory)
    write_config(directory, values)
    return hpnlp.load(directory)


def find_nearest_pair(vectors: np.ndarray) -> tuple[float, int, int]:
    """`(cosine, number, number)` of the most similar pair: the best other vector of each, and the best of these."""
    index, best = Index("exact").build(vectors), (-np.inf, -1, -1)
    for start in range(0, len(vectors), QUERIES):
        scores, ids = map(np.asarray, index.search(vectors[start : start + QUERIES], 2))
        numbers = np.arange(start, start + len(ids))
        column = (ids[:, 0] == numbers).astype(int)  # the first is the vector itself, but for equal ones
        rows = np.arange(len(ids))
        row = scores[rows, column].argmax()
        best = max(best, (float(scores[row, column[row]]), int(numbers[row]), int(ids[row, column[row]])))
    return best


def largest_cosine(vectors: np.ndarray) -> float:
    """The largest product of two different vectors, by all products."""
    largest = -np.inf
    for start in range(0, len(vectors), QUERIES):
        products = vectors[start : start + QUERIES] @ vectors.T
        rows = np.arange(len(products))
        products[rows, start + rows] = -np.inf
        largest = max(largest, float(products.max()))
    return largest


def main(_: Any) -> None:
    cli.prepare_jax()
    sentences = read_sentences(FLAGS.sentences)
    tokenizer = tokenizers.build("bpe(8192)", (sentence.encode() for sentence in sentences))
    draw, count = np.random.default_rng(0), FLAGS.sentences
    first, offsets = draw.integers(0, count, FLAGS.pairs), draw.integers(1, count, FLAGS.pairs)
    sample = [(sentences[i], sentences[j]) for i, j in zip(first, (first + offsets) % count, strict=True)]
    with tempfile.TemporaryDirectory() as scratch:
        dual = save_run(Path(scratch, "dual_encoder"), "dual_encoder", tokenizer)
        cross = save_run(Path(scratch, "cross_encoder"), "classification", tokenizer)
    vectors = dual.encode(sentences, BATCH)
    cosine, *pair = find_nearest_pair(vectors)
    if abs(cosine - largest_cosine(vectors)) > 1e-5:
        sys.exit(
            f"the search found a cosine of {cosine}, and the largest is {largest_cosine(vectors)}: nothing is reported"
        )
    print(f"cosine {cosine:.4f}: {sentences[pair[0]]!r} and {sentences[pair[1]]!r}", flush=True)
    times = measure.timeit(
        {
            "encode": lambda: dual.encode(sentences, BATCH),
            "search": lambda: find_nearest_pair(vectors),
            "cross": lambda: cross.predict(sample, BATCH),
        },
        rounds=FLAGS.rounds,
    )
    pairs = count * (count - 1) // 2
    seconds = [encode + search for encode, search in zip(times["encode"].all, times["search"].all, strict=True)]
    dual_time = measure.Timing(tuple(seconds))
    all_pairs = measure.Timing(tuple(second * pairs / FLAGS.pairs for second in times["cross"].all))
    about = {
        "sentences": count, "pairs": pairs, "layers": FLAGS.layers, "dim": FLAGS.dim, "batch": BATCH,
        "mean_tokens": float(np.mean([len(ids) for ids in tokenizer.encode_batch([s.encode() for s in sentences])])),
    }  # fmt: skip
    rows = [
        {
            **about, "encoder": "dual encoder", "measured_pairs": pairs, "seconds": dual_time.median,
            "encode_seconds": times["encode"].median, "search_seconds": times["search"].median,
            "all_seconds": seconds, "extrapolated": False,
        },
        {
            **about, "encoder": "cross-encoder", "measured_pairs": FLAGS.pairs, "seconds": all_pairs.median,
            "pairs_per_second": FLAGS.pairs / times["cross"].median, "measured_seconds": list(times["cross"].all),
            "over_dual_encoder": all_pairs.over(dual_time), "interval": list(all_pairs.interval(dual_time)),
            "extrapolated": True,
        },
    ]  # fmt: skip
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("nearest_pair", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
