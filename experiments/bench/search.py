"""Measures approximate maximum inner product search against exact search, faiss and ScaNN, on trained embeddings.

    python experiments/bench/search.py --run=WORKDIR
    python experiments/bench/search.py --table=TABLE.npy --queries=QUERIES.npy
    python experiments/bench/search.py --run=WORKDIR --keys=1000000 --k=32 --name=search_keys
    python experiments/bench/search.py --synthetic=200000 --methods=pq,faiss_pq,faiss_pq4 --name=search_pq
    python experiments/bench/search.py --synthetic=200000 --methods=lsh,ivf --targets=0.5,0.8,0.95 --name=search_lsh
    python experiments/bench/search.py --synthetic=200000 --methods=ivf,faiss,scann --name=search_scann

A run provides the table of its output layer and, as queries, hidden states of held-out tokens. With --keys, the hidden states
of that many training tokens are searched in place of the table, as by a nearest-neighbour language model: two more columns make
the order of products that of distances, and faiss searches the same vectors. --synthetic draws unit vectors in clusters, of low
intrinsic dimension. For each method, the fastest setting whose recall@k reaches a target is chosen on separate queries. Rows of
a method that reaches no target are those of its setting with the largest recall, which is their target. Recall and time are
measured on the other queries by the public interface. For product quantization, with codes of 16 bytes, the number of
vectors that are ranked again varies too; faiss searches vectors in the rotation of pq, which takes seconds, in place of OPQ.
The method scann needs the package scann.
Indexes that search everything are first compared with sorting all scores in float64.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads of faiss would spin on the cores of the next measurement

import faiss
import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.data import prepare
from hpnlp.jobs.retrieval import next_words
from hpnlp.nn.attention import Context
from hpnlp.ops.attention import Causal
from hpnlp.ops.search import PqCodes, build_pq, recall
from hpnlp.retrieval import Index, datastore
from hpnlp.training.run_directory import load
from hpnlp.types import InputError

RESULTS = Path(__file__).parents[1] / "results"
MOST = 4096  # queries that are kept beside those for tuning
TUNING = 500
PROBES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128
# Bytes of a product-quantized vector, without its id.
CODE = 16
NAMES = {"faiss": "faiss ivf", "faiss_pq": "faiss pq", "faiss_pq4": "faiss pq, 4 bits"}

FLAGS = flags.FLAGS
flags.DEFINE_string("run", "", "A finished run, which provides the table and held-out tokens.")
flags.DEFINE_string("table", "", "Instead of a run: a .npy file, [V, D].")
flags.DEFINE_string("queries", "", "With --table: a .npy file, [Q, D].")
flags.DEFINE_integer("synthetic", 0, "Instead of a run: number of synthetic vectors of 128 numbers.")
flags.DEFINE_list(
    "methods",
    ["ivf", "lsh", "faiss"],
    "Methods to measure, of ivf, lsh, pq, faiss, faiss_pq (8 bits), faiss_pq4 (4 bits) and scann.",
)
flags.DEFINE_list("counts", ["64", "500", str(MOST)], f"Numbers of queries of a search, at most {MOST}.")
flags.DEFINE_list("targets", ["0.95", "0.99"], "Recalls to reach.")
flags.DEFINE_string(
    "indexes", "", "Directory that keeps built indexes between runs of the same vectors; empty for none."
)
flags.DEFINE_list("reranks", ["4", "8", "12", "16", "24", "32"], "Vectors that are ranked again, over k, to try.")
flags.DEFINE_integer("least_probes", 1, "Least number of probes to try.")
flags.DEFINE_bool("build_only", False, "With --indexes: build the indexes and measure nothing.")
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
    states, count = [], TUNING + MOST
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
    source = next_words.load_source(workdir, next_words.IndexOptions(keys=keys), None)
    with tempfile.TemporaryDirectory() as directory:
        next_words.build_shard(source, directory)
        vectors, _, scale = datastore.index_vectors([np.load(Path(directory) / datastore.VECTORS)[:keys]])
    tuning = source.windows(source.documents.gate, source.documents.heldout)
    queries = np.concatenate([states for _, states, _ in next_words.hidden_states(source, tuning)])
    queries = queries[np.random.default_rng(0).permutation(len(queries))[: TUNING + MOST]]
    return vectors, np.pad(queries, ((0, 0), (0, 2)), constant_values=scale)


def synthetic(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors [count, 128] of 2000 clusters in 16 dimensions of falling variance, with noise in all; and queries."""
    rng = np.random.default_rng(seed)
    scale = (1 / np.sqrt(np.arange(1, 17))).astype(np.float32)
    basis = np.linalg.qr(rng.standard_normal((128, 16)))[0].T.astype(np.float32)
    centres = rng.standard_normal((2000, 16), np.float32) * scale
    share = 1 / np.arange(10, 2010)

    def draw(n: int) -> np.ndarray:
        x = centres[rng.choice(2000, n, p=share / share.sum())] + 0.35 * scale * rng.standard_normal(
            (n, 16), np.float32
        )
        x = x @ basis + 0.02 * rng.standard_normal((n, 128), np.float32)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    return draw(count), draw(TUNING + MOST)


def check(table: np.ndarray, queries: np.ndarray) -> None:
    """Exits unless indexes that search all of 20,000 rows find the same rows as sorting."""
    w, q = table[:20_000], queries[:50]
    scores = q.astype(np.float64) @ w.T.astype(np.float64)
    true = -np.sort(-scores, axis=1)[:, : FLAGS.k]
    exhaustive = f"ivf(cells=16,probes=16), exact, lsh(bits=2,tables=1,probes=4,candidates={len(w)}), faiss"
    further = [f"scann(rerank={len(w)})"] if "scann" in FLAGS.methods else []
    for kind in [*exhaustive.split(", "), *further]:
        values, ids = Index(kind).build(w).search(q, FLAGS.k)
        error = max(np.abs(x - true).max() for x in (values, np.take_along_axis(scores, np.asarray(ids), axis=1)))
        if not error < 1e-4 * np.abs(true).max():
            sys.exit(f"{kind} differs from sorting all scores by {error:.1e}: nothing is reported")


def settings(method: str, vocab: int) -> Iterator[str]:
    """Spec strings of indexes to build; `fastest` varies their settings of searches."""
    root = vocab.bit_length() // 2
    cells = [1 << i for i in range(root - 1, root + 4) if (1 << i) * 8 <= vocab]
    if method == "lsh":
        bits = [b for b in range(root, root + 8, 2) if 1 << b <= vocab]
        yield from (f"lsh(bits={b},tables={tables},probes=1)" for b, tables in itertools.product(bits, (4, 8, 16)))
    elif method in ("ivf", "faiss"):
        yield from (f"ivf(cells={c},probes=1)" if method == "ivf" else f'faiss("IVF{c},Flat",1)' for c in cells)
    elif method == "scann":
        yield from (f"scann(cells={c},probes=1)" for c in cells)
    elif method == "pq":
        yield f"pq(parts={CODE},cells={cells[1]},probes=1,keep=float16)"
    else:
        code = f"PQ{CODE}" if method == "faiss_pq" else f"PQ{2 * CODE}x4fs"
        yield f'faiss("IVF{cells[1]},{code},RFlat",1)'


class Rotated:
    """A faiss index of vectors that were rotated as pq rotates its own, so that parts get equal shares of the variance.

    Attributes:
      index: Index of the rotated vectors.
      rotation: [D, D].
    """

    def __init__(self, index: Index, rotation: np.ndarray) -> None:
        self.index, self.rotation = index, rotation
        self.kind, self.bytes_per_vector = index.kind, index.bytes_per_vector

    def search(self, q: np.ndarray, k: int) -> tuple[Any, Any]:
        return self.index.search(q @ self.rotation, k)

    def searching(self, **settings: int) -> Rotated:
        return Rotated(self.index.searching(**settings), self.rotation)


def built(spec: str, table: np.ndarray) -> Index | Rotated:
    """An index from --indexes, which is built there first if it does not exist."""
    rotation = None
    if "PQ" in spec:
        parts = int(re.findall(r"PQ(\d+)", spec)[0])
        sample = table[:: max(len(table) // 50_000, 1)]
        index = build_pq(sample, PqCodes(parts, 16, keep="none"), cells=128, iterations=3)
        rotation = np.asarray(index.rotation, np.float64)
        rotation = np.linalg.qr(rotation)[0].astype(np.float32)  # rounded to float16 in the index
        table = table @ rotation
    path = Path(FLAGS.indexes) / (re.sub(r"\W+", "_", spec) + ".npz")
    if FLAGS.indexes and path.exists():
        index = Index.load(path)
    else:
        index = Index(spec).build(table)
        print(f"built {spec}", flush=True)
    if FLAGS.indexes and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        index.save(path)
    return index if rotation is None else Rotated(index, rotation)


def candidates(index: Index | Rotated, method: str) -> Iterator[Iterator[Index | Rotated]]:
    """For each number of vectors that are ranked again, the index with rising numbers of probes."""
    reranks: list[dict[str, int]] = [{}]
    if method == "pq":
        reranks = [{"rerank": n * FLAGS.k} for n in map(int, FLAGS.reranks) if n >= 8]  # pq ranks at least 8 k again
    elif method == "scann":
        reranks = [{"rerank": n * FLAGS.k} for n in map(int, FLAGS.reranks)]
    elif method.startswith("faiss_pq"):
        reranks = [{"refine": n} for n in map(int, FLAGS.reranks)]
    for rerank in reranks:
        yield (index.searching(probes=probes, **rerank) for probes in PROBES if probes >= FLAGS.least_probes)


def fastest(method: str, table: np.ndarray, q: np.ndarray, true: Any) -> dict[float, Index | Rotated]:
    """Target recall -> the fastest index that reaches it, by preliminary measurements.

    Where no setting reaches the least target, the index with the largest recall, under that recall.
    """
    best: dict[float, tuple[float, Index | Rotated]] = {}
    nearest: tuple[float, Index | Rotated | None] = (0.0, None)
    for spec in settings(method, len(table)):
        for indexes in candidates(built(spec, table), method):
            nearest = max(nearest, _tune(indexes, q, true, best), key=lambda x: x[0])
    if not best and nearest[1] is not None:
        return {nearest[0]: nearest[1]}
    return {target: index for target, (_, index) in best.items()}


def _tune(
    indexes: Iterator[Index | Rotated], q: np.ndarray, true: Any, best: dict[float, tuple[float, Index | Rotated]]
) -> tuple[float, Index | Rotated | None]:
    """Measures indexes of rising recall until all targets are reached, and enters the faster ones in `best`.

    Returns the largest recall with its index.
    """
    targets, nearest = sorted(map(float, FLAGS.targets)), (0.0, None)
    while targets:
        try:
            candidate = next(indexes)
            achieved = recall(candidate.search(q, FLAGS.k)[1], true)
        except (InputError, StopIteration):  # the index has fewer cells or buckets
            return nearest
        if achieved - nearest[0] < 2e-3:  # more probes add little
            return nearest
        nearest = achieved, candidate
        if achieved < targets[0]:
            continue
        seconds = measure.timeit({"": lambda index=candidate: index.search(q, FLAGS.k)}, rounds=3)[""].min
        print(f"  {candidate.kind}: recall {achieved:.3f}, {seconds * 1e3:.1f} ms for {len(q)} queries", flush=True)
        while targets and achieved >= targets[0]:
            target = targets.pop(0)
            best[target] = min(best.get(target, (np.inf, candidate)), (seconds, candidate), key=lambda x: x[0])
    return nearest


def compare(
    setting: str, target: float, indexes: dict[str, Index | Rotated], q: np.ndarray, true: np.ndarray
) -> dict[str, Any]:
    recalls = {name: recall(index.search(q, FLAGS.k)[1], true[: len(q)]) for name, index in indexes.items()}
    # Queries are rotated beforehand: threads of numpy's product would slow faiss down.
    calls = {n: (i.index, q @ i.rotation) if isinstance(i, Rotated) else (i, q) for n, i in indexes.items()}
    times = measure.timeit(
        {name: lambda call=call: call[0].search(call[1], FLAGS.k) for name, call in calls.items()}, rounds=FLAGS.rounds
    )
    ratios = {f"time of {name} over exact": x.over(times["exact"]) for name, x in times.items() if name != "exact"}
    if "pq" in times:
        ratios |= {f"time of {n} over pq": x.over(times["pq"]) for n, x in times.items() if n.startswith("faiss pq")}
    label = f"search, {setting}, recall@{FLAGS.k} of {target:.3g}"
    print(f"{label}: {', '.join(f'{name} {x:.3g}' for name, x in ratios.items())}", flush=True)
    kinds = {name: str(index.kind) for name, index in indexes.items()}
    seconds = {name: list(x.all) for name, x in times.items()}
    medians = {name: x.median for name, x in times.items()}
    sizes = {n: {str(r): i.bytes_per_vector(reranking=r) for r in (True, False)} for n, i in indexes.items()}
    sizes = {n: {"with vectors to rank again": x["True"], "searched": x["False"]} for n, x in sizes.items()}
    return {
        "what": label, "ratios": ratios, "recall": recalls, "kinds": kinds, "s": medians, "all_s": seconds, "bytes": sizes
    }  # fmt: skip


def main(_: Any) -> None:
    cli.prepare_jax()
    if not FLAGS.run and not (FLAGS.table and FLAGS.queries) and not FLAGS.synthetic:
        sys.exit("--run=WORKDIR, --table=FILE.npy and --queries=FILE.npy, or --synthetic=COUNT are required")
    if FLAGS.synthetic:
        table, queries = synthetic(FLAGS.synthetic)
    elif FLAGS.keys:
        table, queries = load_states(FLAGS.run, FLAGS.keys)
    else:
        table, queries = load_run(FLAGS.run) if FLAGS.run else (np.load(FLAGS.table), np.load(FLAGS.queries))
    counts = [int(count) for count in FLAGS.counts]
    if len(queries) < TUNING + MOST:
        sys.exit(f"got {len(queries)} queries, expected at least {TUNING + MOST}")
    faiss.omp_set_num_threads(measure.environment()["cores"])
    if FLAGS.build_only:
        for method in FLAGS.methods:
            for spec in settings(method, len(table)):
                built(spec, table)
        return
    check(table, queries)
    tuning, queries = queries[:TUNING], queries[TUNING:]
    references = {"exact": Index("exact").build(table), "faiss flat": Index("faiss").build(table)}
    true_tuning, true_ids = (np.asarray(references["exact"].search(q, FLAGS.k)[1]) for q in (tuning, queries[:MOST]))
    tuned = {NAMES.get(method, method): fastest(method, table, tuning, true_tuning) for method in FLAGS.methods}
    rows, path = [], Path()
    below = {reached for found in tuned.values() for reached in found} - set(map(float, FLAGS.targets))
    for target, count in itertools.product([*map(float, FLAGS.targets), *sorted(below)], counts):
        indexes = references | {method: best[target] for method, best in tuned.items() if target in best}
        rows.append(
            compare(
                f"V {len(table):,}, D {table.shape[1]}, {count} queries", target, indexes, queries[:count], true_ids
            )
        )
        path = measure.write_result(FLAGS.name, rows, FLAGS.out)  # after each row, since the last ones take longest
    print(path)


if __name__ == "__main__":
    app.run(main)
