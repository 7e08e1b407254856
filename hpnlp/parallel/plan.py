"""The Plan of a run: sizes of the mesh axes, ZeRO stage, pipeline, rematerialisation and offloading.

RULES is the only place in the project that relates the logical axes of arrays to the axes of the mesh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from hpnlp.errors import plural
from hpnlp.parallel.layout import Layout
from hpnlp.parallel.memory.remat import policy
from hpnlp.spec import lookup
from hpnlp.types import InputError, check_options, option

EXCHANGES = ("ring", "heads")
# Mesh axes, in order of rising communication: devices that are neighbours in the mesh are neighbours in the machine, and the
# last axes have the nearest neighbours.
AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")

# Named plans: sizes of mesh axes, and the ZeRO stage, for Plan fields that are None. An axis that is not listed has size 1, and
# -1 stands for all remaining devices.
PLANS: dict[str, dict[str, int]] = {
    "single": {},
    "data": {"data": -1},
    "zero1": {"fsdp": -1, "zero": 1},
    "zero2": {"fsdp": -1, "zero": 2},
    "zero3": {"fsdp": -1, "zero": 3},
    "tensor": {"tensor": -1},
    "pipeline": {"pipeline": -1},
    "sequence": {"sequence": -1},
    "expert": {"expert": -1},
    "3d": {"data": -1, "tensor": 2, "pipeline": 2},
}
DEFAULT_ZERO = 3  # the stage of the axis `fsdp` where neither the Plan nor the named plan gives one
FILL = -1  # an axis size: all remaining devices

# Logical axis -> the mesh axes that divide it, as far as they divide its size. Layers give their arrays' axes the names on the
# left; no other code names a mesh axis for an array. ZeRO's axis `fsdp` is added by `parallel.memory.zero`.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "length": ("sequence",),
    "memory": (),  # the vectors that a sequence of a decoder attends to
    "positions": (),  # rows of a table of learned positions
    "token_types": (),  # rows of a table of token types
    "layers": ("pipeline",),
    "periods": ("pipeline",),  # layers / period of their forms: all stages run the same program
    "embed": (),  # the model dimension of parameters
    "hidden": (),  # the model dimension of activations
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "rank": (),  # the inner axis of a product of two matrices
    "entries": (),  # slots of a trained memory that is read by nearest neighbours
    "taps": (),  # the weights of a convolution along the sequence
    "channels": (),  # inputs of a convolution of images: K K C rows of its matrix
    "filters": (),  # outputs of a convolution of images
    "ranks": (),  # compressed tokens, inner dimensions of factors, and terms of a mixture
    "mlp": ("tensor",),
    "experts": ("expert",),  # MLPs of a mixture of experts
    "router": (),  # outputs of a router
    "gates": (),  # gates of a recurrent layer, which need all of them for every token, and of shared experts
    "vocab": ("pipeline", "tensor"),  # stages would otherwise wait for the last one's logits
    "labels": ("pipeline", "tensor"),  # the classes of a classifier, as words
    "classes": (),  # outputs that are not words: clusters, classes and bits of an output layer
}

# Logical names of the axes of tables of words and of classes.
TABLES = (("vocab", "embed"), ("labels", "embed"))

Sizes = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Layout of a run on devices, and what is rematerialised or offloaded."""

    name: str = option(
        "data",
        "An entry of PLANS, which fills in the sizes left None. One size may be -1, for all remaining devices.",
    )
    pipeline: int | None = option(None, 'Number of stages, each with its own layers (Huang et al. 2019, "GPipe").')
    data: int | None = option(None, "Number of replicas, each with its own part of the batch.")
    fsdp: int | None = option(
        None,
        "Number of devices, each with its own part of the batch, that divide the training state as zero says.",
    )
    expert: int | None = option(
        None,
        "Number of devices, each with its own part of the batch, that divide the experts of each layer; tokens are sent to "
        'their experts and back (Lepikhin et al. 2020, "GShard").',
    )
    sequence: int | None = option(None, "Number of devices that divide each sequence, by exchange.")
    tensor: int | None = option(
        None,
        "Number of devices that divide each layer's heads and MLP columns, and the vocabulary (Shoeybi et al. "
        '2019, "Megatron-LM").',
    )
    zero: int | None = option(
        None,
        'ZeRO stage of the axis fsdp (Rajbhandari et al. 2020, "ZeRO"), 0 to divide nothing, 1 the optimizer '
        "state, 2 also gradients, 3 also parameters.",
        least=0,
        most=3,
    )
    microbatches: int = option(
        0,
        "Number of microbatches that each device's sequences pass the pipeline in, 0 for up to four times the stages.",
        least=0,
    )
    rounds: int = option(
        1,
        "Number of chunks of layers per stage, and of passes of a microbatch through the stages (Narayanan et al. "
        '2021, "Efficient large-scale language model training on GPU clusters", sec. 2.2.2). More rounds make the '
        "pipeline bubble smaller and send more.",
        least=1,
    )
    recompute_stages: bool = option(
        False,
        "Keep only the input of each stage, microbatch and round for the backward pass, which runs the stage "
        "again, and with remat also each layer, for one microbatch at a time.",
    )
    exchange: str = option(
        "ring",
        'What the devices of a sequence send each other, "ring" (keys and values) or "heads" (all tokens of some '
        "heads).",
        among=EXCHANGES,
    )
    remat: str = option(
        "none",
        'What the backward pass recomputes, an entry of `parallel.memory.remat.REMAT`: "none", "full", "dots", '
        '"names(mixed,hidden)" or "offload(mixed)".',
    )
    offload_optimizer: bool = option(
        False,
        "Keep the optimizer state in the host's memory, and on the device during the update only.",
    )
    offload_parameters: bool = option(
        False,
        "Keep the layers' parameters, their gradients and averages in the host's memory, and one layer's at a "
        "time on the device, in the forward pass, the backward pass and the update.",
    )

    def __post_init__(self) -> None:
        check_options(self, "plan")
        policy(self.remat)

    def sizes(self, device_count: int) -> Sizes:
        """Sizes of the mesh axes.

        Args:
          device_count: Number of devices.

        Returns:
          Mesh axis -> size, in the order of AXES. Their product is `device_count`; the plan `single` has 1.

        Raises:
          InputError: The sizes do not multiply to `device_count`, or do not fit the other fields.
        """
        sizes = self.requested_sizes()
        shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
        if any(size < 1 and size != FILL for size in sizes.values()) or list(sizes.values()).count(FILL) > 1:
            raise InputError(
                f"plan ({shown}): sizes are at least 1, and one of them may be -1, for all remaining devices"
            )
        fixed, fills = math.prod(size for size in sizes.values() if size != FILL), FILL in sizes.values()
        if fills:
            sizes = {axis: device_count // fixed if size == FILL else size for axis, size in sizes.items()}
        if math.prod(sizes.values()) != device_count and not (self.name == "single" and fixed == 1):
            excess = ", more than there are" if fixed > device_count else ""
            raise InputError(
                f"plan ({shown}) does not divide {device_count} {plural(device_count, 'device')}: "
                f"{fixed} is the product of the given sizes{excess}; {_fix_of_sizes(sizes, fixed, device_count, fills)}"
            )
        self._check_fields(sizes)
        return sizes

    def requested_sizes(self) -> Sizes:
        """Sizes from the fields and, where these are None, from the named plan.

        Returns:
          Mesh axis -> size, or -1 for all remaining devices.

        Raises:
          InputError: There is no such plan.
        """
        named = {axis: lookup(PLANS, self.name, "plan.name").get(axis, 1) for axis in AXES}
        explicit = {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}
        # An explicit -1 takes all remaining devices, so a -1 of the named plan counts as 1.
        if FILL in explicit.values():
            named = {axis: 1 if size == FILL else size for axis, size in named.items()}
        return {**named, **explicit}

    def _check_fields(self, sizes: Sizes) -> None:
        """Raises InputError where other fields do not fit the sizes of the mesh axes."""
        for field, unset in (("microbatches", 0), ("rounds", 1), ("recompute_stages", False)):
            if sizes["pipeline"] == 1 and (value := getattr(self, field)) != unset:
                raise InputError(
                    f"plan.{field}={value} needs a pipeline, and plan.pipeline is 1: set plan.{field}={unset}, or "
                    "plan.pipeline to at least 2"
                )
        if self.zero and sizes["fsdp"] == 1 and sizes["data"] > 1:
            raise InputError(
                f"plan.zero={self.zero} divides the training state over plan.fsdp, which is 1: set plan.fsdp=-1 and "
                f"plan.data=1, or plan.name=zero{self.zero}"
            )
        if self.offload_parameters and sizes["pipeline"] > 1:
            raise InputError(
                f"plan.offload_parameters=True fetches a layer for all of a batch, and plan.pipeline={sizes['pipeline']} takes "
                "it for each microbatch: set plan.pipeline=1, or plan.offload_parameters=False"
            )

    def mesh(self, devices: Sequence[Any] | int | None = None) -> Mesh | AbstractMesh:
        """The mesh of the plan.

        Args:
          devices: The devices, all by default; the plan `single` takes the first. A number stands for so many devices that
              need not be there.

        Returns:
          A Mesh, or an AbstractMesh for a number of devices.
        """
        axis_types = (AxisType.Auto,) * len(AXES)
        if isinstance(devices, int):
            sizes = self.sizes(devices)
            return AbstractMesh(tuple(sizes.values()), AXES, axis_types=axis_types)
        devices = jax.devices() if devices is None else devices
        sizes = self.sizes(len(devices))
        used = devices[: math.prod(sizes.values())]
        return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=axis_types, devices=used)

    def layout(self, sizes: Mapping[str, tuple[int, str]], devices: Sequence[Any] | int | None = None) -> Layout:
        """Resolves the plan on devices, for a model.

        Args:
          sizes: Logical axis -> (size, the config field that sets it). An axis that no mesh axis divides is replicated.
          devices: As for `mesh`.

        Returns:
          The Layout.

        Raises:
          InputError: Layers do not divide into stages, or the mesh axis `tensor` divides nothing.
        """
        mesh = self.mesh(devices)
        rules = {name: tuple(a for a in axes if mesh.shape[a] > 1) for name, axes in RULES.items()}
        for name, (size, field) in sizes.items():
            if name in ("layers", "periods"):
                self._check_stages(size, f"periods of {field}" if name == "periods" else field, mesh.shape["pipeline"])
            rules[name] = _dividing_axes(size, rules[name], mesh.shape)
        self._check_experts(sizes.get("experts"), mesh.shape["expert"])
        # Attention is divided by complete groups of query heads and their key head, or not at all.
        if rules["heads"] != rules["kv_heads"]:
            rules["heads"] = rules["kv_heads"] = ()
        if mesh.shape["tensor"] > 1 and not any("tensor" in rules[name] for name in sizes):
            fields = ", ".join(f"{field}={size}" for name, (size, field) in sizes.items() if "tensor" in RULES[name])
            if not fields:
                raise InputError(
                    f"plan.tensor={mesh.shape['tensor']} divides heads and columns of layers, and the model has none of them: "
                    "set plan.tensor=1, and divide the batch (plan.data, plan.fsdp)"
                )
            raise InputError(
                f"plan.tensor={mesh.shape['tensor']} divides none of {fields}: make one a multiple of it, or change the plan"
            )
        zero = PLANS[self.name].get("zero", DEFAULT_ZERO) if self.zero is None else self.zero
        return Layout(
            mesh,
            rules,
            zero if mesh.shape["fsdp"] > 1 else 0,
            self.microbatches,
            self.exchange,
            self.rounds,
            self.recompute_stages,
            self.offload_parameters,
        )

    def _check_experts(self, experts: tuple[int, str] | None, devices: int) -> None:
        """Raises InputError unless the mesh axis `expert` divides the experts of all layers that have any."""
        if devices == 1:
            return
        if experts is None:
            raise InputError(
                f"plan.expert={devices} divides the experts of layers, and the model has none: set plan.expert=1 and divide "
                "the batch (plan.data, plan.fsdp), or choose a network with experts, as model.mlp='top_k(8,2)'"
            )
        size, field = experts
        if size % devices:
            raise InputError(
                f"plan.expert={devices} does not divide {size} experts ({field}): choose a multiple of {devices} experts, or "
                f"set plan.expert to a divisor of {size}"
            )

    def _check_stages(self, size: int, field: str, stages: int) -> None:
        """Raises InputError unless the layers, or periods of layers, divide into stages and rounds."""
        if size % (stages * self.rounds) or (not size and stages > 1):
            chunks = f" of plan.rounds={self.rounds} chunks" if self.rounds > 1 else ""
            raise InputError(
                f"{field}={size} does not divide into plan.pipeline={stages} stages{chunks}: make it a multiple of "
                f"{stages * self.rounds}, or change the plan"
            )


def _dividing_axes(size: int, axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The largest combination of mesh axes, earlier axes first, whose product divides a size; () if none does."""
    for count in range(len(axes), 0, -1):
        for combination in itertools.combinations(axes, count):
            if size % math.prod(mesh_shape[axis] for axis in combination) == 0:
                return combination
    return ()


def _fix_of_sizes(sizes: Sizes, fixed: int, device_count: int, fills: bool) -> str:
    """Advice where the product `fixed` of the given sizes does not fit the devices; fills: whether a size was -1."""
    if fills:
        return f"choose sizes whose product divides {device_count}"
    axes = [axis for axis in AXES if axis != "expert" or sizes[axis] > 1]  # few models have experts
    free = [f"plan.{axis}" for axis in axes if device_count % (fixed // sizes[axis]) == 0]
    alternative = f", or set {'one of ' * (len(free) > 1)}{', '.join(free)} to -1" if free else ""
    return f"choose sizes whose product is {device_count}{alternative}"
