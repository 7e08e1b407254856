"""Mixture of experts: the choice of experts for tokens, balance statistics and losses, and the MLPs of the experts."""

from hpnlp.ops.moe.assignment import balanced_assignment, hashed_experts
from hpnlp.ops.moe.balance import (
    LOAD_SUMS,
    SUMS,
    VECTORS,
    balance_loss,
    expert_counts,
    load_metrics,
    load_sums,
    moved_bias,
    router_metrics,
    routing_sums,
    squared_variation,
    z_loss,
)
from hpnlp.ops.moe.experts import expert_mlp, reference_expert_mlp
from hpnlp.ops.moe.routing import (
    Gates,
    Routing,
    choice_probability,
    drop_second_choice,
    noisy_logits,
    normalized_scores,
    route,
    route_by_expert,
    token_scores,
    within_capacity,
)

__all__ = [
    "LOAD_SUMS", "SUMS", "VECTORS", "Gates", "Routing", "balance_loss", "balanced_assignment", "choice_probability",
    "drop_second_choice", "expert_counts", "expert_mlp", "hashed_experts", "load_metrics", "load_sums", "moved_bias",
    "noisy_logits", "normalized_scores", "reference_expert_mlp", "route", "route_by_expert", "router_metrics",
    "routing_sums", "squared_variation", "token_scores", "within_capacity", "z_loss",
]  # fmt: skip
