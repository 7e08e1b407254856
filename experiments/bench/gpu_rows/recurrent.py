"""Row of the LSTM: a training pass of two layers against torch."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows import peers
from gpu_rows.rows import TOLERANCES, Calls, Case, Context, Record, Row, Target, Work, compare, difference
from hpnlp import measure
from hpnlp.nn.rnn import RecurrentInputs
from hpnlp.nn.rnn_stack import RecurrentStack, StackConfig

PEER = "torch LSTM"


def run_lstm(context: Context) -> list[Record]:
    """Mean square of the outputs with the gradients of inputs and weights, in float32 with products of TF32 on both sides."""
    batch, length, features = (2, 8, 16) if context.rehearse else (64, 256, 1024)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, length, features)), jnp.float32)
    impls = {"ours": "xla"} if context.rehearse else {"ours": "cudnn", "ours, xla": "xla"}
    if "LSTM, cudnn" in context.differing:
        impls = {"ours": "xla"}
    calls, results, weights = Calls(), {}, []
    for name, impl in impls.items():
        stack = RecurrentStack(StackConfig(cells=f"lstm({features})*2", impl=impl))
        params = nn.meta.unbox(stack.init(jax.random.key(0), x[:, :1], RecurrentInputs()))
        weights = [params["params"][key] for key in sorted(params["params"])]

        def loss(params: Any, x: jax.Array, stack: RecurrentStack = stack) -> jax.Array:
            return jnp.square(stack.apply(params, x, RecurrentInputs())[0]).mean()

        def make(loss: Any = loss, params: Any = params) -> Any:
            program = measure.compile(jax.value_and_grad(loss, (0, 1)), params, x)
            return lambda: program(params, x)

        results[name] = calls.add(name, make)
    layers = [tuple(layer[name] for name in ("kernel", "recurrent", "bias")) for layer in weights]
    expected = calls.add(PEER, lambda: peers.lstm(context, x, layers))
    if expected is not None:
        loss, dx = expected.arrays()[:2]
        for name, result in results.items():
            gap = None if result is None else difference((result[0], result[1][1]), (loss, dx))
            if result is not None and (gap is None or gap > TOLERANCES["float32"]):
                calls.failed[name] = f"differs from {PEER} by {gap}"
                del calls.running[name]
    work = Work(3 * 2 * 2 * batch * length * 8 * features**2, "float32")
    return [compare(context, f"2 x {features}, B {batch}, T {length}", calls, work)]


LSTM = Row(
    "lstm",
    "LSTM 2 x 1024, B 64, T 256, forward and backward, float32",
    "cuDNN through torch",
    {f"time over {PEER}": Target(1.1, 1.0)},
    [Case("2 x 1024", 25, run_lstm)],
    checks=("LSTM",),
)
