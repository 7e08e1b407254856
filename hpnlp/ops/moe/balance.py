"""Statistics of a routing, and the losses, buffers and metrics that are functions of their sums over a batch.

Statistics are sums over tokens without padding. They are added up over devices, microbatches and accumulated parts first;
losses and signs are taken afterwards, so that they do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.moe.routing import Routing

Sums = Mapping[str, Array]
# Names of the statistics of `load_sums` and `routing_sums`; those of VECTORS hold one number for each expert.
LOAD_SUMS = ("tokens", "assigned", "kept", "load")
SUMS = (*LOAD_SUMS, "importance", "square_lse", "entropy", "largest")
VECTORS = ("load", "importance")


@array_op()
def expert_counts(experts: Int[Array, " A"], count: int) -> Float[Array, " E"]:
    """Number of assignments of each expert.

    Args:
      experts: The expert of each assignment; E for none.
      count: Number of experts E.

    Returns:
      The numbers, float32.
    """
    return jnp.bincount(experts, length=count + 1)[:count].astype(jnp.float32)


@array_op()
def load_sums(real: Bool[Array, " N"], routing: Routing, kept: Routing, experts: int) -> dict[str, Array]:
    """Statistics of the loads of one layer.

    Args:
      real: False for padding.
      routing: The routing before the drops by a capacity.
      kept: The routing after these drops.
      experts: Number of experts E.

    Returns:
      "tokens", "assigned" and "kept": numbers of tokens, and of assignments before and after the drops; "load" `[E]`:
      assignments of each expert before the drops.
    """
    load = expert_counts(routing.experts, experts)
    return {
        "tokens": jnp.sum(real, dtype=jnp.float32),
        "assigned": jnp.sum(load),
        "kept": jnp.sum(kept.experts < experts, dtype=jnp.float32),
        "load": load,
    }


@array_op()
def routing_sums(
    logits: Float[Array, "N E"],
    scores: Float[Array, "N E"],
    real: Bool[Array, " N"],
    routing: Routing,
    kept: Routing,
) -> dict[str, Array]:
    """Statistics of one layer.

    Args:
      logits: Router logits, float32.
      scores: Scores that sum to 1 over the experts.
      real: False for padding.
      routing: The routing before the drops by a capacity.
      kept: The routing after these drops.

    Returns:
      The statistics of `load_sums`; "importance" `[E]`: sums of scores, through which losses have their gradient;
      "square_lse": sum of the squares of logsumexp(logits); "entropy" and "largest": sums of the entropies of the scores of a
      token, and of the largest score.
    """
    experts = logits.shape[1]
    weight = real.astype(jnp.float32)
    # Padding may hold NaN, whose product with the weight 0 would be NaN.
    scores, logits = (jnp.where(real[:, None], x, 1.0 / experts) for x in (scores, logits))
    entropy = -jnp.sum(scores * jnp.log(jnp.maximum(scores, 1e-20)), axis=1)
    return load_sums(real, routing, kept, experts) | {
        "importance": jnp.sum(scores * weight[:, None], axis=0),
        "square_lse": jnp.sum(weight * jax.nn.logsumexp(logits, axis=1) ** 2),
        "entropy": jax.lax.stop_gradient(jnp.sum(weight * entropy)),
        "largest": jax.lax.stop_gradient(jnp.sum(weight * jnp.max(scores, axis=1))),
    }


@array_op()
def balance_loss(sums: Sums) -> Float[Array, ""]:
    """The product of each expert's share of choices and its mean score, summed over experts and multiplied by E.

    Args:
      sums: Statistics of one layer, as `routing_sums` returns them.

    Returns:
      1 for equal loads, up to E where one expert takes all. The gradient passes through the scores only.

    References: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, eq. 4 to 6, with shares of all k choices.
    """
    experts = sums["load"].shape[0]
    load = jax.lax.stop_gradient(sums["load"])
    share = load / jnp.maximum(jnp.sum(load), 1.0)
    return experts * jnp.sum(share * sums["importance"]) / jnp.maximum(sums["tokens"], 1.0)


@array_op()
def z_loss(sums: Sums) -> Float[Array, ""]:
    """Mean square of the logsumexp of a token's router logits.

    Args:
      sums: Statistics of one layer.

    Returns:
      The mean over tokens.

    References: Zoph et al. 2022, "ST-MoE", arXiv 2202.08906, eq. 5.
    """
    return sums["square_lse"] / jnp.maximum(sums["tokens"], 1.0)


@array_op()
def squared_variation(values: Float[Array, " E"]) -> Float[Array, ""]:
    """The squared coefficient of variation: variance over squared mean.

    Args:
      values: One number for each expert.

    Returns:
      0 for equal values.

    References: Shazeer et al. 2017, arXiv 1701.06538, eq. 7.
    """
    return jnp.var(values) / (jnp.mean(values) ** 2 + 1e-10)


@array_op()
def moved_bias(bias: Float[Array, " E"], load: Float[Array, " E"], rate: float) -> Float[Array, " E"]:
    """Raises the bias of experts with less than the mean load, and lowers that of the others, by a fixed rate.

    The mean of the change is subtracted, which does not affect any choice, so that the biases do not drift together.

    Args:
      bias: Biases of the choice.
      load: Choices of each expert in a batch.
      rate: Size of a change.

    Returns:
      The new biases.

    References: Wang et al. 2024, "Auxiliary-loss-free load balancing", arXiv 2408.15664, algorithm 1.
    """
    change = jnp.sign(jnp.mean(load) - load)
    return bias + rate * (change - jnp.mean(change))


@array_op()
def load_metrics(sums: Sums) -> dict[str, Array]:
    """Metrics of the loads of one layer.

    Args:
      sums: Statistics of one layer, as `load_sums` returns them.

    Returns:
      "load_max" and "load_min": the largest and the smallest load over the mean load; "load_variation": standard deviation of
      the loads over their mean; "load_entropy": entropy of the loads over log E; "dropped": share of assignments without a
      place; "dead_experts": number of experts with less than 1 % of the mean load.
    """
    load = sums["load"] / jnp.maximum(jnp.mean(sums["load"]), 1e-20)
    share = load / load.shape[0]
    entropy = -jnp.sum(share * jnp.log(jnp.maximum(share, 1e-20)))
    return {
        "load_max": jnp.max(load),
        "load_min": jnp.min(load),
        "load_variation": jnp.sqrt(squared_variation(load)),
        "load_entropy": entropy / jnp.log(jnp.float32(max(load.shape[0], 2))),
        "dropped": (sums["assigned"] - sums["kept"]) / jnp.maximum(sums["assigned"], 1.0),
        "dead_experts": jnp.sum(load < 0.01, dtype=jnp.float32),
    }


@array_op()
def router_metrics(sums: Sums) -> dict[str, Array]:
    """Metrics of the router of one layer.

    Args:
      sums: Statistics of one layer, as `routing_sums` returns them.

    Returns:
      "balance" and "router_z": the values of `balance_loss` and `z_loss`; "router_entropy": mean entropy of a token's scores,
      in nats; "router_lse": root mean square of the logsumexp of the logits; "router_largest": mean of a token's largest score.
    """
    return {
        "balance": balance_loss(sums),
        "router_z": z_loss(sums),
        "router_entropy": sums["entropy"] / jnp.maximum(sums["tokens"], 1.0),
        "router_lse": jnp.sqrt(z_loss(sums)),
        "router_largest": sums["largest"] / jnp.maximum(sums["tokens"], 1.0),
    }
