"""Measures the exact loss over a large vocabulary against naive JAX and torch, and a step of every output layer.

    python experiments/bench/softmax.py [--only=exact,large,kept,bfloat16,layers] [--rounds=5]

N 4096, D 512, float32, gradients with respect to h and w; the public call `linear_cross_entropy`, labels by Zipf's law,
programs interleaved. Losses and gradients are first compared with float64; if they differ, nothing is reported. By default, a
process returns freed memory to the system; training keeps it (`hpnlp.training.processes.allocator`), which saves most for
programs with large temporaries, above all naive JAX. "kept" is the same comparison with freed memory kept, in a separate
process.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from output_step import OutputStep, output_arrays

from hpnlp import cli, measure
from hpnlp.ops.softmax import linear_cross_entropy
from hpnlp.training.processes.allocator import keep_freed_memory

RESULTS = Path(__file__).parents[1] / "results"
TOKENS, DIM = 4096, 512
LAYERS = (
    "sampled(1024)", "importance(1024)", "nce(1024)", "negative_sampling(1024)", "adaptive", "class", "hierarchical(balanced)",
    "hierarchical(huffman)", "binary", "binary_hybrid(2048)", "binary_ecc(2048)", "margin(8,1024)", "vmf",
)  # fmt: skip
BY_ROWS = (
    "sampled(1024)", "importance(1024)", "nce(1024)", "negative_sampling(1024)", "hierarchical(huffman)", "margin(8,1024)",
    "vmf",
)  # fmt: skip

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all.")
flags.DEFINE_integer("rounds", 5, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
flags.DEFINE_bool("keep", False, "Internal: keeps freed memory, and prints the rows instead of writing them.")


def arrays(vocab: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """h [TOKENS, DIM] and w [vocab, DIM], whose scores are of order 1, and labels [TOKENS]."""
    return output_arrays(TOKENS, vocab, DIM, dtype)


def naive(h: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(h @ w.T, labels).mean()


def compiled(loss: Callable[..., Any], *operands: jax.Array) -> tuple[Callable[[], Any], int]:
    """A call of the loss with its gradients of h and w, and its temporary bytes."""
    program = measure.compile(jax.value_and_grad(loss, (0, 1)), *operands)
    return lambda: program(*operands), program.memory.temp


def in_float64(h: np.ndarray, w: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The mean loss and its gradients, chunk by chunk over the tokens."""
    h, w = (np.asarray(x, np.float64) for x in (h, w))
    total, dh, dw = 0.0, np.zeros_like(h), np.zeros_like(w)
    for at in np.array_split(np.arange(len(h)), max(len(h) * len(w) // 2**25, 1)):
        s = h[at] @ w.T
        top = s.max(axis=1, keepdims=True)
        lse = top + np.log(np.exp(s - top).sum(axis=1, keepdims=True))
        total += (lse[:, 0] - s[np.arange(len(at)), labels[at]]).sum()
        ds = np.exp(s - lse)
        ds[np.arange(len(at)), labels[at]] -= 1
        dh[at] = ds @ w / len(h)
        dw += ds.T @ h[at] / len(h)
    return total / len(h), dh, dw


def check() -> None:
    """Exits unless every form of the loss is exact, also with block sizes that do not divide the operands."""
    h, w, labels = arrays(1009)
    for impl, size in (("auto", None), ("tokens", 1000), ("vocabulary", 128)):
        loss = functools.partial(linear_cross_entropy, impl=impl, block_size=size)
        loss, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(h, w, labels)
        expected = in_float64(h, w, np.asarray(labels))
        for actual, exact in zip((loss, *grads), expected, strict=True):
            error = float(np.max(np.abs(np.asarray(actual) - exact)) / np.max(np.abs(exact)))
            if not error < 5e-6:
                sys.exit(
                    f"impl={impl!r} with block_size={size} differs from float64 by {error:.1e}: nothing is reported"
                )


def row(label: str, times: dict[str, measure.Timing], ratios: dict[str, float], **fields: Any) -> dict[str, Any]:
    shown = ", ".join(f"{name} {timing.median:.3f} s" for name, timing in times.items())
    print(f"{label}: {', '.join(f'{name} {x:.4g}' for name, x in ratios.items())} ({shown})", flush=True)
    seconds = {name: list(timing.all) for name, timing in times.items()}
    return {"what": label, "ratios": ratios, "s": {n: t.median for n, t in times.items()}, "all_s": seconds, **fields}


def compare(label: str, vocab: int, rounds: int, peers: bool) -> dict[str, Any]:
    operands = arrays(vocab)
    programs = {"ours": compiled(linear_cross_entropy, *operands), "naive": compiled(naive, *operands)}
    calls = {name: call for name, (call, _) in programs.items()}
    if peers:
        calls["torch"] = torch_call(*operands)
    times = measure.timeit(calls, rounds=rounds)
    temp = {name: bytes_ for name, (_, bytes_) in programs.items()}
    ratios = {f"time over {name}": times["ours"].over(times[name]) for name in calls if name != "ours"}
    ratios["temporary memory over naive"] = temp["ours"] / temp["naive"]
    return row(label, times, ratios, megabytes={name: x / 1e6 for name, x in temp.items()})


def torch_call(h: jax.Array, w: jax.Array, labels: jax.Array) -> Callable[[], Any]:
    """A call of torch's chunked linear_cross_entropy. Exits unless its loss equals that of hpnlp."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(measure.environment()["cores"])
    states, table = (torch.from_numpy(np.array(x)).requires_grad_() for x in (h, w))
    numbers = torch.from_numpy(np.array(labels)).long()
    options = torch.nn.LinearCrossEntropyOptions()

    def call() -> Any:
        loss = F.linear_cross_entropy(states, table, numbers, options=options)
        return loss, torch.autograd.grad(loss, (states, table))

    theirs, ours = float(call()[0].detach()), float(jax.jit(linear_cross_entropy)(h, w, labels))
    if abs(theirs - ours) > 1e-4:
        sys.exit(f"the loss of torch is {theirs}, that of hpnlp {ours}: nothing is reported")
    return call


def bench_exact(rounds: int) -> list[dict[str, Any]]:
    label = "exact, V 50,000" + (", freed memory kept" if FLAGS.keep else "")
    return [compare(label, 50_000, rounds, peers=not FLAGS.keep)]


def bench_large(rounds: int) -> list[dict[str, Any]]:
    return [compare("exact, V 262,144", 262_144, min(rounds, 3), peers=False)]  # a call takes half a minute


def bench_kept(rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--only=exact", "--keep", f"--rounds={rounds}"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    for kept in rows:
        print(f"{kept['what']}: {kept['ratios']}", flush=True)
    return rows


def bench_bfloat16(rounds: int) -> list[dict[str, Any]]:
    """Error of float32 sums of bfloat16 products against float64 sums of the same numbers."""
    operands = arrays(131_072, jnp.bfloat16)
    loss, grads = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))(*operands)
    exact, dh, dw = in_float64(*(np.asarray(x, np.float32) for x in operands[:2]), np.asarray(operands[2]))
    ratios = {"absolute error of the mean loss": abs(float(loss) - exact)}
    for name, actual, expected in (("dh", grads[0], dh), ("dw", grads[1], dw)):
        error = np.linalg.norm(np.asarray(actual, np.float64) - expected)
        ratios[f"relative error of {name}"] = float(error / np.linalg.norm(expected))
    return [row("exact, bfloat16, V 131,072", {}, ratios)]


def bench_layers(rounds: int) -> list[dict[str, Any]]:
    """A step of each output layer, with Adam for its parameters and the gradient of h, relative to the full softmax.

    "by rows": the optimizer updates only the rows of the table that the step looks up, as with `optimizer.rows=True`. The full
    step of the larger vocabulary takes half a minute and is measured separately, before the others, which take less than 1/10.
    """
    results = []
    for vocab in (50_000, 262_144):
        full = OutputStep("full", TOKENS, vocab, DIM)
        memory = full.program.memory.temp
        alone = measure.timeit({"full": full}, rounds=2) if vocab > 2**17 else {}
        if alone:
            full = None  # frees 1.6 GB of the table and its Adam moments
        for spec, rows in [*((spec, False) for spec in LAYERS), *((spec, True) for spec in BY_ROWS)]:
            call = OutputStep(spec, TOKENS, vocab, DIM, rows=rows)
            if alone:
                times = {**measure.timeit({spec: call}, rounds=rounds), **alone}
                ratio = times[spec].median / times["full"].median
            else:
                times = measure.timeit({spec: call, "full": full}, rounds=rounds)
                ratio = times[spec].over(times["full"])
            megabytes = {spec: call.program.memory.temp / 1e6, "full": memory / 1e6}
            label = f"step of {spec}{' by rows' * rows}, V {vocab:,}"
            results.append(row(label, times, {"time over full": ratio}, megabytes=megabytes))
    return results


BENCHES = {
    "exact": bench_exact,
    "large": bench_large,
    "kept": bench_kept,
    "bfloat16": bench_bfloat16,
    "layers": bench_layers,
}


def main(_: Any) -> None:
    if FLAGS.keep:
        keep_freed_memory()
    cli.prepare_jax()
    check()
    results = {name: BENCHES[name](FLAGS.rounds) for name in FLAGS.only or BENCHES}
    layers = results.pop("layers", [])
    exact = [row for rows in results.values() for row in rows]
    if FLAGS.keep:
        print(json.dumps(exact))
        return
    for name, rows in (("softmax", exact), ("softmax_layers", layers)):
        if rows:
            print(measure.write_result(name, rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
