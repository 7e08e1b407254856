"""Measures the bias of the sampled softmax's gradient, and the error of logarithms of Bessel functions.

    python experiments/bench/estimates.py [--draws=3000] [--grid=60]

The mean gradient over draws of a quarter of the vocabulary is compared with the gradient of the exact softmax; its standard
error, the smallest bias that could be detected, is reported with it. Bessel functions are compared with mpmath at 60 digits,
for dimensions from 32 to 4096 and concentrations from 1e-3 to 1e5. Needs mpmath (extra `oracles`). Takes less than a minute on
two cores.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.ops.softmax.proposals import LogUniform, sample
from hpnlp.ops.softmax.sampled_losses import sampled_softmax, scores
from hpnlp.ops.softmax.vmf import log_iv

RESULTS = Path(__file__).parents[1] / "results"
DIMS = (32, 64, 100, 300, 512, 1024, 2048, 4096)

FLAGS = flags.FLAGS
flags.DEFINE_integer("draws", 3000, "Draws of negative samples; their mean gradient is compared.")
flags.DEFINE_integer("grid", 60, "Concentrations for each dimension.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def sampled(
    h: jax.Array, w: jax.Array, labels: jax.Array, key: jax.Array, *, corrected: bool, unique: bool
) -> jax.Array:
    """The sum of the sampled losses with a quarter of the words as negative samples."""
    count = len(w) // 4
    samples = sample(LogUniform(len(w)), key, count, labels, unique=unique)
    if not corrected:
        samples = samples._replace(log_expected=jnp.zeros(count), labels_expected=jnp.zeros(len(labels)))
    return sampled_softmax(*scores(h, w[labels], w[samples.ids]), samples, labels).sum()


def gradient_bias(vocab: int, draws: int) -> list[dict[str, Any]]:
    """|mean gradient of h - exact| / |exact|. Labels follow the proposal, scores have a standard deviation of 1.5."""
    tokens, dim = 64, 16
    rng = np.random.default_rng(0)
    q = np.log1p(1 / np.arange(1.0, vocab + 1)) / np.log(vocab + 1)
    labels = jnp.asarray(rng.choice(vocab, tokens, p=q / q.sum()), jnp.int32)
    h, w = (jnp.asarray(rng.standard_normal((count, dim)), jnp.float32) for count in (tokens, vocab))
    h = 1.5 / dim**0.5 * h
    exact = jax.jit(jax.grad(functools.partial(linear_cross_entropy, reduction="sum")))(h, w, labels)
    norm = float(jnp.linalg.norm(exact))
    rows = []
    forms = {"": (True, False), ", without repetition": (True, True), ", correction left out": (False, False)}
    for name, (corrected, unique) in forms.items():
        gradient = jax.jit(jax.grad(functools.partial(sampled, corrected=corrected, unique=unique)))
        estimates = np.stack([gradient(h, w, labels, key) for key in jax.random.split(jax.random.key(4), draws)])
        bias = float(np.linalg.norm(estimates.mean(axis=0, dtype=np.float64) - exact)) / norm
        error = float(np.sqrt(estimates.var(axis=0, dtype=np.float64).sum() / draws)) / norm
        ratios = {"bias of the gradient by h": bias, "standard error of the mean": error}
        rows.append({"what": f"sampled softmax, V {vocab:,}, S = V/4{name}", "ratios": ratios, "draws": draws})
        print(rows[-1], flush=True)
    return rows


def logarithm_error(dtype: str, grid: int) -> dict[str, Any]:
    """The largest error of log I_v: relative to max(1, |log I_v|) in float32, absolute in float64."""
    kappas = np.logspace(-3, 5, grid).astype(np.float32)
    largest = (0.0, 0, 0.0)  # (error, dimension, concentration)
    for dim in DIMS:
        with jax.enable_x64(dtype == "float64"):
            values = np.asarray(jax.jit(functools.partial(log_iv, dim / 2 - 1))(jnp.asarray(kappas, dtype)))
        for kappa, value in zip(kappas, values, strict=True):
            with mpmath.workdps(60):
                exact = mpmath.log(mpmath.besseli(mpmath.mpf(dim) / 2 - 1, mpmath.mpf(float(kappa)), maxterms=10**7))
                error = abs(float(mpmath.mpf(float(value)) - exact))
            scale = max(1.0, abs(float(exact))) if dtype == "float32" else 1.0
            largest = max(largest, (error / scale, dim, float(kappa)))
    kind = "relative" if dtype == "float32" else "absolute"
    ratios = {f"largest {kind} error, dimensions 32 to 4096, concentrations 1e-3 to 1e5": largest[0]}
    row = {"what": f"log I_v, {dtype}", "ratios": ratios, "at": {"dim": largest[1], "kappa": largest[2]}}
    print(row, flush=True)
    return row


def main(_: Any) -> None:
    cli.prepare_jax()
    rows = [row for vocab in (1000, 12_000) for row in gradient_bias(vocab, FLAGS.draws)]
    rows += [logarithm_error(dtype, FLAGS.grid) for dtype in ("float32", "float64")]
    print(measure.write_result("estimates", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
