"""Measures mixtures of experts against dense MLPs of equal active FLOPs, and against torch, interleaved in one process.

    python experiments/bench/experts.py [--only=dense,torch,skew,decode] [--rounds=9] [--tiny]

D 256, k 2, SwiGLU experts of 512 columns, float32: router, choice, dispatch, experts and combination, forward and backward with
an update in place, as in a training step. The dense MLP has 1,024 columns. The ratio of a row is the median of the ratios of
neighbouring measurements, with the interval of 95 % of that median. CPU time is that of all threads of the process. --tiny runs
every row at 64 tokens, to test this script.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.training.allocator import keep_freed_memory
from hpnlp.types import MixerInputs

RESULTS = Path(__file__).parents[1] / "results"
DIM, COLUMNS, K = 256, 512, 2
SIZES = ((8, 4096), (64, 4096), (64, 16384))  # experts, tokens

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all.")
flags.DEFINE_integer("rounds", 9, "Pairs of measurements of each row.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")
flags.DEFINE_bool("tiny", False, "Few tokens and rounds, to test this script.")


def tokens(count: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, count, DIM)), jnp.float32)


def step_of(spec: str, columns: int, x: jax.Array, router: Callable[[Any], Any] = lambda p: p) -> Callable[[], Any]:
    """A training step of one layer, which updates its parameters and inputs in place."""
    layer = build_feed_forward(spec, hidden=columns)
    inputs = functools.partial(MixerInputs, segment_ids=jnp.ones(x.shape[:2], jnp.int32))
    variables = jax.tree.map(
        lambda box: box.unbox(),
        layer.init(jax.random.key(0), inputs(x=x)),
        is_leaf=lambda box: hasattr(box, "unbox"),
    )
    state = [router(variables["params"]), jnp.copy(x)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        out = layer.apply({"params": params}, inputs(x=x))
        return jnp.mean(out.o**2)  # pyright: ignore[reportAttributeAccessIssue]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, x: jax.Array) -> Any:
        gradients = jax.grad(loss, (0, 1))(params, x)
        return jax.tree.map(lambda p, g: p - 1e-6 * g, (params, x), gradients)

    def run() -> None:
        state[:] = jax.block_until_ready(step(*state))

    run.memory = step.lower(*state).compile().memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
    return run


def paired(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Ratios of the times of two functions, in wall-clock and CPU time, each measured next to the other in turn."""
    walls, cpus = [], []
    for function in (first, second, first, second):  # compiles, and fills the allocator's pools
        function()
    for i in range(rounds):
        wall, cpu = {}, {}
        for function in (first, second) if i % 2 == 0 else (second, first):
            start, used = time.perf_counter(), time.process_time()
            function()
            wall[function], cpu[function] = time.perf_counter() - start, time.process_time() - used
        walls.append((wall[first], wall[second]))
        cpus.append((cpu[first], cpu[second]))
    return {"wall": _ratio(walls), "cpu": _ratio(cpus)}


def _ratio(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median times in milliseconds, and the median ratio with its interval by order statistics."""
    ratios = np.sort([a / b for a, b in pairs])
    spread = int(np.floor((len(ratios) - 1.96 * np.sqrt(len(ratios))) / 2))
    low = max(spread, 0)
    first, second = np.median(np.array(pairs), axis=0) * 1e3
    return {
        "ms": round(float(first), 3),
        "other_ms": round(float(second), 3),
        "ratio": round(float(np.median(ratios)), 3),
        "interval": [round(float(ratios[low]), 3), round(float(ratios[-1 - low]), 3)],
    }


def dense_rows(rounds: int, tiny: bool) -> dict[str, Any]:
    """Experts over the dense MLP of equal active FLOPs."""
    rows = {}
    for experts, count in SIZES:
        x = tokens(64 if tiny else count)
        moe_step, dense = step_of(f"top_k({experts},{K})", COLUMNS, x), step_of("swiglu", K * COLUMNS, x)
        row = paired(moe_step, dense, rounds)
        memory = [run.memory.temp_size_in_bytes / 2**20 for run in (moe_step, dense)]  # pyright: ignore
        row["temporary_mib"] = [round(value, 1) for value in memory]
        rows[f"E {experts}, N {x.shape[1]}"] = row
    return rows


def skew_rows(rounds: int, tiny: bool) -> dict[str, Any]:
    """All tokens to two experts, over a router at its initial values."""
    x = jnp.abs(tokens(64 if tiny else 4096))

    def skewed(params: Any) -> Any:
        router = jnp.zeros_like(params["router"]).at[:, :K].set(1.0)
        return {**params, "router": router}

    rows = {}
    for experts in (8, 64):
        spec = f"top_k({experts},{K})"
        rows[f"E {experts}"] = paired(step_of(spec, COLUMNS, x, skewed), step_of(spec, COLUMNS, x), rounds)
    return rows


def decode_rows(rounds: int, tiny: bool) -> dict[str, Any]:
    """One, four and sixteen tokens through 64 experts, forward, over a dense MLP of equal active FLOPs."""
    rows = {}
    for count in (1, 4, 16):
        x = tokens(count)
        runs = []
        for spec, columns in ((f"top_k(64,{K})", COLUMNS), ("swiglu", K * COLUMNS)):
            layer = build_feed_forward(spec, hidden=columns)
            variables = jax.tree.map(
                lambda box: box.unbox(), layer.init(jax.random.key(0), MixerInputs(x=x)),
                is_leaf=lambda box: hasattr(box, "unbox"),
            )  # fmt: skip
            call = jax.jit(lambda v, x, layer=layer: layer.apply(v, MixerInputs(x=x, decoding=True)).o)  # pyright: ignore

            def run(call: Any = call, variables: Any = variables, x: jax.Array = x) -> None:
                for _ in range(50):
                    jax.block_until_ready(call(variables, x))

            runs.append(run)
        rows[f"{count} tokens"] = paired(*runs, rounds)
    return rows


def torch_rows(rounds: int, tiny: bool) -> dict[str, Any]:
    """Experts over the Mixtral layer of transformers with grouped products."""
    try:
        import torch  # noqa: PLC0415
        from transformers import AutoConfig  # noqa: PLC0415
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # noqa: PLC0415
    except ImportError as error:
        return {"skipped": {"reason": str(error)}}
    rows = {}
    for experts, count in SIZES[:2]:
        x = tokens(64 if tiny else count)
        sizes = {"hidden_size": DIM, "intermediate_size": COLUMNS, "num_local_experts": experts}
        config = AutoConfig.for_model("mixtral", num_experts_per_tok=K, **sizes)
        config._experts_implementation = "grouped_mm"
        block = MixtralSparseMoeBlock(config)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        inputs = torch.tensor(np.asarray(x), requires_grad=True)

        def run(block: Any = block, inputs: Any = inputs) -> None:
            y = block(inputs)
            loss = ((y[0] if isinstance(y, tuple) else y) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                for parameter in (*block.parameters(), inputs):
                    parameter -= 1e-6 * parameter.grad
                    parameter.grad = None

        rows[f"E {experts}, N {x.shape[1]}"] = paired(step_of(f"top_k({experts},{K})", COLUMNS, x), run, rounds)
    return rows


BENCHMARKS = {"dense": dense_rows, "torch": torch_rows, "skew": skew_rows, "decode": decode_rows}


def main(_: Any) -> None:
    if unknown := set(FLAGS.only) - set(BENCHMARKS):
        sys.exit(f"--only={','.join(sorted(unknown))}: expected some of {', '.join(BENCHMARKS)}")
    keep_freed_memory()
    cli.prepare_jax()
    rows = []
    for name in FLAGS.only or BENCHMARKS:
        for row, values in BENCHMARKS[name](2 if FLAGS.tiny else FLAGS.rounds, FLAGS.tiny).items():
            rows.append({"compared": name, "row": row, **values})
            print(rows[-1], flush=True)
    if not FLAGS.tiny and not FLAGS.only:
        print(measure.write_result("experts", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
