"""What a run's step will cost on devices that need not be there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hpnlp import measure
from hpnlp.data import tokenizers
from hpnlp.models.lm import LM
from hpnlp.parallel.pipeline import microbatches
from hpnlp.planner.collectives import Collective, held_bytes, step_traffic, trace
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.jaxpr_cost import Program, read
from hpnlp.spec import parse_one
from hpnlp.training import config as configs
from hpnlp.training.config import Config
from hpnlp.training.sparse_rows import keys
from hpnlp.training.step import Trainer, check_batch, make_trainer
from hpnlp.types import WordStats


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of one device and one step.

    memory: bytes by what takes them; "activations" is all that is live at the worst moment beside the state and the gradients.
    hosted: bytes of the state that rest in the host's memory.
    program: its operations, those of ticks that a stage of a pipeline waits through included. bubble: the share of these.
    undivided: the matrices that no axis of the plan divides. sent: the collectives. credited: FLOPs that count in MFU
    (`measure.training_flops`).
    """

    config: Config
    devices: int
    sizes: Mapping[str, int]
    zero: int
    microbatches: int
    parameters: int
    memory: Mapping[str, int]
    hosted: int
    undivided: tuple[str, ...]
    program: Program
    bubble: float
    sent: tuple[Collective, ...]
    credited: float

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    def fits(self, device: Device) -> bool:
        return self.bytes <= USABLE * device.memory

    def unplanned(self, device: Device) -> float:
        """Bytes of temporaries that may come on top of those planned."""
        return device.unplanned * (self.memory.get("gradients", 0) + self.memory.get("activations", 0))

    def is_tight(self, device: Device) -> bool:
        """Whether it fits with less to spare than may come on top."""
        return self.fits(device) and self.bytes + self.unplanned(device) > USABLE * device.memory

    def seconds(self, device: Device) -> dict[str, float]:
        """By what takes them, at the least that the data sheet allows: products and memory, of which the share that a pipeline
        idles stands apart, and what is sent along each axis, nothing of it hidden behind the rest."""
        working = self.program.seconds(device.flops, device.rate, device.fuses)
        found = {"compute": working * (1 - self.bubble), "bubble": working * self.bubble}
        if self.program.hosted:
            found["host"] = self.program.hosted / device.host
        for one in self.sent:
            name = " x ".join(one.axes)
            found[name] = found.get(name, 0.0) + device.seconds(one, self.sizes)
        return found

    def total_seconds(self, device: Device) -> float:
        return sum(self.seconds(device).values())

    def mfu(self, device: Device) -> float:
        """Of the bfloat16 peak, where the step takes `seconds`."""
        return self.credited / (self.total_seconds(device) * device.flops["bfloat16"])


def model_of(config: Config) -> LM:
    """The model of a config, without its data: of a tokenizer that is trained on these, as large as it may be, and words as
    frequent as Zipf has them. Raises InputError where no such tokenizer goes with the model."""
    tokenizer, stats = config.data.tokenizer, None
    least, most = tokenizers.sizes(tokenizer)
    ids = max(least, min(most, config.model.vocab or most))
    if tokenizers.is_trained(tokenizer) and parse_one(tokenizer, "data.tokenizer").name == "words":
        ranks = np.arange(ids)
        stats = WordStats(10**9 // (1 + ranks), ranks)
    return configs.model_of(config, ids, stats)


def trainer_of(config: Config, devices: Sequence[Any] | int) -> Trainer:
    """The trainer of a config on devices, or on so many that need not be there.

    Raises InputError where the model, the batch and the plan do not go together.
    """
    optimizer = config.optimizer.for_batch(config.data.batch_size)
    trainer = make_trainer(model_of(config), optimizer, config.plan, steps=config.train.steps, devices=devices)
    check_batch(trainer.layout, config.data.batch_size, config.data.seq_len, config.optimizer.accumulate)
    return trainer


def costs(config: Config, devices: int) -> Costs:
    """What a step costs under `config.plan` on so many devices. Raises InputError where plan, model and batch do not fit.

    Cost: one trace of the step, whatever the sizes; nothing is allocated or compiled.
    """
    trainer, c = trainer_of(config, devices), model_of(config).config
    rows, length = config.data.batch_size, config.data.seq_len
    layout, shapes = trainer.layout, trainer.state_shapes
    jaxpr = trace(trainer, rows, length).jaxpr
    program = read(jaxpr, parts_of(trainer), donated=True)
    gradients = min(program.peak, gradient_bytes(trainer, rows, length))
    memory = {
        "parameters": held_bytes(shapes.params),
        "optimizer": held_bytes(shapes.opt_state),
        "average": held_bytes(shapes.ema),
        "gradients": gradients,
        "activations": program.peak - gradients,
    }
    stages, micro = layout.size("layers"), microbatches(layout, rows // config.optimizer.accumulate)
    credited = measure.training_flops(
        c.non_embedding_parameters(),
        rows * length,
        layers=c.layers,
        width=c.heads * c.head_size,
        length=length,
    )
    return Costs(
        config=config,
        devices=layout.mesh.size,
        sizes=dict(layout.mesh.shape),
        zero=layout.zero,
        microbatches=micro,
        parameters=sum(x.size for x in jax.tree.leaves(shapes.params)),
        memory={name: size for name, size in memory.items() if size},
        hosted=held_bytes(shapes, hosted=True),
        undivided=trainer.undivided,
        program=program,
        bubble=(stages - 1) / (config.plan.rounds * micro + stages - 1),
        sent=tuple(step_traffic(trainer, jaxpr)),
        credited=credited / layout.mesh.size,
    )


def state_bytes(config: Config, devices: int) -> int:
    """Of parameters, their gradients and what the optimizer keeps of them, on each device; no trace of the step."""
    trainer = trainer_of(config, devices)
    return held_bytes(trainer.state_shapes) + gradient_bytes(trainer, config.data.batch_size, config.data.seq_len)


def gradient_bytes(trainer: Trainer, rows: int, length: int) -> int:
    """Of the gradients of a batch, on each device: of the rows alone, where a table's rows are trained."""
    shapes = trainer.part_shapes if trainer.layout.zero >= 2 else trainer.state_shapes.params
    trained = trainer.rows_trained(rows, length)

    def kept(path: Any, x: Any) -> Any:
        if (count := trained.get(keys(path))) is None:
            return x
        # What divides words does not divide the rows that are taken out; what divides the model's dimension does.
        sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None, *x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype, sharding=sharding)

    return held_bytes(jax.tree_util.tree_map_with_path(kept, shapes))


def parts_of(trainer: Trainer) -> dict[int, int]:
    """Of how many devices each of the step's arguments is shared out over, by its number."""
    leaves = enumerate(jax.tree.leaves(trainer.state_shapes))
    return {at: math.prod(x.shape) // math.prod(x.sharding.shard_shape(x.shape)) for at, x in leaves if x.size}
