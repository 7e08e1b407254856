"""Measures time, MFU and memory of a training step on one accelerator against the plan, by batch size and setting.

    python experiments/bench/gpu_step.py [--size=1B] [--batches=4,8,16] [--settings="none full full+optimizer"] [--rounds=7]

bfloat16 activations, float32 parameters, T 2048, AdamW, clipping, packed sequences of several documents: the step that the
training loop calls. Attention is cuDNN's on NVIDIA GPUs; unless it agrees with the dense reference, forward and gradients,
nothing is reported. A setting is a value of plan.remat; `+optimizer` and `+parameters` store these in host memory, and are
compared with the same setting without offloading. MFU counts 6 x non-embedding parameters x tokens and half of attention's
products, relative to the dense bf16 peak of the data sheet. Settings that run out of memory are reported as such.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from hpnlp import cli, measure, planner
from hpnlp.models.lm import LMConfig
from hpnlp.ops.attention import Causal, attend, reference
from hpnlp.parallel.plan import Plan
from hpnlp.planner.devices import Device, this_cpu
from hpnlp.planner.estimate import trainer_of
from hpnlp.planner.search import changed
from hpnlp.training.config import Config, default, resolve

RESULTS = Path(__file__).parents[1] / "results"
# (layers, dimension, heads)
SIZES = {"350M": (24, 1024, 16), "1B": (20, 2048, 16), "tiny": (2, 64, 2)}
SETTINGS = "none names(mixed,hidden) names(mixed) full full+optimizer full+optimizer+parameters"

FLAGS = flags.FLAGS
flags.DEFINE_enum("size", "1B", list(SIZES), "Model size; tiny is for testing this script.")
flags.DEFINE_list("batches", ["4", "8", "16"], "Sequences per step.")
flags.DEFINE_spaceseplist("settings", SETTINGS, "Rematerialisation policy, and what is stored in host memory.")
flags.DEFINE_integer("vocab", 50304, "Vocabulary size.")
flags.DEFINE_integer("length", 2048, "Tokens per sequence.")
flags.DEFINE_integer("rounds", 7, "Measurements of each step; the median is reported.")
flags.DEFINE_string("out", str(RESULTS), "Where the result goes.")


def check_attention() -> float:
    """Largest difference of the model's attention from the dense reference. Outputs and gradients are of order 1."""
    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.standard_normal((2, 512, 4, 64)), jnp.bfloat16) for _ in range(4))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, 512)), axis=1), jnp.int32)

    def output_and_gradients(function: Any) -> Any:
        def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return function(q, k, v, Causal(), segment_ids=segments, kv_segment_ids=segments)

        def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            o, pull = jax.vjp(call, q, k, v)
            return o, *pull(do)

        return jax.device_get(jax.jit(both)(q, k, v))

    pairs = zip(output_and_gradients(attend), output_and_gradients(reference), strict=True)
    return max(float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max()) for a, b in pairs)


def packed_batch(batch: int) -> dict[str, np.ndarray]:
    """Sequences of four documents of different lengths each."""
    rng, length = np.random.default_rng(0), FLAGS.length
    ids = rng.integers(0, FLAGS.vocab, (batch, length + 1), dtype=np.int32)
    cuts = np.sort(rng.integers(1, length, (batch, 3)), axis=1)
    segments = 1 + (np.arange(length)[None, :, None] >= cuts[:, None, :]).sum(axis=2)
    starts = np.concatenate([np.zeros((batch, 1), int), cuts], axis=1)
    positions = np.arange(length)[None] - np.take_along_axis(starts, segments - 1, axis=1)
    return {
        "tokens": np.ascontiguousarray(ids[:, :-1]),
        "labels": np.ascontiguousarray(ids[:, 1:]),
        "segment_ids": segments.astype(np.int32),
        "positions": positions.astype(np.int32),
        "weights": np.ones((batch, length), np.float32),
    }


def config_of(batch: int, setting: str) -> Config:
    layers, dim, heads = SIZES[FLAGS.size]
    remat, *hosted = setting.split("+")
    model = LMConfig(
        layers=layers, dim=dim, heads=heads, vocab=FLAGS.vocab, max_len=FLAGS.length, mlp="gelu", dtype="bfloat16", unroll=1
    )  # fmt: skip
    plan = Plan("single", remat=remat, **{f"offload_{kind}": True for kind in hosted})
    overrides = {
        "model": model,
        "plan": plan,
        "optimizer.name": "adamw",
        "data.seq_len": FLAGS.length,
        "data.batch_size": batch,
    }
    return changed(resolve(default()), overrides)


def data_sheet() -> Device:
    """The data sheet of this machine's device, found by its name; a CPU is measured."""
    kind = jax.devices()[0].device_kind.lower().replace("v5 lite", "v5e")
    if jax.default_backend() == "cpu":
        return this_cpu(1)
    for name, device in planner.DEVICES.items():
        if name in kind:
            return device
    sys.exit(f"hpnlp/planner/devices.py has no data sheet for {kind!r}, only for {', '.join(planner.DEVICES)}")


def bench(batch: int, setting: str, device: Device) -> dict[str, Any]:
    config = config_of(batch, setting)
    planned, trainer = planner.costs(config, 1), trainer_of(config, jax.devices()[:1])
    layers, width = config.model.layers, config.model.heads * config.model.head_size
    row: dict[str, Any] = {
        "size": FLAGS.size, "batch": batch, "setting": setting, "length": FLAGS.length, "layers": layers,
        "parameters": planned.parameters, "planned_ms": 1e3 * planned.total_seconds(device), "planned_bytes": planned.bytes,
    }  # fmt: skip
    key = jax.random.key(0)
    try:
        data = jax.device_put(packed_batch(batch), trainer.batch_sharding)
        with jax.set_mesh(trainer.layout.mesh):
            program = measure.compile(trainer.step.jitted, trainer.state_shapes, data, key)
        row["device_bytes"] = program.memory.peak
        held = [trainer.init(key)]

        def step() -> Any:
            held[0], metrics = program(held[0], data, key)
            return metrics

        seconds = measure.timeit({"step": step}, rounds=FLAGS.rounds, warmup=2)["step"]
        loss = float(step()["loss"])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"batch {batch}, {setting}: out of memory", flush=True)
        return {**row, "out_of_memory": True}
    tokens = batch * FLAGS.length
    flops = measure.training_flops(
        config.model.non_embedding_parameters(), tokens, layers=layers, width=width, length=FLAGS.length
    )
    row |= {
        "step_ms": 1e3 * seconds.median,
        "tokens_per_second": tokens / seconds.median,
        "planned_over_measured": row["planned_ms"] / (1e3 * seconds.median),
        "mfu": measure.mfu(flops, seconds.median),
        "loss": loss,
        "all_ms": [1e3 * s for s in seconds.all],
    }
    mfu = "unknown peak" if row["mfu"] is None else f"MFU {100 * row['mfu']:.1f} %"
    print(
        f"batch {batch}, {setting}: {row['step_ms']:.1f} ms (planned {row['planned_ms']:.1f}), "
        f"{row['device_bytes'] / 1e9:.2f} GB (planned {row['planned_bytes'] / 1e9:.2f}), "
        f"{row['tokens_per_second']:,.0f} tokens/s, {mfu}",
        flush=True,
    )
    return row


def add_offload_costs(rows: list[dict[str, Any]]) -> None:
    """Adds to each row with offloading the device memory that it frees and its time relative to no offloading."""
    timed = {(row["batch"], row["setting"]): row for row in rows if "step_ms" in row}
    for (batch, setting), row in timed.items():
        without = timed.get((batch, setting.partition("+")[0]))
        if "+" in setting and without:
            row["freed_bytes"] = without["device_bytes"] - row["device_bytes"]
            row["time_over_without"] = row["step_ms"] / without["step_ms"]


def main(_: Any) -> None:
    cli.prepare_jax()
    difference = check_attention()
    if difference > 0.1:
        sys.exit(f"attention differs from the dense reference by {difference:.2g}: nothing is reported")
    print(f"attention agrees with the dense reference to {difference:.2g}", flush=True)
    device = data_sheet()
    rows = [bench(int(batch), setting, device) for setting in FLAGS.settings for batch in FLAGS.batches]
    add_offload_costs(rows)
    print(measure.write_result("gpu_step", [{"attention_apart": difference, **row} for row in rows], FLAGS.out))


if __name__ == "__main__":
    app.run(main)
