"""Rematerialisation policies: which intermediate results of a layer the backward pass keeps, recomputes or offloads.

Layers name the results that are expensive to compute (`jax.ad_checkpoint.checkpoint_name`):
    projected: queries, keys and values of attention.
    mixed: the output of attention, with its log-sum-exp.
    hidden: the products that enter the activation of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from hpnlp.parallel.host_offload import HOST
from hpnlp.spec import build, did_you_mean, parse_one
from hpnlp.types import InputError

NAMES = ("projected", "mixed", "hidden")


def _names(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*_known(names))


def _offload(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(_known(names)),
        offload_src="device",
        offload_dst=HOST,
    )


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in NAMES:
            raise InputError(f"plan.remat: no layer names {name!r}: {did_you_mean(str(name), NAMES)}")
    return names or ("mixed",)


# What the forward pass leaves for the backward pass beside the inputs of each layer; all else is computed again (Chen et al.
# 2016, "Training deep nets with sublinear memory cost"). dots: what linear layers give. names, offload: what layers name, by
# default `mixed`, kept where it is or on the host.
REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "full": lambda: jax.checkpoint_policies.nothing_saveable,
    "dots": lambda: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": _names,
    "offload": _offload,
}


def policy(text: str) -> Any:
    """The policy of `jax.checkpoint` that a spec such as "names(mixed, hidden)" stands for; None for one that keeps all.

    Raises InputError on an unknown policy or name.
    """
    return build(parse_one(text, "plan.remat"), REMAT, "plan.remat")
