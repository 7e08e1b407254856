"""Measures recurrent layers against torch and flax: a training pass and a decoding step of two layers.

    python experiments/bench/recurrent.py [--rounds=7]

The training pass is the mean square of the outputs and its gradients by inputs and parameters, of two layers of one width, in
float32, without an embedding or an output layer. All functions of one shape are interleaved in one process. torch runs
`torch.nn.LSTM` and `torch.nn.GRU`, flax its cells under `nn.RNN`. torch comes last in each round, before a pause, because its
threads stay busy for a while after their work and slow what runs next. After the pause the first function runs once more than
the others, which is not counted, because cores and threads wake up slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.nn.rnn import RecurrentInputs
from hpnlp.nn.rnn_stack import RecurrentStack, StackConfig
from hpnlp.training.processes.allocator import keep_freed_memory

SHAPES = [(32, 128, 512), (8, 128, 128)]  # sequences, tokens, features
PAUSE = 0.2  # seconds after torch
# Name of a form of ours -> fields of its stack.
FORMS = {
    "lstm": {"cells": "lstm(H)*2"},
    "lstm_norm": {"cells": "lstm(H, norm=True)*2"},
    "lstm_zoneout": {"cells": "lstm(H)*2", "zoneout": 0.05, "zoneout_cell": 0.5},
    "lstm_weight_drop": {"cells": "lstm(H)*2", "weight_drop": 0.5},
    "gru": {"cells": "gru(H)*2"},
    "gru_original": {"cells": "gru(H, form=original)*2"},
    "qrnn": {"cells": "qrnn(H)*2"},
    "sru": {"cells": "sru(H)*2"},
}

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 7, "Measurements of each function.")
flags.DEFINE_list("forms", list(FORMS), "Entries of FORMS.")
flags.DEFINE_integer("threads", 2, "Threads of torch.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


class FlaxStack(nn.Module):
    """Two layers of flax's cells."""

    cell: Any
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        for _ in range(2):
            x = nn.RNN(self.cell(self.features))(x)
        return x


def square(y: Any) -> Any:
    return (y * y).mean()


def ours(form: str, x: jax.Array) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """`(training pass, decoding step of the first sequence)`."""
    batch, length, features = x.shape
    fields: dict[str, Any] = {**FORMS[form]}
    stack = RecurrentStack(StackConfig(**{**fields, "cells": fields["cells"].replace("H", str(features))}))
    params = nn.meta.unbox(stack.init(jax.random.key(0), x, RecurrentInputs()))
    ids = jnp.arange(batch * length, dtype=jnp.int32).reshape(batch, length)
    inputs, key = RecurrentInputs(ids=ids, deterministic=False), jax.random.key(1)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return square(stack.apply(params, x, inputs, rngs={"dropout": key})[0])

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    decode = jax.jit(lambda params, x, states: stack.apply(params, x, RecurrentInputs(), states)[:2])
    token = x[:1, :1]
    _, states = jax.jit(lambda params, x: stack.apply(params, x, RecurrentInputs())[:2])(params, token)
    return lambda: step(params, x, key), lambda: decode(params, token, states)


def flax_cells(cell: Any, x: jax.Array) -> Callable[[], Any]:
    """The training pass of flax's cells."""
    stack = FlaxStack(cell, x.shape[-1])
    params = stack.init(jax.random.key(0), x)
    step = jax.jit(jax.value_and_grad(lambda params, x: square(stack.apply(params, x)), (0, 1)))
    return lambda: step(params, x)


def of_torch(name: str, x: jax.Array) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """`(training pass, decoding step)` of torch."""
    layer = getattr(torch.nn, name)(x.shape[-1], x.shape[-1], num_layers=2, batch_first=True)
    values = torch.from_numpy(np.array(x)).requires_grad_(True)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        values.grad = None
        square(layer(values)[0]).backward()

    with torch.no_grad():
        token = values[:1, :1].clone()
        state = layer(token)[1]

    def decode() -> None:
        with torch.no_grad():
            layer(token, state)

    return step, decode


def rows_of(batch: int, length: int, features: int) -> list[dict[str, Any]]:
    """Rows of all functions of one shape."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, length, features)), jnp.float32)
    steps: dict[str, Callable[[], Any]] = {}
    decodes: dict[str, Callable[[], Any]] = {}
    for form in FLAGS.forms:
        steps[form], decodes[form] = ours(form, x)
    cells = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}
    peers = [form for form in cells if form in FLAGS.forms]
    for form in peers:
        steps[f"flax_{form}"] = flax_cells(cells[form], x)
    for form in peers:
        steps[f"torch_{form}"], decodes[f"torch_{form}"] = of_torch(form.upper(), x)
    shape = {"batch": batch, "length": length, "features": features}
    rows = []
    for part, functions in (("training", steps), ("decoding", decodes)):
        first = next(iter(functions.values()))
        times = measure.timeit({"first": first, **functions, "pause": lambda: time.sleep(PAUSE)}, rounds=FLAGS.rounds)
        del times["first"], times["pause"]
        for name, t in times.items():
            others = {peer: f"{peer}_{name}" for peer in ("torch", "flax")} | {"ours": "lstm"}
            ratios = {f"over_{peer}": t.over(times[other]) for peer, other in others.items() if other in times}
            rows.append({"part": part, **shape, "function": name, "seconds": t.median, "least": min(t.all), **ratios})
    return rows


def main(_: list[str]) -> None:
    cli.prepare_jax()
    keep_freed_memory()
    torch.set_num_threads(FLAGS.threads)
    rows = [row for shape in SHAPES for row in rows_of(*shape)]
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("recurrent", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
