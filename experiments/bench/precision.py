"""Measures trainings in bfloat16 and float16 beside float32, and the largest batches within one memory before and after.

    python experiments/bench/precision.py --workdir=runs/precision [--parts=training,steps,batches] [--tiny]

"training": a byte-level language model of the standard library's source, with activations of each dtype and parameters of
float32, three seeds, equal steps. float16 is trained with loss scaling and without. Losses are of the same held-out text, and
their differences to float32 are paired (`small_runs.paired`). "steps": time of a training step, interleaved, and the temporary
memory of the compiled step. "batches": the largest batch of an encoder whose compiled program fits into --megabytes with
weights, inputs and temporary buffers, and the sequences per second there, for each recipe; and the largest batch of a training
step of the same encoder. Finished runs are skipped when the script runs again.

Offloading is not in this file: on a CPU both memories are the same. The row "step" of gpu.py measures time and memory of
`plan.offload_optimizer` and `plan.offload_parameters`.

Micikevicius et al. 2018, "Mixed precision training": half the memory, the accuracy of float32.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import small_runs
from absl import flags

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.compress.recipe import compress, parse_recipe
from hpnlp.data import tokenizers
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.models.lm import example_batch
from hpnlp.parallel.plan import Plan
from hpnlp.report import read_metrics
from hpnlp.spec import lookup
from hpnlp.tasks.vocabulary import Vocabulary
from hpnlp.training.config import Config, default, resolve
from hpnlp.training.optim import OptimizerConfig
from hpnlp.training.run_directory import make_model
from hpnlp.training.trainer import make_trainer

# Name -> fields of the config.
DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model.dtype": "bfloat16"},
    "float16, loss scaling": {"model.dtype": "float16"},
    "float16, no loss scaling": {"model.dtype": "float16", "optimizer.loss_scale": 0.0},
}
FORMATS = {"float32": "", "bfloat16": "bf16", "int8": "int8", "int4": "int4(group=32)"}
SIZES, TINY_SIZES = (6, 384, 6), (1, 32, 2)  # layers, D, heads of the encoder
LENGTH, VOCAB = 128, 8192

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Directory of the runs.", required=True)
flags.DEFINE_list("parts", ["training", "steps", "batches"], "Parts to measure.")
flags.DEFINE_integer("steps", 500, "Steps of a training.", lower_bound=1)
flags.DEFINE_integer(
    "megabytes", 256, "Memory of a program in the part batches, in units of 2^20 bytes.", lower_bound=1
)
flags.DEFINE_integer("rounds", 7, "Measurements of each time.", lower_bound=1)
flags.DEFINE_bool(
    "tiny", False, "A few steps of a tiny model, whose figures mean nothing; the result stays in --workdir."
)
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Directory of the result.")


def config_of(dtype: str, seed: int) -> Config:
    """The config of a training."""
    values: Any = default()
    values.data.update(path="stdlib", tokenizer="bytes", seq_len=128, batch_size=16, heldout_bytes=400_000)
    values.model.update(layers=4, dim=128, heads=4, mlp="gelu")
    values.optimizer.update(learning_rate=2e-3, warmup=50, final=0.0)
    values.train.update(steps=FLAGS.steps, seed=seed, checkpoint_every=0, baselines=False, sample=0)
    values.plan.name = "single"
    if FLAGS.tiny:
        values.data.update(path=__file__, seq_len=32, batch_size=4, heldout_path=small_runs.__file__)
        values.model.update(layers=1, dim=32, heads=2)
        values.train.steps = 4
    values.update_from_flattened_dict(DTYPES[dtype])
    return resolve(values)


def seeds() -> tuple[int, ...]:
    return (0,) if FLAGS.tiny else (0, 1, 2)


def directory(dtype: str, seed: int) -> Path:
    return Path(FLAGS.workdir).absolute() / f"{dtype.replace(', ', '_').replace(' ', '_')}-{seed}"


def train_all() -> None:
    """Trains what is not finished."""
    missing = [(d, s) for d in DTYPES for s in seeds() if not small_runs.is_finished(directory(d, s))]
    progress = small_runs.Progress(len(missing) * (20 + 0.25 * config_of("float32", 0).train.steps))
    each = progress.remaining / max(1, len(missing))
    for dtype, seed in missing:
        progress.begin(f"{dtype}, seed {seed}")
        target = directory(dtype, seed)
        with (target.parent / "log.txt").open("a") as log, contextlib.redirect_stdout(log):
            result = small_runs.train(config_of(dtype, seed), target)
        skipped = sum(line.get("skipped") or 0 for line in read_metrics(target, result.step)[0])
        small_runs.write(target, {"loss": result.heldout["loss"], "skipped_steps": skipped})
        progress.end(each, f"held-out loss {result.heldout['loss']:.4f} nats per byte")


def training_rows() -> list[dict[str, Any]]:
    """Losses of each dtype, and their differences to float32."""
    train_all()
    scores = {dtype: [small_runs.scores(directory(dtype, seed)) for seed in seeds()] for dtype in DTYPES}
    rows = []
    for dtype, of_seeds in scores.items():
        results = [small_runs.read(directory(dtype, seed)) for seed in seeds()]
        losses = [result["loss"] for result in results]
        row = {"table": "training", "what": dtype, "steps": config_of(dtype, 0).train.steps, "losses": losses}
        row |= {"loss": statistics.mean(losses), "skipped_steps": [result["skipped_steps"] for result in results]}
        compared = small_runs.paired(of_seeds, scores["float32"], "loss") if dtype != "float32" else {}
        rows.append(row | compared)
    return rows


class TrainingStep:
    """A training step of a language model, as a call without arguments.

    Attributes:
      memory: Memory of the compiled step.
      state_bytes: Bytes of parameters and optimizer state.
    """

    def __init__(self, config: Config) -> None:
        model = make_model(config, Vocabulary(tokenizers.build("bytes")))
        optimizer = config.optimizer.for_batch(config.data.batch_size)
        trainer = make_trainer(model, optimizer, config.plan, steps=1000, devices=jax.devices()[:1])
        self._key = jax.random.key(0)
        batch = example_batch(config.data.batch_size, config.data.seq_len)
        self._batch = jax.device_put(batch, trainer.batch_sharding)
        with jax.set_mesh(trainer.layout.mesh):
            self._program = measure.compile(trainer.step.jitted, trainer.state_shapes, self._batch, self._key)
        self._state = trainer.init(self._key)
        self.memory = self._program.memory
        self.state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state) if isinstance(leaf, jax.Array))

    def __call__(self) -> Any:
        self._state, metrics = self._program(self._state, self._batch, self._key)
        return metrics["loss"]


def step_rows() -> list[dict[str, Any]]:
    """Time and memory of a training step of each dtype, interleaved."""
    steps = {dtype: TrainingStep(config_of(dtype, 0)) for dtype in DTYPES if dtype != "float16, no loss scaling"}
    times = measure.timeit(steps, rounds=FLAGS.rounds)
    return [
        {
            "table": "steps",
            "what": dtype,
            "seconds": times[dtype].median,
            "over_float32": times[dtype].over(times["float32"]),
            "interval": list(times[dtype].interval(times["float32"])),
            "temp_bytes": step.memory.temp,
            "temp_over_float32": step.memory.temp / steps["float32"].memory.temp,
            "state_bytes": step.state_bytes,
        }
        for dtype, step in steps.items()
    ]


def inputs_of(model: Encoder, batch: int) -> dict[str, Any]:
    """A batch of random tokens."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, LENGTH)).astype(np.int32)
    return {**model.example_batch(batch, LENGTH), "tokens": jnp.asarray(tokens)}


class Forward:
    """The logits of a model with some weights, compiled for batches of several sizes."""

    def __init__(self, config: EncoderConfig, weights: Any) -> None:
        self._model, self._weights = Encoder(config), weights
        self._programs: dict[int, measure.Compiled] = {}

    def _logits(self, weights: Any, inputs: Any) -> Any:
        return self._model.apply({"params": weights}, inputs, method="logits")

    def peak(self, batch: int) -> int:
        """Bytes of weights, inputs, logits and temporary buffers."""
        if batch not in self._programs:
            self._programs[batch] = measure.compile(self._logits, self._weights, inputs_of(self._model, batch))
        return self._programs[batch].memory.peak

    def call(self, batch: int) -> Callable[[], Any]:
        program, inputs = self._programs[batch], inputs_of(self._model, batch)
        return lambda: program(self._weights, inputs)


def batch_rows() -> list[dict[str, Any]]:
    """Largest batches and the sequences per second there, of each format; and the largest batches of training steps."""
    (layers, dim, heads), limit = TINY_SIZES if FLAGS.tiny else SIZES, (8 if FLAGS.tiny else FLAGS.megabytes) << 20
    config = EncoderConfig(
        layers=layers, dim=dim, heads=heads, vocab=VOCAB, max_len=LENGTH, mlp="gelu", pooling="mean", classes=2
    )
    params = nn.meta.unbox(Encoder(config).init(jax.random.key(0), inputs_of(Encoder(config), 1))["params"])
    rows, calls = [], {}
    for name, recipe in FORMATS.items():
        stages = compress(config, params, parse_recipe(recipe)) if recipe else ((None, config, params),)
        *_, (_, small, weights) = stages
        forward = Forward(small, weights)
        batch, size = small_runs.largest_batch(forward.peak, limit)
        rows.append({"table": "batches", "what": name, "limit_bytes": limit, "batch": batch, "bytes": size})
        print(rows[-1], flush=True)
        if batch:
            calls[name] = forward.call(batch)
    times = measure.timeit(calls, rounds=FLAGS.rounds)
    for row in rows:
        if timing := times.get(row["what"]):
            row |= {"seconds": timing.median, "sequences_per_second": row["batch"] / timing.median}
    return rows + [training_batch_row(config, dtype, limit) for dtype in ("float32", "bfloat16")]


def training_batch_row(config: EncoderConfig, dtype: str, limit: int) -> dict[str, Any]:
    """The largest batch of a training step."""
    model = Encoder(dataclasses.replace(config, dtype=dtype))
    trainer = make_trainer(model, OptimizerConfig(), Plan("single"), steps=1000, devices=jax.devices()[:1])

    def peak(batch: int) -> int:
        shapes = jax.eval_shape(lambda: (model.example_batch(batch, LENGTH), jax.random.key(0)))
        with jax.set_mesh(trainer.layout.mesh):
            return measure.compile(trainer.step.jitted, trainer.state_shapes, *shapes).memory.peak

    batch, size = small_runs.largest_batch(peak, 4 * limit)
    row = {"table": "training batches", "what": dtype, "limit_bytes": 4 * limit, "batch": batch, "bytes": size}
    print(row, flush=True)
    return row


PARTS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "training": training_rows,
    "steps": step_rows,
    "batches": batch_rows,
}


def main(_: list[str]) -> None:
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir).absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    parts = [lookup(PARTS, part, "--parts") for part in FLAGS.parts]
    rows = []
    for part in parts:
        rows += part()
    for row in rows:
        print(row, flush=True)
    print(measure.write_result("precision", rows, str(workdir) if FLAGS.tiny else FLAGS.out))


if __name__ == "__main__":
    run_script(main)
