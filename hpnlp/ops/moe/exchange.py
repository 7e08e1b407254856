"""Experts that are divided over devices: assignments are sent to the devices of their experts, and results back."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.ops.moe.dispatch import rows_of_tokens, tokens_of_rows
from hpnlp.ops.moe.experts import expert_count, expert_mlp
from hpnlp.ops.moe.grouped import Activation, Experts
from hpnlp.ops.moe.routing import Routing
from hpnlp.ops.moe.schedule import equal_schedule

# Sends block i of an array `[S, ...]` to device i, and returns the blocks that the S devices sent to this device.
Swap = Callable[[Array], Array]


def exchanged_rows(routing: Routing, tokens: int, experts: int, shards: int, factor: float = 0.0) -> int:
    """Number of assignments that a device can send to each device.

    Args:
      routing: Assignments of the device's tokens.
      tokens: Number of the device's tokens N.
      experts: Number of experts E of all devices.
      shards: Number of devices S.
      factor: Factor of the mean number A / S; 0 for the largest number that the routing allows.

    Returns:
      The number, at least 1.
    """
    assignments = routing.experts.shape[0]
    most = min(assignments, routing.most * (experts // shards))
    if routing.tokens is None:  # the experts of a token are different
        most = min(most, tokens * min(assignments // max(tokens, 1), experts // shards))
    if factor:
        most = min(most, math.ceil(factor * assignments / shards))
    return max(most, 1)


def within_exchange(routing: Routing, experts: int, shards: int, rows: int) -> Routing:
    """Drops assignments beyond the number that a device can send to another, in the order of tokens.

    Args:
      routing: Assignments of the device's tokens.
      experts: Number of experts E of all devices.
      shards: Number of devices S.
      rows: Assignments that a device can send to each device.

    Returns:
      The routing; dropped assignments have the expert E and the gate 0.
    """
    schedule = equal_schedule(routing.experts // (experts // shards), shards, rows)
    return routing.kept(schedule.row < shards * rows, experts)


def exchanged_expert_mlp(
    x: Float[Array, "N D"],
    routing: Routing,
    local_experts: Experts,
    activation: Activation,
    impl: str,
    *,
    shards: int,
    rows: int,
    swap: Swap,
) -> Float[Array, "N D"]:
    """`expert_mlp` with experts that are divided over S devices, of which device i has those from i E / S on.

    Args:
      x: The device's tokens.
      routing: Their assignments to the experts of all devices.
      local_experts: The device's experts, with stacks of E / S matrices.
      activation: Elementwise function, see `expert_mlp`.
      impl: Entry of IMPLEMENTATIONS.
      shards: Number of devices S.
      rows: Assignments that a device can send to each device, at least as many as there are.
      swap: The all-to-all over the S devices.

    Returns:
      The sums for the device's tokens, added up in the order of a token's assignments as by `expert_mlp`.

    Cost: with the derivative, four all-to-alls of S x rows vectors, and one of as many indices. A device computes the rows
    that it receives; its buffers hold S x rows, whatever it receives.

    References: Lepikhin et al. 2020, "GShard", arXiv 2006.16668.
    """
    count = expert_count(local_experts)
    schedule = equal_schedule(routing.experts // count, shards, rows)
    local = jnp.where(routing.experts < shards * count, routing.experts % count, count)
    sent_experts = local.at[schedule.source].get(mode="fill", fill_value=count)
    sent = rows_of_tokens(x, routing, schedule.source, schedule.row)
    received = swap(sent.reshape(shards, rows, -1)).reshape(shards * rows, -1)
    experts = swap(sent_experts.reshape(shards, rows)).reshape(-1)
    gates = jnp.ones_like(experts, jnp.float32)
    most = shards * min(rows, routing.most)
    arrived = Routing(experts, gates, None, most, expected=min(routing.experts.shape[0], shards * rows))
    results = expert_mlp(received, arrived, local_experts, activation, impl)
    returned = swap(results.reshape(shards, rows, -1)).reshape(shards * rows, -1)
    return tokens_of_rows(returned, routing, schedule.row, x.shape[0])
