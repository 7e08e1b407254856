"""Measures approximate maximum inner product search against exact search and faiss, on trained embeddings.

    python experiments/bench/search.py --run=WORKDIR
    python experiments/bench/search.py --table=TABLE.npy --queries=QUERIES.npy
    python experiments/bench/search.py --run=WORKDIR --keys=1000000 --k=32 --name=search_keys

A run provides the table of its output layer and, as queries, hidden states of held-out tokens. With --keys, the hidden states
of that many training tokens are searched in place of the table, as by a nearest-neighbour language model: two more columns make
the order of products that of distances, and faiss searches the same vectors. For each method, the fastest setting whose
recall@k reaches a target is chosen on separate queries; recall and time are measured on the others by the public
interface. Indexes that search everything are first compared with sorting all scores in float64.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.data import prepare
from hpnlp.jobs.retrieval import next_words
from hpnlp.nn.attention import Context
from hpnlp.ops.attention import Causal
from hpnlp.ops.search import recall
from hpnlp.retrieval import Index, datastore
from hpnlp.training.run_directory import load
from hpnlp.types import InputError

RESULTS = Path(__file__).parents[1] / "results"
TARGETS = 0.95, 0.99
COUNTS = 64, 500, 4096
TUNING = 500
PROBES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128

FLAGS = flags.FLAGS
flags.DEFINE_string("run", "", "A finished run, which provides the table and held-out tokens.")
flags.DEFINE_string("table", "", "Instead of a run: a .npy file, [V, D].")
flags.DEFINE_string("queries", "", "With --table: a .npy file, [Q, D].")
flags.DEFINE_list("methods", ["ivf", "lsh", "faiss"], "Methods to measure, of ivf, lsh, faiss.")
flags.DEFINE_integer(
    "keys", 0, "With --run: number of hidden states of the training text to search, in place of the table."
)
flags.DEFINE_integer("k", 10, "Number of vectors that a search returns.")
flags.DEFINE_string("name", "search", "Name of the result.")
flags.DEFINE_integer("rounds", 5, "Measurements of each index; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def load_run(workdir: str) -> tuple[np.ndarray, np.ndarray]:
    """The table of a run's output layer, and hidden states of held-out tokens."""
    run = load(workdir)
    params = {"params": run.params}
    states, count = [], TUNING + COUNTS[-1]
    for batch in prepare(run.config.data, run.tokenizer).heldout(batch_size=run.config.data.batch_size):
        context = Context(batch["positions"], batch["segment_ids"], Causal())
        h, _, _ = jax.jit(run.model.apply, static_argnames="method")(params, batch["tokens"], context, method="hidden")
        states.append(np.asarray(h)[np.asarray(batch["weights"]) > 0])
        if sum(map(len, states)) >= 4 * count:
            break
    queries = np.concatenate(states)
    queries = queries[np.random.default_rng(0).permutation(len(queries))[:count]]
    table = np.asarray(run.model.apply(params, method=lambda model: model.table))
    logits = run.model.apply(params, queries[:8], method=lambda model, h: model.output.logits(model.table, h))
    if not np.allclose(logits, queries[:8] @ table.T, atol=1e-2):
        sys.exit(f"{workdir}: the scores of model.output={run.config.model.output} are not inner products with a table")
    return table, queries


def load_states(workdir: str, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of a run's training text, as `hpnlp index build` stores them, and those of its last documents."""
    source = next_words.load_source(workdir, next_words.Options(keys=keys), None)
    with tempfile.TemporaryDirectory() as directory:
        next_words.build_shard(source, directory)
        vectors, _, scale = datastore.index_vectors([np.load(Path(directory) / datastore.VECTORS)[:keys]])
    tuning = source.windows(source.documents.gate, source.documents.heldout)
    queries = np.concatenate([states for _, states, _ in next_words.hidden_states(source, tuning)])
    queries = queries[np.random.default_rng(0).permutation(len(queries))[: TUNING + COUNTS[-1]]]
    return vectors.astype(np.float32), np.pad(queries, ((0, 0), (0, 2)), constant_values=scale)


def check(table: np.ndarray, queries: np.ndarray) -> None:
    """Exits unless indexes that search all of 20,000 rows find the same rows as sorting."""
    w, q = table[:20_000], queries[:50]
    scores = q.astype(np.float64) @ w.T.astype(np.float64)
    true = -np.sort(-scores, axis=1)[:, : FLAGS.k]
    exhaustive = f"ivf(cells=16,probes=16), exact, lsh(bits=2,tables=1,probes=4,candidates={len(w)}), faiss"
    for kind in exhaustive.split(", "):
        values, ids = Index(kind).build(w).search(q, FLAGS.k)
        error = max(np.abs(x - true).max() for x in (values, np.take_along_axis(scores, np.asarray(ids), axis=1)))
        if not error < 1e-4 * np.abs(true).max():
            sys.exit(f"{kind} differs from sorting all scores by {error:.1e}: nothing is reported")


def settings(method: str, vocab: int) -> Iterator[str]:
    """Spec strings of indexes to build; `fastest` varies the number of probes."""
    root = vocab.bit_length() // 2
    cells = [1 << i for i in range(root - 1, root + 4) if (1 << i) * 8 <= vocab]
    if method == "lsh":
        bits = [b for b in range(root, root + 8, 2) if 1 << b <= vocab]
        yield from (f"lsh(bits={b},tables={tables},probes=1)" for b, tables in itertools.product(bits, (4, 8, 16)))
    else:
        yield from (f"ivf(cells={c},probes=1)" if method == "ivf" else f'faiss("IVF{c},Flat",1)' for c in cells)


def fastest(method: str, table: np.ndarray, q: np.ndarray, true: Any) -> dict[float, Index]:
    """Target recall -> the fastest index that reaches it, by preliminary measurements."""
    best: dict[float, tuple[float, Index]] = {}
    for spec in settings(method, len(table)):
        index = Index(spec).build(table)
        targets = list(TARGETS)
        for probes in PROBES:
            try:
                candidate = index.probing(probes)
                achieved = recall(candidate.search(q, FLAGS.k)[1], true)
            except InputError:  # the index has fewer cells or buckets
                break
            if achieved < targets[0]:
                continue
            seconds = measure.timeit({"": lambda index=candidate: index.search(q, FLAGS.k)}, rounds=3)[""].min
            print(f"  {candidate.kind}: recall {achieved:.3f}, {seconds * 1e3:.1f} ms for {len(q)} queries", flush=True)
            while targets and achieved >= targets[0]:
                target = targets.pop(0)
                best[target] = min(best.get(target, (np.inf, candidate)), (seconds, candidate), key=lambda x: x[0])
            if not targets:
                break
    return {target: index for target, (_, index) in best.items()}


def compare(setting: str, target: float, indexes: dict[str, Index], q: np.ndarray, true: np.ndarray) -> dict[str, Any]:
    recalls = {name: recall(index.search(q, FLAGS.k)[1], true[: len(q)]) for name, index in indexes.items()}
    times = measure.timeit({n: lambda i=i: i.search(q, FLAGS.k) for n, i in indexes.items()}, rounds=FLAGS.rounds)
    ratios = {f"time of {name} over exact": x.over(times["exact"]) for name, x in times.items() if name != "exact"}
    label = f"search, {setting}, recall@{FLAGS.k} of {target}"
    print(f"{label}: {', '.join(f'{name} {x:.3g}' for name, x in ratios.items())}", flush=True)
    kinds = {name: str(index.kind) for name, index in indexes.items()}
    seconds = {name: list(x.all) for name, x in times.items()}
    medians = {name: x.median for name, x in times.items()}
    return {"what": label, "ratios": ratios, "recall": recalls, "kinds": kinds, "s": medians, "all_s": seconds}


def main(_: Any) -> None:
    cli.prepare_jax()
    if not FLAGS.run and not (FLAGS.table and FLAGS.queries):
        sys.exit("--run=WORKDIR, or --table=FILE.npy and --queries=FILE.npy, are required")
    if FLAGS.keys:
        table, queries = load_states(FLAGS.run, FLAGS.keys)
    else:
        table, queries = load_run(FLAGS.run) if FLAGS.run else (np.load(FLAGS.table), np.load(FLAGS.queries))
    if len(queries) < TUNING + COUNTS[-1]:
        sys.exit(f"got {len(queries)} queries, expected at least {TUNING + COUNTS[-1]}")
    faiss.omp_set_num_threads(measure.environment()["cores"])
    check(table, queries)
    tuning, queries = queries[:TUNING], queries[TUNING:]
    references = {"exact": Index("exact").build(table), "faiss flat": Index("faiss").build(table)}
    true_tuning, true_ids = (
        np.asarray(references["exact"].search(q, FLAGS.k)[1]) for q in (tuning, queries[: COUNTS[-1]])
    )
    tuned = {method: fastest(method, table, tuning, true_tuning) for method in FLAGS.methods}
    tuned["faiss ivf"] = tuned.pop("faiss", {})
    rows = []
    for target, count in itertools.product(TARGETS, COUNTS):
        indexes = references | {method: best[target] for method, best in tuned.items() if target in best}
        rows.append(
            compare(
                f"V {len(table):,}, D {table.shape[1]}, {count} queries", target, indexes, queries[:count], true_ids
            )
        )
    print(measure.write_result(FLAGS.name, rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
