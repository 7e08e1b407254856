"""Rows of mixers: linear attention and attention by content over exact attention, and training steps of every mixer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mixer_pass import MixerPass

from gpu_rows.rows import Calls, Case, Context, Record, Row, Target, compare, interval, reason
from gpu_rows.step import TrainingStep
from hpnlp import measure
from hpnlp.lra.mixers import all_specs
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import LM, LMConfig
from hpnlp.ops.attention import Causal
from hpnlp.parallel.plan import Plan
from hpnlp.training.optim import OptimizerConfig

EFFICIENCY_TOKENS = 16384  # of a batch, whatever its length
REHEARSED = ("performer", "reformer")


def over_exact(spec: str, seconds: float) -> Case:
    """Forward and backward pass of a causal mixer at T 16K over that of exact attention."""

    def run(context: Context) -> list[Record]:
        # Lengths below 128 have no blocks to choose from.
        length, heads, dim, dtype = (128, 2, 8, jnp.float32) if context.rehearse else (16384, 16, 128, jnp.bfloat16)
        calls = Calls()
        for name, mixer in (("ours", spec), ("exact attention", "full")):
            calls.add(name, lambda mixer=mixer: MixerPass(mixer, Causal(), length, heads, dim, dtype=dtype))
        megabytes = {name: call.program.memory.temp / 1e6 for name, call in calls.running.items()}
        return [compare(context, f"{spec}, T {length}", calls) | {"megabytes": megabytes}]

    return Case(spec, seconds, run, rehearsed=spec in REHEARSED)


def small_model(spec: str, length: int, rehearse: bool) -> LM | Encoder:
    """A language model of the mixer, or an encoder if the mixer is not causal, of four layers of width 512."""
    causal = spec in all_specs(causal=True)[0]
    layers, dim = (1, 16) if rehearse else (4, 512)
    sizes: dict[str, Any] = {
        "mixer": spec, "layers": layers, "dim": dim, "heads": dim // 64 or 2, "vocab": 264, "max_len": length,
        "dtype": "float32" if rehearse else "bfloat16", "unroll": 1,
    }  # fmt: skip
    return LM(LMConfig(**sizes)) if causal else Encoder(EncoderConfig(**sizes, pooling="mean", classes=2))


def random_batch(model: LM | Encoder, length: int, rehearse: bool) -> dict[str, np.ndarray]:
    """Random tokens, one document in each sequence."""
    examples = 2 if rehearse else max(1, EFFICIENCY_TOKENS // length)
    batch = {name: np.asarray(array) for name, array in model.example_batch(examples, length).items()}
    batch["tokens"] = np.random.default_rng(0).integers(1, 9, batch["tokens"].shape).astype(np.int32)
    batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), batch["tokens"].shape)
    return batch


def efficiency_case(spec: str, seconds: float) -> Case:
    def run(context: Context) -> list[Record]:
        records: list[Record] = []
        for length in (128,) if context.rehearse else (1024, 4096, 16384):
            model = small_model(spec, length, context.rehearse)
            batch = random_batch(model, length, context.rehearse)
            result: Record = {
                "what": f"{spec}, T {length}", "mixer": spec, "length": length, "figures": {},
                "model": type(model).__name__, "batch_size": len(batch["tokens"]),
            }  # fmt: skip
            try:
                step = TrainingStep(model, OptimizerConfig(), Plan(), batch)
                timing = measure.timeit({"step": step}, rounds=context.rounds, min_seconds=0.0, enqueue=True)["step"]
            except jax.errors.JaxRuntimeError as error:
                if not measure.is_out_of_memory(error):
                    raise
                records.append({**result, "failed": {"ours": reason(error)}})
                continue
            result["figures"] = {
                "steps/s": interval([1 / s for s in timing.all]),
                "gigabytes": interval([step.program.memory.peak / 1e9]),
            }
            records.append(
                {**result, "ms": {"ours": 1e3 * timing.median}, "all_ms": {"ours": [1e3 * s for s in timing.all]}}
            )
        return records

    return Case(spec, seconds, run, later=True, rehearsed=spec in ("segment_memory", "fnet"))


def all_mixers() -> list[str]:
    """Specs of all mixers: exact attention first, then causal ones, then those of encoders only."""
    causal, both = all_specs(causal=True)[0], all_specs()[0]
    return list(dict.fromkeys(["full", *causal, *both]))


LINEAR = Row(
    "linear",
    "forward and backward pass of linear mixers, T 16384, causal, bfloat16, B 1, N 16, H 128",
    "our exact attention",
    {"time over exact attention": Target(1 / 4, 1 / 10)},
    [over_exact(spec, 12) for spec in ("linear", "retention", "gated_delta", "performer")],
    checks=("linear attention", "attention"),
)
CONTENT = Row(
    "content",
    "forward and backward pass of mixers that choose keys by content, T 16384, causal, bfloat16, B 1, N 16, H 128",
    "our exact attention",
    {"time over exact attention": Target(0.5, 0.2)},
    [over_exact(spec, 20) for spec in ("reformer", "routing", "moba", "nsa")],
    checks=("attention",),
)
EFFICIENCY = Row(
    "efficiency",
    "training steps of every mixer, 4 layers, D 512, 16K tokens in a batch, T 1024, 4096, 16384",
    "",
    {"steps/s": Target(more_is_better=True), "gigabytes": Target()},
    [efficiency_case(spec, 30) for spec in all_mixers()],
    checks=("attention, auto", "training step"),
)
