"""Measures word vectors that are trained by predicting binary codes of words, and word vectors that are stored as codes.

    python experiments/bench/word_codes.py [--groups=outputs] [--limit=S]

"outputs": skip-gram of experiments/embeddings/words.py. Words predict their context by negative sampling, by the decisions of a
Huffman tree, or by the bits of the context words' codes. The score is the share of adjacent held-out words that are more alike
than other pairs, after equal numbers of steps and after equal training time (`forms.py` has the rules and the flags).

"storage": vectors of `hpnlp.training.word2vec`, normalised, as 8-bit and 4-bit integers, three values or signs. Means over the
seeds of the quality on held-out pairs (`word_embeddings.py`), and of the share of the 10 nearest words of float32 that are
found. Queries are float32 vectors, of which "1 bit, and of the query" compares the signs only. Seconds are those of the 10
nearest words of 256 queries, by products and the largest of them, timed in turn. They are measured once, and stay in --workdir.

About 15 minutes of one core.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from forms import Form, Groups, run
from word_pairs import heldout_pairs, quality, read_sentences

from hpnlp import measure
from hpnlp.cli import experiment
from hpnlp.ops.linear import linear
from hpnlp.ops.search import recall
from hpnlp.ops.weights import binarize, binarize_products, dense, pack, quantize, ternarize, to_floats
from hpnlp.training.config import resolve
from hpnlp.training.word2vec import Word2VecConfig, sentence_ids, train_word_vectors

FLAGS = flags.FLAGS
WORDS = str(Path(__file__).parents[1] / "embeddings" / "words.py")
QUERIES, NEIGHBOURS = 256, 10

NEGATIVE = "negative_sampling(64, sampler=unigram, negatives=5)"
# Binary codes have no table, so that their steps update all word vectors: the same by negative sampling stands beside them.
ALL_ROWS = "negative sampling, all rows updated"
# Name -> (model.output, source, published claim).
OUTPUTS = {
    "negative sampling": (NEGATIVE, "Mikolov et al. 2013b", ""),
    ALL_ROWS: (NEGATIVE, "", ""),
    "hierarchical": ("hierarchical", "Mikolov et al. 2013b", ""),
    "binary codes": ("binary", "Oda et al. 2017", "memory of the output layer under 1/10 (translation)"),
    "binary codes with error correction": ("binary_ecc", "Oda et al. 2017", ""),
}
# Name -> the representation of the matrix [D, V] of word vectors.
CODES: dict[str, Callable[[jax.Array], Any]] = {
    "float32": lambda w: w,
    "bfloat16": lambda w: to_floats(w, "bfloat16"),
    "8 bits": lambda w: quantize(w, 8),
    "4 bits": lambda w: pack(quantize(w, 4), "int4"),
    "three values": lambda w: ternarize(w, "column"),
    "1 bit": lambda w: binarize(w, "column"),
    "1 bit, and of the query": binarize_products,
}


def outputs() -> list[Form]:
    """Skip-gram with each output layer."""
    forms = []
    for name, (output, paper, claim) in OUTPUTS.items():
        values = experiment.load(WORDS).get_config()
        values.model.output = output
        rows = name != ALL_ROWS and not output.startswith("binary")
        values.optimizer.update(rows=rows, schedule="constant", warmup=50)
        values.train.update(sample=0, baselines=False)
        values.plan.name = "single"
        if FLAGS.tiny:
            values.data.tokenizer = "words(500, by=whitespace)"
            values.data.update(seq_len=16, batch_size=4, heldout_bytes=2000)
            values.model.dim = 16
        forms.append(Form(name, resolve(values), paper, claim, metric="pair_accuracy"))
    return forms


def nearest(matrix: Any, q: jax.Array) -> jax.Array:
    """Ids [Q, 10] of the words with the largest products."""
    return jax.lax.top_k(linear(q, matrix), NEIGHBOURS)[1]


def code_scores(vectors: np.ndarray, pairs: Any) -> tuple[dict[str, dict[str, float]], dict[str, Callable[[], Any]]]:
    """`(scores of each code, searches by code)`. vectors: [V, D], normalised without their mean."""
    matrix, queries = jnp.asarray(vectors.T), jnp.asarray(vectors[:: max(1, len(vectors) // QUERIES)][:QUERIES])
    search = jax.jit(nearest)
    scores, searches, true = {}, {}, np.asarray(search(matrix, queries))
    for name, make in CODES.items():
        weight = jax.tree.map(jnp.asarray, make(matrix))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight))
        scores[name] = quality(np.asarray(dense(weight), np.float32).T, pairs) | {
            "recall": float(recall(np.asarray(search(weight, queries)), true)),
            "bytes_per_word": size / len(vectors),
        }
        searches[name] = lambda weight=weight: search(weight, queries)
    return scores, searches


def storage(root: Path) -> list[dict[str, Any]]:
    """Rows of the codes in which word vectors are stored, which are measured once. root: directory of finished runs."""
    path, seeds = root / "storage.json", 2 if FLAGS.tiny else FLAGS.seeds
    if not path.exists() or (rows := json.loads(path.read_text()))[0]["seeds"] != seeds:
        rows = storage_rows(seeds)
        path.write_text(json.dumps(rows))
    return rows


def storage_rows(seeds: int) -> list[dict[str, Any]]:
    """Trains the vectors of each seed, and measures their codes."""
    sentences = read_sentences(2000 if FLAGS.tiny else 0)
    ids, words, counts = sentence_ids([line for number, line in enumerate(sentences) if number % 10])
    known = {word: row for row, word in enumerate(words)}
    heldout = [[known[word] for word in line if word in known] + [-1] for line in sentences[::10]]
    pairs = heldout_pairs(np.concatenate(heldout), len(words))
    results, searches = [], {}
    for seed in range(seeds):
        config = Word2VecConfig(dim=32 if FLAGS.tiny else 128, epochs=1 if FLAGS.tiny else 5, seed=seed)
        vectors = np.asarray(train_word_vectors(ids, counts, config)[0])
        vectors = vectors - vectors.mean(axis=0)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
        scores, searches = code_scores(vectors, pairs)
        results.append(scores)
        print(f"storage, seed {seed}: {scores}", flush=True)
    times = measure.timeit(searches, rounds=2 if FLAGS.tiny else FLAGS.rounds)
    return [
        {
            "group": "storage",
            "form": name,
            "words": len(words),
            "seeds": len(results),
            **{field: statistics.mean(scores[name][field] for scores in results) for field in results[0][name]},
            "recall_by_seed": [scores[name]["recall"] for scores in results],
            "pair_accuracy_by_seed": [scores[name]["pair_accuracy"] for scores in results],
            "seconds": times[name].median,
            "time_over_float32": times[name].over(times["float32"]),
        }
        for name in CODES
    ]


def main(_: list[str]) -> None:
    groups: Groups = {"outputs": outputs()}
    run("word_codes", groups, storage)


if __name__ == "__main__":
    app.run(main)
