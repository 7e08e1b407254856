"""Classifiers of sequences whose layers are not stacked: the pooled states of a sequence, and a softmax over classes."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.model_parallel import ModelParallel
from hpnlp.models.prediction import Batch, classification_metrics
from hpnlp.models.stacks.unstacked import UnstackedModel
from hpnlp.nn.layers import dropout, embed_init, param
from hpnlp.nn.output.full import FullOutput
from hpnlp.nn.pooling import Pooling
from hpnlp.types import LossOut


class PooledClassifier(UnstackedModel, nn.Module):
    """The pooled states of a sequence, dropout, and a softmax over `config.classes`. A subclass has `states` and `setup`.

    A batch has "tokens" and "segment_ids" (0 on padding), int32 `[B, T]`, "labels", int32 `[B]`, and "weights", float32 `[B]`.

    Attributes:
      config: Sizes and parts of the model, with the fields vocab, classes, pooling, dropout and dtype.
      model_parallel: Loss over several devices; None for one device. All else is left to the compiler, which divides the batch.
      remat: As for a Backbone.
    """

    config: Any
    model_parallel: ModelParallel | None = None
    remat: str = "none"

    @property
    def is_normalized(self) -> bool:
        """The loss is -log p(label) of a distribution over the classes."""
        return True

    def setup_head(self, features: int) -> None:
        """Makes the pooling and the output layer.

        Args:
          features: Features of a state.
        """
        self.pool = Pooling(self.config.pooling)
        self.setup_output(features)

    def setup_output(self, features: int) -> None:
        """Makes the output layer.

        Args:
          features: Features of the vector of a sequence.
        """
        c = self.config
        self.table = param(self, "head", embed_init, (c.classes, features), ("labels", "embed"))
        self.output = FullOutput(vocab=c.classes, dim=features, axis="labels", use_bias=True)

    def states(self, batch: Batch, ids: Array, rng: Array | None, deterministic: bool) -> Float[Array, "B T D"]:
        """States of the tokens or nodes.

        Args:
          batch: As for `loss`.
          ids: A number for each of them, int32 `[B, T]`, on which dropout depends.
          rng: Key of dropout at the rate `config.dropout`; None for none.
          deterministic: No dropout of any kind.

        Returns:
          The states.
        """
        raise NotImplementedError

    def features(self, batch: Batch, deterministic: bool) -> Float[Array, "B D"]:
        """Pooled states.

        Args:
          batch: As for `loss`.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          One vector of each sequence.
        """
        rate, tokens = self.config.dropout, batch["tokens"]
        ids = jnp.arange(tokens.size, dtype=jnp.int32).reshape(tokens.shape)
        rng = None if deterministic or not rate else self.make_rng("dropout")
        pooled = self.pool(self.states(batch, ids, rng, deterministic), batch["segment_ids"], ids)
        if rng is None:
            return pooled
        return dropout(pooled[None], rate, jax.random.fold_in(rng, 1), ids[None, :, 0])[0]

    def loss(self, batch: Batch, deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens, segment_ids, labels and weights, and what `states` reads.
          deterministic: No dropout; otherwise the rng "dropout" is used.

        Returns:
          The loss summed over sequences, in nats, with "accuracy" and, in evaluations, "confusion"
          (`prediction.classification_metrics`).
        """
        operands = self.table, self.features(batch, deterministic), batch["labels"], batch["weights"]
        with part("output"):
            if self.model_parallel is None:
                out, best = self.output.loss(*operands), self.output.best(*operands[:2])[1]
            else:
                out = self.model_parallel.loss(self.output, *operands, None)
                best = self.model_parallel.best(self.output, *operands[:2])
        metrics = classification_metrics(batch, best, self.config.classes, deterministic)
        return LossOut(out.sum, out.weight, {**out.aux, **metrics})

    def logits(self, batch: Batch) -> Float[Array, "B C"]:
        """Logits of the labels of a batch, on one device.

        Args:
          batch: As for `loss`.

        Returns:
          Float32 logits of each sequence.
        """
        return self.output.logits(self.table, self.features(batch, deterministic=True))

    def __call__(self, batch: Batch) -> LossOut:
        return self.loss(batch)
