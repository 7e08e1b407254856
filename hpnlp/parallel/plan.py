"""The Plan: how a computation is laid out on a mesh of devices, and the one table from logical axes to mesh axes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from hpnlp.parallel.layout import Layout
from hpnlp.parallel.remat import policy
from hpnlp.spec import did_you_mean, lookup
from hpnlp.types import InputError

EXCHANGES = ("ring", "heads")
# Mesh axes, those that talk least first: neighbours in the mesh are neighbours in the machine.
AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")

# A named plan gives what the fields of the Plan leave open: sizes, 1 where it names none and -1 for the devices that are left
# over, and the ZeRO stage.
PLANS: dict[str, dict[str, int]] = {
    "single": {},
    "data": {"data": -1},
    "zero1": {"fsdp": -1, "zero": 1},
    "zero2": {"fsdp": -1, "zero": 2},
    "zero3": {"fsdp": -1, "zero": 3},
    "tensor": {"tensor": -1},
    "pipeline": {"pipeline": -1},
    "sequence": {"sequence": -1},
    "3d": {"data": -1, "tensor": 2, "pipeline": 2},
}

# Logical axis -> the mesh axes that it divides over, where they divide its size. Layers name their arrays' axes on the left;
# nothing else in the project names a mesh axis. What ZeRO divides, `Layout.held` says.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "positions": (),  # of a learned table
    "layers": ("pipeline",),
    "turns": ("pipeline",),  # layers over the period of their mixers: stages are alike
    "embed": (),  # the model dimension of parameters
    "hidden": (),  # the model dimension of activations
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "vocab": ("pipeline", "tensor"),  # stages would wait for the last one's words
    "classes": (),  # outputs that are no words: of clusters, classes and bits
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run is laid out over devices.

    name: an entry of PLANS, which fills the sizes left None. data: replicas with their own part of the batch. fsdp: devices
    with their own part of the batch that share out the training state, as zero says: 1 the optimizer's, 2 gradients too, 3
    parameters too, 0 nothing (Rajbhandari et al. 2020, "ZeRO"). tensor: devices that share each layer's heads, MLP columns
    and the vocabulary (Shoeybi et al. 2019, "Megatron-LM"). pipeline: stages, each with its own layers (Huang et al. 2019,
    "GPipe"). sequence: devices that share each sequence. expert: kept for mixtures of experts. One size may be -1: all devices
    that are left. microbatches: parts that a device's rows go through the pipeline in, 0 for up to four times the stages.
    rounds: how often they go round it, each stage having so many chunks of layers (Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters", sec. 2.2.2): the more, the less is idle and the more is sent.
    recompute_stages: the backward pass finds the input of a stage saved, of each microbatch and round, and runs the stage
    again; with remat, its layers once more, for one microbatch at a time.
    exchange: what devices of a sequence send each other: "ring" (keys and values) or "heads" (all tokens of some heads).
    remat: what the backward pass computes again, an entry of `parallel.offload.REMAT`: "none", "full", "dots",
    "names(mixed,hidden)" or "offload(mixed)". offload_optimizer: the optimizer's state rests in the host's memory, and is on
    the device for the update alone. offload_parameters: the layers' parameters, their gradients and averages rest there, and
    one layer's at a time are on the device, in the forward pass, the backward pass and the update.
    """

    name: str = "data"
    pipeline: int | None = None
    data: int | None = None
    fsdp: int | None = None
    expert: int | None = None
    sequence: int | None = None
    tensor: int | None = None
    zero: int | None = None
    microbatches: int = 0
    rounds: int = 1
    recompute_stages: bool = False
    exchange: str = "ring"
    remat: str = "none"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def __post_init__(self) -> None:
        if self.zero not in (None, 0, 1, 2, 3):
            raise InputError(f"plan.zero={self.zero}: expected a stage of ZeRO, 0 to 3")
        if self.exchange not in EXCHANGES:
            raise InputError(f"plan.exchange={self.exchange!r}: {did_you_mean(self.exchange, EXCHANGES)}")
        policy(self.remat)
        if self.microbatches < 0:
            raise InputError(f"plan.microbatches={self.microbatches}: expected at least 1, or 0 to have it chosen")
        if self.rounds < 1:
            raise InputError(f"plan.rounds={self.rounds}: expected at least 1")

    def sizes(self, device_count: int) -> dict[str, int]:
        """The mesh's axis sizes over `device_count` devices. Raises InputError where they do not multiply to it."""
        named = {axis: lookup(PLANS, self.name, "plan.name").get(axis, 1) for axis in AXES}
        own = {axis: getattr(self, axis) for axis in AXES}
        # An explicit -1 takes what is left, so the named plan's own -1 gives way to it.
        explicit_fill = any(size == -1 for size in own.values())
        sizes = {a: (1 if explicit_fill and named[a] == -1 else named[a]) if own[a] is None else own[a] for a in AXES}
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
        if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
            raise InputError(f"plan ({shown}): sizes are at least 1, and one of them may be -1, which takes the rest")
        fixed, fills = math.prod(size for size in sizes.values() if size != -1), -1 in sizes.values()
        if fills:
            sizes = {axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()}
        if math.prod(sizes.values()) != device_count and not (self.name == "single" and fixed == 1):
            more = ", more than there are" if fixed > device_count else ""
            raise InputError(
                f"plan ({shown}) does not divide {device_count} device{'s' * (device_count > 1)}: "
                f"{fixed} is the product of the given sizes{more}; {_mend(sizes, fixed, device_count, fills)}"
            )
        if sizes["expert"] > 1:
            raise InputError(f"plan.expert={sizes['expert']}: no model here has experts to share out: leave it 1")
        for field, unset in (("microbatches", 0), ("rounds", 1), ("recompute_stages", False)):
            if sizes["pipeline"] == 1 and (value := getattr(self, field)) != unset:
                raise InputError(
                    f"plan.{field}={value} is of stages, and plan.pipeline=1 has none: set plan.{field}={unset}, or "
                    "plan.pipeline to at least 2"
                )
        if self.zero and sizes["fsdp"] == 1 and sizes["data"] > 1:
            raise InputError(
                f"plan.zero={self.zero} shares out the state over plan.fsdp, which is 1: set plan.fsdp=-1 and plan.data=1, or "
                f"plan.name=zero{self.zero}"
            )
        if self.offload_parameters and sizes["pipeline"] > 1:
            raise InputError(
                f"plan.offload_parameters=True fetches a layer for all of a batch, and plan.pipeline={sizes['pipeline']} takes "
                "it for each microbatch: set plan.pipeline=1, or plan.offload_parameters=False"
            )
        return sizes

    def mesh(self, devices: Sequence[Any] | int | None = None) -> Mesh | AbstractMesh:
        """The mesh over `devices` (default: all; plan `single` takes the first), or over so many that need not be there."""
        kinds = (AxisType.Auto,) * len(AXES)
        if isinstance(devices, int):
            sizes = self.sizes(devices)
            return AbstractMesh(tuple(sizes.values()), AXES, axis_types=kinds)
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        used = devices[: math.prod(sizes.values())]
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=used)

    def layout(self, sizes: Mapping[str, tuple[int, str]], devices: Sequence[Any] | int | None = None) -> Layout:
        """Where the arrays of a model lie over `devices` (default: all), or over so many that need not be there.

        sizes: logical axis -> (size, the config field that sets it). An axis that the mesh does not divide is left whole.
        Raises InputError where layers do not divide into stages, and where a mesh axis would divide nothing.
        """
        mesh = self.mesh(devices)
        rules = {name: tuple(a for a in axes if mesh.shape[a] > 1) for name, axes in RULES.items()}
        for name, (size, field) in sizes.items():
            stages = mesh.shape["pipeline"]
            if name in ("layers", "turns") and size % (stages * self.rounds):
                what = "turns of model.mixer" if name == "turns" else field
                chunks = f" of plan.rounds={self.rounds} chunks" if self.rounds > 1 else ""
                raise InputError(
                    f"{what}={size} does not divide into plan.pipeline={stages} stages{chunks}: make it a multiple of "
                    f"{stages * self.rounds}, or change the plan"
                )
            some = [c for n in range(len(rules[name]), -1, -1) for c in itertools.combinations(rules[name], n)]
            rules[name] = next(axes for axes in some if size % math.prod(mesh.shape[axis] for axis in axes) == 0)
        # Attention is divided by whole groups of heads, or not at all.
        if rules["heads"] != rules["kv_heads"]:
            rules["heads"] = rules["kv_heads"] = ()
        if mesh.shape["tensor"] > 1 and not any("tensor" in rules[name] for name in sizes):
            fields = ", ".join(f"{field}={size}" for name, (size, field) in sizes.items() if "tensor" in RULES[name])
            raise InputError(
                f"plan.tensor={mesh.shape['tensor']} divides none of {fields}: make one a multiple of it, or change the plan"
            )
        zero = lookup(PLANS, self.name, "plan.name").get("zero", 3) if self.zero is None else self.zero
        zero = zero if mesh.shape["fsdp"] > 1 else 0
        return Layout(
            mesh,
            rules,
            zero,
            self.microbatches,
            self.exchange,
            self.rounds,
            self.recompute_stages,
            self.offload_parameters,
        )


def _mend(sizes: Mapping[str, int], fixed: int, device_count: int, fills: bool) -> str:
    """What to do about sizes whose product, `fixed`, is not the devices'. fills: whether one of them takes the rest already."""
    if fills:
        return f"choose sizes whose product divides {device_count}"
    able = [f"plan.{axis}" for axis in AXES if axis != "expert" and device_count % (fixed // sizes[axis]) == 0]
    rest = f", or set {'one of ' * (len(able) > 1)}{', '.join(able)} to -1" if able else ""
    return f"choose sizes whose product is {device_count}{rest}"
