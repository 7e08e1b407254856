"""Plans that fit: the smallest change to one that does not, and all that are worth a try, ranked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hpnlp.parallel.plan import AXES, Plan
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.estimate import Costs, costs, state_bytes
from hpnlp.training.config import Config
from hpnlp.types import InputError

T = TypeVar("T")

REMATS = ("none", "names(mixed)", "full")
TENSOR, PIPELINE, SEQUENCE = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)  # sizes to choose from


def mended(found: Costs, device: Device, said: Callable[[int, int], None]) -> tuple[str, Costs] | None:
    """The smallest change to the config, as flags, with which a step fits; None where none of those tried does.

    Tried are, from what costs the least time: parts of the state shared out, parts of the activations computed again, the batch
    in parts, layers shared out, the optimizer's state on the host, the layers' parameters there; then pairs of these but the
    last; and in the end all activations computed again, with some or all of the state on the host. said: is told how many of
    how many are tried. Cost: a trace for each under which the state alone fits.
    """
    config, sizes = found.config, found.sizes
    dp = sizes["data"] * sizes["fsdp"]
    changes: list[dict[str, Any]] = []
    for zero in (1, 2, 3):
        if dp > 1 and (zero > found.zero or sizes["data"] > 1):
            changes.append({"plan.data": 1, "plan.fsdp": dp, "plan.zero": zero})
    at = [remat for remat in REMATS if remat != config.plan.remat]
    changes += [{"plan.remat": remat} for remat in at if remat != "none"]
    changes += [{"optimizer.accumulate": config.optimizer.accumulate * times} for times in (2, 4, 8)]
    for tensor in (2, 4, 8):
        if dp % tensor == 0 and sizes["tensor"] == 1 and dp > 1:
            changes.append({"plan.tensor": tensor, "plan.data": 1, "plan.fsdp": dp // tensor, "plan.zero": 3})
    away = {} if config.plan.offload_optimizer else {"plan.offload_optimizer": True}
    changes += [away] if away else []
    host = {} if config.plan.offload_parameters else {"plan.offload_parameters": True}
    pairs = [a | b for a, b in itertools.combinations(changes, 2) if not a.keys() & b.keys()]
    last = {} if config.plan.remat == "full" else {"plan.remat": "full"}
    last |= {"plan.data": 1, "plan.fsdp": dp, "plan.zero": 3} if dp > 1 and found.zero < 3 else {}
    options = [*changes, host, *pairs, last | away, last | host, last | host | away]
    options = [change for at, change in enumerate(options) if change and change not in options[:at]]
    for tried, change in enumerate(options):
        said(tried, len(options))
        made = _costs_of(config, change, found.devices, device)
        if made is not None and made.fits(device):
            return flags(change), made
    return None


def flags(change: dict[str, Any]) -> str:
    """A change to a config, "section.field" -> value, as a shell takes it."""
    return " ".join(shlex.quote(f"--config.{name}={value}") for name, value in change.items())


def ranked(config: Config, devices: int, device: Device, said: Callable[[int, int], None]) -> list[Costs]:
    """Plans for so many devices that fit, by the time of a step, of the batch that the config has.

    Each is taken with the least recomputation that fits. said: is told how many of how many are done. Cost: a trace of the
    step, or up to three, for each plan whose state alone fits. Raises InputError where all plans are refused, as the first is,
    and where no plan shares out the batch.
    """
    if next(_plans(config, devices), None) is None:
        least = devices // math.gcd(devices, max(TENSOR) * max(PIPELINE) * max(SEQUENCE)) * config.optimizer.accumulate
        raise InputError(
            f"data.batch_size={config.data.batch_size} with optimizer.accumulate={config.optimizer.accumulate} is shared out "
            f"over {devices} devices by no plan that is searched: make it a multiple of {least}, or take other devices"
        )
    refused: list[InputError] = []

    def asked(function: Callable[[Config, int], T], plan: Plan) -> T | None:
        try:
            return function(dataclasses.replace(config, plan=plan), devices)
        except InputError as error:
            refused.append(error)
            return None

    sizes = {plan: size for plan in _plans(config, devices) if (size := asked(state_bytes, plan)) is not None}
    plans = [plan for plan, size in sizes.items() if size <= USABLE * device.memory]
    known, fitting = len(plans) < len(sizes), []
    for done, plan in enumerate(plans):
        said(done, len(plans))
        for remat in REMATS:
            made = asked(costs, dataclasses.replace(plan, remat=remat))
            if made is None:
                break
            known = True
            if made.fits(device):
                fitting.append(made)
                break
    if refused and not known:
        raise refused[0]
    said(len(plans), len(plans))
    return sorted(fitting, key=lambda one: one.total_seconds(device))


def _plans(config: Config, devices: int) -> Iterator[Plan]:
    """Devices shared out over tensor, pipeline and sequence by powers of two, the rest over data, or over fsdp with each stage
    of ZeRO; a pipeline in one round. What else the config's plan says stays."""
    rows = config.data.batch_size // config.optimizer.accumulate
    for tensor, pipeline, sequence in itertools.product(TENSOR, PIPELINE, SEQUENCE):
        dp, left = divmod(devices, tensor * pipeline * sequence)
        if left or not dp or rows % dp:
            continue
        sizes: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "sequence": sequence, "expert": 1}
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            own: dict[str, Any] = {"data": 1, "fsdp": dp} if zero else {"data": dp, "fsdp": 1}
            # Named after what shares out the batch, or else the layers: what is left to say of it is short.
            sharing = (axis for axis in ("data", "tensor", "pipeline", "sequence") if (sizes | own)[axis] > 1)
            name = f"zero{zero}" if zero else next(sharing, "single")
            open_ = {"name": name, "microbatches": 0, "rounds": 1, "recompute_stages": False}
            yield dataclasses.replace(config.plan, **open_, **sizes, **own, zero=zero)


def _costs_of(config: Config, change: dict[str, Any], devices: int, device: Device) -> Costs | None:
    """None where the plan does not go together with the model or the batch, or the state alone does not fit."""
    try:
        config = changed(config, change)
        return costs(config, devices) if state_bytes(config, devices) <= USABLE * device.memory else None
    except InputError:
        return None


def changed(config: Config, change: dict[str, Any]) -> Config:
    """A config with some of its fields, "section.field" or a whole section, set."""
    for name, value in change.items():
        section, _, field = name.partition(".")
        if field:
            value = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: value})
    return config


def named(costs: Costs) -> str:
    """The plan of some costs, in short."""
    sizes = [f"{axis} {costs.sizes[axis]}" for axis in AXES if costs.sizes[axis] > 1]
    zero = [f"zero {costs.zero}"] if costs.zero else []
    remat = [f"remat {costs.config.plan.remat}"] if costs.config.plan.remat != "none" else []
    return ", ".join([" x ".join(sizes) or "one device", *zero, *remat])
