"""Estimate of a training step on devices that need not exist: memory, operations, collectives and time.

The memory is estimated in `hpnlp.planner.memory`, the operations in `jaxpr_cost`, the messages in `collectives`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hpnlp import tasks
from hpnlp.parallel.pipeline import microbatches
from hpnlp.planner.collectives import Collective, step_traffic, trace
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.jaxpr.jaxpr_cost import program_cost
from hpnlp.planner.memory import held_bytes, memory_estimate, state_shards
from hpnlp.planner.roofline import ProgramCost
from hpnlp.training.batch_lengths import check_buckets
from hpnlp.training.config import Config
from hpnlp.training.trainer import Trainer, check_batch, make_trainer


@dataclasses.dataclass(frozen=True)
class Costs:
    """Estimated costs of one training step on one device."""

    config: Config  #: config of the run
    devices: int  #: number of devices
    sizes: Mapping[str, int]  #: number of devices of each mesh axis
    zero: int  #: stage of ZeRO
    microbatches: int  #: number of microbatches of a pipeline, 1 without one
    parameters: int  #: number of parameters of the model
    memory: Mapping[str, int]  #: bytes by use (`memory.memory_estimate`)
    host_bytes: int  #: bytes of the training state in host memory
    undivided: tuple[str, ...]  #: paths of the matrices that no axis of the plan divides
    program: ProgramCost  #: operations of the step, those of a pipeline's idle ticks included
    bubble: float  #: share of the operations that a pipeline spends on idle ticks
    collectives: tuple[Collective, ...]  #: collectives of a step
    model_flops: float  #: FLOPs that count in MFU (`measure.training_flops`)

    @property
    def bytes(self) -> int:
        """Bytes in device memory, of all uses."""
        return sum(self.memory.values())

    @property
    def temporary_bytes(self) -> int:
        """Bytes of temporary buffers: gradients and activations."""
        return self.memory.get("gradients", 0) + self.memory.get("activations", 0)

    @property
    def state_bytes(self) -> int:
        """Bytes that stay in device memory from step to step: parameters, optimizer state and so on."""
        return self.bytes - self.temporary_bytes

    def fits(self, device: Device) -> bool:
        """Whether the step fits into the usable memory of a device.

        Args:
          device: The accelerator.

        Returns:
          True where the planned bytes are not more.
        """
        return self.bytes <= USABLE * device.memory

    def error_bytes(self, device: Device) -> float:
        """Bytes of temporary buffers that a compiled step may need beyond the estimate.

        Args:
          device: The accelerator, with the largest measured error.

        Returns:
          Bytes.
        """
        return device.temporaries_error * self.temporary_bytes

    def is_tight(self, device: Device) -> bool:
        """Whether the step fits, but would not fit if the estimate had its largest measured error.

        Args:
          device: The accelerator.

        Returns:
          False where the step fits even with this error, and where it does not fit.
        """
        return self.fits(device) and self.bytes + self.error_bytes(device) > USABLE * device.memory

    def seconds(self, device: Device) -> dict[str, float]:
        """Lower bound of the time of a step by the device's data sheet, with no communication hidden behind computation.

        Args:
          device: The accelerator.

        Returns:
          Seconds of "compute" (products and memory traffic), of "bubble" (the share of these that a pipeline idles), of
          "host" (transfers from and to host memory) and of the collectives along each mesh axis or set of axes.
        """
        working = self.program.seconds(device.flops, device.memory_bandwidth, device.fuses_attention)
        seconds = {"compute": working * (1 - self.bubble), "bubble": working * self.bubble}
        if self.program.host_bytes:
            seconds["host"] = self.program.host_bytes / device.host_bandwidth
        for collective in self.collectives:
            name = " x ".join(collective.axes)
            seconds[name] = seconds.get(name, 0.0) + device.seconds(collective, self.sizes)
        return seconds

    def total_seconds(self, device: Device) -> float:
        """Sum of `seconds`.

        Args:
          device: The accelerator.

        Returns:
          Seconds of a step.
        """
        return sum(self.seconds(device).values())

    def mfu(self, device: Device) -> float:
        """Model FLOPs utilisation of a step that takes `total_seconds`.

        Args:
          device: The accelerator.

        Returns:
          The share of the device's bfloat16 peak.
        """
        return self.model_flops / (self.total_seconds(device) * device.flops["bfloat16"])


def planned_model(config: Config) -> Any:
    """The model of a config, without its data, whose vocabulary is taken to reach its largest size.

    Args:
      config: A resolved config.

    Returns:
      The model.

    Raises:
      InputError: The model does not fit the task or the largest vocabulary.
    """
    if config.distill.teacher:
        from hpnlp.training.starts import teacher

        return teacher.planned(config)
    return tasks.make_model(config, tasks.find(config.task).planned_sizes(config))


def planned_trainer(config: Config, devices: Sequence[Any] | int) -> Trainer:
    """The trainer of a config.

    Args:
      config: A resolved config.
      devices: JAX devices, or a number of devices that need not exist.

    Returns:
      The trainer, on a mesh of these devices or on an abstract mesh.

    Raises:
      InputError: The model, the batch and the plan are not compatible.
    """
    optimizer, model = config.optimizer.for_batch(config.data.batch_size), planned_model(config)
    trainer = make_trainer(
        model,
        optimizer,
        config.plan,
        steps=config.train.steps,
        devices=devices,
        batch_size=config.data.batch_size,
    )
    check_buckets(config, model, trainer.layout)
    check_batch(trainer.layout, config.data.batch_size, config.data.seq_len, config.optimizer.accumulate)
    return trainer


def costs(config: Config, devices: int) -> Costs:
    """Costs of a training step under `config.plan`.

    Args:
      config: A resolved config.
      devices: Number of devices, which need not exist.

    Returns:
      Memory, operations and collectives of one device.

    Raises:
      InputError: The model, the batch and the plan are not compatible.

    Cost: one trace of the step, whatever the sizes; nothing is allocated or compiled.
    """
    trainer, model = planned_trainer(config, devices), planned_model(config).config
    batch_size, length = config.data.batch_size, config.data.seq_len
    layout, shapes = trainer.layout, trainer.state_shapes
    jaxpr = trace(trainer, batch_size, length).jaxpr
    program = program_cost(jaxpr, state_shards(trainer), donated=True)
    stages, count = layout.size("layers"), microbatches(layout, batch_size // config.optimizer.accumulate)
    return Costs(
        config=config,
        devices=layout.mesh.size,
        sizes=dict(layout.mesh.shape),
        zero=layout.zero,
        microbatches=count,
        parameters=sum(x.size for x in jax.tree.leaves(shapes.params)),
        memory=memory_estimate(trainer, program.peak, batch_size, length),
        host_bytes=held_bytes(shapes, hosted=True),
        undivided=trainer.undivided,
        program=program,
        bubble=(stages - 1) / (config.plan.rounds * count + stages - 1),
        collectives=tuple(step_traffic(trainer, jaxpr)),
        model_flops=model.training_flops(batch_size, length) / layout.mesh.size,
    )
