"""Search for plans that fit: the smallest change to a config that makes its step fit, and all plans, ranked by time."""

from __future__ import annotations

import dataclasses
import itertools
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from hpnlp.parallel.plan import AXES, Plan
from hpnlp.planner.devices import USABLE, Device
from hpnlp.planner.estimate import Costs, costs, planned_trainer
from hpnlp.planner.memory import state_bytes
from hpnlp.training.config import Config
from hpnlp.types import InputError

T = TypeVar("T")
Change = dict[str, Any]  # "section.field" of a config -> value
Progress = Callable[[int, int], None]  # called with (done, total)

# Sizes and policies that are tried, the ones that cost the least time first.
REMATS = ("none", "names(mixed)", "full")
TENSOR, PIPELINE, SEQUENCE, EXPERT = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)
ACCUMULATE = (2, 4, 8)


def smallest_change(estimate: Costs, device: Device, progress: Progress) -> tuple[str, Costs] | None:
    """The first change to a config that makes its step fit.

    Changes are tried in the order of the time that they cost: sharding the state, rematerialisation, accumulation of gradients,
    tensor parallelism, offloading the optimizer's state, offloading the layers' parameters; then pairs of all but the last; and
    finally full rematerialisation with some or all of the state on the host.

    Args:
      estimate: Estimate of the config, which does not fit.
      device: The accelerator.
      progress: Called with (changes tried, all changes) before each trial.

    Returns:
      The flags that make the change and the costs under it; None where no change makes the step fit.

    Cost: one trace of the step for each change under which the state alone fits.
    """
    changes = _changes(estimate)
    for index, change in enumerate(changes):
        progress(index, len(changes))
        changed_costs = _costs_if_valid(estimate.config, change, estimate.devices, device)
        if changed_costs is not None and changed_costs.fits(device):
            return flags(change), changed_costs
    return None


def _changes(estimate: Costs) -> list[Change]:
    """All changes that `smallest_change` tries, in order and without duplicates."""
    plan, sizes = estimate.config.plan, estimate.sizes
    replicas = sizes["data"] * sizes["fsdp"]
    single = [*_sharding_changes(estimate, replicas)]
    single += [{"plan.remat": remat} for remat in REMATS if remat not in ("none", plan.remat)]
    single += [{"optimizer.accumulate": estimate.config.optimizer.accumulate * times} for times in ACCUMULATE]
    if sizes["tensor"] == 1 and replicas > 1:
        single += [
            {"plan.tensor": tensor, "plan.data": 1, "plan.fsdp": replicas // tensor, "plan.zero": 3}
            for tensor in TENSOR[1:]
            if replicas % tensor == 0
        ]
    optimizer: Change = {} if plan.offload_optimizer else {"plan.offload_optimizer": True}
    parameters: Change = {} if plan.offload_parameters else {"plan.offload_parameters": True}
    single += [optimizer] if optimizer else []
    pairs = [a | b for a, b in itertools.combinations(single, 2) if not a.keys() & b.keys()]
    last: Change = {} if plan.remat == "full" else {"plan.remat": "full"}
    if replicas > 1 and estimate.zero < 3:
        last |= {"plan.data": 1, "plan.fsdp": replicas, "plan.zero": 3}
    changes = [*single, parameters, *pairs, last | optimizer, last | parameters, last | parameters | optimizer]
    return [change for index, change in enumerate(changes) if change and change not in changes[:index]]


def _sharding_changes(estimate: Costs, replicas: int) -> Iterator[Change]:
    """Stages of ZeRO over all replicas that shard more of the state than the plan does."""
    for zero in (1, 2, 3):
        if replicas > 1 and (zero > estimate.zero or estimate.sizes["data"] > 1):
            yield {"plan.data": 1, "plan.fsdp": replicas, "plan.zero": zero}


def flags(change: Change) -> str:
    """A change to a config as command-line flags.

    Args:
      change: "section.field" -> value.

    Returns:
      The flags, quoted for a shell.
    """
    return " ".join(shlex.quote(f"--{name}={value}") for name, value in change.items())


def rank_plans(config: Config, devices: int, device: Device, progress: Progress) -> list[Costs]:
    """All plans that fit, fastest first.

    Each plan has the policy of rematerialisation that recomputes least among those that fit. The batch is that of the config.

    Args:
      config: A resolved config; its plan keeps the fields that are not searched.
      devices: Number of devices, which need not exist.
      device: The accelerator.
      progress: Called with (plans tried, all plans).

    Returns:
      Costs, by the time of a step.

    Raises:
      InputError: No plan divides the batch, or no plan is valid, with the error of the first.

    Cost: up to three traces of the step for each plan under which the state alone fits.
    """
    if next(_plans(config, devices), None) is None:
        multiple = devices // math.gcd(devices, max(TENSOR) * max(PIPELINE) * max(SEQUENCE))
        raise InputError(
            f"data.batch_size={config.data.batch_size} with optimizer.accumulate={config.optimizer.accumulate}: no plan "
            f"divides it over {devices} devices; use a multiple of {multiple * config.optimizer.accumulate}, or other devices"
        )
    errors: list[InputError] = []
    sizes: dict[Plan, int] = {}
    for plan in _plans(config, devices):
        if (size := _attempt(_state_bytes, config, plan, devices, errors)) is not None:
            sizes[plan] = size
    plans = [plan for plan, size in sizes.items() if size <= USABLE * device.memory]
    any_valid, fitting = len(plans) < len(sizes), []
    for index, plan in enumerate(plans):
        progress(index, len(plans))
        for remat in REMATS:
            estimate = _attempt(costs, config, dataclasses.replace(plan, remat=remat), devices, errors)
            if estimate is None:
                break
            any_valid = True
            if estimate.fits(device):
                fitting.append(estimate)
                break
    if errors and not any_valid:
        raise errors[0]
    progress(len(plans), len(plans))
    return sorted(fitting, key=lambda estimate: estimate.total_seconds(device))


def _attempt(
    function: Callable[[Config, int], T], config: Config, plan: Plan, devices: int, errors: list[InputError]
) -> T | None:
    """The function of the config under a plan; None, and the error in `errors`, where the plan is not valid."""
    try:
        return function(dataclasses.replace(config, plan=plan), devices)
    except InputError as error:
        errors.append(error)
        return None


def _plans(config: Config, devices: int) -> Iterator[Plan]:
    """Plans to rank, for a batch that they divide.

    The sizes of tensor, pipeline and sequence, and of expert for models with experts, are powers of two; the other devices are
    replicas, over the data axis or, with each stage of ZeRO, over fsdp. Pipelines have one round. Other fields are those of the
    config's plan.
    """
    examples = config.data.batch_size // config.optimizer.accumulate
    experts, _ = config.model.sizes().get("experts", (1, ""))
    divisors = [size for size in EXPERT if experts % size == 0]
    for tensor, pipeline, sequence, expert in itertools.product(TENSOR, PIPELINE, SEQUENCE, divisors):
        replicas, remainder = divmod(devices, tensor * pipeline * sequence * expert)
        if remainder or not replicas or examples % (replicas * expert):
            continue
        for zero in (0, 1, 2, 3) if replicas > 1 else (0,):
            sizes = {
                "data": 1 if zero else replicas,
                "fsdp": replicas if zero else 1,
                "tensor": tensor,
                "pipeline": pipeline,
                "sequence": sequence,
                "expert": expert,
            }
            # The name of an axis that has devices leaves few flags to add.
            divided = (axis for axis in ("data", "expert", "tensor", "pipeline", "sequence") if sizes[axis] > 1)
            name = f"zero{zero}" if zero else next(divided, "single")
            stages: dict[str, Any] = {"microbatches": 0, "rounds": 1, "recompute_stages": False}
            yield dataclasses.replace(config.plan, name=name, zero=zero, **sizes, **stages)


def _state_bytes(config: Config, devices: int) -> int:
    """Bytes of state and gradients on one device. Raises InputError for an invalid plan."""
    return state_bytes(planned_trainer(config, devices), config.data.batch_size, config.data.seq_len)


def _costs_if_valid(config: Config, change: Change, devices: int, device: Device) -> Costs | None:
    """Costs of a step after a change; None where the config is not valid with it, or the state alone does not fit."""
    try:
        config = changed(config, change)
        return costs(config, devices) if _state_bytes(config, devices) <= USABLE * device.memory else None
    except InputError:
        return None


def changed(config: Config, change: Change) -> Config:
    """A config with some of its fields replaced.

    Args:
      config: A config.
      change: "section.field", or "section" for all of it, -> value.

    Returns:
      The new config.

    Raises:
      InputError: A value is not valid.
    """
    for name, value in change.items():
        section, _, field = name.partition(".")
        if field:
            value = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: value})
    return config


def plan_name(estimate: Costs) -> str:
    """A short description of the plan of an estimate.

    Args:
      estimate: Estimate of a step.

    Returns:
      The sizes of the mesh, the stage of ZeRO and the policy of rematerialisation, without defaults.
    """
    sizes = [f"{axis} {estimate.sizes[axis]}" for axis in AXES if estimate.sizes[axis] > 1]
    zero = [f"zero {estimate.zero}"] if estimate.zero else []
    remat = estimate.config.plan.remat
    return ", ".join([" x ".join(sizes) or "one device", *zero, *([f"remat {remat}"] if remat != "none" else [])])
