"""Measures attention within buckets: attention mass that it recalls, and time against exact attention.

    python experiments/bench/bucketed.py [--lengths=1024,4096] [--rounds=5]

Recall: B 1, T 2048, H 64; queries are keys, vectors around 64 random centres, with a cosine of about 0.8 within a cluster and a
softmax of 20 times the cosine over other tokens. The mass recalled is the sum of the exact weights over the pairs that are
computed; random pairs of the same number recall their share of all pairs. The clusters of routing are the result of k-means.

Time: causal, B 1, N 8, H 64, float32, forward and backward, interleaved with `attend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.attention import Causal, attend
from hpnlp.ops.attention.bucketed import (
    BucketSettings,
    bucketed_attention,
    lsh_buckets,
    nearest_centroids,
    random_rotations,
    unit_vectors,
    visible_pairs,
)
from hpnlp.ops.attention.bucketed.sinkhorn import SortSettings, sinkhorn_attention
from hpnlp.training.processes.allocator import keep_freed_memory

RESULTS = Path(__file__).parents[1] / "results"
HEADS, DIM, WINDOW, CENTRES, SHARPNESS = 8, 64, 64, 64, 20.0
DRAWS = 5  # of the rotations; the mean is reported

FLAGS = flags.FLAGS
flags.DEFINE_list("lengths", ["1024", "4096"], "Tokens of the sequences that are timed.")
flags.DEFINE_integer("recall_length", 2048, "Tokens of the sequences whose recall is measured.")
flags.DEFINE_integer("rounds", 5, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def clustered(length: int, noise: float = 0.5) -> jax.Array:
    """Vectors of length 1 around random centres, `[1, length, 1, DIM]`."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((CENTRES, DIM))[draw.integers(0, CENTRES, length)]
    return unit_vectors(jnp.asarray(centres + noise * draw.standard_normal(centres.shape), jnp.float32)[None, :, None])


def k_means(x: jax.Array, clusters: int, steps: int = 20) -> jax.Array:
    """Clusters `[1, T, 1, 1]` of spherical k-means, started from tokens."""
    centroids = x[0, :: x.shape[1] // clusters, 0][None, :clusters]
    for _ in range(steps):
        members = jax.nn.one_hot(nearest_centroids(x, centroids)[0, :, 0], clusters)
        sums = members.T @ x[0, :, 0]
        centroids = unit_vectors(jnp.where(members.sum(axis=0)[:, None] > 0, sums, centroids[0]), eps=1e-12)[None]
    return nearest_centroids(x, centroids)[..., None]


def recall(length: int) -> list[dict[str, Any]]:
    x = clustered(length)
    weights = np.array(x[0, :, 0] @ x[0, :, 0].T) * SHARPNESS
    np.fill_diagonal(weights, -np.inf)
    weights = np.asarray(jax.nn.softmax(weights, axis=1))
    most = max(2, length // WINDOW // 2 * 2)
    rows = []

    def row(method: str, rounds: int, buckets: int, window: int, *draws: jax.Array) -> None:
        visible = [np.array(visible_pairs(found, BucketSettings(window, causal=False)))[0, 0] for found in draws]
        mass, share = (float(np.mean(x)) for x in ([(weights * pairs).sum(axis=1) for pairs in visible], visible))
        rows.append({"what": "recall", "method": method, "rounds": rounds, "length": length, "buckets": buckets,
                     "window": window, "recall": mass, "pairs": share})  # fmt: skip

    for rounds in (1, 2, 4, 8, 16):
        keys = jax.random.split(jax.random.key(rounds), DRAWS)
        for buckets, window in ((most, WINDOW), (most, 2 * WINDOW), (max(2, most // 4 * 2), 2 * WINDOW)):
            draws = [lsh_buckets(x, random_rotations(key, rounds, DIM, buckets)) for key in keys]
            row("reformer", rounds, buckets, window, *draws)
    row("routing", 1, most, WINDOW, k_means(x, most))
    return rows


def forms(length: int) -> dict[str, Callable[..., jax.Array]]:
    """Attention of q, k, v by each method. Reformer and routing ignore k."""
    buckets = max(2, length // WINDOW // 2 * 2)
    centroids = unit_vectors(jax.random.normal(jax.random.key(1), (HEADS, buckets // 4 or 1, DIM)))
    settings = functools.partial(BucketSettings, causal=True, hides_self=True, scale=1.0)

    def hashed(buckets: int, window: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found = lsh_buckets(q, random_rotations(jax.random.key(0), 4, DIM, buckets))
        return bucketed_attention(q, unit_vectors(q), v, found, settings(window))

    def routed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        found = nearest_centroids(q, centroids)[..., None]
        return bucketed_attention(q, unit_vectors(q), v, found, settings(4 * WINDOW))

    def exact(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        o: Any = attend(q, k, v, Causal())
        return o

    def sorted_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sinkhorn_attention(q, k, v, SortSettings(WINDOW, 5, 0.75, True))

    return {
        "attend": exact,
        **{
            f"reformer, 4 rounds, {buckets} buckets, window {window}": functools.partial(hashed, buckets, window)
            for window in (WINDOW, 2 * WINDOW)
        },
        f"routing, {buckets // 4 or 1} clusters, window {4 * WINDOW}": routed,
        f"sinkhorn, block {WINDOW}": sorted_blocks,
    }


def times(length: int, rounds: int) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    operands = [jnp.asarray(draw.standard_normal((1, length, HEADS, DIM), np.float32)) for _ in range(4)]

    def step(form: Callable[..., jax.Array]) -> tuple[Callable[[], Any], int]:
        def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
            o, pull = jax.vjp(form, q, k, v)
            return o, pull(do)

        program = measure.compile(run, *operands)
        return lambda: program(*operands), program.memory.temp

    steps = {name: step(form) for name, form in forms(length).items()}
    timings = measure.timeit({name: call for name, (call, _) in steps.items()}, rounds=rounds)
    return [
        {"what": "time", "method": name, "length": length, "seconds": timing.median, "temp_bytes": steps[name][1],
         "over_attend": timing.over(timings["attend"])}
        for name, timing in timings.items()
    ]  # fmt: skip


def main(_: Any) -> None:
    keep_freed_memory()
    cli.prepare_jax()
    rows = recall(FLAGS.recall_length)
    for length in FLAGS.lengths:
        rows += times(int(length), FLAGS.rounds)
    for row in rows:
        print(row)
    print(measure.write_result("bucketed", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
