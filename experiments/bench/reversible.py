"""Measures memory and time of a deep model's gradient: activations stored, rematerialised by layer, and reversible.

    python experiments/bench/reversible.py [--layers=4,8,16,32] [--rounds=5]

Temporary memory, which excludes parameters and gradients, and time of one compiled gradient, the three stacks of a depth
interleaved. Reversible layers compute another function than plain ones; their gradients must agree with those of the same
layers applied separately, which store their activations, or nothing is reported. Takes some minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.models.decoding.decoding_weights import separate_layers
from hpnlp.models.lm import LM, LMConfig, example_batch

RESULTS = Path(__file__).parents[1] / "results"
BASE = LMConfig(dim=256, heads=4, vocab=264, max_len=256, unroll=1)
STACKS = {"plain": ("plain", "none"), "remat": ("plain", "full"), "reversible": ("reversible", "none")}
ROWS, LENGTH = 8, 256

FLAGS = flags.FLAGS
flags.DEFINE_list("layers", ["4", "8", "16", "32"], "Numbers of layers.")
flags.DEFINE_integer("rounds", 5, "Measurements of each stack; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def batch_of() -> dict[str, jax.Array]:
    """Random tokens, each labelled with the next one."""
    tokens = np.random.default_rng(0).integers(0, BASE.vocab, (ROWS, LENGTH + 1)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
    batch = example_batch(ROWS, LENGTH)
    return jax.device_put({**batch, "tokens": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions})


def loss(model: LM, params: Any, batch: Any) -> jax.Array:
    out: Any = model.apply({"params": params}, batch, method="loss")
    return out.sum / out.weight


def relative_distance(actual: Any, expected: Any) -> float:
    """Norm of the difference of two trees, relative to the norm of `expected`."""
    squared_error, squared_norm = (
        sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree))
        for tree in (jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, actual, expected), expected)
    )
    return (squared_error / squared_norm) ** 0.5


def bench(layers: int, rounds: int) -> list[dict[str, Any]]:
    batch = batch_of()
    models = {
        name: LM(dataclasses.replace(BASE, layers=layers, residual=residual), remat=remat)
        for name, (residual, remat) in STACKS.items()
    }
    params = jax.jit(lambda key: nn.meta.unbox(models["plain"].init(key, batch))["params"])(jax.random.key(0))
    programs = {
        name: measure.compile(jax.grad(functools.partial(loss, model)), params, batch) for name, model in models.items()
    }
    stored = jax.jit(jax.grad(lambda p: loss(models["reversible"], separate_layers(p, models["plain"].config), batch)))(
        params
    )
    error = relative_distance(programs["reversible"](params, batch), stored)
    if error > 1e-3:
        sys.exit(f"{layers} layers: gradients differ by {error:.1e}: nothing is reported")

    calls = {name: functools.partial(program, params, batch) for name, program in programs.items()}
    times = measure.timeit(calls, rounds=rounds)
    rows = []
    for name, program in programs.items():
        row = {
            "stack": name, "layers": layers, "dim": BASE.dim, "length": LENGTH, "batch": ROWS,
            "temp_bytes": program.memory.temp, "ms": 1e3 * times[name].median,
            "time_over_plain": times[name].over(times["plain"]), "matmul_gflops": program.flops / 1e9,
            "all_ms": [1e3 * seconds for seconds in times[name].all],
        }  # fmt: skip
        if name == "reversible":
            row["gradient_error"] = error
        print({key: value for key, value in row.items() if key != "all_ms"}, flush=True)
        rows.append(row)
    return rows


def main(_: Any) -> None:
    cli.prepare_jax()
    rows = [row for layers in FLAGS.layers for row in bench(int(layers), FLAGS.rounds)]
    print(measure.write_result("reversible", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
