"""Rows of output layers: the exact loss over a large vocabulary, and layers that avoid the full softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from output_step import OutputStep

from gpu_rows import peers
from gpu_rows.rows import Calls, Case, Context, Record, Row, Target, Work, compare, difference, interval
from hpnlp import measure
from hpnlp.ops.softmax import linear_cross_entropy

PEER = "torch compile of the naive loss"


def operands(tokens: int, vocab: int, dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """bfloat16 h [N, D] and w [V, D], whose scores are of order 1, and labels [N]."""
    keys = jax.random.split(jax.random.key(0), 3)
    h, w = (jax.random.normal(key, (n, dim), jnp.bfloat16) for key, n in zip(keys, (tokens, vocab), strict=False))
    return h, w / dim**0.5, jax.random.randint(keys[2], (tokens,), 0, vocab, jnp.int32)


def exact_case(seconds: float) -> Case:
    def run(context: Context) -> list[Record]:
        tokens, vocab, dim = (64, 1000, 32) if context.rehearse else (8192, 131072, 2048)
        inputs, calls, megabytes = operands(tokens, vocab, dim), Calls(), {}

        def ours() -> Any:
            program = measure.compile(jax.value_and_grad(linear_cross_entropy, (0, 1)), *inputs)
            megabytes["ours"] = program.memory.temp / 1e6
            return lambda: program(*inputs)

        def theirs() -> Any:
            call, temporaries = peers.naive_loss(context, *inputs)
            if not context.rehearse:
                megabytes[PEER] = temporaries
            return call

        result, expected = calls.add("ours", ours), calls.add(PEER, theirs)
        if result is not None and expected is not None:
            loss, *gradients = expected.arrays()
            sampled = [(x[::16], y[::16]) for x, y in zip(result[1], gradients, strict=True)]
            gap = difference((result[0], *(x for x, _ in sampled)), (loss, *(y for _, y in sampled)))
            if gap is None or gap > 0.1:  # of gradients whose logits were rounded to bfloat16
                calls.failed["ours"] = f"differs from {PEER} by {gap}"
                del calls.running["ours"]
        del result, expected
        work = Work(6 * tokens * vocab * dim, bytes=2 * sum(x.nbytes for x in inputs[:2]))
        record = compare(context, f"N {tokens}, V {vocab}, D {dim}", calls, work)
        record["megabytes"] = megabytes
        if PEER in megabytes and "ours" in megabytes:
            record["figures"][f"memory over {PEER}"] = interval([megabytes["ours"] / max(megabytes[PEER], 1e-6)])
        return [record]

    return Case("V 131072", seconds, run)


def layer_case(spec: str, rows: bool, seconds: float) -> Case:
    name = f"{spec}{' by rows' * rows}"

    def run(context: Context) -> list[Record]:
        shape = (64, 4096, 32) if context.rehearse else (8192, 262144, 1024)
        dtype, calls, megabytes = (jnp.float32 if context.rehearse else jnp.bfloat16), Calls(), {}
        for label, layer, by_rows in (("ours", spec, rows), ("exact loss", "full", False)):

            def make(layer: str = layer, by_rows: bool = by_rows, label: str = label) -> OutputStep:
                step = OutputStep(layer, *shape, dtype=dtype, rows=by_rows)
                megabytes[label] = step.program.memory.temp / 1e6
                return step

            calls.add(label, make)
        tokens, vocab, dim = shape
        return [compare(context, f"{name}, N {tokens}, V {vocab}, D {dim}", calls) | {"megabytes": megabytes}]

    return Case(name, seconds, run, rehearsed=rows)


EXACT = Row(
    "loss",
    "exact loss and its gradients, bfloat16, 8K tokens, V 128K, D 2048",
    PEER,
    {f"time over {PEER}": Target(0.8, 0.5), f"memory over {PEER}": Target(1 / 20, 1 / 100)},
    [exact_case(25)],
    checks=("exact loss",),
)
LAYERS = Row(
    "layers",
    "training step of output layers with Adam, bfloat16 activations, 8K tokens, V 262K, D 1024",
    "the exact loss",
    {"time over exact loss": Target(1 / 3, 1 / 10)},
    [
        layer_case(*case)
        for case in (("sampled(1024)", True, 15), ("adaptive", False, 20), ("sampled(1024)", False, 15))
    ],
    checks=("exact loss",),
)
