"""Measures the error of attention with random features, by kind of features, their number and the scale of the inputs.

    python experiments/bench/random_features.py [--tiny]

Entries of queries and keys are normal with standard deviation 0.5 or 1. Reported are, as medians over draws of the projections:
the error of the output relative to the norm of the exact one, and the Kullback-Leibler divergence and the total variation
distance between the exact weights of attention and those of random features, as means over queries. RFA has its own reference,
softmax attention of queries and keys of length 1 times the scale of its parameter. Takes a few minutes on two cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.attention import Full, attend
from hpnlp.ops.attention.linear.random_attention import random_feature_attention, rfa_attention
from hpnlp.ops.attention.linear.random_features import optimal_rho, projection_count, random_projections

RESULTS = Path(__file__).parents[1] / "results"
SCALES = 0.5, 1.0
FORMS = (
    ("positive", "iid"),
    ("positive", "orthogonal"),
    ("positive", "sphere"),
    ("hyperbolic", "orthogonal"),
    ("optimal", "orthogonal"),
    ("trigonometric", "orthogonal"),
)

FLAGS = flags.FLAGS
flags.DEFINE_integer("length", 512, "Number of tokens of the sequence.")
flags.DEFINE_integer("dim", 64, "Head size.")
flags.DEFINE_list("features", ["32", "64", "128", "256", "512", "1024"], "Numbers of features.")
flags.DEFINE_integer("draws", 20, "Draws of the projections.")
flags.DEFINE_boolean("tiny", False, "Small sizes, for testing this script.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def inputs(scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v `[1, T, 1, H]`."""
    rng, shape = np.random.default_rng(0), (1, FLAGS.length, 1, FLAGS.dim)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3))
    return scale * q, scale * k, v


def exact_inputs(q: jax.Array, k: jax.Array, kind: str, scale: float) -> tuple[jax.Array, jax.Array]:
    """Queries and keys whose scores q . k / sqrt(H) random features of this kind estimate."""
    if kind != "trigonometric":
        return q, k
    # `attend` divides scores by sqrt(H).
    factor = scale * FLAGS.dim**0.25
    return tuple(factor * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))  # pyright: ignore[reportReturnType]  (of two arrays)


def errors(q: jax.Array, k: jax.Array, v: jax.Array, kind: str, projections: str, features: int, scale: float) -> Any:
    """`[draws, 3]`: error of the output, divergence and distance of the weights."""
    count = projection_count(features, kind)
    gamma = jnp.mean(jnp.sum(jnp.square(q[0, :, None, 0] + k[0, None, :, 0]), axis=-1)) / FLAGS.dim**0.5
    rho = optimal_rho(gamma, FLAGS.dim) if kind == "optimal" else None
    # With one-hot values, the outputs are the weights.
    values = jnp.concatenate([v, jnp.eye(FLAGS.length)[None, :, None]], axis=-1)
    exact_o: Any = attend(*exact_inputs(q, k, kind, scale), values, Full())

    @jax.jit
    def draw(key: jax.Array) -> jax.Array:
        w = random_projections(key, count, FLAGS.dim, projections)
        if kind == "trigonometric":
            o = rfa_attention(q, k, values, w, scale=jnp.full((1, FLAGS.dim), scale), causal=False)
        else:
            o = random_feature_attention(q, k, values, w, kind=kind, rho=rho, causal=False)
        o, weights = o[0, :, 0, : FLAGS.dim], o[0, :, 0, FLAGS.dim :]
        expected, exact = exact_o[0, :, 0, : FLAGS.dim], exact_o[0, :, 0, FLAGS.dim :]
        positive = jnp.maximum(weights, 1e-9)  # RFA has negative weights
        divergence = jnp.sum(exact * (jnp.log(jnp.maximum(exact, 1e-30)) - jnp.log(positive)), axis=1).mean()
        distance = 0.5 * jnp.abs(exact - weights).sum(axis=1).mean()
        return jnp.stack([jnp.linalg.norm(o - expected) / jnp.linalg.norm(expected), divergence, distance])

    return np.stack([draw(key) for key in jax.random.split(jax.random.key(1), FLAGS.draws)])


def main(_: Any) -> None:
    cli.prepare_jax()
    counts = [int(count) for count in FLAGS.features]
    if FLAGS.tiny:
        FLAGS.length, FLAGS.dim, FLAGS.draws, counts = 32, 8, 2, [8, 16]
    rows = []
    for scale in SCALES:
        for kind, projections in FORMS:
            all_errors = [errors(*inputs(scale), kind, projections, count, scale) for count in counts]
            medians = np.median(all_errors, axis=1)
            slope = np.polyfit(np.log(counts), np.log(medians[:, 0]), 1)[0]
            for count, values in zip(counts, medians, strict=True):
                names = "error of the output", "divergence of the weights", "distance of the weights"
                ratios = dict(zip(names, map(float, values), strict=True))
                what = f"random features, scale {scale}, H {FLAGS.dim}, {kind}, {projections}, M {count}"
                rows.append({"what": what, "ratios": ratios, "slope": float(slope), "draws": FLAGS.draws})
                print(f"{what}: " + ", ".join(f"{name} {value:.3g}" for name, value in ratios.items()), flush=True)
    print(measure.write_result("random_features", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
