"""Row of experts: their MLPs with sort and combination, over a dense MLP of equal active FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_rows.rows import Calls, Case, Context, Record, Row, Target, Work, compare
from hpnlp import measure
from hpnlp.ops import moe

PEER = "dense MLP"
K = 2  # experts of a token
IMPLS = ("pallas", "batched", "loops")
CAPACITY = 1.25  # of "batched", which otherwise computes every token by every expert


def expert_sums(x: jax.Array, logits: jax.Array, experts: Any, impl: str, capacity: float = 0.0) -> jax.Array:
    """Results of the experts of each token.

    Args:
      x: Tokens `[N, D]`.
      logits: Of the router, `[N, E]`.
      experts: "up", "gate" and "down".
      impl: As of `expert_mlp`.
      capacity: Factor of the capacity of an expert; 0 for none.

    Returns:
      `[N, D]`.
    """
    count = x.shape[0]
    routing = moe.route(logits, K, moe.Gates("softmax_k"), jnp.ones(count, bool))
    if capacity:
        counts = jnp.full(count, count)
        routing = moe.within_capacity(routing, None, counts, count, K, capacity, logits.shape[1])
    return moe.expert_mlp(x, routing, experts, jax.nn.silu, impl)


def dense_mlp(x: jax.Array, logits: jax.Array, matrices: Any) -> jax.Array:
    """A gated MLP; the logits are not used."""
    del logits
    return (jax.nn.silu(x @ matrices["gate"]) * (x @ matrices["up"])) @ matrices["down"]


def experts_case(experts: int, seconds: float) -> Case:
    """Forward and backward pass, with gradients of tokens, gates and matrices."""

    def run(context: Context) -> list[Record]:
        tokens, dim, columns = (32, 64, 64) if context.rehearse else (16384, 2048, 1024)
        draw = np.random.default_rng(0)

        def arrays(*shape: int) -> jax.Array:
            return jnp.asarray(draw.standard_normal(shape, np.float32) / shape[-2] ** 0.5, jnp.bfloat16)

        def matrices(shape: tuple[int, ...], width: int) -> dict[str, jax.Array]:
            up = (*shape, dim, width)
            return {"up": arrays(*up), "gate": arrays(*up), "down": arrays(*shape, width, dim)}

        x, dy = arrays(tokens, dim), arrays(tokens, dim)
        logits = jnp.asarray(draw.standard_normal((tokens, experts), np.float32))
        stacks, dense = matrices((experts,), columns), matrices((), K * columns)
        calls, megabytes = Calls(), {}

        def add(name: str, function: Callable[..., jax.Array], weights: Any) -> None:
            def call() -> Any:
                def step(x: jax.Array, logits: jax.Array, weights: Any, dy: jax.Array) -> Any:
                    y, pull = jax.vjp(function, x, logits, weights)
                    return y, pull(dy)

                program = measure.compile(step, x, logits, weights, dy)
                megabytes[name] = program.memory.temp / 1e6
                return lambda: program(x, logits, weights, dy)

            calls.add(name, call)

        add("ours", lambda *a: expert_sums(*a, "auto"), stacks)
        for impl in () if context.rehearse else IMPLS:
            label = f"ours, {impl}"
            if f"experts, {impl}" in context.differing:
                calls.failed[label] = "differs in the parity check"
                continue
            add(label, lambda *a, i=impl: expert_sums(*a, i, CAPACITY if i == "batched" else 0.0), stacks)
        add(PEER, dense_mlp, dense)
        work = Work(3 * 6 * tokens * K * dim * columns)
        record = compare(context, f"E {experts}, N {tokens}, D {dim}, F {columns}", calls, work)
        return [record | {"megabytes": megabytes}]

    return Case(f"E {experts}", seconds, run, rehearsed=experts == 8)


EXPERTS = Row(
    "experts",
    f"MLPs of experts with sort and combination, forward and backward, bfloat16, N 16384, D 2048, F 1024, k {K}",
    "a dense MLP of equal active FLOPs",
    {f"time over {PEER}": Target(1.4, 1.15)},
    [experts_case(8, 30), experts_case(64, 40)],
    checks=("experts, auto",),
)
