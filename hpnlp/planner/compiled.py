"""The step compiled for devices that are pretended, or described, and how far off its plan was."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from typing import Any

import jax
from jax.sharding import Mesh

from hpnlp.planner.collectives import Collective, compiled_traffic, total, trace
from hpnlp.planner.estimate import Costs, trainer_of
from hpnlp.types import InputError

# Devices that one CPU process can pretend to have: JAX takes further ones for those of another process.
MAX_PRETENDED = 2048
# No faster code is asked for than is needed to know its bytes.
HASTY = {"xla_backend_optimization_level": 0}
# Else libtpu looks for a TPU of this host, and for servers that know of it, and says at length that there are none.
DESCRIBED = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """seconds: of tracing and compiling. arguments, temporaries: bytes on each device. sent: without the names of axes; None
    where the program's text does not tell, as for TPUs."""

    seconds: float
    arguments: int
    temporaries: int
    sent: tuple[Collective, ...] | None


def compile_step(costs: Costs, depth: str, device: str) -> Compiled:
    """depth: "compiled", for pretended CPU devices, of which there must be as many, or "tpu", for chips of a kind."""
    devices = jax.devices("cpu") if depth == "compiled" else tpus(device, costs.devices)
    if len(devices) < costs.devices:
        raise InputError(f"{costs.devices} devices are planned for and {len(devices)} pretended: start with as many")
    start = time.perf_counter()
    config = costs.config
    trainer = trainer_of(config, devices[: costs.devices])
    mesh = trainer.layout.mesh
    assert isinstance(mesh, Mesh)
    with jax.set_mesh(mesh):
        lowered = trace(trainer, config.data.batch_size, config.data.seq_len).lower()
        try:
            executable = lowered.compile(HASTY if depth == "compiled" else None)
        except jax.errors.JaxRuntimeError as error:
            raise InputError(
                f"XLA does not compile the step for {costs.devices} devices ({str(error).splitlines()[0]:.300}): take fewer "
                "--devices, or --depth=formulas"
            ) from error
    stats = executable.memory_analysis()
    try:
        sent = tuple(compiled_traffic(executable.as_text()))
    except (InputError, jax.errors.JaxRuntimeError):  # the latter from jaxlib and libtpu of different months
        sent = None
    return Compiled(
        time.perf_counter() - start,
        stats.argument_size_in_bytes,
        stats.temp_size_in_bytes,
        sent,
    )


def tpus(device: str, count: int) -> list[Any]:
    """So many TPU chips that are only described. Raises InputError where libtpu is not there, or has no such slice."""
    from jax.experimental import topologies

    if device not in ("v5e", "v5p"):
        raise InputError(f"--depth=tpu compiles for --device=v5e or v5p, not for {device}")
    sides = _sides(count, 2 if device == "v5e" else 3)
    name = f"{device}:{'x'.join(map(str, sides))}"
    host = (*(2 if side % 2 == 0 else 1 for side in sides[:2]), 1)  # of its chips, as many along each side
    for variable, said in DESCRIBED.items():
        os.environ.setdefault(variable, said)
    try:
        chips = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=host)
        return list(chips.devices)
    except Exception as error:  # whatever a plugin that is not there, or knows no such slice, raises
        raise InputError(
            f"no TPU slice {name} ({' '.join(str(error).split())[:200]}): pip install '.[tpu-aot]' in the repository of "
            "hpnlp, or choose other --devices"
        ) from error


def _sides(count: int, dimensions: int) -> list[int]:
    """Sides of a slice, as alike as they can be."""
    if dimensions == 1:
        return [count]
    root = round(count ** (1 / dimensions))
    side = max((n for n in range(1, root + 1) if count % n == 0), default=1)
    return sorted([side, *_sides(count // side, dimensions - 1)])


def compare(costs: Costs, depth: str, device: str) -> str:
    """A table of what was planned beside what the compiler made of it."""
    found = compile_step(costs, depth, device)
    kinds = sorted({one.kind for one in (*costs.sent, *(found.sent or ()))})
    held = sum(costs.memory.get(name, 0) for name in ("parameters", "optimizer", "average"))
    rows: list[tuple[str, float, float]] = [
        ("state, bytes", float(held), float(found.arguments)),
        (
            "temporaries, bytes",
            float(costs.memory["gradients"] + costs.memory.get("activations", 0)),
            float(found.temporaries),
        ),
    ]
    for kind in kinds if found.sent is not None else ():
        planned, made = (total(one for one in sent if one.kind == kind) for sent in (costs.sent, found.sent or ()))
        rows.append((f"{kind}, bytes", planned, made))
    if found.sent is not None:
        rows.append(("all that is sent, bytes", total(costs.sent), total(found.sent)))
    lines = [f"Compiled in {found.seconds:.0f} s.", f"{'':26}{'planned':>14}{'compiled':>14}{'planned is':>14}"]
    for name, planned, made in rows:
        apart = f"{100 * (planned / made - 1):+.1f} %" if made else ("the same" if planned == made else "")
        lines.append(f"{name:26}{_short(planned):>14}{_short(made):>14}{apart:>14}")
    if depth == "compiled" and costs.config.model.dtype != "float32":
        lines.append(
            f"CPUs widen {costs.config.model.dtype}: temporaries and messages are up to twice what others take and send."
        )
    if found.sent is None:
        lines.append("What is sent could not be compared: the compiled program's text does not tell it.")
    return "\n".join(lines)


def _short(value: float) -> str:
    power = min(4, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{value / 1000**power:.4g} {['', 'k', 'M', 'G', 'T'][power]}B"
