"""A bidirectional Backbone that makes one vector of a text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.models.backbone import Backbone
from hpnlp.models.prediction import Batch
from hpnlp.nn.attention import Context
from hpnlp.nn.layers import Embed
from hpnlp.nn.pooling import Pooling

INPUTS = ("tokens", "segment_ids", "positions")


class Tower(Backbone):
    """A Backbone with pooling: a normalised vector of each text.

    Attributes:
      config: An EncoderConfig with pooling.
    """

    def setup(self) -> None:
        super().setup()
        self.pool = Pooling(self.config.pooling)
        if self.config.token_types:
            self.token_types = Embed(self.config.token_types, self.config.dim, axis="token_types")

    def pooled(
        self, batch: Batch, numbers: Int[Array, " B"], deterministic: bool
    ) -> tuple[Float[Array, "B D"], LayerReport]:
        """Pooled hidden states of texts.

        Args:
          batch: Tokens, segment_ids and positions, int32 `[B, T]`.
          numbers: Numbers of the texts, on which dropout depends.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          `(states, report of the layers)`: float32; 0 for texts without tokens.
        """
        length = batch["tokens"].shape[1]
        ids = numbers[:, None] * length + jnp.arange(length, dtype=jnp.int32)[None]
        operands, order = [batch[name] for name in INPUTS] + [ids], None
        if self.model_parallel is not None:
            order, indices = self.model_parallel.token_order(length)
            operands = operands if indices is None else [x[:, indices] for x in operands]
        tokens, segment_ids, positions, ids = operands
        drawn = None if deterministic else ids
        context = Context(positions, segment_ids, self.config.mask, deterministic, ids=drawn, order=order)
        types = self.token_types(jnp.zeros((1, 1), jnp.int32)) if self.config.token_types else None
        h, _, report = self.hidden(tokens, context, added=types)
        return self.pool(h, segment_ids, ids).astype(jnp.float32), report

    def vectors(
        self, batch: Batch, numbers: Int[Array, " B"], deterministic: bool
    ) -> tuple[Float[Array, "B D"], LayerReport]:
        """Vectors of texts: the pooled states, divided by their length.

        Arguments: see `pooled`.

        Returns:
          `(vectors, report of the layers)`: float32 vectors of length 1, or of 0 for texts without tokens.
        """
        pooled, report = self.pooled(batch, numbers, deterministic)
        squares = jnp.square(pooled).sum(axis=-1, keepdims=True)
        return pooled * jax.lax.rsqrt(jnp.maximum(squares, np.float32(1e-24))), report
