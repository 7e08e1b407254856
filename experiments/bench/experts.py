"""Measures mixtures of experts against dense MLPs of equal active FLOPs, and against torch, interleaved in one process.

    python experiments/bench/experts.py [--only=dense,torch,...] [--rounds=9] [--tiny]

D 256, SwiGLU experts of 512 columns, float32. A row of a layer is its complete training step: router, choice, dispatch,
experts, combination, statistics, balance loss and metrics, forward and backward, and updates of parameters and input in place.
Its dense peer has k x 512 columns. The rows "trainer" are steps of `make_trainer` of a model of two layers, with AdamW.

The ratio of a row is the median of the ratios of neighbouring measurements, with an interval of at least 95 % of that median.
CPU time is that of all threads of the process. The layer of torch has no balance loss; its parameters move against their
gradients like those of hpnlp. --tiny runs every row at 64 tokens, to test this script, and writes nothing. About ten minutes on
two cores.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure
from hpnlp.models.lm import LM, LMConfig
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.processes.allocator import keep_freed_memory
from hpnlp.training.trainer import make_trainer
from hpnlp.types import MixerInputs

RESULTS = Path(__file__).parents[1] / "results"
DIM, COLUMNS, K = 256, 512, 2
SIZES = ((8, 4096), (64, 4096), (64, 16384))  # experts, tokens
LENGTH = 256  # tokens of a sequence

FLAGS = flags.FLAGS
flags.DEFINE_list("only", [], "Names of the benchmarks to run; empty for all.")
flags.DEFINE_integer("rounds", 9, "Pairs of measurements of each row.", lower_bound=5)
flags.DEFINE_string("out", str(RESULTS), "Directory of the result.")
flags.DEFINE_bool("tiny", False, "Few tokens and rounds, to test this script.")

Row = dict[str, Any]


@dataclasses.dataclass
class Step:
    """A step that is timed, and the memory of its program."""

    run: Callable[[], Any]
    memory: measure.ProgramMemory | None = None


def tokens(count: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, count, DIM)), jnp.float32)


def variables_of(layer: Any, x: jax.Array) -> Any:
    return nn.meta.unbox(layer.init(jax.random.key(0), MixerInputs(x=x)))


def layer_step(spec: str, columns: int, x: jax.Array, change: Callable[[Any], Any] = lambda params: params) -> Step:
    """A training step of one layer. change: a change of its initial parameters."""
    layer = build_feed_forward(spec, hidden=columns)
    segments = jnp.ones(x.shape[:2], jnp.int32)
    loss_of = getattr(layer, "auxiliary_loss", None)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        out: Any = layer.apply({"params": params}, MixerInputs(x=x, segment_ids=segments))
        reported = loss_of(out.statistics) if loss_of else {}
        losses = [value for name, value in reported.items() if name.endswith("_loss")]
        return sum(losses, jnp.mean(out.o**2)), reported

    def step(params: Any, x: jax.Array) -> Any:
        gradients, reported = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-6 * g, (params, x), gradients), reported

    state = [change(variables_of(layer, x)["params"]), jnp.copy(x)]
    program = measure.compile(step, *state, jit_options={"donate_argnums": (0, 1)})

    def run() -> None:
        state[:], _ = jax.block_until_ready(program(*state))

    return Step(run, program.memory)


def trainer_step(spec: str, columns: int, count: int) -> Step:
    """A training step of a language model of two layers."""
    config = LMConfig(layers=2, dim=DIM, heads=8, vocab=264, max_len=LENGTH, mlp=spec, mlp_dim=columns)
    trainer = make_trainer(LM(config), OptimizerConfig(name="adamw", warmup=0), Plan("single"), steps=1000)
    shape = count // LENGTH or 1, min(count, LENGTH)
    ids = np.random.default_rng(0).integers(0, 264, (shape[0], shape[1] + 1)).astype(np.int32)
    ones, positions = np.ones(shape, np.int32), np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segment_ids": ones, "positions": positions}
    batch = jax.device_put(batch | {"weights": ones.astype(np.float32)}, trainer.batch_sharding)
    state = [trainer.init(jax.random.key(0))]

    def run() -> None:
        state[0], metrics = trainer.step(state[0], batch, jax.random.key(1))
        jax.block_until_ready((state[0], metrics))

    return Step(run)


def paired(first: Step, second: Step, rounds: int) -> Row:
    """Ratios of two steps in wall-clock and CPU time, each measured next to the other in turn, and in memory."""
    walls, cpus = [], []
    for step in (first, second, first, second):  # compiles, and fills the allocator's pools
        step.run()
    for number in range(rounds):
        seconds = {}
        for name, step in sorted({0: first, 1: second}.items(), reverse=number % 2 == 1):
            start, used = time.perf_counter(), time.process_time()
            step.run()
            seconds[name] = time.perf_counter() - start, time.process_time() - used
        walls.append((seconds[0][0], seconds[1][0]))
        cpus.append((seconds[0][1], seconds[1][1]))
    row: Row = {"wall": _ratio(walls), "cpu": _ratio(cpus)}
    if first.memory and second.memory:
        for name, of in (("temporary_mib", lambda memory: memory.temp), ("peak_mib", lambda memory: memory.peak)):
            row[name] = [round(of(memory) / 2**20, 1) for memory in (first.memory, second.memory)]
    return row


def _ratio(pairs: list[tuple[float, float]]) -> Row:
    """Median times in milliseconds, and the median ratio with its interval."""
    first, second = (measure.Timing(seconds) for seconds in zip(*pairs, strict=True))
    return {
        "ms": round(first.median * 1e3, 3),
        "other_ms": round(second.median * 1e3, 3),
        "ratio": round(first.over(second), 3),
        "interval": [round(bound, 3) for bound in first.interval(second)],
    }


def dense_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """Experts over the dense MLP of equal active FLOPs."""
    for experts, count in SIZES:
        x = tokens(64 if tiny else count)
        pair = layer_step(f"top_k({experts},{K})", COLUMNS, x), layer_step("swiglu", K * COLUMNS, x)
        yield f"E {experts}, N {x.shape[1]}", paired(*pair, rounds)


def trainer_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """Models with experts over models with dense MLPs of equal active FLOPs, in complete training steps."""
    for experts, count in SIZES[:2]:
        count = 64 if tiny else count
        pair = trainer_step(f"top_k({experts},{K})", COLUMNS, count), trainer_step("swiglu", K * COLUMNS, count)
        yield f"E {experts}, N {count}", paired(*pair, rounds)


def implementation_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """Each implementation over the dense MLP of equal active FLOPs; "batched" with a capacity of 1.25."""
    x = tokens(64 if tiny else 512)
    for experts in (8, 64):
        for impl in ("loops", "batched", "ragged", "dense"):
            capacity = ",capacity=1.25" if impl == "batched" else ""
            step = layer_step(f"top_k({experts},{K},impl={impl}{capacity})", COLUMNS, x)
            yield f"{impl}, E {experts}, N {x.shape[1]}", paired(step, layer_step("swiglu", K * COLUMNS, x), rounds)


def skew_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """All tokens to the same one or two experts, over a router at its initial values."""
    x = jnp.abs(tokens(64 if tiny else 4096))

    def skewed(params: Any, k: int) -> Any:
        return {**params, "router": jnp.zeros_like(params["router"]).at[:, :k].set(1.0)}

    for experts in (8, 64):
        for k, gates in ((1, "softmax"), (2, "softmax_k")):
            spec = f"top_k({experts},{k},gates={gates})"
            skew = layer_step(spec, COLUMNS, x, functools.partial(skewed, k=k))
            yield f"E {experts}, all tokens to {k}", paired(skew, layer_step(spec, COLUMNS, x), rounds)


def decode_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """One, four and sixteen tokens, forward, over a dense MLP of equal active FLOPs; a measurement is 50 calls."""
    for experts, count in ((8, 1), (64, 1), (64, 4), (64, 16)):
        x = tokens(count)
        pair = decode_step(f"top_k({experts},{K})", COLUMNS, x), decode_step("swiglu", K * COLUMNS, x)
        yield f"E {experts}, tokens: {count}", paired(*pair, rounds)


def decode_step(spec: str, columns: int, x: jax.Array) -> Step:
    layer = build_feed_forward(spec, hidden=columns)
    variables = variables_of(layer, x)

    def call(variables: Any, x: jax.Array) -> jax.Array:
        out: Any = layer.apply(variables, MixerInputs(x=x, decoding=True))
        return out.o

    program = measure.compile(call, variables, x)

    def run() -> None:
        for _ in range(50):
            jax.block_until_ready(program(variables, x))

    return Step(run, program.memory)


def torch_rows(rounds: int, tiny: bool) -> Iterator[tuple[str, Row]]:
    """Experts over the Mixtral layer of transformers with grouped products."""
    try:
        import torch  # noqa: F401, PLC0415
        from transformers.models.mixtral import modeling_mixtral  # noqa: F401, PLC0415
    except ImportError as error:
        print(f"torch: skipped, {error}")
        return
    for experts, count in SIZES[:2]:
        x = tokens(64 if tiny else count)
        pair = layer_step(f"top_k({experts},{K})", COLUMNS, x), torch_step(experts, x)
        yield f"E {experts}, N {x.shape[1]}", paired(*pair, rounds)


def torch_step(experts: int, x: jax.Array) -> Step:
    """A training step of the Mixtral layer of transformers."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig  # noqa: PLC0415
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock  # noqa: PLC0415

    sizes = {"hidden_size": DIM, "intermediate_size": COLUMNS, "num_local_experts": experts}
    config = AutoConfig.for_model("mixtral", num_experts_per_tok=K, **sizes)
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    inputs = torch.tensor(np.asarray(x), requires_grad=True)

    def run() -> None:
        y = block(inputs)
        loss = ((y[0] if isinstance(y, tuple) else y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in (*block.parameters(), inputs):
                assert parameter.grad is not None
                parameter -= 1e-6 * parameter.grad
                parameter.grad = None

    return Step(run)


BENCHMARKS = {
    "dense": dense_rows,
    "trainer": trainer_rows,
    "torch": torch_rows,
    "skew": skew_rows,
    "implementations": implementation_rows,
    "decode": decode_rows,
}


def main(_: Any) -> None:
    if unknown := set(FLAGS.only) - set(BENCHMARKS):
        sys.exit(f"--only={','.join(sorted(unknown))}: expected some of {', '.join(BENCHMARKS)}")
    keep_freed_memory()
    cli.prepare_jax()
    rows = []
    for name in FLAGS.only or BENCHMARKS:
        for row, values in BENCHMARKS[name](2 if FLAGS.tiny else FLAGS.rounds, FLAGS.tiny):
            rows.append({"compared": name, "row": row, **values})
            print(rows[-1], flush=True)
    if not FLAGS.tiny and not FLAGS.only:
        print(measure.write_result("experts", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
