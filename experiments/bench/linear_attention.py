"""Measures linear attention against dense attention and against chunked forms in pure torch, interleaved in one process.

    python experiments/bench/linear_attention.py [--only=dense,torch,length,decode] [--rounds=5] [--tiny]

B 1, N 8, H 64, float32, by the public calls `linear_attention`, `linear_attention_step` and `attend`; forward and backward
unless the row is labelled otherwise. Before a form is timed, outputs and gradients are compared with the reference; if they
differ, nothing is reported. The forms in torch are loops over chunks with an einsum for each product, and for the gated delta
rule `torch_chunk_gated_delta_rule` of transformers' Qwen3-Next. --tiny runs every row at T 64 once, to test this script.
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
from hpnlp.ops.attention import Causal, Full, attend
from hpnlp.ops.attention.linear import (
    linear_attention,
    linear_attention_step,
    reference_linear_attention,
    zero_state,
)
from hpnlp.training.processes.allocator import keep_freed_memory

RESULTS = Path(__file__).parents[1] / "results"
HEADS, DIM = 8, 64
# Name of a form -> (options of linear_attention, names of the gates that it reads).
FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "linear, causal": ({"normalize": True}, ()),
    "linear": ({"normalize": True, "causal": False}, ()),
    "retention": ({}, ("head",)),
    "gla": ({}, ("feature",)),
    "gated_delta": ({}, ("token", "beta")),
}

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all.")
flags.DEFINE_integer("rounds", 5, "Measurements of each program; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
flags.DEFINE_bool("tiny", False, "Short sequences and one round, to test this script.")


def arrays(length: int, gates: tuple[str, ...] = ()) -> list[jax.Array]:
    """Random q, keys of length 1, v, a cotangent of o, each [1, length, HEADS, DIM], and gates."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 1, length, HEADS, DIM))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    if not gates:
        q, k = np.abs(q), np.abs(k)
    values = {
        "head": np.log1p(-(2.0 ** (-5 - np.arange(HEADS)))),
        "token": -0.1 * rng.random((1, length, HEADS)),
        "feature": -0.1 * rng.random((1, length, HEADS, DIM)),
        "beta": rng.random((1, length, HEADS)),
    }
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, do, *(values[name] for name in gates))]


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """(q, k, v, cotangent of o, *gates) -> (o, gradients)."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, *gates: jax.Array) -> Any:
        o, pull = jax.vjp(function, q, k, v, *gates)
        return o, pull(do)

    return run


def form_call(name: str, function: Callable[..., Any] = linear_attention) -> Callable[..., Any]:
    """A function of q, k, v and gates."""
    options, gates = FORMS[name]

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *values: jax.Array) -> Any:
        by_name = {("beta" if gate == "beta" else "log_decay"): x for gate, x in zip(gates, values, strict=True)}
        return function(q, k, v, **options, **by_name)

    return call


def compiled_call(function: Callable[..., Any], operands: list[jax.Array]) -> Callable[[], Any]:
    """A call without arguments of the compiled function."""
    program = measure.compile(function, *operands)
    return lambda: program(*operands)


def program_of(name: str, length: int) -> Callable[[], Any]:
    """Forward and backward pass of a form."""
    return compiled_call(with_gradients(form_call(name)), arrays(length, FORMS[name][1]))


def dense_program(causal: bool, length: int) -> Callable[[], Any]:
    """Forward and backward pass of exact attention."""
    mask = Causal() if causal else Full()
    return compiled_call(with_gradients(lambda q, k, v: attend(q, k, v, mask)), arrays(length))


def check(length: int = 200) -> None:
    """Exits if the outputs or gradients of a form differ from those of the reference."""
    for name, (_, gates) in FORMS.items():
        functions = (form_call(name), form_call(name, reference_linear_attention))
        results = [jax.jit(with_gradients(f))(*arrays(length, gates)) for f in functions]
        for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
            difference = float(jnp.max(jnp.abs(actual - expected) / (1 + jnp.abs(expected))))
            if not difference < 1e-4:
                sys.exit(f"{name}: differs from the reference by {difference:.1e}: nothing is reported")


def torch_linear(q: Any, k: Any, v: Any, chunk: int = 64) -> Any:
    """Causal linear attention with normalisation, a loop over chunks. Arrays are [B, N, T, H]."""
    import torch

    visible = torch.ones(chunk, chunk).tril()
    s, z, outputs = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), torch.zeros(*k.shape[:2], k.shape[-1]), []
    for start in range(0, q.shape[2], chunk):
        qc, kc, vc = (x[:, :, start : start + chunk] for x in (q, k, v))
        scores = torch.einsum("bntm,bnsm->bnts", qc, kc) * visible
        o = torch.einsum("bnts,bnsh->bnth", scores, vc) + torch.einsum("bntm,bnmh->bnth", qc, s)
        weight = scores.sum(-1) + torch.einsum("bntm,bnm->bnt", qc, z)
        outputs.append(o / weight[..., None])
        s, z = s + torch.einsum("bnsm,bnsh->bnmh", kc, vc), z + kc.sum(2)
    return torch.cat(outputs, 2)


def torch_gla(q: Any, k: Any, v: Any, log_decay: Any, chunk: int = 16) -> Any:
    """Gated linear attention, a loop over chunks with the decay of each pair of tokens and feature."""
    import torch

    visible = torch.ones(chunk, chunk, dtype=torch.bool).tril()[..., None]
    s, outputs = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1]), []
    for start in range(0, q.shape[2], chunk):
        qc, kc, vc, gc = (x[:, :, start : start + chunk] for x in (q, k, v, log_decay))
        total = gc.cumsum(2)
        decay = (total[:, :, :, None] - total[:, :, None]).masked_fill(~visible, -torch.inf).exp()
        scores = torch.einsum("bntm,bnsm,bntsm->bnts", qc, kc, decay)
        outputs.append(
            torch.einsum("bnts,bnsh->bnth", scores, vc) + torch.einsum("bntm,bnmh->bnth", qc * total.exp(), s)
        )
        last = total[:, :, -1:]
        s = last.exp().transpose(2, 3) * s + torch.einsum("bnsm,bnsh->bnmh", kc * (last - total).exp(), vc)
    return torch.cat(outputs, 2)


def torch_gated_delta(q: Any, k: Any, v: Any, log_decay: Any, beta: Any) -> Any:
    """The gated delta rule of transformers, which scales queries by H^-0.5."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    arrays = (x.transpose(1, 2) for x in (q * q.shape[-1] ** 0.5, k, v, log_decay, beta))
    return torch_chunk_gated_delta_rule(*arrays)[0].transpose(1, 2)


PEERS = {"linear, causal": torch_linear, "gla": torch_gla, "gated_delta": torch_gated_delta}


def torch_program(name: str, length: int) -> Callable[[], Any]:
    """Forward and backward pass of the form of torch."""
    import torch

    q, k, v, do, *gates = (torch.from_numpy(np.array(x).swapaxes(1, 2).copy()) for x in arrays(length, FORMS[name][1]))
    operands = [x.requires_grad_() for x in (q, k, v, *gates)]

    def run() -> Any:
        o = PEERS[name](*operands)
        return o, torch.autograd.grad(o, operands, do)

    return run


def row(label: str, times: dict[str, measure.Timing], ratios: dict[str, float], **fields: Any) -> dict[str, Any]:
    shown = ", ".join(f"{name} {1e3 * timing.median:.1f} ms" for name, timing in times.items())
    print(f"{label}: {', '.join(f'{name} {x:.3f}' for name, x in ratios.items())} ({shown})", flush=True)
    return {
        "what": label,
        "ratios": ratios,
        "ms": {name: 1e3 * timing.median for name, timing in times.items()},
        "all_ms": {name: [1e3 * s for s in timing.all] for name, timing in times.items()},
        **fields,
    }


def bench_dense(rounds: int) -> list[dict[str, Any]]:
    """Each form against exact attention with the same mask."""
    length = 64 if FLAGS.tiny else 4096
    programs = {name: program_of(name, length) for name in FORMS}
    programs |= {f"dense, causal={causal}": dense_program(causal, length) for causal in (True, False)}
    times = measure.timeit(programs, rounds=rounds)
    rows = []
    for name, (options, _) in FORMS.items():
        dense = f"dense, causal={options.get('causal', True)}"
        ratios = {"over our dense": times[name].over(times[dense])}
        rows.append(row(f"{name}, T {length}", {x: times[x] for x in (name, dense)}, ratios))
    return rows


def bench_torch(rounds: int) -> list[dict[str, Any]]:
    """Forms against those of torch, whose outputs are compared first."""
    length, rows = 64 if FLAGS.tiny else 4096, []
    for name in PEERS:
        programs = {"ours": program_of(name, length), "torch": torch_program(name, length)}
        difference = np.abs(np.asarray(programs["ours"]()[0]).swapaxes(1, 2) - programs["torch"]()[0].detach().numpy())
        if difference.max() > 1e-4:
            sys.exit(f"{name}: differs from torch by {difference.max():.1e}: nothing is reported")
        times = measure.timeit(programs, rounds=rounds)
        rows.append(row(f"{name}, T {length}", times, {"over torch": times["ours"].over(times["torch"])}))
    return rows


def bench_length(rounds: int) -> list[dict[str, Any]]:
    """Time of four times the length."""
    lengths, rows = (64, 256) if FLAGS.tiny else (4096, 16384), []
    for name in FORMS:
        times = measure.timeit({f"T {length}": program_of(name, length) for length in lengths}, rounds=rounds)
        short, long = (times[f"T {length}"] for length in lengths)
        rows.append(row(f"{name}, T {lengths[1]}", times, {f"over T {lengths[0]}": long.over(short)}))
    return rows


def bench_decode(rounds: int) -> list[dict[str, Any]]:
    """A decoding step against a pass over the preceding tokens."""
    length, rows = 64 if FLAGS.tiny else 32768, []
    for name, (options, gates) in FORMS.items():
        if options.get("causal", True):
            q, k, v, _, *values = arrays(length, gates)
            step = functools.partial(form_call(name, _step), *(x[:, 0] if x.ndim > 1 else x for x in (q, k, v)))
            calls = {
                "step": compiled_call(step, [x[:, 0] if x.ndim > 1 else x for x in values]),
                "pass": compiled_call(form_call(name), [q, k, v, *values]),
            }
            times = measure.timeit(calls, rounds=rounds)
            ratios = {"pass over step": times["pass"].over(times["step"])}
            rows.append(row(f"{name}, decoding after {length} tokens", times, ratios))
    return rows


def _step(q: jax.Array, k: jax.Array, v: jax.Array, normalize: bool = False, **gates: Any) -> Any:
    """A step from a state of zeros, whose time does not depend on the values."""
    return linear_attention_step(q, k, v, zero_state(1, HEADS, DIM, DIM, normalize), **gates)


BENCHES = {"dense": bench_dense, "torch": bench_torch, "length": bench_length, "decode": bench_decode}


def main(_: Any) -> None:
    import torch

    keep_freed_memory()
    cli.prepare_jax()
    torch.set_num_threads(measure.environment()["cores"])
    check(64 if FLAGS.tiny else 200)
    rounds = 1 if FLAGS.tiny else FLAGS.rounds
    rows = [row for name in FLAGS.only or BENCHES for row in BENCHES[name](rounds)]
    rows = [{**row, "torch": torch.__version__} for row in rows]
    if FLAGS.tiny:
        print("--tiny: no result is written")
    else:
        print(measure.write_result("linear_attention", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
