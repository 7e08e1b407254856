"""The full output layer: the exact softmax over the vocabulary."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.ops.softmax import linear_cross_entropy, logits
from hpnlp.ops.softmax.sampling import sample
from hpnlp.types import LossOut


class FullOutput(nn.Module):
    """Softmax over all rows of the table. Cost: as `linear_cross_entropy`."""

    is_normalized: ClassVar[bool] = True

    def loss(
        self,
        table: Float[Array, "V D"],
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of -log p(label) in nats. `rng` is not used: nothing here is random."""
        total = linear_cross_entropy(h, table, labels, weights=weights, ignore_index=None, reduction="sum")
        return LossOut(total, weights.astype(jnp.float32).sum())

    def nll(self, table: Float[Array, "V D"], h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        """-log p(label) of each token, in nats."""
        return linear_cross_entropy(h, table, labels, ignore_index=None, reduction="none")

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """Unnormalised float32 log-probabilities."""
        return logits(h, table)

    def log_prob(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        """log p of every row of the table, float32."""
        return jax.nn.log_softmax(self.logits(table, h), axis=-1)

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """The k most probable ids of each token, best first: `(log p, ids)`."""
        values, ids = jax.lax.top_k(self.log_prob(table, h), k)
        return values, ids

    def sample(
        self,
        table: Float[Array, "V D"],
        h: Float[Array, "N D"],
        rng: jax.Array,
        temperature: float | jax.Array = 1.0,
        top_k: int = 0,
        top_p: float | jax.Array = 1.0,
    ) -> Int[Array, " N"]:
        """One id a token; see `ops.softmax.sampling.sample` for the arguments."""
        return sample(self.logits(table, h), rng, temperature=temperature, top_k=top_k, top_p=top_p)
