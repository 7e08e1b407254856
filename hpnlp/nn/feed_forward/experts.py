"""Mixture of experts: the layer that all routers share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hpnlp.nn.feed_forward.mlp import ACTIVATIONS, GATED, MLP
from hpnlp.nn.feed_forward.network import FeedForward
from hpnlp.nn.layers import Initializer, dense_init, param
from hpnlp.ops import moe
from hpnlp.ops.dropout import random_bits, seed_words
from hpnlp.ops.moe import exchange
from hpnlp.ops.moe.experts import IMPLEMENTATIONS, token_gates
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Statistics, option

# Rule of capacity factors, of which 1 gives places for all tokens at equal loads, and 0 stands for no limit.
NONE_OR_ONE = "0 for none, or at least 1", lambda capacity: capacity == 0 or capacity >= 1

router_init: Initializer = nn.initializers.normal(0.02)


def statistic_axes(names: Sequence[str]) -> dict[str, tuple[str | None, ...]]:
    """Logical axes of statistics of `ops.moe`, by name: one axis, of the experts, for those in VECTORS."""
    return {name: (None,) * (name in moe.VECTORS) for name in names}


@dataclasses.dataclass(frozen=True)
class RoutedTokens:
    """The tokens that a router reads, flattened.

    Attributes:
      x: `[N, D]`, float32, 0 for padding.
      real: bool `[N]`, False for padding.
      inputs: Inputs of the layer, `[B, T]`.
      groups: int32 `[N]`, a number for each document of each sequence, ascending.
      counts: int32 `[N]`, tokens of the token's document.
    """

    x: jax.Array
    real: jax.Array
    inputs: MixerInputs
    groups: jax.Array
    counts: jax.Array


class ExpertLayer(FeedForward):
    """A feed-forward network of E MLPs, of which a router chooses a few for each token.

    Entries of FEED_FORWARDS derive from it: a router is the method `route`.

    Attributes:
      hidden: Columns F of each expert, `model.mlp_dim`.

    Raises:
      InputError: A number that does not fit.

    Cost: that of k + shared MLPs of F columns per token, and of an MLP of E columns for the router.
    """

    experts: int = option(8, "Number of experts E.")
    k: int = option(2, "Experts per token.")
    kind: str = option("swiglu", "Kind of MLP, an entry of ACTIVATIONS.", among=ACTIVATIONS)
    shared: int = option(
        0,
        "Number of experts that every token uses in addition to the k chosen ones, as one MLP of shared x F columns.",
        least=0,
    )
    shared_gate: bool = option(
        False, "Multiply the result of the shared experts by the sigmoid of a linear function of the token (Qwen2-MoE)."
    )
    impl: str = option(
        "auto", "Implementation of the experts' products, see `ops.moe.expert_mlp`.", among=IMPLEMENTATIONS
    )
    exchange_capacity: float = option(
        0.0,
        "Where plan.expert divides the experts, a device sends each device at most this factor of the mean number of "
        "assignments in training, and drops all others, which count as dropped. 0 for buffers that hold all assignments, even "
        "if all tokens choose the experts of one device.",
        rule=NONE_OR_ONE,
    )
    balance: float = option(
        0.0, "Factor of `ops.moe.balance_loss`, which is then in the training loss as balance_loss.", least=0
    )
    z: float = option(0.0, "Factor of `ops.moe.z_loss`, which is then in the training loss as router_z_loss.", least=0)

    # Linear functions of a token with a result for each expert.
    router_matrices: ClassVar[int] = 1

    @property
    def is_gated(self) -> bool:
        return self.kind in GATED

    @property
    def expert_count(self) -> int:
        return self.experts

    @property
    def experts_per_token(self) -> int:
        return self.k

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Axes of the statistics of `ops.moe.routing_sums`."""
        return statistic_axes(moe.SUMS)

    @property
    def traits(self) -> MixerTraits:
        """Dependence of the choice of experts on other tokens and on random numbers."""
        return MixerTraits()

    @property
    def keeps_scale(self) -> bool:
        """Whether the gates of a token sum to 1 and no assignment is dropped, so that equal experts act as one of them."""
        return False

    def matrix_size(self, dim: int) -> int:
        """Number of weights that a token is multiplied with: of experts, router, and gate of shared experts."""
        used = (self.k + self.shared) * super().matrix_size(dim)
        return used + self.router_matrices * self.experts * dim + self.shared_gate * dim

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Checks the arguments.

        Raises:
          InputError: A number that does not fit.
        """
        name = type(self).__name__
        if self.use_bias:
            raise InputError(f"model.mlp_bias=True: {name} has no biases: set model.mlp_bias=False")
        if not 1 <= self.k <= self.experts:
            raise InputError(
                f"k={self.k} of {self.experts} experts: a token uses at least 1 and at most all experts: change k or experts"
            )
        if self.shared_gate and not self.shared:
            raise InputError("shared_gate=True has no effect without shared experts: set shared to at least 1")

    def route(self, tokens: RoutedTokens) -> tuple[moe.Routing, dict[str, jax.Array]]:
        """Chooses experts.

        Returns:
          `(routing, statistics)`, the statistics with the names in `statistic_axes`.
        """
        raise NotImplementedError

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """Losses and metrics of a layer.

        Args:
          statistics: Sums over a batch.

        Returns:
          The losses whose factors are over 0, and the metrics of `ops.moe.load_metrics` and `ops.moe.router_metrics`.
        """
        metrics = moe.load_metrics(statistics) | moe.router_metrics(statistics)
        losses = {}
        if self.balance:
            losses["balance_loss"] = self.balance * metrics["balance"]
        if self.z:
            losses["router_z_loss"] = self.z * metrics["router_z"]
        return losses | metrics

    @nn.compact
    def __call__(self, inputs: MixerInputs) -> MixerOutput:
        assert inputs.x is not None
        x = inputs.x
        tokens = self._tokens(inputs)
        routing, statistics = self.route(tokens)
        size = self.tensor_parallel.local_size("mlp", self.hidden)
        shapes = {"up": (x.shape[-1], size), "down": (size, x.shape[-1])}
        if self.kind in GATED:
            shapes["gate"] = shapes["up"]
        weights = {name: self._stack(name, shape) for name, shape in shapes.items()}
        flat = jnp.where(tokens.real[:, None], x.reshape(-1, x.shape[-1]), 0)
        if self.is_initializing():  # parameters exist by now, and results are not used
            y = jnp.zeros_like(x)
        else:
            y, kept = self._mlps(flat, routing, weights, inputs.deterministic)
            y, statistics = y.reshape(x.shape), statistics | kept
        y = self.tensor_parallel.reduce_output(y, "mlp")
        taps = {}
        if "routing" in inputs.taps:
            taps["gates"] = token_gates(routing, flat.shape[0], self.experts).reshape(*x.shape[:-1], -1)
        return MixerOutput(y + self._shared(inputs) if self.shared else y, statistics=statistics, taps=taps)

    def _mlps(
        self, x: jax.Array, routing: moe.Routing, weights: dict[str, PyTree], deterministic: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """`(sums of the experts' results [N, D], statistics that the exchange between devices changes)`."""
        parallel, activation = self.tensor_parallel, ACTIVATIONS[self.kind]
        shards = self.experts // parallel.local_size("experts", self.experts)
        if shards == 1:
            return moe.expert_mlp(x, routing, weights, activation, self.impl), {}
        factor, statistics = 0.0 if deterministic else self.exchange_capacity, {}
        rows = exchange.exchanged_rows(routing, x.shape[0], self.experts, shards, factor)
        if factor:
            routing = exchange.within_exchange(routing, self.experts, shards, rows)
            statistics["kept"] = jnp.sum(routing.experts < self.experts, dtype=jnp.float32)
        swap = functools.partial(parallel.exchange, name="experts")
        y = exchange.exchanged_expert_mlp(
            x, routing, weights, activation, self.impl, shards=shards, rows=rows, swap=swap
        )
        return y, statistics

    def _stack(self, name: str, shape: tuple[int, int]) -> Any:
        """The matrices of one name of all experts, `[E, ...]`."""
        init = self.down_init if name == "down" else dense_init
        axes = ("mlp", "embed") if name == "down" else ("embed", "mlp")
        count = self.tensor_parallel.local_size("experts", self.experts)
        return param(self, name, _by_expert(init), (count, *shape), ("experts", *axes))

    def _shared(self, inputs: MixerInputs) -> jax.Array:
        """Result of the shared experts, for the device's tokens."""
        columns = self.shared * self.hidden
        y = MLP(columns, False, self.down_init, self.tensor_parallel, self.kind, name="shared_experts")(inputs).o
        if not self.shared_gate:
            return y
        assert inputs.x is not None
        gate = jax.nn.sigmoid(self.linear(inputs.x.astype(jnp.float32), "shared_gate_kernel", 1))
        return y * self.tensor_parallel.local_tokens(gate, 1).astype(y.dtype)

    def linear(
        self, x: jax.Array, name: str = "router", features: int = 0, init: Initializer = router_init
    ) -> jax.Array:
        """A linear function of the tokens in float32, such as the logits of a router.

        Args:
          x: `[..., D]`, float32.
          name: Name of the parameter.
          features: Number of results, 0 for E.
          init: Initialiser.

        Returns:
          `[..., features]`, float32.
        """
        axes = ("embed", "gates" if features else "router")
        kernel = param(self, name, init, (x.shape[-1], features or self.experts), axes)
        return jnp.einsum("...d,de->...e", x, kernel, precision=jax.lax.Precision.HIGHEST)

    def uniform(self, tokens: RoutedTokens, stream: int, columns: int) -> jax.Array:
        """Random numbers that depend on the key of the layer and step, the token and the column only.

        Args:
          tokens: The tokens.
          stream: Number of the draw within a layer.
          columns: Numbers per token.

        Returns:
          float32 `[N, columns]` in (0, 1).
        """
        assert tokens.inputs.draws is not None and tokens.inputs.ids is not None
        ids = tokens.inputs.ids.reshape(-1, 1)
        column = jnp.arange(columns, dtype=jnp.uint32) + jnp.uint32(stream << 16)
        bits = random_bits(seed_words(tokens.inputs.draws), ids, column[None], jnp.zeros((1, 1), jnp.uint32))
        # 23 bits and a half are exact in float32; more would round to 1, whose normal quantile is infinite.
        return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)

    def _tokens(self, inputs: MixerInputs) -> RoutedTokens:
        assert inputs.x is not None
        batch, length, dim = inputs.x.shape
        segments = jnp.ones((batch, length), jnp.int32) if inputs.segment_ids is None else inputs.segment_ids
        begins = jnp.concatenate([jnp.ones((batch, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
        groups = jnp.cumsum(begins.reshape(-1), dtype=jnp.int32) - 1
        real = (segments > 0).reshape(-1)
        counts = jnp.zeros(batch * length, jnp.int32).at[groups].add(real.astype(jnp.int32))[groups]
        x = jnp.where(real[:, None], inputs.x.reshape(-1, dim).astype(jnp.float32), 0.0)
        return RoutedTokens(x, real, inputs, groups, counts)


def _by_expert(init: Initializer) -> Initializer:
    """Initialises the matrix of each expert by itself, with a key of its own."""

    def stacked(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(shape[0]))
        return jax.vmap(lambda k: init(k, shape[1:], dtype))(keys)

    return stacked
