"""A mixture of a language model with the neighbours of a position, on the binary decisions of a token's id."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from hpnlp.ops.softmax.bit_paths import path_length, path_log_prob, vote_counts

CLIP = 16.0  # largest log-odds that are mixed
PRIOR = 0.2  # votes for 0 and for 1 that are added to those of neighbours


class BitGate(nn.Module):
    """Mixes log-odds with weights that a small network chooses for each decision.

    The network reads the log-odds of the model and of the neighbours of each context, once with equal weights and once with
    more for recent ones, the numbers of neighbours, and which decision it is.

    Attributes:
      vocab: Number of ids V.
      hidden: Sizes of the network's layers.
      decay: Weight of a neighbour relative to a more recent one.

    References: Mahoney 2005, "Adaptive weighing of context models for lossless data compression", whose networks mix the
    log-odds of decisions; Khandelwal et al. 2020, arXiv 1911.00172, for the neighbours of a language model.
    """

    vocab: int
    hidden: tuple[int, ...] = (64, 32)
    decay: float = 0.6

    @nn.compact
    def __call__(
        self,
        model_log_odds: Float[Array, "N L"],
        tokens: Int[Array, "N C K"],
        count: Int[Array, "N C"],
        ids: Int[Array, " N"],
    ) -> Float[Array, "N L"]:
        """The log-odds of the decisions of one token in each row.

        Args:
          model_log_odds: Those of the language model, see `ops.softmax.bit_paths.path_log_odds`.
          tokens: Neighbours, for each of C contexts; negative for none.
          count: Number of earlier occurrences of each context.
          ids: The token whose decisions are mixed.

        Returns:
          Mixed log-odds.
        """
        length = path_length(self.vocab)
        per_context = jnp.broadcast_to(ids[:, None], count.shape)
        votes, recent = vote_counts(tokens.astype(jnp.int32), per_context, self.decay, length)  # [N, C, L, 2]
        experts = [jnp.log(v[..., 1] + PRIOR) - jnp.log(v[..., 0] + PRIOR) for v in (votes, recent)]
        experts = [jnp.swapaxes(odds, 1, 2) for odds in experts]  # [N, L, C]
        voters = jnp.log1p(jnp.swapaxes(votes.sum(axis=-1), 1, 2))
        model = jnp.clip(model_log_odds, -CLIP, CLIP)[..., None]
        odds = jnp.concatenate([*experts, model], axis=-1)
        seen = jnp.broadcast_to(jnp.log1p(count.astype(jnp.float32))[:, None], voters.shape)
        decision = jnp.broadcast_to(jnp.eye(length)[None], (*voters.shape[:2], length))
        x = jnp.concatenate([odds / 4.0, voters / 4.0, seen / 8.0, decision], axis=-1)
        for size in self.hidden:
            x = jax.nn.relu(nn.Dense(size)(x))
        outputs = nn.Dense(odds.shape[-1] + 1, bias_init=_equal_weights, kernel_init=nn.initializers.normal(0.01))(x)
        return jnp.sum(outputs[..., :-1] * odds, axis=-1) + outputs[..., -1]

    def nll(
        self,
        model_log_odds: Float[Array, "N L"],
        tokens: Int[Array, "N C K"],
        count: Int[Array, "N C"],
        ids: Int[Array, " N"],
    ) -> Float[Array, " N"]:
        """-log p of one token in each row, in nats; arguments as of `__call__`."""
        return -path_log_prob(self(model_log_odds, tokens, count, ids), ids, self.vocab)


def _equal_weights(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Initial biases: equal weights of all log-odds, and no correction."""
    return jnp.full(shape, 2.0 / shape[0], dtype).at[-1].set(0.0)
