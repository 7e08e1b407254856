"""Measures exact attention against jax.nn, torch's SDPA and compiled FlexAttention, interleaved in one process.

    python experiments/bench/attention.py [--only=dense,flex,patterns,short,memory,plan,decode] [--rounds=5]

B 1, N 8, H 64, float32, by the public call `attend`; forward and backward unless the row is labelled forward. Before a
pattern is timed, its outputs and gradients are compared with the dense reference; if they differ, nothing is reported.
FlexAttention compiles only the forward pass for CPUs, so its rows are forward. The C library keeps freed memory, as in
training (`hpnlp.training.processes.allocator`), for the peers as well: otherwise page faults take 20 % of a dense call of
hpnlp.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.attention import (
    Causal,
    Dilated,
    Full,
    Global,
    Mask,
    Strided,
    Window,
    attend,
    bigbird,
    longformer,
    reference,
    sparse_transformer_fixed,
)  # fmt: skip
from hpnlp.ops.attention.block_sparse.block_mask import active_tiles, density
from hpnlp.ops.attention.block_sparse.schedule import make_schedule
from hpnlp.ops.attention.decoding.kv_cache import extend_cache, start_cache
from hpnlp.training.processes.allocator import keep_freed_memory

if TYPE_CHECKING:
    import torch  # not imported at run time here: the process whose peak memory is measured must not load torch

RESULTS = Path(__file__).parents[1] / "results"
HEADS, DIM = 8, 64
PATTERNS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda t: Causal(),
    "window +-256": lambda t: Window(256),
    "longformer, window +-256, 16 global": lambda t: longformer(512, 16),
    "bigbird, block 64, window 3, global 2, random 3": lambda t: bigbird(64, 3, 2, 3, among=t // 64),
    "causal strided, window 64, stride 64": lambda t: Causal() & (Window(64, 0) | Strided(64)),
    "Causal() & Dilated(63, 4)": lambda t: Causal() & Dilated(63, 4),
    "sparse transformer fixed, block 128, 8 columns": lambda t: sparse_transformer_fixed(128, 8),
}

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all.")
flags.DEFINE_integer("rounds", 5, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
flags.DEFINE_integer("peak_of", 0, "Internal: runs one window of this length and prints the process's peak memory.")


def arrays(length: int, batch: int = 1) -> list[jax.Array]:
    """Random q, k, v and a cotangent of o, each [batch, length, HEADS, DIM]."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((batch, length, HEADS, DIM), np.float32)) for _ in range(4)]


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """(q, k, v, cotangent of o) -> (o, gradients of q, k and v)."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(function, q, k, v)
        return o, pull(do)

    return run


def compiled_call(function: Callable[..., Any], operands: list[jax.Array]) -> Callable[[], Any]:
    """A call without arguments of the compiled function."""
    program = measure.compile(function, *operands)
    return lambda: program(*operands)


def attend_call(mask: Mask, operands: list[jax.Array]) -> Callable[[], Any]:
    """A call of `attend`, forward and backward."""
    return compiled_call(with_gradients(lambda q, k, v: attend(q, k, v, mask)), operands)


def jax_dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v)


def naive(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense attention as tutorials write it."""
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1]), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def torch_arrays(operands: list[jax.Array]) -> list[torch.Tensor]:
    """The arrays of `arrays` in torch's order [B, N, T, H]; q, k and v require gradients."""
    import torch

    tensors = [torch.from_numpy(np.array(x).transpose(0, 2, 1, 3).copy()) for x in operands]
    return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]


def torch_sdpa(operands: list[jax.Array]) -> Callable[[], Any]:
    """A call of torch's scaled_dot_product_attention, forward and backward."""
    import torch
    import torch.nn.functional as F

    q, k, v, do = torch_arrays(operands)

    def run() -> Any:
        o = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(o, (q, k, v), do)

    return run


def check(masks: dict[str, Mask], length: int = 1536) -> None:
    """Exits if the outputs or gradients of a pattern differ from those of the dense reference."""
    q, k, v, do = arrays(length)
    for name, mask in masks.items():
        results = [
            jax.jit(with_gradients(lambda *qkv, f=f, m=mask: f(*qkv, m)))(q, k, v, do) for f in (attend, reference)
        ]
        for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
            difference = float(jnp.max(jnp.abs(actual - expected)))
            if not difference < 2e-5:
                sys.exit(f"{name}: differs from the reference by {difference:.1e}: nothing is reported")


def row(label: str, times: dict[str, measure.Timing], ratios: dict[str, float], **fields: Any) -> dict[str, Any]:
    shown = ", ".join(f"{name} {1e3 * timing.median:.1f} ms" for name, timing in times.items())
    print(f"{label}: {', '.join(f'{name} {x:.3f}' for name, x in ratios.items())} ({shown})", flush=True)
    all_ms = {name: [1e3 * s for s in timing.all] for name, timing in times.items()}
    return {
        "what": label,
        "ratios": ratios,
        "ms": {n: 1e3 * t.median for n, t in times.items()},
        "all_ms": all_ms,
        **fields,
    }


def bench_dense(rounds: int) -> list[dict[str, Any]]:
    """Dense and window attention at T 4096 against both peers in the same rounds."""
    operands = arrays(4096)
    programs = {"ours": attend_call(Full(), operands), "window": attend_call(Window(256), operands)}
    programs |= {
        "jax.nn": compiled_call(with_gradients(jax_dense), operands),
        "torch SDPA": torch_sdpa(operands),
    }
    times = measure.timeit(programs, rounds=rounds)
    window = {f"over {peer} dense": times["window"].over(times[peer]) for peer in ("jax.nn", "torch SDPA")}
    dense = {f"over {peer}": times["ours"].over(times[peer]) for peer in ("jax.nn", "torch SDPA")}
    return [
        row("dense, T 4096", {name: times[name] for name in ("ours", "jax.nn", "torch SDPA")}, dense),
        row("window +-256, T 4096", {name: times[name] for name in ("window", "jax.nn", "torch SDPA")}, window),
    ]


def bench_flex(rounds: int) -> list[dict[str, Any]]:
    """The forward pass of window attention against compiled FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = []
    for length in (4096, 16384):
        operands = arrays(length)
        q, k, v, _ = (x.detach() for x in torch_arrays(operands))
        blocks = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 256, None, None, length, length, device="cpu")
        compiled = torch.compile(flex_attention)

        def flex(q=q, k=k, v=v, blocks=blocks, compiled=compiled) -> Any:
            with torch.no_grad():
                return compiled(q, k, v, block_mask=blocks)

        ours = compiled_call(lambda q, k, v: attend(q, k, v, Window(256)), operands[:3])
        difference = np.abs(np.asarray(ours()) - flex().transpose(1, 2).numpy()).max()
        if difference > 1e-5:
            sys.exit(f"FlexAttention differs by {difference:.1e}: nothing is reported")
        times = measure.timeit({"ours": ours, "FlexAttention": flex}, rounds=max(rounds, 7))
        ratios = {"over compiled FlexAttention": times["ours"].over(times["FlexAttention"])}
        rows.append(row(f"window +-256, forward, T {length}", times, ratios))
    return rows


def bench_patterns(rounds: int) -> list[dict[str, Any]]:
    """Each pattern relative to dense attention at T 4096; at T 16384 relative to 16 times the dense time at T 4096."""
    dense, short = attend_call(Full(), arrays(4096)), arrays(4096)
    programs = {name: attend_call(pattern(4096), short) for name, pattern in PATTERNS.items()}
    times = measure.timeit({"dense": dense} | programs, rounds=rounds)
    rows = []
    for name, pattern in PATTERNS.items():
        ratio = {"over our dense": times[name].over(times["dense"])}
        rows.append(row(f"{name}, T 4096", {name: times[name]}, ratio, density=density(pattern(4096), 4096)))
    operands = arrays(16384)
    for name, pattern in list(PATTERNS.items())[1:]:
        pair = measure.timeit({"dense": dense, "pattern": attend_call(pattern(16384), operands)}, rounds=rounds)
        ratio = {"over our dense by its square law": pair["pattern"].over(pair["dense"]) / 16}
        rows.append(row(f"{name}, T 16384", pair, ratio, density=density(pattern(16384), 16384)))
    return rows


def bench_short(rounds: int) -> list[dict[str, Any]]:
    """Batches of short sequences against the dense forms that users would write."""
    rows = []
    for length in (128, 256, 512):
        operands = arrays(length, 16)
        programs = {"ours": attend_call(Full(), operands)}
        programs["jax.nn"] = compiled_call(with_gradients(jax_dense), operands)
        programs["naive"] = compiled_call(with_gradients(naive), operands)
        times = measure.timeit(programs, rounds=max(rounds, 9))
        ratio = max(times["ours"].over(times[peer]) for peer in ("jax.nn", "naive"))
        rows.append(row(f"dense, T {length}, B 16", times, {"over the faster of jax.nn and naive": ratio}))
    return rows


def bench_memory(rounds: int) -> list[dict[str, Any]]:
    """Temporary memory of the compiled programs, and the peak memory of a process that runs a long window."""

    def temp(function: Callable[..., Any], length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
        return measure.compile(with_gradients(function), *[shape] * 4).memory.temp

    ours = {length: temp(lambda q, k, v: attend(q, k, v), length) for length in (4096, 16384)}
    theirs = temp(jax_dense, 4096)
    ratios = {"T 16384 over T 4096": ours[16384] / ours[4096], "T 4096 over jax.nn": ours[4096] / theirs}
    rows = [row("temporary memory, dense", {}, ratios, megabytes={str(t): m / 1e6 for t, m in ours.items()})]
    command = [sys.executable, __file__, "--peak_of=65536"]
    peaks = []
    for _ in range(rounds):  # peaks differ between processes, since the allocator may or may not reuse freed memory
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(int(output.split()[-1]) / 1e9)
    label = "window +-256, T 65536: peak memory of the process, median"
    return [*rows, row(label, {}, {"GB": statistics.median(peaks)}, all_gb=peaks)]


def bench_plan(rounds: int) -> list[dict[str, Any]]:
    """Time to make the block-sparse schedule of 2^20 tokens on the host."""
    mask, length = Causal() & (Window(256) | Global(16)), 1 << 20

    def make() -> Any:
        return make_schedule(active_tiles(mask, length, length, 128, 128), length, 128, 128, HEADS)

    timing = measure.timeit({"plan": make}, rounds=rounds)
    return [
        row(
            "block schedule of Causal() & (Window(256) | Global(16)), T 2^20",
            timing,
            {"seconds": timing["plan"].median},
        )
    ]


def bench_decode(rounds: int) -> list[dict[str, Any]]:
    """A decoding step with the cache of a window, early and late in a sequence."""
    mask, size = Causal() & Window(256, 0), 1 << 21
    q, k, v, _ = arrays(1)
    step = jax.jit(lambda q, k, v, cache: extend_cache(q, k, v, mask, cache), donate_argnums=3)
    empty = jax.jit(lambda k, v, n: start_cache(k, v, n, mask, size))(k, v, jnp.ones(1, jnp.int32))
    caches = {}
    for position in (10**3, 10**6):
        lengths = jnp.full((1,), position, jnp.int32)
        caches[position] = dataclasses.replace(jax.tree.map(jnp.copy, empty), lengths=lengths)

    def step_at(position: int) -> Any:
        o, caches[position] = step(q, k, v, caches[position])
        return o

    calls = {f"at {position}": functools.partial(step_at, position) for position in caches}
    times = measure.timeit(calls, rounds=max(rounds, 15), min_seconds=0.1)
    ratio = times["at 1000000"].over(times["at 1000"])
    megabytes = {"cache": (caches[10**6].k.nbytes + caches[10**6].v.nbytes) / 1e6}
    return [row("decode step, window 256, position 10^6", times, {"over position 10^3": ratio}, megabytes=megabytes)]


BENCHES = {
    "dense": bench_dense,
    "flex": bench_flex,
    "patterns": bench_patterns,
    "short": bench_short,
    "memory": bench_memory,
    "plan": bench_plan,
    "decode": bench_decode,
}


def print_peak(length: int) -> None:
    """Runs one window and prints the peak memory. The operands are constants, since drawing numbers takes memory."""
    operands = [jnp.full((1, length, HEADS, DIM), number, jnp.float32) for number in range(4)]
    jax.block_until_ready(attend_call(Window(256), operands)())
    print(measure.peak_memory_bytes())


def main(_: Any) -> None:
    keep_freed_memory()
    cli.prepare_jax()
    if FLAGS.peak_of:
        return print_peak(FLAGS.peak_of)
    import torch

    torch.set_num_threads(len(jax.devices()) * measure.environment()["cores"])
    check({"dense": Full(), **{name: mask(1536) for name, mask in PATTERNS.items()}})
    rows = [row for name in FLAGS.only or BENCHES for row in BENCHES[name](FLAGS.rounds)]
    rows = [{**row, "torch": torch.__version__} for row in rows]
    print(measure.write_result("attention", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
