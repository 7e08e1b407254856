"""Checks fits of scaling laws against published constants, known constants and other implementations.

    python experiments/bench/scaling_laws.py --points=svg_extracted_data.csv --peer=vpnls/src

--points is data/svg_extracted_data.csv of the repository epoch-research/analyzing-chinchilla: 245 models of figure 4 of
Hoffmann et al. 2022, which Besiroglu et al. 2024 read off the figure. The file has no licence and is not part of this
repository. --peer is the directory src of the repository Open-Athena/vpnls, whose gradient of variable projection is minimised
by scipy. Parts without their file are left out.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from scipy import optimize

from hpnlp import measure
from hpnlp.scaling_laws import Points, fit, isoflop_bias, warnings
from hpnlp.scaling_laws.fitting.forms import LOSS_FORMS

ROOT = Path(__file__).parents[2]
# Fit of the 240 points that is published with them (Besiroglu et al. 2024), and the printed constants of Hoffmann et al. 2022.
PUBLISHED = {"A": 482.01, "B": 2085.43, "E": 1.8172, "alpha": 0.3478, "beta": 0.3658}
REFERENCE = {"A": 477.83, "B": 2143.42, "E": 1.8172, "alpha": 0.34731, "beta": 0.36717}
PRINTED = {"A": 406.4, "B": 410.7, "E": 1.69, "alpha": 0.34, "beta": 0.28}
NOISE = 0.005  # standard deviation of log losses of the synthetic studies

FLAGS = flags.FLAGS
flags.DEFINE_string("points", "", "File of the 245 points.")
flags.DEFINE_string("peer", "", "Directory with the package vpnls.")
flags.DEFINE_integer("studies", 200, "Number of synthetic studies of each kind.")
flags.DEFINE_string("out", str(ROOT / "experiments" / "results"), "Where the result goes.")


def main(_: Any) -> None:
    rows: list[dict[str, Any]] = []
    parts = (refit(FLAGS.points), noise_free(), peer(FLAGS.peer, FLAGS.points), coverage(FLAGS.studies))
    for row in itertools.chain.from_iterable(parts):
        rows.append(row)
        print(row, flush=True)
    print(measure.write_result("scaling_laws", rows, FLAGS.out))


def read_points(path: str) -> Points:
    """The points of a file, in order of their losses."""
    with Path(path).open(newline="") as file:
        records = [record for record in csv.DictReader(file) if record["loss"]]
    n, c, loss = (np.array([float(r[name]) for r in records]) for name in ("Model Size", "Training FLOP", "loss"))
    order = np.argsort(loss)
    return Points(n[order], (c / (6 * n))[order], loss[order], c[order])


def refit(path: str) -> Iterator[dict[str, Any]]:
    """The fit of the 240 points, and of all 245."""
    if not path:
        return
    every = read_points(path)
    for label, points in (("240 points", every[np.arange(240)]), ("245 points", every)):
        start, cpu = time.perf_counter(), time.process_time()
        law = fit(points, bootstrap=2)
        row = {
            "part": "refit",
            "points": label,
            **law.constants,
            "a": law.interval("a").value,
            "objective": law.objective,
        }
        row |= {"starts": law.starts, "agreeing": law.agreeing, "seconds": time.perf_counter() - start}
        row |= {"cpu_seconds": time.process_time() - cpu}
        sampled = fit(points, bootstrap=400)
        for name, deviation in zip(sampled.constants, np.sqrt(np.diag(sampled.covariance)), strict=True):
            row[f"sd_{name}"] = float(deviation)
        row["a_95"] = [sampled.interval("a", 0.95).low, sampled.interval("a", 0.95).high]
        row["warnings"] = warnings(sampled)
        for budget in (1e20, 5.76e23):
            best = law.optimum(budget)
            row |= {f"n_{budget:g}": best.n.value, f"ratio_{budget:g}": best.ratio.value}
        if len(points) == 240:
            row["largest_difference"] = max(abs(law.constants[k] / v - 1) for k, v in REFERENCE.items())
            row["largest_difference_to_published"] = max(abs(law.constants[k] / v - 1) for k, v in PUBLISHED.items())
        yield row


def loss_of(n: np.ndarray, d: np.ndarray, constants: dict[str, float]) -> np.ndarray:
    form = LOSS_FORMS["additive"]
    parameters = form.to_parameters(np.array(list(constants.values())))
    return np.exp(form.log_loss(parameters, np.log(n), np.log(d))[0])


def isoflop_grid(drift: float, sizes: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """N and D of five budgets from 1e17 to 1e21, with sizes up to 4 times to each side of drifting centres."""
    a, scale = _optimum(PRINTED)
    budgets = np.geomspace(1e17, 1e21, 5)
    centres = scale * (budgets / 6) ** a * drift ** np.linspace(-1, 1, 5)
    n = (centres[:, None] * np.geomspace(0.25, 4, sizes)).ravel()
    return n, np.repeat(budgets, sizes) / 6 / n


def _optimum(k: dict[str, float]) -> tuple[float, float]:
    a = k["beta"] / (k["alpha"] + k["beta"])
    return a, (k["alpha"] * k["A"] / (k["beta"] * k["B"])) ** (1 / (k["alpha"] + k["beta"]))


def noise_free() -> Iterator[dict[str, Any]]:
    """Errors of both approaches on losses without noise."""
    a, scale = _optimum(PRINTED)
    for drift in (1.0, 1.5, 3.0):
        n, d = isoflop_grid(drift)
        points = Points(n, d, loss_of(n, d, PRINTED))
        additive, parabolas = fit(points, bootstrap=2), fit(points, "isoflop", bootstrap=2)
        bias, far = isoflop_bias(points), 1e24
        yield {
            "part": "noise-free",
            "drift": drift,
            "approach_3_error": abs(additive.interval("a").value - a),
            "agreeing": additive.agreeing,
            "starts": additive.starts,
            "approach_2_error": parabolas.constants["a"] - a,
            "approach_2_size_error": parabolas.optimum(far).n.value / (scale * (far / 6) ** a) - 1,
            "estimated_bias": bias.exponent,
            "estimated_size_bias": bias.size,
            "warned": bool(warnings(parabolas)),
        }


def peer(directory: str, path: str) -> Iterator[dict[str, Any]]:
    """The objective of the data's own notebook, and least squares by variable projection of another implementation."""
    if path:
        yield notebook(read_points(path)[np.arange(240)])
    if not directory:
        return
    n, d = isoflop_grid(3.0)
    clean = loss_of(n, d, PRINTED)
    noisy = clean * np.exp(NOISE * np.random.default_rng(0).standard_normal(n.size))
    # Their residuals are those of losses, ours of log losses: minima agree without noise, and within the deviation with noise.
    law = fit(Points(n, d, noisy), delta=np.inf)
    theirs, exact = projected(directory, n, d, noisy), projected(directory, n, d, clean)
    names = ("alpha", "beta")
    deviations = np.sqrt(np.diag(law.covariance))[3:]
    own = np.array([law.constants[name] for name in names])
    ours_exact = fit(Points(n, d, clean), bootstrap=2).constants["alpha"]
    yield {
        "part": "peer",
        "peer": "vpnls",
        **dict(zip(names, own.tolist(), strict=True)),
        **dict(zip(("peer_alpha", "peer_beta"), theirs.tolist(), strict=True)),
        "differences_in_sd": ((own - theirs) / deviations).tolist(),
        "noise_free_error": abs(ours_exact - PRINTED["alpha"]),
        "peer_noise_free_error": abs(float(exact[0]) - PRINTED["alpha"]),
    }


def projected(directory: str, n: np.ndarray, d: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """(alpha, beta) by the objective and gradient of vpnls, whose compiled grid search is replaced by nine starts."""
    sys.path.insert(0, directory)
    package, grid = types.ModuleType("vpnls"), types.ModuleType("vpnls.grid")
    package.__path__ = [str(Path(directory) / "vpnls")]
    vars(grid)["fit_vpnls_grid"] = None
    sys.modules |= {"vpnls": package, "vpnls.grid": grid}
    objective = importlib.import_module("vpnls.scipy")._vpnls_objective_and_grad
    found = [
        optimize.minimize(
            objective,
            start,
            (np.log(n / 1e6), np.log(d / 1e9), loss),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0.01, 0.99)] * 2,
            options={"ftol": 1e-15, "gtol": 1e-15},
        )
        for start in itertools.product((0.2, 0.4, 0.7), repeat=2)
    ]
    return min(found, key=lambda result: result.fun).x


def notebook(points: Points) -> dict[str, Any]:
    """The sum of Huber losses as the notebook of the data writes it, minimised by BFGS without a gradient, near our minimum."""
    law = fit(points, bootstrap=2)

    def objective(parameters: np.ndarray) -> float:
        a, b, e, alpha, beta = parameters
        predicted = np.log(np.exp(a - alpha * np.log(points.n)) + np.exp(b - beta * np.log(points.d)) + np.exp(e))
        difference = np.log(points.loss) - predicted
        near = np.abs(difference) <= 1e-3
        return float(np.sum(np.where(near, 0.5 * difference**2, 1e-3 * (np.abs(difference) - 0.5e-3))))

    values = np.r_[np.log(law.values[:3]), law.values[3:]]
    random, best = np.random.default_rng(0), objective(values)
    # The scale keeps finite differences of an objective of 1e-3 above the tolerances.
    near = [values * (1 + 0.02 * random.standard_normal(5)) for _ in range(20)]
    found = [
        optimize.minimize(
            lambda x: 1e4 * objective(x), x, method="Nelder-Mead", options={"maxiter": 20_000, "maxfev": 20_000}
        )
        for x in near
    ]
    return {
        "part": "peer",
        "peer": "notebook of the data",
        "objective": best,
        "peer_objective": min(float(result.fun) / 1e4 for result in found),
    }


def coverage(studies: int) -> Iterator[dict[str, Any]]:
    """Share of synthetic studies whose 90 % intervals hold the true constants, a, and N* at ten times the largest budget."""
    random = np.random.default_rng(0)
    n = np.exp(random.uniform(np.log(5e7), np.log(1.5e10), 240))
    d = np.exp(random.uniform(np.log(1e18), np.log(3e21), 240)) / 6 / n
    small = [x.ravel() for x in np.meshgrid([68e3, 164e3, 356e3, 819e3, 1.58e6], [2e6, 4e6, 8e6, 16e6])]
    cases = (
        ("240 points", n, d, 1e-3),
        ("5 sizes x 4 numbers of tokens", *small, 1e-3),
        ("5 sizes x 4 numbers of tokens", *small, np.inf),
    )
    a, scale = _optimum(PRINTED)
    for label, n, d, delta in cases:
        budget = 10 * float((6 * n * d).max())
        true = {**PRINTED, "a": a}
        held: dict[str, list[bool]] = {}
        start = time.perf_counter()
        for study in range(studies):
            loss = loss_of(n, d, PRINTED) * np.exp(NOISE * random.standard_normal(n.size))
            law = fit(Points(n, d, loss), delta=delta, seed=study)
            for name, value in true.items():
                held.setdefault(name, []).append(value in law.interval(name))
            held.setdefault("N*", []).append(scale * (budget / 6) ** a in law.optimum(budget).n)
            again = loss_of(n[:1], d[:1], PRINTED)[0] * np.exp(NOISE * random.standard_normal())
            held.setdefault("loss", []).append(again in law.predict(n[0], d[0]))
        yield {
            "part": "coverage",
            "design": label,
            "delta": None if delta == np.inf else delta,
            "studies": studies,
            "noise": NOISE,
            **{name: float(np.mean(values)) for name, values in held.items()},
            "seconds": time.perf_counter() - start,
        }


if __name__ == "__main__":
    app.run(main)
