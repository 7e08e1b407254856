"""Measures the block-sparse attention kernels on one NVIDIA GPU against cuDNN, XLA and compiled FlexAttention.

    python experiments/bench/gpu_attention.py [--dense=4096,8192,16384] [--sparse=16384,32768,65536,131072] [--rounds=7]

bfloat16, head size 128; dense causal at B 4, N 16, and window, BigBird and random blocks at B 1, N 16. Forward, and forward
with all gradients, interleaved; medians are reported. FlexAttention is measured if torch has CUDA. Every implementation is
first compared with the dense reference, forward and gradients: one that differs is not timed, the result records it, and the
command exits with 1. Sparse times are reported with cuDNN's dense causal times of the same length; `ideal` is the fraction of
pairs that the mask allows, divided by that of the causal mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.ops.attention import Blockwise, Causal, Mask, Operands, RandomBlocks, Window, attend, bigbird, reference
from hpnlp.ops.attention.block_sparse.block_mask import active_tiles, density
from hpnlp.ops.attention.kernels.pallas_gpu import limits, pallas

RESULTS = Path(__file__).parents[1] / "results"
# Largest difference between two bfloat16 implementations; outputs and gradients are of order 1.
TOLERANCE = 6e-2
FAILED = 1e9  # stands for infinity, which JSON cannot represent
# Beyond this length, XLA's loop over tiles takes minutes.
MAX_XLA_LENGTH = 32768

FLAGS = flags.FLAGS
flags.DEFINE_list("dense", ["4096", "8192", "16384"], "Lengths of dense causal attention.")
flags.DEFINE_list("sparse", ["16384", "32768", "65536", "131072"], "Lengths of the sparse patterns.")
flags.DEFINE_integer("rounds", 7, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")

Call = Callable[..., Any]


def implementations() -> dict[str, Call]:
    """Name -> call(q, k, v, mask) -> o."""
    return {
        "auto": attend,
        "cudnn": functools.partial(attend, impl="cudnn"),
        "xla": functools.partial(attend, impl="xla"),
        "pallas": pallas,
    }


def patterns() -> dict[str, Mask]:
    """Causal masks of about 2000 keys per query, whose blocks fit the tiles of 128 of all implementations."""
    return {
        "window": Causal() & Window(2048),
        "bigbird": bigbird(128, window=7, global_blocks=2, random=7, causal=True),
        "random": Causal() & (RandomBlocks(128, 15, seed=1) | Blockwise(128)),
    }


def arrays(batch: int, length: int, heads: int, dim: int = 128, kv_heads: int | None = None) -> tuple[jax.Array, ...]:
    """q, k, v and the cotangent of o."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads or heads, kv_heads or heads, heads)
    return tuple(
        jax.random.normal(key, (batch, length, n, dim), jnp.bfloat16) for key, n in zip(keys, counts, strict=True)
    )


def with_gradients(call: Call, mask: Mask) -> Call:
    """(q, k, v, do) -> (o, dq, dk, dv), one program."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> Any:
        o, pull = jax.vjp(lambda q, k, v: call(q, k, v, mask), q, k, v)
        return o, *pull(do)

    return jax.jit(both)


def differences(call: Call) -> dict[str, float]:
    """Largest relative difference of o and the gradients from the dense reference, for each mask that `call` supports."""
    largest = {}
    for name, mask in {"causal": Causal(), **patterns()}.items():
        operands = arrays(1, 4096, 4, kv_heads=2)
        try:
            actual = jax.device_get(with_gradients(call, mask)(*operands))
        except ValueError:  # the implementation does not support this mask
            continue
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error)[:400]}", flush=True)
            largest[name] = FAILED
            continue
        expected = jax.device_get(with_gradients(reference, mask)(*operands))
        pairs = [(a.astype(np.float32), b.astype(np.float32)) for a, b in zip(actual, expected, strict=True)]
        gaps = [np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in pairs]
        largest[name] = float(max(gaps)) if all(np.isfinite(a).all() for a, _ in pairs) else FAILED
    return largest


def flex(mask: Mask, batch: int, length: int, heads: int) -> dict[str, Callable[[], Any]]:
    """Calls of compiled FlexAttention with the same mask, in blocks of 128; {} without torch on CUDA."""
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    torch._dynamo.reset()  # torch limits how often one function is recompiled
    blocks = torch.from_numpy(_active_blocks(mask, length)).cuda()
    left, _ = mask.band() or (None, None)

    def is_visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        # mask_mod cannot call numpy: the block pattern is an array, and bands, which cut through blocks, are written out.
        in_window = True if left is None else i - j <= left
        return blocks[i // 128, j // 128] & (j <= i) & in_window

    block_mask = create_block_mask(is_visible, None, None, length, length, device="cuda", BLOCK_SIZE=128, _compile=True)
    q, k, v, do = (
        torch.randn(batch, heads, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=i < 3)
        for i in range(4)
    )
    call = torch.compile(flex_attention)

    def forward() -> None:
        with torch.no_grad():
            call(q, k, v, block_mask=block_mask)
        torch.cuda.synchronize()

    def both() -> None:
        call(q, k, v, block_mask=block_mask).backward(do)
        q.grad = k.grad = v.grad = None
        torch.cuda.synchronize()

    return {"forward": forward, "both": both}


@functools.lru_cache
def cached_density(mask: Mask, length: int) -> float:
    """Fraction of all pairs that the mask allows."""
    return density(mask, length)


def _active_blocks(mask: Mask, length: int) -> np.ndarray:
    """bool [T / 128, T / 128]: blocks with an allowed pair."""
    tiles = active_tiles(mask, length, length, 128, 128)
    dense = np.zeros((-(-length // 128),) * 2, bool)
    dense[tiles.rows, tiles.columns] = True
    return dense


def bench(label: str, calls: dict[str, tuple[Call, Mask]], batch: int, length: int, heads: int, extra: Any) -> list:
    """A row for each implementation and direction; failures, such as exhausted memory, are recorded."""
    operands = arrays(batch, length, heads)
    functions: dict[tuple[str, str], Callable[[], Any]] = {}
    rows = []
    for name, (call, mask) in calls.items():
        programs = {
            "forward": (jax.jit(functools.partial(call, mask=mask)), operands[:3]),
            "both": (with_gradients(call, mask), operands),
        }
        for way, (program, inputs) in programs.items():
            try:
                jax.block_until_ready(program(*inputs))
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                rows.append({"bench": label, "impl": name, "way": way, "length": length, "failed": str(error)[:200]})
            else:
                functions[name, way] = functools.partial(program, *inputs)
    functions |= {("flex", way): function for way, function in extra.items()}
    times = measure.timeit({f"{a}/{b}": f for (a, b), f in functions.items()}, rounds=FLAGS.rounds, warmup=2)
    for name, way in functions:
        seconds = times[f"{name}/{way}"]
        mask = calls[name][1] if name in calls else next(iter(calls.values()))[1]
        density = cached_density(mask, length)
        flops = (4 if way == "forward" else 14) * batch * heads * length * length * density * 128
        row = {
            "bench": label, "impl": name, "way": way, "batch": batch, "heads": heads, "length": length,
            "density": density, "ideal": density / cached_density(Causal(), length), "ms": 1e3 * seconds.median,
            "tflops": flops / seconds.median / 1e12, "all_ms": [1e3 * s for s in seconds.all],
        }  # fmt: skip
        print(f"{label} T {length} {name}/{way}: {row['ms']:.2f} ms, {row['tflops']:.0f} TFLOP/s", flush=True)
        rows.append(row)
    return rows


def main(_: Any) -> None:
    cli.prepare_jax()
    small = arrays(1, 128, 1)[:3]
    if reasons := limits(*small, Causal(), Operands()):
        sys.exit(f"impl 'pallas' does not support {', '.join(reasons)}: run this on an NVIDIA Hopper GPU")
    gaps = {name: differences(call) for name, call in implementations().items()}
    agree = {name for name, by_mask in gaps.items() if by_mask and max(by_mask.values()) < TOLERANCE}
    for name, by_mask in gaps.items():
        print(
            f"{name} differs from the dense reference by {by_mask}", "" if name in agree else ": not timed", flush=True
        )
    calls = {name: call for name, call in implementations().items() if name in agree}
    rows = [
        {"bench": "parity", "impl": name, "apart": by_mask, "agrees": name in agree} for name, by_mask in gaps.items()
    ]
    for length in map(int, FLAGS.dense):
        rows += bench("causal", {name: (call, Causal()) for name, call in calls.items()}, 4, length, 16, {})
    for length in map(int, FLAGS.sparse):
        for label, mask in patterns().items():
            names = ("pallas", "xla") if length <= MAX_XLA_LENGTH else ("pallas",)
            sparse = {name: (calls[name], mask) for name in names if name in calls}
            dense = {"cudnn": (calls["cudnn"], Causal())} if "cudnn" in calls else {}
            rows += bench(label, sparse | dense, 1, length, 16, flex(mask, 1, length, 16))
    print(measure.write_result("gpu_attention", rows, FLAGS.out))
    if agree != set(gaps):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
