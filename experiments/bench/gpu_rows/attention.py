"""Rows of exact attention: dense causal, and block-sparse patterns over long sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gpu_rows import peers
from gpu_rows.rows import TOLERANCES, Calls, Case, Context, Record, Row, Target, Work, compare, difference
from hpnlp import measure
from hpnlp.ops.attention import Blockwise, Causal, Mask, Operands, RandomBlocks, Window, attend, bigbird
from hpnlp.ops.attention.block_sparse.block_mask import density
from hpnlp.ops.attention.dispatch import resolve

Call = Callable[..., Any]

WAYS = {"forward": False, "forward and gradients": True}
# Beyond this length, the loop of "xla" over tiles takes minutes.
MAX_XLA_LENGTH = 32768
PEERS = {"dense": "torch SDPA", "sparse": "FlexAttention"}


def patterns(block: int) -> dict[str, Mask]:
    """Causal masks of about 16 blocks of keys per query."""
    return {
        "window": Causal() & Window(16 * block),
        "BigBird": bigbird(block, window=7, global_blocks=2, random=7, causal=True),
        "random blocks": Causal() & (RandomBlocks(block, 15, seed=1) | Blockwise(block)),
    }


def random_operands(batch: int, length: int, heads: int, dim: int) -> tuple[jax.Array, ...]:
    """bfloat16 q, k, v and the cotangent of o, each [B, T, N, H]."""
    keys = jax.random.split(jax.random.key(0), 4)
    return tuple(jax.random.normal(key, (batch, length, heads, dim), jnp.bfloat16) for key in keys)


def program(impl: str, mask: Mask, gradients: bool, operands: tuple[jax.Array, ...]) -> Callable[[], Any]:
    """A call of `attend` that returns (o,), or (o, dq, dk, dv)."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, mask, impl=impl)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(forward, q, k, v)
        return o, *pull(do)

    inputs = operands if gradients else operands[:3]
    run = measure.compile(both if gradients else lambda *x: (forward(*x),), *inputs)
    return lambda: run(*inputs)


@functools.lru_cache
def cached_density(mask: Mask, length: int) -> float:
    """Fraction of all pairs that the mask allows."""
    return density(mask, length)


def attention_work(operands: tuple[jax.Array, ...], mask: Mask, gradients: bool) -> Work:
    """Two products of each allowed pair forward, and five more, one of them a second time, for the gradients."""
    batch, length, heads, dim = operands[0].shape
    pairs = batch * heads * length**2 * cached_density(mask, length)
    return Work((14 if gradients else 4) * pairs * dim, bytes=(8 if gradients else 4) * operands[0].nbytes)


def record(
    context: Context, what: str, impls: dict[str, tuple[str, Mask]], operands: tuple[jax.Array, ...], mask: Mask,
    gradients: bool, peer: tuple[str, Call],
) -> Record:  # fmt: skip
    """Compares implementations of ours and a peer. impls: name -> (impl, mask); a result that differs is not timed."""
    calls, results = Calls(), {}
    for name, (impl, its_mask) in impls.items():
        if f"attention, {impl}" in context.differing:
            calls.failed[name] = "differs in the parity check"
        else:
            results[name] = calls.add(name, lambda i=impl, m=its_mask: program(i, m, gradients, operands))
    name, make = peer
    their_result = calls.add(name, make)
    # Each tenth query is enough to see a wrong mask.
    samples = {n: [x[:, ::10] for x in r] for n, r in results.items() if r is not None and impls[n][1] == mask}
    if their_result is not None:
        theirs = [x.swapaxes(1, 2)[:, ::10] for x in their_result.arrays()]
        for n, ours in samples.items():
            gap = difference(ours, theirs)
            if gap is None or gap > TOLERANCES["bfloat16"]:
                calls.failed[n] = f"differs from {name} by {gap}"
                calls.running.pop(n)
    del results, samples, their_result
    works = {n: attention_work(operands, m, gradients) for n, (_, m) in impls.items()}
    return compare(context, what, calls, works | {name: attention_work(operands, mask, gradients)})


def dense_case(length: int, seconds: float) -> Case:
    def run(context: Context) -> list[Record]:
        size = (1, 64, 2, 64) if context.rehearse else (4, length, 16, 128)
        operands = random_operands(*size)
        impls = {"ours": ("auto", Causal())}
        if not context.rehearse:
            impls["ours, pallas"] = ("pallas", Causal())
        return [
            record(
                context, f"T {size[1]}, {way}", impls, operands, Causal(), gradients,
                (PEERS["dense"], functools.partial(peers.causal_attention, context, operands, gradients)),
            )
            for way, gradients in WAYS.items()
        ]  # fmt: skip

    return Case(f"T {length}", seconds, run, rehearsed=length == 4096)


def sparse_case(name: str, length: int, seconds: float) -> Case:
    def run(context: Context) -> list[Record]:
        block = 16 if context.rehearse else 128
        size = (1, 20 * block, 2, 64) if context.rehearse else (1, length, 16, 128)
        mask, operands = patterns(block)[name], random_operands(*size)
        impl = resolve("auto", None, *operands[:3], mask, Operands())
        impls = {} if impl == "xla" and length > MAX_XLA_LENGTH else {"ours": ("auto", mask)}
        if not context.rehearse:
            impls |= {"ours, pallas": ("pallas", mask), "dense causal": ("auto", Causal())}
        # Kernels of a pattern take up to a minute to compile: those of the forward pass alone are not compiled as well.
        theirs = functools.partial(peers.flex_attention, context, operands, True, mask, block)
        what = f"{name}, T {size[1]}, forward and gradients"
        return [record(context, what, impls, operands, mask, True, (PEERS["sparse"], theirs))]

    return Case(
        f"{name}, T {length}", seconds, run, later=length > 16384, rehearsed=(name, length) == ("random blocks", 16384)
    )


DENSE = Row(
    "dense",
    "dense causal attention, bfloat16, B 4, N 16, H 128",
    "cuDNN through torch SDPA",
    {f"time over {PEERS['dense']}": Target(1.25, 1.05)},
    [dense_case(length, 15) for length in (4096, 8192, 16384)],
    checks=("attention",),
)
SPARSE = Row(
    "sparse",
    "window of 2048, BigBird, random blocks, causal, bfloat16, B 1, N 16, H 128",
    "compiled FlexAttention",
    {f"time over {PEERS['sparse']}": Target(0.9, 0.7)},
    [
        sparse_case(name, length, seconds)
        for length in (16384, 131072, 65536, 32768)
        for name, seconds in zip(patterns(128), (25, 35, 60), strict=True)
    ],
    checks=("attention",),
)
