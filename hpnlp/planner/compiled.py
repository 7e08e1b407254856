"""Comparison of a plan with the step compiled for simulated CPU devices or for TPUs that need not exist."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from hpnlp.planner.collectives import Collective, compiled_traffic, total, trace
from hpnlp.planner.estimate import Costs, planned_trainer
from hpnlp.types import InputError

# Simulated devices of one CPU process; JAX would assign larger device ids to another process.
MAX_SIMULATED = 2048
# Optimised machine code is not needed to know the bytes of a program.
FAST_COMPILATION = {"xla_backend_optimization_level": 0}
# Without these, libtpu looks for TPUs of this host and for metadata servers, and prints long warnings that there are none.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled training step, on one device."""

    seconds: float  #: duration of tracing and compilation
    arguments: int  #: bytes of the arguments
    temporaries: int  #: bytes of temporary buffers
    #: Collectives of the program, without the names of mesh axes; None where they cannot be read from the program's text, as
    #: for TPUs.
    collectives: tuple[Collective, ...] | None


def compile_step(costs: Costs, depth: str, device: str) -> CompiledStep:
    """Compiles the training step of an estimate.

    Args:
      costs: The estimate.
      depth: "compiled" for simulated CPU devices, or "tpu" for chips of the kind `device`.
      device: An entry of `DEVICES`.

    Returns:
      The memory and the collectives of the compiled program.

    Raises:
      InputError: Too few devices are simulated, or XLA cannot compile the step.
    """
    devices = jax.devices("cpu") if depth == "compiled" else tpu_devices(device, costs.devices)
    if len(devices) < costs.devices:
        raise InputError(
            f"the plan is for {costs.devices} devices, and {len(devices)} are simulated: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={costs.devices}"
        )
    start = time.perf_counter()
    config = costs.config
    trainer = planned_trainer(config, devices[: costs.devices])
    mesh = trainer.layout.mesh
    assert isinstance(mesh, Mesh)
    with jax.set_mesh(mesh):
        lowered = trace(trainer, config.data.batch_size, config.data.seq_len).lower()
        try:
            executable = lowered.compile(FAST_COMPILATION if depth == "compiled" else None)
        except jax.errors.JaxRuntimeError as error:
            raise InputError(
                f"XLA cannot compile the step for {costs.devices} devices ({str(error).splitlines()[0]:.300}): use fewer "
                "--devices, or --depth=formulas"
            ) from error
    stats = executable.memory_analysis()
    try:
        collectives = tuple(compiled_traffic(executable.as_text()))
    except (InputError, jax.errors.JaxRuntimeError):  # jaxlib cannot read the programs of a newer libtpu
        collectives = None
    seconds = time.perf_counter() - start
    return CompiledStep(seconds, stats.argument_size_in_bytes, stats.temp_size_in_bytes, collectives)


def tpu_devices(device: str, count: int) -> list[Any]:
    """Descriptions of TPU chips to compile for.

    Args:
      device: "v5e" or "v5p".
      count: Number of chips, in a slice whose sides are as equal as possible.

    Returns:
      JAX devices that programs can be compiled for but not run on.

    Raises:
      InputError: Another device, libtpu is not installed, or there is no slice of this size.
    """
    from jax.experimental import topologies

    if device not in ("v5e", "v5p"):
        raise InputError(f"--depth=tpu compiles for --device=v5e or v5p, not for {device}")
    sides = _slice_sides(count, 2 if device == "v5e" else 3)
    name = f"{device}:{'x'.join(map(str, sides))}"
    chips_per_host = (*(2 if side % 2 == 0 else 1 for side in sides[:2]), 1)
    for variable, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=name, chips_per_host_bounds=chips_per_host
        )
        return list(topology.devices)
    except Exception as error:  # the type depends on the plugin and on what it lacks
        raise InputError(
            f"no TPU slice {name} ({' '.join(str(error).split())[:200]}): install libtpu (pip install '.[tpu-aot]' in the "
            "repository of hpnlp), or choose other --devices"
        ) from error


def _slice_sides(count: int, dimensions: int) -> list[int]:
    """Sides of a slice of `count` chips, as equal as possible, smallest first."""
    if dimensions == 1:
        return [count]
    root = round(count ** (1 / dimensions))
    side = max((n for n in range(1, root + 1) if count % n == 0), default=1)
    return sorted([side, *_slice_sides(count // side, dimensions - 1)])


def compare(costs: Costs, depth: str, device: str) -> str:
    """Compiles a step and compares it with its plan.

    Args:
      costs: The plan.
      depth: "compiled" or "tpu", as for `compile_step`.
      device: An entry of `DEVICES`.

    Returns:
      A table of planned and compiled bytes.

    Raises:
      InputError: As `compile_step`.
    """
    compiled = compile_step(costs, depth, device)
    rows: list[tuple[str, float, float]] = [
        ("state, bytes", float(costs.state_bytes), float(compiled.arguments)),
        ("temporaries, bytes", float(costs.temporary_bytes), float(compiled.temporaries)),
    ]
    if compiled.collectives is not None:
        for kind in sorted({collective.kind for collective in (*costs.collectives, *compiled.collectives)}):
            planned, measured = (
                total(collective for collective in collectives if collective.kind == kind)
                for collectives in (costs.collectives, compiled.collectives)
            )
            rows.append((f"{kind}, bytes", planned, measured))
        rows.append(("communication, bytes", total(costs.collectives), total(compiled.collectives)))
    lines = [f"Compiled in {compiled.seconds:.0f} s.", f"{'':26}{'planned':>14}{'compiled':>14}{'error':>14}"]
    lines += [_comparison_row(*row) for row in rows]
    if depth == "compiled" and costs.config.model.dtype != "float32":
        lines.append(
            f"XLA:CPU widens {costs.config.model.dtype} to float32: compiled temporaries and messages are up to twice as large "
            "as on accelerators."
        )
    if compiled.collectives is None:
        lines.append("The communication was not compared: it cannot be read from the text of the compiled program.")
    return "\n".join(lines)


def _comparison_row(name: str, planned: float, compiled: float) -> str:
    """A row of the comparison, with the error of the plan relative to the compiled program."""
    error = f"{100 * (planned / compiled - 1):+.1f} %" if compiled else ("equal" if planned == compiled else "")
    return f"{name:26}{_format_bytes(planned):>14}{_format_bytes(compiled):>14}{error:>14}"


def _format_bytes(value: float) -> str:
    power = min(4, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {['', 'k', 'M', 'G', 'T'][power]}B"
