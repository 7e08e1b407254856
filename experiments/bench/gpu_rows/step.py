"""Rows of training steps: utilisation of the largest dense models, and time and memory of further settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gpu_rows.rows import Case, Context, Record, Row, Target, interval, reason
from hpnlp import measure, planner
from hpnlp.models.lm import LM, LMConfig
from hpnlp.parallel.plan import Plan
from hpnlp.planner.search import changed
from hpnlp.training.config import Config, default, resolve
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.trainer import make_trainer
from hpnlp.types import Model

# layers, dimension, heads
SIZES = {"350M": (24, 1024, 16), "1B": (20, 2048, 16), "tiny": (2, 64, 2)}
VOCAB, LENGTH = 50304, 2048


def packed_batch(batch: int, length: int, vocab: int) -> dict[str, np.ndarray]:
    """Sequences of four documents of different lengths each."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, (batch, length + 1), dtype=np.int32)
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


def step_config(size: str, setting: str, batch: int, length: int = LENGTH, vocab: int = VOCAB) -> Config:
    """A step with AdamW and clipping, bfloat16 activations and float32 parameters.

    Args:
      size: Key of SIZES.
      setting: Value of plan.remat; "+optimizer" and "+parameters" store these in host memory.
      batch: Sequences of a batch.
      length: Tokens of a sequence.
      vocab: Size of the vocabulary.
    """
    layers, dim, heads = SIZES[size]
    remat, *hosted = setting.split("+")
    model = LMConfig(layers=layers, dim=dim, heads=heads, vocab=vocab, max_len=length, mlp="gelu", dtype="bfloat16")
    overrides = {
        "model": model,
        "plan": Plan("single", remat=remat, **{f"offload_{kind}": True for kind in hosted}),
        "optimizer.name": "adamw",
        "data.seq_len": length,
        "data.batch_size": batch,
    }
    return changed(resolve(default()), overrides)


class TrainingStep:
    """The compiled step of the training loop, as a call without arguments that returns the metrics.

    Attributes:
      program: The compiled step.
    """

    def __init__(self, model: Model, optimizer: OptimizerConfig, plan: Plan, batch: dict[str, np.ndarray]) -> None:
        """Compiles the step; parameters are made by the first call.

        Args:
          model: The model.
          optimizer: The optimizer.
          plan: Rematerialisation and offloading.
          batch: Arrays of a batch.
        """
        device, examples = jax.devices()[0], len(batch["tokens"])
        trainer = make_trainer(model, optimizer, plan, steps=1000, devices=[device], batch_size=examples)
        self._key, self._trainer = jax.random.key(0), trainer
        self._batch = jax.device_put(batch, trainer.batch_sharding)
        with jax.set_mesh(trainer.layout.mesh):
            self.program = measure.compile(trainer.step.jitted, trainer.state_shapes, self._batch, self._key)
        self._state: Any = None

    def __call__(self) -> dict[str, jax.Array]:
        if self._state is None:
            self._state = self._trainer.init(self._key)
        self._state, metrics = self.program(self._state, self._batch, self._key)
        return metrics


def step_record(context: Context, size: str, setting: str, batch: int) -> Record:
    """Time, utilisation and memory of a step beside those planned; with an entry "failed" if it does not fit."""
    if context.rehearse:
        size, batch, length, vocab = "tiny", 2, 32, 512
    else:
        length, vocab = LENGTH, VOCAB
    config = step_config(size, setting, batch, length, vocab)
    planned, device = planner.costs(config, 1), data_sheet()
    result: Record = {
        "what": f"{size}, B {batch}, T {length}, plan.remat={setting}", "figures": {}, "parameters": planned.parameters,
        "planned_gigabytes": planned.bytes / 1e9,
    }  # fmt: skip
    if device:
        result["planned_ms"] = 1e3 * planned.total_seconds(device)
    try:
        step = TrainingStep(LM(config.model), config.optimizer, config.plan, packed_batch(batch, length, vocab))
        result["gigabytes"] = step.program.memory.peak / 1e9
        timing = measure.timeit({"step": step}, rounds=context.rounds, warmup=2, min_seconds=0.0, enqueue=True)["step"]
        loss = float(step()["loss"])
    except jax.errors.JaxRuntimeError as error:
        if not measure.is_out_of_memory(error):
            raise
        return {**result, "failed": {"ours": reason(error)}}
    flops = measure.training_flops(
        config.model.non_embedding_parameters(),
        batch * length,
        layers=config.model.layers,
        width=config.model.heads * config.model.head_size,
        length=length,
    )
    if utilisation := [u for s in timing.all if (u := measure.mfu(flops, s)) is not None]:
        result["figures"][f"MFU of {size}"] = interval(utilisation)
    if not np.isfinite(loss):
        return {**result, "failed": {"ours": f"the loss is {loss}"}, "figures": {}}
    if context.card:
        result["roofline"] = {"ours": flops / context.card.products["bfloat16"] / timing.median}
    return {
        **result,
        "loss": loss,
        "ms": {"ours": 1e3 * timing.median},
        "tokens_per_second": batch * length / timing.median,
        "all_ms": {"ours": [1e3 * s for s in timing.all]},
    }


def data_sheet() -> Any | None:
    """The data sheet of this machine's device, found by its name."""
    kind = jax.devices()[0].device_kind.lower()
    return next((device for name, device in planner.DEVICES.items() if name in kind), None)


def first_that_fits(size: str, settings: Sequence[tuple[str, int]], seconds: float) -> Case:
    """The first of some settings, in the order of their expected speed, whose step fits into memory."""

    def run(context: Context) -> list[Record]:
        records = []
        for setting, batch in settings:
            records.append(step_record(context, size, setting, batch))
            if "ms" in records[-1]:
                break
        return records

    return Case(size, seconds, run, rehearsed=size == "350M")


def setting_case(size: str, setting: str, batch: int, seconds: float) -> Case:
    def run(context: Context) -> list[Record]:
        return [step_record(context, size, setting, batch)]

    return Case(f"{size}, B {batch}, {setting}", seconds, run, later=True, rehearsed="+" in setting)


STEP = Row(
    "step",
    "training step of the language model, bfloat16, T 2048, packed documents",
    "",
    {"MFU of 350M": Target(0.45, 0.55, more_is_better=True), "MFU of 1B": Target(0.50, 0.60, more_is_better=True)},
    [
        first_that_fits("350M", [("none", 16), ("names(mixed,hidden)", 16), ("full", 16)], 45),
        first_that_fits("1B", [("none", 8), ("names(mixed,hidden)", 8), ("full", 8)], 45),
    ],
    checks=("training step", "attention, auto"),
    alone=True,
)
SETTINGS = Row(
    "settings",
    "training step of 1B parameters with other batch sizes, rematerialisation and offloading",
    "",
    {},
    [
        setting_case("1B", setting, batch, 45)
        for setting, batch in (
            ("names(mixed,hidden)", 16),
            ("full", 16),
            ("full+optimizer", 16),
            ("names(mixed)", 32),
        )
    ],
    checks=("training step", "attention, auto"),
    alone=True,
)
