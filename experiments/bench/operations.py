"""Measures operation-wise parallelism: the two directions of a bidirectional LSTM, and four members of an ensemble.

python experiments/bench/operations.py [--measurements=15]

For a machine with two cores. Two simulated devices run at the same time and share the cores, so that the time of two devices is
real. `together` runs all functions on one device, in one program, which may use both cores; `divided` runs them on two devices,
and sends the results to both. A step is a loss and its gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from absl import app, flags  # noqa: E402

from hpnlp import measure  # noqa: E402
from hpnlp.ops.rnn import lstm  # noqa: E402
from hpnlp.parallel.operations import Function, divide_operations  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"


def forward(weights: Any, x: jax.Array) -> jax.Array:
    return lstm(x, *weights)[0]


def backward(weights: Any, x: jax.Array) -> jax.Array:
    return lstm(x, *weights, reverse=True)[0]


def mlp(weights: Any, x: jax.Array) -> jax.Array:
    hidden, output = weights
    return jax.nn.gelu(x @ hidden) @ output


def draw(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape) * shape[0] ** -0.5


def lstm_weights(number: int, inputs: int, hidden: int) -> tuple[jax.Array, ...]:
    return draw(number, inputs, 4 * hidden), draw(number + 1, hidden, 4 * hidden), jnp.zeros(4 * hidden)


def steps(
    functions: Sequence[Function], weights: Sequence[Any], x: jax.Array
) -> tuple[dict[str, Callable[[], Any]], int]:
    """A step on one device and on two, and the bytes that a device receives in the forward pass."""
    operations = divide_operations(functions, weights, x)
    packed = operations.pack(weights)

    def loss(outputs: Sequence[jax.Array]) -> jax.Array:
        return sum((jnp.sum(output**2) for output in outputs), jnp.zeros(()))

    @jax.jit
    @jax.value_and_grad
    def together(weights: Any) -> jax.Array:
        return loss([function(w, x) for function, w in zip(functions, weights, strict=True)])

    @jax.jit
    @jax.value_and_grad
    def divided(packed: Any) -> jax.Array:
        return loss(operations(packed, x))

    return {"together": lambda: together(tuple(weights)), "divided": lambda: divided(packed)}, operations.sent_bytes


def main(_: Any) -> None:
    rows = []
    for batch, length, dim in ((16, 128, 128), (16, 128, 256), (32, 128, 512)):
        x = draw(9, batch, length, dim)
        weights = [lstm_weights(0, dim, dim), lstm_weights(2, dim, dim)]
        name = f"bidirectional LSTM, B {batch}, T {length}, H {dim}"
        rows.append(measured(name, *steps((forward, backward), weights, x)))
    for dim in (256, 512):
        x = draw(9, 512, dim)
        weights = [(draw(n, dim, 4 * dim), draw(n + 1, 4 * dim, dim)) for n in range(0, 8, 2)]
        rows.append(measured(f"four MLPs of {dim} x {4 * dim}, 512 rows", *steps((mlp,) * 4, weights, x)))
    print(measure.write_result("operations", rows, FLAGS.out))


def measured(name: str, functions: dict[str, Callable[[], Any]], sent_bytes: int) -> dict[str, Any]:
    times = measure.timeit(functions, rounds=FLAGS.measurements, warmup=2)
    low, high = times["divided"].interval(times["together"])
    row = {
        "name": name,
        "together_ms": 1000 * times["together"].median,
        "divided_ms": 1000 * times["divided"].median,
        "ratio": times["divided"].over(times["together"]),
        "interval": [low, high],
        "sent_bytes": sent_bytes,
    }
    print(row, flush=True)
    return row


FLAGS = flags.FLAGS

if __name__ == "__main__":
    flags.DEFINE_integer("measurements", 15, "Measurements of each step.")
    flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
    app.run(main)
