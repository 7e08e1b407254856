"""Rematerialisation policies: the intermediate results of a layer that the backward pass keeps, recomputes or offloads.

Layers name the results that are expensive to compute (`jax.ad_checkpoint.checkpoint_name`):
    projected: queries, keys and values of attention.
    mixed: the output of attention, with its log-sum-exp.
    hidden: the products that enter the activation of an MLP; all products of experts.
    routing: the choice of experts, which every policy keeps: recomputed logits might lead to another choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hpnlp.ops.helpers.checkpoint_names import ROUTING
from hpnlp.parallel.memory.host_offload import HOST
from hpnlp.spec import build, did_you_mean, parse_one
from hpnlp.types import InputError

NAMES = ("projected", "mixed", "hidden")
DEFAULT_NAMES = ("mixed",)


def _none() -> None:
    return None


def _full() -> Any:
    return jax.checkpoint_policies.save_only_these_names(ROUTING)


def _dots() -> Any:
    policies = jax.checkpoint_policies
    return policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, _full())


def _names(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(ROUTING, *_checked_names(names))


def _offload(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[ROUTING],
        names_which_can_be_offloaded=list(_checked_names(names)),
        offload_src="device",
        offload_dst=HOST,
    )


def _checked_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name == ROUTING:
            raise InputError(f"plan.remat: every policy keeps {ROUTING!r}, the choice of experts: leave it out")
        if name not in NAMES:
            raise InputError(f"plan.remat: no layer names {name!r}: {did_you_mean(str(name), NAMES)}")
    return names or DEFAULT_NAMES


# Results that the forward pass keeps for the backward pass in addition to the inputs of each layer; all others are recomputed
# (Chen et al. 2016, "Training deep nets with sublinear memory cost").
#   none: everything is kept. full: nothing else is kept. dots: the results of linear layers.
#   names, offload: the results with these names (DEFAULT_NAMES if none is given), kept on the device or on the host.
REMAT: dict[str, Callable[..., Any]] = {
    "none": _none,
    "full": _full,
    "dots": _dots,
    "names": _names,
    "offload": _offload,
}


def policy(text: str) -> Any:
    """Parses a rematerialisation policy.

    Args:
      text: A spec string such as "names(mixed, hidden)", an entry of REMAT.

    Returns:
      A policy of `jax.checkpoint`; None for "none", which keeps everything.

    Raises:
      InputError: Unknown policy or name.
    """
    return build(parse_one(text, "plan.remat"), REMAT, "plan.remat")
