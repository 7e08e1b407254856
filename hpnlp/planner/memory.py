"""Memory estimate of a training step on one device: parameters, optimizer state, gradients and activations."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from hpnlp.parallel.memory.host_offload import HOST
from hpnlp.training.optimizers.sparse_rows import keys
from hpnlp.training.trainer import Trainer


def memory_estimate(trainer: Trainer, peak: int, batch_size: int, length: int) -> dict[str, int]:
    """Bytes of a training step in the memory of one device, by use.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.
      peak: Peak bytes of the step's temporary buffers (`jaxpr_cost.program_cost`), gradients included.
      batch_size: Examples in a batch of all devices.
      length: Tokens of an example.

    Returns:
      Bytes of "parameters", "optimizer" (its state), "average" (of the parameters), "buffers", "frozen" (variables that the
      task provides), "carry", "gradients" and "activations". The last are all temporary buffers at the peak that are not
      gradients. Uses without any bytes are left out.
    """
    shapes = trainer.state_shapes
    gradients = min(peak, gradient_bytes(trainer, batch_size, length))
    memory = {
        "parameters": held_bytes(shapes.params),
        "optimizer": held_bytes(shapes.opt_state),
        "average": held_bytes(shapes.ema),
        "buffers": held_bytes(shapes.buffers),
        "frozen": held_bytes(trainer.step.frozen),
        "carry": held_bytes(shapes.carry),
        "gradients": gradients,
        "activations": peak - gradients,
    }
    return {use: size for use, size in memory.items() if size}


def state_bytes(trainer: Trainer, batch_size: int, length: int) -> int:
    """Bytes of the training state, frozen variables and gradients in the memory of one device, known without a trace.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.
      batch_size: Examples in a batch of all devices.
      length: Tokens of an example.

    Returns:
      A lower bound of what the step needs.
    """
    held = held_bytes((trainer.state_shapes, trainer.step.frozen))
    return held + gradient_bytes(trainer, batch_size, length)


def gradient_bytes(trainer: Trainer, batch_size: int, length: int) -> int:
    """Bytes of the gradients of a batch in the memory of one device.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.
      batch_size: Examples in a batch of all devices.
      length: Tokens of an example.

    Returns:
      Bytes; a table that is trained sparsely counts with the rows that the batch touches.
    """
    shapes = trainer.gradient_shapes if trainer.layout.zero >= 2 else trainer.state_shapes.params
    rows_trained = trainer.rows_trained(batch_size, length)

    def gradient(path: KeyPath, parameter: Any) -> Any:
        if (count := rows_trained.get(keys(path))) is None:
            return parameter
        # The rows that a batch touches are not divided over the vocabulary's axes; the model dimension still is.
        sharding = NamedSharding(parameter.sharding.mesh, PartitionSpec(None, *parameter.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((count, *parameter.shape[1:]), parameter.dtype, sharding=sharding)

    return held_bytes(jax.tree_util.tree_map_with_path(gradient, shapes))


def held_bytes(shapes: PyTree, *, hosted: bool = False) -> int:
    """Bytes of arrays in the memory of one device or of its host.

    Args:
      shapes: A tree of arrays or of shapes with shardings.
      hosted: Whether to count the arrays in host memory instead of those in device memory.

    Returns:
      Bytes of one device's shards.
    """
    leaves = (x for x in jax.tree.leaves(shapes) if (x.sharding.memory_kind == HOST) == hosted)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def state_shards(trainer: Trainer) -> dict[int, int]:
    """Number of devices that each array of the training state and each frozen variable is divided over.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.

    Returns:
      The number of shards by the index of the array among the arguments of the step; empty arrays are left out.
    """
    between = [None] * (len(trainer.batch_sharding) + 1)  # the batch and the key
    leaves = [*jax.tree.leaves(trainer.state_shapes), *between, *jax.tree.leaves(trainer.step.frozen)]
    return {
        index: math.prod(x.shape) // math.prod(x.sharding.shard_shape(x.shape))
        for index, x in enumerate(leaves)
        if x is not None and x.size
    }
