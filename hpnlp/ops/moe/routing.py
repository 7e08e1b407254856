"""The choice of experts for each token: from router logits to assignments with gates."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.helpers.checkpoint_names import ROUTING
from hpnlp.types import InputError

SCORES = ("softmax", "softmax_k", "sigmoid")
# Number of the largest scores of a group whose sum is the score of the group.
GROUP_SCORES = {"best": 1, "best_two": 2}


@dataclasses.dataclass(frozen=True)
class Gates:
    """Gates of the chosen experts, by which their results are multiplied.

    Attributes:
      score: "softmax" over all experts, "softmax_k" over the k chosen ones, or "sigmoid" of each logit.
      normalize: Divide the gates of a token by their sum.
      scale: Factor of all gates.
    """

    score: str = "softmax_k"
    normalize: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise InputError(f"gates={self.score!r}: expected one of {', '.join(SCORES)}")
        if self.normalize and self.score == "softmax_k":
            raise InputError("gates='softmax_k' with normalize=True: these gates sum to 1 already: leave normalize out")
        if not self.scale > 0.0:
            raise InputError(f"scale={self.scale} of gates: expected a factor of more than 0")

    def check(self, k: int) -> None:
        """Checks that the router receives a gradient.

        Args:
          k: Experts per token.

        Raises:
          InputError: The gate of a single expert would be the constant 1.
        """
        if k == 1 and (self.normalize or self.score == "softmax_k"):
            named = "normalize=True" if self.normalize else f"gates={self.score!r}"
            raise InputError(
                f"k=1 with {named}: the gate would be 1 for every token, and the router would have no gradient: use "
                "gates='softmax' or 'sigmoid' without normalize"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Assignments of tokens to experts.

    Attributes:
      experts: int32 `[A]`, the expert of each assignment; the number of experts E for none.
      gates: float32 `[A]`, 0 for assignments to none.
      tokens: int32 `[A]`, the token of each assignment; None where token i has the assignments from i k to i k + k - 1.
      most: Largest number of assignments to one expert.
      expected: Number of assignments to experts that sizes of blocks and estimates of cost assume; 0 for A.
    """

    experts: Any  # arrays; placeholders where JAX rebuilds the record
    gates: Any
    tokens: Any
    most: int = dataclasses.field(metadata={"static": True})
    expected: int = dataclasses.field(default=0, metadata={"static": True})

    def kept(self, keep: Bool[Array, " A"], experts: int) -> Routing:
        """Removes assignments.

        Args:
          keep: False for assignments to remove.
          experts: Number of experts E.

        Returns:
          The routing, whose removed assignments have the expert E and the gate 0.
        """
        return dataclasses.replace(
            self, experts=jnp.where(keep, self.experts, experts), gates=jnp.where(keep, self.gates, 0.0)
        )


@array_op()
def route(
    logits: Float[Array, "N E"],
    k: int,
    gates: Gates,
    real: Bool[Array, " N"],
    *,
    bias: Float[Array, " E"] | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_score: str = "best_two",
) -> Routing:
    """Assigns each token to the k experts with the largest scores. Of equal scores, the expert with the lower number wins.

    Args:
      logits: Router logits, float32.
      k: Experts per token.
      gates: How gates are computed from the logits.
      real: False for padding, which gets no expert.
      bias: Added to the scores for the choice alone, not for the gates (DeepSeek-V3).
      groups: Number of groups of consecutive experts. A token uses experts of the `kept_groups` groups with the largest
        scores only.
      kept_groups: Number of groups that a token uses.
      group_score: Score of a group: "best_two", the sum of its two largest biased scores (DeepSeek-V3), or "best", the largest
        one (DeepSeek-V2).

    Returns:
      The routing, `[N k]`.

    Raises:
      InputError: Groups that do not divide the experts, or have fewer than k experts; unknown `group_score`.

    Cost: O(N E) time.

    References: Shazeer et al. 2017, arXiv 1701.06538; DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv 2412.19437,
    sec. 2.1.2; DeepSeek-AI 2024, "DeepSeek-V2", arXiv 2405.04434, sec. 2.2.2.
    """
    count, experts = logits.shape
    check_groups(k, experts, groups, kept_groups, group_score)
    logits = jnp.where(real[:, None], logits, 0.0)  # the gradient of padding of NaN would be NaN
    scores = token_scores(logits, gates)
    biased = jax.lax.stop_gradient(logits if bias is None and groups == 1 else scores)
    if bias is not None:
        biased = biased + bias[None]
    if groups > 1:
        biased = _in_best_groups(biased, groups, kept_groups, GROUP_SCORES[group_score])
    # Named for rematerialisation: a recomputed choice might differ where logits are nearly equal.
    chosen = checkpoint_name(jax.lax.top_k(biased, k)[1], ROUTING)
    if gates.score == "softmax_k":
        values = jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1), axis=1)
    else:
        values = jnp.take_along_axis(scores, chosen, 1)
    if gates.normalize:
        values = values / (jnp.sum(values, axis=1, keepdims=True) + 1e-20)
    routing = Routing(chosen.reshape(-1).astype(jnp.int32), (values * gates.scale).reshape(-1), None, count)
    return routing.kept(jnp.repeat(real, k), experts)


@array_op("N E", logits="N E")
def token_scores(logits: Float[Array, "N E"], gates: Gates) -> Float[Array, "N E"]:
    """Scores of all experts before the choice.

    Args:
      logits: Router logits.
      gates: How gates are computed.

    Returns:
      Probabilities of the softmax over all experts, or the sigmoids.
    """
    return jax.nn.sigmoid(logits) if gates.score == "sigmoid" else jax.nn.softmax(logits, axis=1)


@array_op("N E", logits="N E")
def normalized_scores(logits: Float[Array, "N E"], gates: Gates) -> Float[Array, "N E"]:
    """Scores of all experts divided by their sum, for balance losses.

    Computed from logarithms, so that a router cannot make the loss small by making all sigmoids small.

    Args:
      logits: Router logits.
      gates: How gates are computed.

    Returns:
      Probabilities.
    """
    return jax.nn.softmax(jax.nn.log_sigmoid(logits) if gates.score == "sigmoid" else logits, axis=1)


def check_groups(k: int, experts: int, groups: int, kept_groups: int, group_score: str) -> None:
    """Checks a limit of the choice to groups of experts.

    Args:
      k: Experts per token.
      experts: Number of experts E.
      groups: Number of groups.
      kept_groups: Number of groups that a token uses.
      group_score: Entry of GROUP_SCORES.

    Raises:
      InputError: Arguments that do not fit.
    """
    if groups < 1 or experts % groups:
        raise InputError(f"groups={groups} does not divide {experts} experts: choose a divisor")
    if not 1 <= kept_groups <= groups:
        raise InputError(f"kept_groups={kept_groups}: expected at least 1 and at most groups={groups}")
    if k > kept_groups * (experts // groups):
        raise InputError(
            f"k={k}: kept_groups={kept_groups} of groups={groups} have fewer experts, {kept_groups * (experts // groups)}: "
            "raise kept_groups, or lower k"
        )
    if group_score not in GROUP_SCORES:
        raise InputError(f"group_score={group_score!r}: expected one of {', '.join(GROUP_SCORES)}")
    if groups == 1 and group_score != "best_two":
        raise InputError(
            f"group_score={group_score!r} has no effect with one group: set groups, or leave group_score out"
        )


def _in_best_groups(scores: jax.Array, groups: int, kept: int, summed: int) -> jax.Array:
    """The scores, -inf in all groups but those with the largest sums of their `summed` largest scores."""
    by_group = scores.reshape(scores.shape[0], groups, -1)
    group_scores = jax.lax.top_k(by_group, min(summed, by_group.shape[2]))[0].sum(axis=2)
    _, best = jax.lax.top_k(group_scores, kept)
    is_best = jnp.any(best[:, :, None] == jnp.arange(groups)[None, None], axis=1)
    return jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(scores.shape)


@array_op("N E", clean="N E")
def noisy_logits(
    clean: Float[Array, "N E"], spread: Float[Array, "N E"], noise: Float[Array, "N E"]
) -> tuple[Float[Array, "N E"], Float[Array, "N E"]]:
    """Logits with trainable noise.

    Args:
      clean: Logits without noise.
      spread: The standard deviation of the noise before softplus, a linear function of the token.
      noise: Standard normal numbers.

    Returns:
      `(noisy logits, standard deviation)`. 0.01 is added to the deviation, as in the published code.

    References: Shazeer et al. 2017, eq. 4.
    """
    deviation = jax.nn.softplus(spread) + 0.01
    return clean + noise * deviation, deviation


@array_op("N E", clean="N E")
def choice_probability(
    clean: Float[Array, "N E"], noisy: Float[Array, "N E"], deviation: Float[Array, "N E"], k: int
) -> Float[Array, "N E"]:
    """Probability that an expert is among the k chosen ones if its own noise is drawn again.

    Args:
      clean: Logits without noise.
      noisy: Logits with noise.
      deviation: Standard deviation of the noise.
      k: Experts per token, less than E.

    Returns:
      The probabilities. Their sum over tokens is a smooth estimate of the load of each expert.

    References: Shazeer et al. 2017, appendix A, eq. 8 to 10.
    """
    order = checkpoint_name(jax.lax.top_k(jax.lax.stop_gradient(noisy), k + 1)[1], ROUTING)
    last, next_one = jnp.split(jnp.take_along_axis(noisy, order[:, k - 1 :], axis=1), 2, axis=1)
    is_chosen = jnp.any(order[:, :k, None] == jnp.arange(noisy.shape[1])[None, None], axis=1)
    threshold = jnp.where(is_chosen, next_one, last)  # the k-th largest of the other noisy logits
    return jax.scipy.stats.norm.cdf((clean - threshold) / deviation)


@array_op()
def drop_second_choice(routing: Routing, uniform: Float[Array, " N"], threshold: float, experts: int) -> Routing:
    """Keeps the second of two experts with a probability that grows with its gate.

    Args:
      routing: Two experts per token, with gates that sum to 1.
      uniform: Random numbers in [0, 1), one for each token.
      threshold: Gate of the second expert from which on the second expert is always kept: 0.5 in GShard's paper, 0.2 in ST-MoE.
      experts: Number of experts E.

    Returns:
      The routing. The gate of the first expert stays as it is, below 1, where the second expert is dropped.

    References: Lepikhin et al. 2020, "GShard", arXiv 2006.16668, algorithm 1; Zoph et al. 2022, "ST-MoE", arXiv 2202.08906.
    """
    second = routing.gates.reshape(-1, 2)[:, 1]
    keeps_second = checkpoint_name(uniform * threshold < second, ROUTING)
    keeps = jnp.stack([jnp.ones_like(keeps_second), keeps_second], axis=1)
    return routing.kept(keeps.reshape(-1), experts)


@array_op()
def route_by_expert(logits: Float[Array, "B T E"], k: int, factor: float, real: Bool[Array, "B T"]) -> Routing:
    """Expert choice: each expert takes the tokens of a sequence with the largest probabilities.

    An expert takes `ceil(k n factor / E)` of the n tokens of a sequence without padding, and at most n. A token may have any
    number of experts. Later tokens displace earlier ones: not causal.

    Args:
      logits: Router logits, float32.
      k: Mean number of experts per token.
      factor: Factor of the number of tokens of an expert.
      real: False for padding.

    Returns:
      The routing `[B E C]` of all tokens `[B T]`, with C = ceil(k T factor / E).

    References: Zhou et al. 2022, "Mixture-of-experts with expert choice routing", arXiv 2202.09368.
    """
    batch, length, experts = logits.shape
    most = min(math.ceil(k * length * factor / experts - 1e-4), length)
    probabilities = jax.nn.softmax(jnp.where(real[..., None], logits, 0.0), axis=2)
    probabilities = jnp.swapaxes(probabilities, 1, 2)
    ranked = jnp.where(real[:, None], jax.lax.stop_gradient(probabilities), -jnp.inf)
    tokens = checkpoint_name(jax.lax.top_k(ranked, most)[1], ROUTING)  # [B, E, C]
    gates = jnp.take_along_axis(probabilities, tokens, axis=2)
    counts = jnp.sum(real, axis=1)
    taken = jnp.minimum(_capacities(counts, k, factor, experts), counts)
    keep = jnp.broadcast_to(jnp.arange(most)[None, None] < taken[:, None, None], gates.shape)
    tokens = tokens + jnp.arange(batch, dtype=jnp.int32)[:, None, None] * length
    chosen = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[None, :, None], gates.shape)
    tokens = tokens.reshape(-1).astype(jnp.int32)
    routing = Routing(chosen.reshape(-1), gates.reshape(-1), tokens, batch * most)
    return routing.kept(keep.reshape(-1), experts)


def _capacities(counts: Int[Array, " G"], k: int, factor: float, experts: int) -> Int[Array, " G"]:
    """Number of assignments that an expert takes in each group of tokens.

    Args:
      counts: Tokens of each group, without padding.
      k: Experts per token.
      factor: Capacity factor.
      experts: Number of experts E.

    Returns:
      `ceil(k n factor / E)`.
    """
    return jnp.ceil(counts.astype(jnp.float32) * (k * factor / experts) - 1e-4).astype(jnp.int32)


@array_op()
def within_capacity(
    routing: Routing,
    groups: Int[Array, " N"] | None,
    counts: Int[Array, " N"],
    length: int,
    k: int,
    factor: float,
    experts: int,
    first_choices_first: bool = False,
) -> Routing:
    """Drops assignments beyond the capacity of an expert in each document.

    Places are given token by token, so that no token takes the place of an earlier one. With `first_choices_first` the first
    choices of all tokens of a document get places before any second choice, as in GShard: not causal.

    Args:
      routing: k assignments per token.
      groups: Number of the document of each token, ascending; documents lie within sequences. None where each sequence is one
        document, which limits `Routing.most`: many short documents may assign all tokens of a sequence to one expert.
      counts: Number of tokens of the token's document, without padding.
      length: Tokens of a sequence T, a divisor of N.
      k: Experts per token.
      factor: Capacity factor: an expert takes `ceil(k n factor / E)` assignments of a document of n tokens.
      experts: Number of experts E.
      first_choices_first: Order of places.

    Returns:
      The routing; dropped assignments have the expert E and the gate 0.

    Cost: O(N k E) numbers.

    References: Lepikhin et al. 2020, "GShard", arXiv 2006.16668; Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961.
    """
    count = counts.shape[0]
    is_chosen = (routing.experts.reshape(-1, k)[:, :, None] == jnp.arange(experts)[None, None]).astype(
        jnp.int32
    )  # [N, k, E]
    most, capacities = length, _capacities(counts, k, factor, experts)
    if groups is None:
        groups = jnp.arange(count, dtype=jnp.int32) // length
        if isinstance(length, int):  # an exported program may take any length
            most = min(math.ceil(k * length * factor / experts - 1e-4), length)
            capacities = jnp.minimum(capacities, most)  # float32 may round them up
    keep = checkpoint_name(_places(is_chosen, groups, first_choices_first) < capacities[:, None], ROUTING)
    return dataclasses.replace(routing, most=count // length * most).kept(keep.reshape(-1), experts)


def _places(is_chosen: Int[Array, "N k E"], groups: jax.Array, first_choices_first: bool) -> Int[Array, "N k"]:
    """Number of assignments to the same expert before each assignment, among those of its group."""
    index = jnp.arange(groups.shape[0], dtype=jnp.int32)
    changes, edge = groups[1:] != groups[:-1], jnp.ones(1, bool)
    first = jax.lax.cummax(jnp.where(jnp.concatenate([edge, changes]), index, 0))  # first token of each token's group
    if first_choices_first:
        before = jnp.cumsum(is_chosen, axis=0) - is_chosen
        before = before - before[first]
        ends = jnp.where(jnp.concatenate([changes, edge]), index, np.iinfo(np.int32).max)
        last = jax.lax.cummin(ends, reverse=True)
        in_group = (before + is_chosen)[last]
        places = before + jnp.cumsum(in_group, axis=1) - in_group
    else:
        by_token = jnp.sum(is_chosen, axis=1)
        before = jnp.cumsum(by_token, axis=0) - by_token
        places = (before - before[first])[:, None] + jnp.cumsum(is_chosen, axis=1) - is_chosen
    return jnp.sum(places * is_chosen, axis=2)
