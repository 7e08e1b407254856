"""What a layout sends, before it is run, and what its arrays take.

Programs over a mesh name their collectives (`hpnlp.parallel`), so that what is sent can be read off the jaxpr, loops multiplied
out, for any number of devices, with none of them at hand. What the compiler adds is little: it gathers the parameters that ZeRO
1 and 2 have updated in parts, and sums the gradients of what stands outside of those programs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend import core

from hpnlp.models.lm import example_batch
from hpnlp.parallel.host_offload import HOST
from hpnlp.training.step import Trainer
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective. axes: the mesh axes it goes over. devices: how many take part. size: bytes of the whole that is summed,
    gathered, scattered, exchanged or passed on by one device. times: how often in a step.
    """

    kind: str
    axes: tuple[str, ...]
    devices: int
    size: int
    times: int = 1

    @property
    def bytes(self) -> float:
        """What each device sends in a step, by ring algorithms (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce")."""
        n = self.devices
        share = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}.get(self.kind, (n - 1) / n)
        return self.times * share * self.size


# jaxpr primitive -> (kind, whether its operand is a part of what counts)
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


def traffic(jaxpr: Any, sizes: Mapping[str, int]) -> list[Collective]:
    """The collectives of a program, as `jax.jit(f).trace(...).jaxpr` has it: each once, with how often it runs.

    sizes: of the mesh's axes. A `cond` counts with its dearest branch.
    Raises InputError on a collective in a loop of unknown length.
    """
    found: collections.Counter[Collective] = collections.Counter()
    for one in _collectives(jaxpr, sizes, 1):
        found[dataclasses.replace(one, times=1)] += one.times
    return [dataclasses.replace(one, times=times) for one, times in found.items()]


def live(jaxpr: Any) -> list[Any]:
    """The equations that what a jaxpr returns depends on, or that do more than return, in order; compilers drop others."""
    needed, found = {var for var in jaxpr.outvars if not isinstance(var, core.Literal)}, []
    for equation in reversed(jaxpr.eqns):
        # That a collective is over an axis counts as an effect, which keeps nothing alive.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        if acts or not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, core.Literal))
    return found[::-1]


def _collectives(jaxpr: Any, sizes: Mapping[str, int], times: int) -> Iterable[Collective]:
    for equation in live(getattr(jaxpr, "jaxpr", jaxpr)):
        name, params = equation.primitive.name, equation.params
        if name in PRIMITIVES:
            kind, part = PRIMITIVES[name]
            axes = params.get("axes", params.get("axis_name"))
            axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
            devices = math.prod(sizes[axis] for axis in axes)
            for operand in equation.invars if devices > 1 else ():
                size = operand.aval.size * operand.aval.dtype.itemsize * (devices if part else 1)
                yield Collective(kind, axes, devices, size, times)
            continue
        inner = list(core.jaxprs_in_params(params))
        if name == "cond":
            branches = [list(_collectives(branch, sizes, times)) for branch in params["branches"]]
            yield from max(branches, key=total)
            continue
        of_inner = params["length"] if name == "scan" else 1
        for one in (one for body in inner for one in _collectives(body, sizes, times * of_inner)):
            if name == "while":
                raise InputError(
                    f"{one.kind} over {one.axes} runs in a loop whose length is not known before it is run"
                )
            yield one


def total(sent: Iterable[Collective]) -> float:
    """Bytes that each device sends."""
    return sum((one.bytes for one in sent), 0.0)


def updated(params: Any, parts: Any) -> list[Collective]:
    """What ZeRO 1 and 2 send beside: parameters that each device has updated a part of.

    params, parts: shapes with the shardings of the parameters and of their statistics.
    """
    found = []
    for whole, part in zip(jax.tree.leaves(params), jax.tree.leaves(parts), strict=True):
        held = math.prod(whole.sharding.shard_shape(whole.shape))
        more = held // math.prod(part.sharding.shard_shape(part.shape))
        if more > 1:
            found.append(Collective("all-gather", ("fsdp",), more, held * whole.dtype.itemsize))
    return found


def trace(trainer: Trainer, rows: int, length: int) -> Any:
    """The training step of `rows` rows of `length` tokens, traced: its `jaxpr`, and `lower()`."""
    batch = jax.eval_shape(lambda: example_batch(rows, length))
    return trainer.step.jitted.trace(trainer.state_shapes, batch, jax.eval_shape(lambda: jax.random.key(0)))


def step_traffic(trainer: Trainer, jaxpr: Any) -> list[Collective]:
    """What a training step sends. jaxpr: of its trace. Raises InputError as `traffic`."""
    layout, params = trainer.layout, trainer.state_shapes.params
    sent = traffic(jaxpr, layout.mesh.shape)
    if layout.zero in (1, 2):
        sent += updated(params, trainer.part_shapes)
    if layout.zero == 3 and "head" not in params:
        # A table that is looked up and scored against is gathered by both, which the compiler does once.
        whole = params["embed"]["table"]
        size = whole.size * whole.dtype.itemsize // layout.size("vocab")
        once = Collective("all-gather", ("fsdp",), layout.mesh.shape["fsdp"], size)
        if any(dataclasses.replace(one, times=1) == once and one.times > 1 for one in sent):
            sent.append(dataclasses.replace(once, times=-1))
    return sent


def held_bytes(shapes: Any, *, hosted: bool = False) -> int:
    """Bytes of arrays in each device's memory, or of what rests in its host's, from shapes that carry their shardings."""
    own = (x for x in jax.tree.leaves(shapes) if (x.sharding.memory_kind == HOST) == hosted)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in own)


_ITEMS = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def compiled_traffic(text: str) -> list[Collective]:
    """The collectives of a compiled program, from its HLO text; without the names of the axes.

    Raises InputError on a collective in a loop whose length the text does not tell, or over devices that it does not tell.
    """
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            lines = bodies["ENTRY" if head[1] else head[2]] = []
        lines.append(line)
    found: collections.Counter[Collective] = collections.Counter()
    partitions = re.search(r"\bnum_partitions=(\d+)", text)
    everyone = int(partitions[1]) if partitions else 1

    def walk(name: str, times: int) -> None:
        for line in bodies[name][1:]:
            if sent := re.search(rf" = (.*?) ({_KINDS})(-start)?\(", line):
                kind, devices = sent[2], _group(line, everyone)
                sizes = [_size(*shape) for shape in re.findall(r"(\w+)\[([\d,]*)\]", sent[1])]
                if sent[3] and kind in ("all-gather", "collective-permute"):  # a pair of operand and result
                    sizes = sizes[len(sizes) // 2 :]
                whole = sum(sizes) * (devices if kind == "reduce-scatter" else 1)
                if devices > 1:
                    found[Collective(kind, (), devices, whole)] += times
            for called, again in _calls(line):
                if called in bodies:
                    if again is None and re.search(rf"({_KINDS})(-start)?\(", "\n".join(bodies[called])):
                        raise InputError(
                            f"a collective runs in {called}, a loop whose length is not known before it is run"
                        )
                    walk(called, times * (again or 1))

    walk("ENTRY", 1)
    return [dataclasses.replace(one, times=times) for one, times in found.items()]


def _calls(line: str) -> list[tuple[str, int | None]]:
    """(computation, how often it runs) of what an instruction calls; reductions' own are nothing here."""
    if loop := re.search(r"\bwhile\(.*body=%?([\w.-]+)", line):
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        return [(loop[1], int(trips[1]) if trips else None)]
    if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
        return [(name.strip().lstrip("%"), 1) for name in branches[1].split(",")]
    if branches := re.search(r"true_computation=%?([\w.-]+), false_computation=%?([\w.-]+)", line):
        return [(branches[1], 1), (branches[2], 1)]
    called = re.search(r" (?:call|fusion)\(.*(?:to_apply|calls)=%?([\w.-]+)", line)
    return [(called[1], 1)] if called else []


def _group(line: str, everyone: int) -> int:
    """How many devices take part, of so many; of a permutation, 2 where it sends anything to another device."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return 2 if any(a != b for a, b in re.findall(r"\{(\d+),(\d+)", pairs[1])) else 1
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\S*\))? \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in parts)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if unread := re.search(r"replica_groups=(?!\{\})\S*", line):
        raise InputError(f"which devices a collective of the compiled program is over cannot be read: {unread[0]}")
    return everyone  # where no groups are named, or none is in them


def _size(dtype: str, shape: str) -> int:
    return _ITEMS.get(dtype, 4) * math.prod(int(size) for size in shape.split(",") if size)
