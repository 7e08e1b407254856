"""Collectives of a training step: read from its jaxpr before it runs, and from a compiled program.

Programs over a mesh name their collectives (`hpnlp.parallel`), so that the messages can be read from the jaxpr, for any number
of devices and without any of them. The compiler adds few: the all-gathers of parameters that ZeRO 1 and 2 have updated in
shards, and the sums of gradients of arrays outside of `shard_map`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.extend import core
from jaxtyping import PyTree

from hpnlp.planner.jaxpr.jaxprs import needed_equations, open_jaxpr
from hpnlp.training.trainer import Trainer
from hpnlp.types import Equation, InputError


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of one array."""

    kind: str  #: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute"
    axes: tuple[str, ...]  #: the mesh axes that it goes over
    devices: int  #: number of devices that take part
    size: int  #: bytes of the whole array that is summed, gathered, scattered or exchanged, or that a device passes on
    times: int = 1  #: number of times that it runs in a step

    @property
    def bytes(self) -> float:
        """Bytes that each device sends in a step, by ring algorithms.

        References:
          Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
        """
        n = self.devices
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.kind, (n - 1) / n)
        return self.times * share * self.size


# Primitive -> (kind, whether its operand is one device's shard of the array that counts).
PRIMITIVES = {
    "psum": ("all-reduce", False),
    "psum_invariant": ("all-reduce", False),
    "pmax": ("all-reduce", False),
    "pmin": ("all-reduce", False),
    "all_gather": ("all-gather", True),
    "all_gather_invariant": ("all-gather", True),
    "reduce_scatter": ("reduce-scatter", False),
    "all_to_all": ("all-to-all", False),
    "ppermute": ("collective-permute", False),
}


def traffic(jaxpr: core.Jaxpr | core.ClosedJaxpr, sizes: Mapping[str, int]) -> list[Collective]:
    """Collectives of a program. A `cond` counts as the branch that sends most.

    Args:
      jaxpr: As `jax.jit(f).trace(...).jaxpr` returns it.
      sizes: Number of devices of each mesh axis.

    Returns:
      Each distinct collective once, with the number of times that it runs.

    Raises:
      InputError: A collective runs in a loop of unknown length.
    """
    return _merged(_jaxpr_collectives(jaxpr, sizes, 1))


def _merged(collectives: Iterable[Collective]) -> list[Collective]:
    """Equal collectives as one that runs as often as they do together."""
    times: collections.Counter[Collective] = collections.Counter()
    for collective in collectives:
        times[dataclasses.replace(collective, times=1)] += collective.times
    return [dataclasses.replace(collective, times=count) for collective, count in times.items()]


def _jaxpr_collectives(
    jaxpr: core.Jaxpr | core.ClosedJaxpr, sizes: Mapping[str, int], times: int
) -> Iterator[Collective]:
    for equation in needed_equations(open_jaxpr(jaxpr)):
        if equation.primitive.name in PRIMITIVES:
            yield from _operand_collectives(equation, sizes, times)
        else:
            yield from _body_collectives(equation, sizes, times)


def _operand_collectives(equation: Equation, sizes: Mapping[str, int], times: int) -> Iterator[Collective]:
    """One collective for each operand; none over a single device."""
    kind, is_shard = PRIMITIVES[equation.primitive.name]
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
    devices = math.prod(sizes[axis] for axis in axes)
    for operand in equation.invars if devices > 1 else ():
        size = operand.aval.size * operand.aval.dtype.itemsize * (devices if is_shard else 1)
        yield Collective(kind, axes, devices, size, times)


def _body_collectives(equation: Equation, sizes: Mapping[str, int], times: int) -> list[Collective]:
    """Collectives in the body of a call, a loop or a branch."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return max((list(_jaxpr_collectives(branch, sizes, times)) for branch in params["branches"]), key=total)
    times *= params["length"] if name == "scan" else 1
    collectives = [c for body in core.jaxprs_in_params(params) for c in _jaxpr_collectives(body, sizes, times)]
    if name == "while" and collectives:
        raise InputError(
            f"{collectives[0].kind} over {collectives[0].axes} runs in a loop whose length is not known before it runs"
        )
    return collectives


def total(collectives: Iterable[Collective]) -> float:
    """Bytes that each device sends.

    Args:
      collectives: Collectives of a step.

    Returns:
      The sum of their `bytes`.
    """
    return sum((collective.bytes for collective in collectives), 0.0)


def trace(trainer: Trainer, batch_size: int, length: int) -> Any:
    """Traces a training step.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.
      batch_size: Examples in a batch of all devices.
      length: Tokens of an example.

    Returns:
      A `jax.stages.Traced`, with its `jaxpr` and `lower()`.
    """
    batch = jax.eval_shape(lambda: trainer.example_batch(batch_size, length))
    key = jax.eval_shape(lambda: jax.random.key(0))
    return trainer.step.jitted.trace(trainer.state_shapes, batch, key, *trainer.step.frozen)


def step_traffic(trainer: Trainer, jaxpr: core.Jaxpr | core.ClosedJaxpr) -> list[Collective]:
    """Collectives of a training step, those that the compiler adds for ZeRO included.

    Args:
      trainer: A trainer, on devices or on an abstract mesh.
      jaxpr: Jaxpr of the traced step, see `trace`.

    Returns:
      Each distinct collective once. `times` of -1 takes off an all-gather that the compiler does once instead of twice.

    Raises:
      InputError: A collective runs in a loop of unknown length.
    """
    layout, params = trainer.layout, trainer.state_shapes.params
    collectives = traffic(jaxpr, layout.mesh.shape)
    if layout.zero in (1, 2):
        collectives += _parameter_gathers(params, trainer.gradient_shapes)
    if layout.zero == 3 and "head" not in params:
        # The lookup and the scores both gather a tied table, which the compiler does once.
        table = params["embed"]["table"]
        size = table.size * table.dtype.itemsize // layout.size("vocab")
        gather = Collective("all-gather", ("fsdp",), layout.mesh.shape["fsdp"], size)
        if any(dataclasses.replace(c, times=1) == gather and c.times > 1 for c in collectives):
            collectives.append(dataclasses.replace(gather, times=-1))
    return collectives


def _parameter_gathers(params: PyTree, shards: PyTree) -> list[Collective]:
    """All-gathers of the parameters that each device has updated a shard of, under ZeRO 1 and 2.

    params, shards: shapes with the shardings of the parameters and of their optimizer statistics.
    """
    collectives = []
    for parameter, shard in zip(jax.tree.leaves(params), jax.tree.leaves(shards), strict=True):
        elements = math.prod(parameter.sharding.shard_shape(parameter.shape))
        devices = elements // math.prod(shard.sharding.shard_shape(shard.shape))
        if devices > 1:
            collectives.append(Collective("all-gather", ("fsdp",), devices, elements * parameter.dtype.itemsize))
    return collectives


_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def compiled_traffic(text: str) -> list[Collective]:
    """Collectives of a compiled program.

    Args:
      text: The HLO text of the program, as `jax.stages.Compiled.as_text()` returns it.

    Returns:
      Each distinct collective once, without the names of mesh axes.

    Raises:
      InputError: A collective runs in a loop whose length is not in the text, or its devices cannot be read from it.
    """
    computations: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            body = computations["ENTRY" if head[1] else head[2]] = []
        else:
            body.append(line)
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    return _merged(_hlo_collectives(computations, "ENTRY", 1, int(partitions[1]) if partitions else 1))


def _hlo_collectives(
    computations: Mapping[str, list[str]], name: str, times: int, all_devices: int
) -> Iterator[Collective]:
    """Collectives of a computation that runs `times` times, and of the computations that it calls."""
    for line in computations[name]:
        if collective := _hlo_collective(line, times, all_devices):
            yield collective
        for callee, runs in _calls(line):
            if callee not in computations:
                continue
            if runs is None and re.search(rf"({_KINDS})(-start)?\(", "\n".join(computations[callee])):
                raise InputError(f"a collective runs in {callee}, a loop whose length is not known before it runs")
            yield from _hlo_collectives(computations, callee, times * (runs or 1), all_devices)


def _hlo_collective(line: str, times: int, all_devices: int) -> Collective | None:
    """The collective of an HLO instruction."""
    instruction = re.search(rf" = (.*?) ({_KINDS})(-start)?\(", line)
    if not instruction:
        return None
    shapes, kind, is_start = instruction.groups()
    devices = _group_size(line, all_devices)
    sizes = [_array_bytes(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes)]
    if is_start and kind in ("all-gather", "collective-permute"):  # their type is a pair of operands and results
        sizes = sizes[len(sizes) // 2 :]
    size = sum(sizes) * (devices if kind == "reduce-scatter" else 1)
    return Collective(kind, (), devices, size, times) if devices > 1 else None


def _calls(line: str) -> list[tuple[str, int | None]]:
    """(computation, how often it runs) for what an HLO instruction calls; None where a loop's length is not in the text.

    Reductions are left out: what they call is a scalar function.
    """
    if loop := re.search(r"\bwhile\(.*body=%?([\w.-]+)", line):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        return [(loop[1], int(trips[1]) if trips else None)]
    if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
        return [(name.strip().lstrip("%"), 1) for name in branches[1].split(",")]
    if branches := re.search(r"true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", line):
        return [(branches[1], 1), (branches[2], 1)]
    called = re.search(r" (?:call|fusion)\(.*(?:to_apply|calls)=%?([\w.-]+)", line)
    return [(called[1], 1)] if called else []


def _group_size(line: str, all_devices: int) -> int:
    """Number of devices that take part in a collective; of a permutation, 2 where any device sends to another."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return 2 if any(a != b for a, b in re.findall(r"\{(\d+),(\d+)", pairs[1])) else 1
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\S*\))? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if unknown := re.search(r"replica_groups=(?!\{\})\S*", line):
        raise InputError(f"the devices of a collective in the compiled program cannot be read: {unknown[0]}")
    return all_devices  # no groups, or an empty list of them, stands for all devices


def _array_bytes(dtype: str, shape: str) -> int:
    return _ITEM_BYTES.get(dtype, 4) * math.prod(int(size) for size in shape.split(",") if size)
