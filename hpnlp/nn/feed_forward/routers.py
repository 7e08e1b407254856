"""Routers: the choice of experts for tokens, with gates and statistics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.nn.feed_forward.experts import NONE_OR_ONE, ExpertLayer, RoutedTokens, statistic_axes
from hpnlp.nn.layers import buffer
from hpnlp.ops import moe
from hpnlp.ops.moe.routing import check_groups
from hpnlp.types import InputError, MixerTraits, Statistics, option


def check_k(layer: ExpertLayer, k: int) -> None:
    """Raises InputError if a router of a fixed number of experts per token is given another."""
    if layer.k != k:
        raise InputError(f"k={layer.k}: the router {type(layer).__name__} uses {k} per token: leave k out")


def check_without_effect(reason: str, **values: float) -> None:
    """Raises InputError for a factor of a loss that is a constant."""
    for name, value in values.items():
        if value:
            raise InputError(f"{name}={value} has no effect: {reason}: leave {name} out")


def limited(
    layer: ExpertLayer, tokens: RoutedTokens, routing: moe.Routing, capacity: float, first_choices_first: bool = False
) -> moe.Routing:
    """The routing without the assignments beyond the capacity; unchanged without a capacity, and in decoding."""
    if not capacity or tokens.inputs.decoding:
        return routing
    assert tokens.inputs.x is not None
    return moe.within_capacity(
        routing,
        None if tokens.inputs.segment_ids is None else tokens.groups,
        tokens.counts,
        tokens.inputs.x.shape[1],
        layer.k,
        capacity,
        layer.experts,
        first_choices_first,
    )


class TopK(ExpertLayer):
    """The k experts with the largest logits, without a capacity unless one is given.

    References: Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, "Mixtral of experts", arXiv 2401.04088; Muennighoff et
    al. 2024, "OLMoE", arXiv 2409.02060.
    """

    balance: float = 0.01
    gates: str = option(
        "softmax_k",
        "softmax_k, over the chosen experts (Mixtral); softmax, over all experts (OLMoE, Qwen2-MoE; with normalize Qwen3-MoE, "
        "which equals softmax_k); or sigmoid.",
    )
    normalize: bool = option(False, "Divide the gates of a token by their sum.")
    scale: float = option(1.0, "Factor of the gates.")
    capacity: float = option(
        0.0,
        "An expert takes ceil(capacity k n / E) assignments of a document of n tokens, and drops the others; 0 for no limit. "
        "Decoding drops none.",
        rule=NONE_OR_ONE,
    )

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(prefix_consistent=not self.capacity)

    @property
    def keeps_scale(self) -> bool:
        return (self.gates == "softmax_k" or self.normalize) and self.scale == 1.0 and not self.capacity

    def check(self) -> None:
        super().check()
        self.gate_rule().check(self.k)

    def gate_rule(self) -> moe.Gates:
        """The definition of the gates."""
        return moe.Gates(self.gates, self.normalize, self.scale)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        logits = self.linear(tokens.x)
        routing = moe.route(logits, self.k, self.gate_rule(), tokens.real)
        scores = moe.normalized_scores(logits, self.gate_rule())
        kept = limited(self, tokens, routing, self.capacity)
        return kept, moe.routing_sums(logits, scores, tokens.real, routing, kept)


class Switch(TopK):
    """One expert per token, with a capacity.

    References: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961.
    """

    k: int = 1
    kind: str = "relu"
    gates: str = "softmax"
    capacity: float = 1.25
    jitter: float = option(
        0.01,
        "In training, the router reads the token times random numbers between 1 - jitter and 1 + jitter.",
        least=0,
        below=1,
    )

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(prefix_consistent=not self.capacity, draws=self.jitter > 0.0)

    def check(self) -> None:
        super().check()
        check_k(self, 1)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        if self.jitter and not tokens.inputs.deterministic:
            factor = 1.0 + self.jitter * (2.0 * self.uniform(tokens, 0, tokens.x.shape[1]) - 1.0)
            tokens = dataclasses.replace(tokens, x=tokens.x * factor)
        return super().route(tokens)


class GShard(ExpertLayer):
    """Two experts per token, of which the second is kept at random in training, with a capacity.

    The gates are the probabilities of the two experts divided by their sum, also where the second is dropped.

    References: Lepikhin et al. 2020, "GShard", arXiv 2006.16668, algorithm 1.
    """

    balance: float = 0.01
    capacity: float = option(
        2.0,
        "In training, an expert takes ceil(capacity k n / E) assignments of a document of n tokens. The paper has 2 n / E "
        "places, which is capacity 1 here: the default has twice as many.",
        least=1,
    )
    eval_capacity: float = option(0.0, "Capacity in evaluation; 0 for the value of capacity.", rule=NONE_OR_ONE)
    threshold: float = option(
        0.5,
        "The second expert is kept with the probability gate / threshold, at most 1; in evaluation always. A second expert "
        "that is not kept takes no place; in algorithm 1 of the paper it takes one.",
        above=0,
        most=1,
    )
    first_choices_first: bool = option(
        False,
        "The first choices of all tokens of a document get places before any second choice, as in the paper. Then tokens "
        "depend on later ones, and language models refuse the layer.",
    )

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        return {**super().statistic_axes, "first": (None,)}

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(causal=not self.first_choices_first, prefix_consistent=False, draws=True)

    def check(self) -> None:
        super().check()
        check_k(self, 2)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        logits = self.linear(tokens.x)
        routing = moe.route(logits, 2, moe.Gates("softmax", normalize=True), tokens.real)
        first = routing.experts.reshape(-1, 2)[:, 0]
        training = not tokens.inputs.deterministic
        if training:
            uniform = self.uniform(tokens, 0, 1)[:, 0]
            routing = moe.drop_second_choice(routing, uniform, self.threshold, self.experts)
        capacity = self.capacity if training else self.eval_capacity or self.capacity
        kept = limited(self, tokens, routing, capacity, self.first_choices_first)
        scores = jax.nn.softmax(logits, axis=1)
        sums = moe.routing_sums(logits, scores, tokens.real, routing, kept)
        return kept, sums | {"first": moe.expert_counts(first, self.experts)}

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        # The published loss counts first choices, and the metrics of the load count all.
        values = super().auxiliary_loss({**statistics, "load": statistics["first"]})
        return values | moe.load_metrics(statistics)


class StMoE(GShard):
    """The router of ST-MoE: GShard with a lower threshold, less capacity and the z-loss.

    The published capacity factors, 1.25 in training and 2 in evaluation, count n / E places, not k n / E: experts have twice as
    many places here. Experts are those of `kind`, and evaluation keeps every second expert; the published code draws then too.

    References: Zoph et al. 2022, "ST-MoE", arXiv 2202.08906.
    """

    capacity: float = 1.25
    eval_capacity: float = 2.0
    threshold: float = 0.2
    z: float = 0.001


class NoisyTopK(ExpertLayer):
    """The k experts with the largest logits after noise of a learned size, in training.

    References: Shazeer et al. 2017, "Outrageously large neural networks", arXiv 1701.06538, sec. 4 and appendix A.
    """

    importance: float = option(
        0.1,
        "Factor of importance_loss, the squared coefficient of variation of the experts' sums of gates.",
        least=0,
    )
    load: float = option(
        0.1,
        "Factor of load_loss, the same of the sums of the probabilities that a token chooses an expert.",
        least=0,
    )

    router_matrices: ClassVar[int] = 2

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        return {**super().statistic_axes, "gates": (None,), "probability": (None,)}

    @property
    def keeps_scale(self) -> bool:
        return True

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(draws=True)

    def check(self) -> None:
        super().check()
        moe.Gates().check(self.k)
        if self.k == self.experts:
            raise InputError(
                f"k={self.k} of {self.experts} experts: noise does not change the choice: set k below experts"
            )

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        clean = self.linear(tokens.x, init=nn.initializers.zeros)
        spread = self.linear(tokens.x, "noise", init=nn.initializers.zeros)
        logits = clean
        training = not tokens.inputs.deterministic
        if training:
            noise = jax.scipy.stats.norm.ppf(self.uniform(tokens, 0, self.experts))
            logits, deviation = moe.noisy_logits(clean, spread, noise)
            probability = moe.choice_probability(clean, logits, deviation, self.k)
        routing = moe.route(logits, self.k, moe.Gates("softmax_k"), tokens.real)
        gates = jnp.zeros(self.experts).at[routing.experts].add(routing.gates, mode="drop")
        sums = moe.routing_sums(logits, jax.nn.softmax(logits, axis=1), tokens.real, routing, routing)
        smooth = jnp.sum(jnp.where(tokens.real[:, None], probability, 0.0), axis=0) if training else sums["load"]
        return routing, sums | {"gates": gates, "probability": smooth}

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        losses = {
            "importance_loss": self.importance * moe.squared_variation(statistics["gates"]),
            "load_loss": self.load * moe.squared_variation(statistics["probability"]),
        }
        return losses | super().auxiliary_loss(statistics)


class ExpertChoice(ExpertLayer):
    """Each expert chooses the tokens of a sequence with the largest probabilities.

    References: Zhou et al. 2022, "Mixture-of-experts with expert choice routing", arXiv 2202.09368.
    """

    capacity: float = option(1.0, "An expert takes ceil(capacity k n / E) of n tokens.", least=1)

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(causal=False, prefix_consistent=False, isolates_segments=False, decodes=False)

    def check(self) -> None:
        super().check()
        check_without_effect("all experts choose equally many tokens", balance=self.balance)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        logits = self.linear(tokens.x)
        assert tokens.inputs.x is not None
        shape = tokens.inputs.x.shape[:2]
        routing = moe.route_by_expert(logits.reshape(*shape, -1), self.k, self.capacity, tokens.real.reshape(shape))
        scores = jax.nn.softmax(logits, axis=1)
        return routing, moe.routing_sums(logits, scores, tokens.real, routing, routing)


class BiasBalanced(ExpertLayer):
    """The k experts with the largest sums of a sigmoid score and a bias, which is moved towards equal loads.

    References: DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv 2412.19437, sec. 2.1.2; Wang et al. 2024,
    arXiv 2408.15664.
    """

    scale: float = option(1.0, "Factor of the gates, which are the scores divided by their sum.")
    rate: float = option(0.001, "Change of a bias in each step.", least=0)
    groups: int = option(1, "Number of groups of experts, a divisor of E.")
    kept_groups: int = option(1, "Groups that a token uses, see `ops.moe.route`.")
    group_score: str = option("best_two", "Score of a group, best_two (DeepSeek-V3) or best (DeepSeek-V2).")

    @property
    def needs_all_experts(self) -> str:
        return f"the {self.groups} groups are of equal size" if self.groups > 1 else ""

    @property
    def keeps_scale(self) -> bool:
        return self.scale == 1.0

    def check(self) -> None:
        super().check()
        self.gate_rule().check(self.k)
        check_groups(self.k, self.experts, self.groups, self.kept_groups, self.group_score)

    def gate_rule(self) -> moe.Gates:
        """The definition of the gates."""
        return moe.Gates("sigmoid", normalize=True, scale=self.scale)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        logits = self.linear(tokens.x)
        bias = buffer(self, "bias", nn.initializers.zeros, (self.experts,), ("router",))
        gates = self.gate_rule()
        routing = moe.route(
            logits,
            self.k,
            gates,
            tokens.real,
            bias=bias,
            groups=self.groups,
            kept_groups=self.kept_groups,
            group_score=self.group_score,
        )
        scores = moe.normalized_scores(logits, gates)
        return routing, moe.routing_sums(logits, scores, tokens.real, routing, routing)

    def advance(self, buffers: Mapping[str, jax.Array], statistics: Statistics, step: jax.Array, rng: jax.Array) -> Any:
        """The biases of the next step.

        Args:
          buffers: "bias" `[E]`.
          statistics: Sums over the batch.
          step: Unused.
          rng: Unused.

        Returns:
          The new buffers.
        """
        return {"bias": moe.moved_bias(buffers["bias"], statistics["load"], self.rate)}


class Hash(ExpertLayer):
    """Experts by a fixed hash of the token's id; the gates are 1 / k.

    References: Roller et al. 2021, "Hash layers for large sparse models", arXiv 2106.04426.
    """

    k: int = 1
    seed: int = option(0, "Number of the hash function.")

    reads_tokens: ClassVar[bool] = True
    router_matrices: ClassVar[int] = 0

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        return statistic_axes(moe.LOAD_SUMS)

    @property
    def needs_all_experts(self) -> str:
        return "a hash of another number of experts gives all words other experts"

    @property
    def keeps_scale(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        check_without_effect("the choice does not depend on parameters", balance=self.balance, z=self.z)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        ids = tokens.inputs.tokens
        if self.is_initializing():
            ids = jnp.zeros(tokens.real.shape, jnp.int32)
        if ids is None:
            raise InputError("the hash router reads token ids, which this layer does not get: choose another router")
        count = tokens.real.shape[0]
        chosen = moe.hashed_experts(ids.reshape(-1), self.k, self.experts, self.seed)
        gates = jnp.full(count * self.k, 1.0 / self.k)
        routing = moe.Routing(chosen.reshape(-1), gates, None, count)
        routing = routing.kept(jnp.repeat(tokens.real, self.k), self.experts)
        return routing, moe.load_sums(tokens.real, routing, routing, self.experts)

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        return moe.load_metrics(statistics)


class Base(ExpertLayer):
    """One expert per token, in training by an assignment that gives each expert equally many tokens of a sequence.

    The score of a token and an expert is the product of the token and the expert's centroid, a column of the router; its
    sigmoid is the gate. In evaluation each token uses the expert with the largest score.

    References: Lewis et al. 2021, "BASE layers", arXiv 2103.16716.
    """

    k: int = 1

    @property
    def traits(self) -> MixerTraits:
        return MixerTraits(causal=False, prefix_consistent=False, isolates_segments=False, decodes=False)

    def check(self) -> None:
        super().check()
        check_k(self, 1)
        check_without_effect("the assignment gives all experts equally many tokens", balance=self.balance)

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        logits = self.linear(tokens.x)
        if tokens.inputs.deterministic:
            routing = moe.route(logits, 1, moe.Gates("sigmoid"), tokens.real)
        else:
            assert tokens.inputs.x is not None
            shape = tokens.inputs.x.shape[:2]
            assign = jax.vmap(moe.balanced_assignment)
            chosen = assign(logits.reshape(*shape, -1), tokens.real.reshape(shape)).reshape(-1)
            gates = jnp.take_along_axis(logits, jnp.minimum(chosen, self.experts - 1)[:, None], axis=1)[:, 0]
            most = shape[0] * -(-shape[1] // self.experts)
            routing = moe.Routing(chosen, jax.nn.sigmoid(gates), None, most).kept(tokens.real, self.experts)
        scores = jax.nn.softmax(logits, axis=1)
        return routing, moe.routing_sums(logits, scores, tokens.real, routing, routing)
