"""Exact attention beside jax.nn, torch's SDPA and compiled FlexAttention, one process, interleaved.

    python experiments/bench/attention.py [--only=dense,flex,patterns,short,memory,plan,decode] [--rounds=5]

B 1, N 8, H 64, float32, through `attend` as anybody calls it; forward and backward unless a row says otherwise. Before a
pattern is timed, its outputs and gradients are held against the dense reference; what differs is not reported.
FlexAttention compiles for the CPU forward only; its rows are forward. The C library keeps freed memory, as it does in
training (`hpnlp.training.allocator`), for the peers as well: without that a fifth of a dense call of ours is page faults.
"""

from __future__ import annotations

import dataclasses
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
from hpnlp.training.allocator import keep_freed_memory

if TYPE_CHECKING:
    import torch  # imported where it runs: the process whose memory is measured does without

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
flags.DEFINE_list("only", [], "Which of the benchmarks; all where empty.")
flags.DEFINE_integer("rounds", 5, "Measurements of each; the median counts.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
flags.DEFINE_integer("peak_of", 0, "Internal: runs one window of this length and prints the process's peak memory.")


def arrays(length: int, batch: int = 1) -> list[jax.Array]:
    """q, k, v and a cotangent of o."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((batch, length, HEADS, DIM), np.float32)) for _ in range(4)]


def both(function: Callable[..., Any]) -> Callable[..., Any]:
    """Output and gradients for a given cotangent."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(function, q, k, v)
        return o, pull(do)

    return run


def ready(function: Callable[..., Any], given: list[jax.Array], count: int) -> Callable[[], Any]:
    program = measure.compile(function, *given[:count])
    return lambda: program(*given[:count])


def ours(mask: Mask, given: list[jax.Array]) -> Callable[[], Any]:
    return ready(both(lambda q, k, v: attend(q, k, v, mask)), given, 4)


def dense_of_jax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v)


def naive(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """As a tutorial writes it."""
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1]), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def torch_arrays(given: list[jax.Array]) -> list[torch.Tensor]:
    import torch

    turned = [torch.from_numpy(np.array(x).transpose(0, 2, 1, 3).copy()) for x in given]
    return [x.requires_grad_(i < 3) for i, x in enumerate(turned)]


def torch_both(given: list[jax.Array]) -> Callable[[], Any]:
    import torch
    import torch.nn.functional as F

    q, k, v, do = torch_arrays(given)

    def run() -> Any:
        o = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(o, (q, k, v), do)

    return run


def check(masks: dict[str, Mask], length: int = 1536) -> None:
    """Exits where a pattern's outputs or gradients differ from the dense reference's."""
    q, k, v, do = arrays(length)
    for name, mask in masks.items():
        pairs = [jax.jit(both(lambda *a, f=f, m=mask: f(*a, m)))(q, k, v, do) for f in (attend, reference)]
        for mine, twin in zip(*map(jax.tree.leaves, pairs), strict=True):
            worst = float(jnp.max(jnp.abs(mine - twin)))
            if not worst < 2e-5:
                sys.exit(f"{name}: differs from the reference by {worst:.1e}: nothing is reported")


def row(what: str, times: dict[str, measure.Timing], ratios: dict[str, float], **more: Any) -> dict[str, Any]:
    shown = ", ".join(f"{name} {1e3 * timing.median:.1f} ms" for name, timing in times.items())
    print(f"{what}: {', '.join(f'{name} {x:.3f}' for name, x in ratios.items())} ({shown})", flush=True)
    all_ms = {name: [1e3 * s for s in timing.all] for name, timing in times.items()}
    return {
        "what": what,
        "ratios": ratios,
        "ms": {n: 1e3 * t.median for n, t in times.items()},
        "all_ms": all_ms,
        **more,
    }


def bench_dense(rounds: int) -> list[dict[str, Any]]:
    """Dense and window at T 4096 with the peers, which run in the same rounds."""
    given = arrays(4096)
    programs = {"ours": ours(Full(), given), "window": ours(Window(256), given)}
    programs |= {"jax.nn": ready(both(dense_of_jax), given, 4), "torch SDPA": torch_both(given)}
    times = measure.timeit(programs, rounds=rounds)
    window = {f"over {peer} dense": times["window"].over(times[peer]) for peer in ("jax.nn", "torch SDPA")}
    dense = {f"over {peer}": times["ours"].over(times[peer]) for peer in ("jax.nn", "torch SDPA")}
    pick = lambda *names: {name: times[name] for name in names}  # noqa: E731
    return [
        row("dense, T 4096", pick("ours", "jax.nn", "torch SDPA"), dense),
        row("window +-256, T 4096", pick("window", "jax.nn", "torch SDPA"), window),
    ]


def bench_flex(rounds: int) -> list[dict[str, Any]]:
    """The window's forward pass beside compiled FlexAttention."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = []
    for length in (4096, 16384):
        given = arrays(length)
        q, k, v, _ = (x.detach() for x in torch_arrays(given))
        blocks = create_block_mask(lambda b, h, i, j: (i - j).abs() <= 256, None, None, length, length, device="cpu")
        compiled = torch.compile(flex_attention)

        def flex(q=q, k=k, v=v, blocks=blocks, compiled=compiled) -> Any:
            with torch.no_grad():
                return compiled(q, k, v, block_mask=blocks)

        mine = ready(lambda q, k, v: attend(q, k, v, Window(256)), given, 3)
        worst = np.abs(np.asarray(mine()) - flex().transpose(1, 2).numpy()).max()
        if worst > 1e-5:
            sys.exit(f"FlexAttention differs by {worst:.1e}: nothing is reported")
        times = measure.timeit({"ours": mine, "FlexAttention": flex}, rounds=max(rounds, 7))
        ratios = {"over compiled FlexAttention": times["ours"].over(times["FlexAttention"])}
        rows.append(row(f"window +-256, forward, T {length}", times, ratios))
    return rows


def bench_patterns(rounds: int) -> list[dict[str, Any]]:
    """Each pattern beside our own dense at T 4096; at T 16384 beside 16 times that."""
    dense, short = ours(Full(), arrays(4096)), arrays(4096)
    times = measure.timeit({"dense": dense} | {n: ours(m(4096), short) for n, m in PATTERNS.items()}, rounds=rounds)
    share = lambda name, t: density(PATTERNS[name](t), t)  # noqa: E731
    rows = [
        row(f"{n}, T 4096", {n: times[n]}, {"over our dense": times[n].over(times["dense"])}, density=share(n, 4096))
        for n in PATTERNS
    ]
    given = arrays(16384)
    for name in list(PATTERNS)[1:]:
        pair = measure.timeit({"dense": dense, "pattern": ours(PATTERNS[name](16384), given)}, rounds=rounds)
        ratio = {"over our dense by its square law": pair["pattern"].over(pair["dense"]) / 16}
        rows.append(row(f"{name}, T 16384", pair, ratio, density=share(name, 16384)))
    return rows


def bench_short(rounds: int) -> list[dict[str, Any]]:
    """Short sequences of a batch beside the dense forms that users would write."""
    rows = []
    for length in (128, 256, 512):
        given = arrays(length, 16)
        programs = {"ours": ours(Full(), given), "jax.nn": ready(both(dense_of_jax), given, 4)}
        times = measure.timeit(programs | {"naive": ready(both(naive), given, 4)}, rounds=max(rounds, 9))
        ratio = max(times["ours"].over(times[peer]) for peer in ("jax.nn", "naive"))
        rows.append(row(f"dense, T {length}, B 16", times, {"over the faster of jax.nn and naive": ratio}))
    return rows


def bench_memory(rounds: int) -> list[dict[str, Any]]:
    """Temporary bytes of the compiled programs; and what a process that runs a long window holds at most."""

    def temp(function: Callable[..., Any], length: int) -> int:
        shape = jax.ShapeDtypeStruct((1, length, HEADS, DIM), jnp.float32)
        return measure.compile(both(function), *[shape] * 4).memory.temp

    mine = {length: temp(lambda q, k, v: attend(q, k, v), length) for length in (4096, 16384)}
    theirs = temp(dense_of_jax, 4096)
    ratios = {"T 16384 over T 4096": mine[16384] / mine[4096], "T 4096 over jax.nn": mine[4096] / theirs}
    rows = [row("temporary memory, dense", {}, ratios, megabytes={str(t): m / 1e6 for t, m in mine.items()})]
    command = [sys.executable, __file__, "--peak_of=65536"]
    run = lambda: subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]  # noqa: E731
    peaks = [int(run()) / 1e9 for _ in range(rounds)]  # they differ, as memory that was freed is met again or not
    what = "window +-256, T 65536: peak memory of the process, median"
    return [*rows, row(what, {}, {"GB": statistics.median(peaks)}, all_gb=peaks)]


def bench_plan(rounds: int) -> list[dict[str, Any]]:
    """The block plan of a million tokens, on the host."""
    mask, length = Causal() & (Window(256) | Global(16)), 1 << 20
    make = lambda: make_schedule(active_tiles(mask, length, length, 128, 128), length, 128, 128, HEADS)  # noqa: E731
    timing = measure.timeit({"plan": make}, rounds=rounds)
    return [
        row("block plan of Causal() & (Window(256) | Global(16)), T 2^20", timing, {"seconds": timing["plan"].median})
    ]


def bench_decode(rounds: int) -> list[dict[str, Any]]:
    """A step of decoding with a window's cache, early and late in a sequence."""
    mask, size = Causal() & Window(256, 0), 1 << 21
    q, k, v, _ = arrays(1)
    step = jax.jit(lambda q, k, v, cache: extend_cache(q, k, v, mask, cache), donate_argnums=3)
    empty = jax.jit(lambda k, v, n: start_cache(k, v, n, mask, size))(k, v, jnp.ones(1, jnp.int32))
    held = {}
    for place in (10**3, 10**6):
        held[place] = dataclasses.replace(jax.tree.map(jnp.copy, empty), lengths=jnp.full((1,), place, jnp.int32))

    def at(place: int) -> Any:
        o, held[place] = step(q, k, v, held[place])
        return o

    times = measure.timeit({f"at {p}": lambda p=p: at(p) for p in held}, rounds=max(rounds, 15), min_seconds=0.1)
    ratio = times["at 1000000"].over(times["at 1000"])
    megabytes = {"cache": (held[10**6].k.nbytes + held[10**6].v.nbytes) / 1e6}
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


def peak_of(length: int) -> None:
    """Of constants: drawing numbers would take memory of its own."""
    given = [jnp.full((1, length, HEADS, DIM), number, jnp.float32) for number in range(4)]
    jax.block_until_ready(ours(Window(256), given)())
    print(measure.peak_memory_bytes())


def main(_: Any) -> None:
    keep_freed_memory()
    cli.prepare_jax()
    if FLAGS.peak_of:
        return peak_of(FLAGS.peak_of)
    import torch

    torch.set_num_threads(len(jax.devices()) * measure.environment()["cores"])
    check({"dense": Full(), **{name: mask(1536) for name, mask in PATTERNS.items()}})
    rows = [row for name in FLAGS.only or BENCHES for row in BENCHES[name](FLAGS.rounds)]
    rows = [{**row, "torch": torch.__version__} for row in rows]
    print(measure.write_result("attention", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
