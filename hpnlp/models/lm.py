"""The causal language model: a Backbone and an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.models.backbone import Backbone, BackboneConfig
from hpnlp.nn.attention import Context, mixer_period
from hpnlp.nn.layers import embed_init, param
from hpnlp.nn.output import OUTPUTS, is_normalized
from hpnlp.ops.attention.masks.patterns import Causal
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, LossOut, option


@dataclasses.dataclass(frozen=True)
class LMConfig(BackboneConfig):
    """A causal language model."""

    output: str = option("full", "Output layer, an entry of OUTPUTS.")
    tied: bool = option(True, "The output layer shares the embedding table, if its rows are words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for spec, mixer in zip(mixer_period(self.mixer), self.mixers(), strict=True):
            if not (mixer.traits.causal and mixer.traits.prefix_consistent):
                raise InputError(
                    f"model.mixer={self.mixer!r}: {spec.name} lets tokens depend on later ones, which a language model "
                    "predicts: choose a causal mixer"
                )

    def masks(self) -> list[Any]:
        """Masks of the layers of one period.

        Returns:
          The intersection of each mixer's mask with Causal(), in the order of `mixers`.
        """
        return [mixer.within(Causal()) for mixer in self.mixers()]


class LM(Backbone):
    """A causal language model over `config.vocab` ids.

    A batch is a mapping with tokens, labels, segment_ids and positions, int32 `[B, T]`, and weights, float32 `[B, T]`. Labels
    are the tokens that follow; segment id 0 marks padding.

    Attributes:
      config: Sizes and parts of the model, an LMConfig.
    """

    @property
    def is_normalized(self) -> bool:
        """Whether the loss is -log p(label) of a distribution over the vocabulary."""
        return is_normalized(self.config.output)

    def setup(self) -> None:
        super().setup()
        c = self.config
        extra = {"vocab": c.vocab, "dim": c.dim, "stats": self.stats}
        self.output = build(parse_one(c.output, "model.output"), OUTPUTS, "output layer", **extra)
        if c.tied and self.output.rows_are != "words":
            raise InputError(
                f"model.output={c.output!r} has no table of words by id that the embedding could share: set model.tied=False"
            )
        if not self.output.rows_are:
            self.table = None
        elif c.tied:
            self.table = self.embed.table
        else:
            self.table = param(self, "head", embed_init, (c.vocab, c.dim), ("vocab", "embed"))

    def loss(self, batch: Mapping[str, jax.Array], deterministic: bool = True) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens, labels, segment_ids, positions and weights.
          deterministic: No dropout and no sampling in the output layer; otherwise the rngs "dropout" and "output" are used.

        Returns:
          The loss summed over tokens, in nats, with the auxiliary losses and metrics of the layers.
        """
        order = indices = None
        ids = jnp.arange(batch["tokens"].size, dtype=jnp.int32).reshape(batch["tokens"].shape)
        batch = {**batch, "ids": ids}
        if self.model_parallel is not None:
            order, indices = self.model_parallel.token_order(batch["tokens"].shape[1])
            batch = batch if indices is None else {name: x[:, indices] for name, x in batch.items()}
        ids = None if deterministic else batch["ids"]
        context = Context(batch["positions"], batch["segment_ids"], Causal(), deterministic, ids=ids, order=order)
        h, _, aux = self.hidden(batch["tokens"], context)
        rng = None if deterministic else self.make_rng("output")
        operands = h, batch["labels"], batch["weights"]
        if self.model_parallel is None:
            h, labels, weights = (x.reshape(-1, *x.shape[2:]) for x in operands)
            out = self.output.loss(self.table, h, labels, weights, rng)
        else:
            if indices is not None and not self.output.merges(rng):
                # Such a layer may draw samples per token, by the token's index: tokens return to their original order.
                operands = tuple(x[:, np.argsort(indices)] for x in operands)
            out = self.model_parallel.loss(self.output, self.table, *operands, rng)
        return LossOut(out.sum, out.weight, {**aux, **out.aux})

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros; see the function `example_batch`."""
        return example_batch(batch_size, length)

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: all of them are `[B, T]`."""
        return dict.fromkeys(example_batch(1, 1), ("batch", "length"))

    def rows(self, batch: Mapping[str, jax.Array]) -> dict[tuple[str, ...], Int[Array, " R"]]:
        """Rows of tables that `loss` of this batch looks up with the same rngs.

        Args:
          batch: As for `loss`.

        Returns:
          Path of a table among the parameters -> ids, with repetitions. `TableRows` of them may replace the table. Tables
          that are used in full are left out.

        Raises:
          InputError: The embedding and the output layer share their table.
        """
        if self.config.tied:
            raise InputError(
                "optimizer.rows=True trains only the rows that a batch looks up, but the output layer uses all rows of a tied "
                "table: set model.tied=False"
            )
        rows = {("embed", "table"): batch["tokens"].reshape(-1)}
        labels = jnp.where(batch["weights"] != 0, batch["labels"], 0).reshape(-1)
        head_rows = self.output.rows(labels, self.make_rng("output"))
        return rows if head_rows is None else {**rows, ("head",): head_rows}

    def logits(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every next token.

        Args:
          tokens: Ids, one document per sequence.

        Returns:
          Float32 logits.
        """
        h, _, _ = self.hidden(tokens, Context(_positions(tokens), None, Causal()))
        return self.output.logits(self.table, h.reshape(-1, h.shape[-1])).reshape(*tokens.shape, -1)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], capacity: int
    ) -> tuple[Float[Array, "B D"], Any]:
        """Runs prompts through the model and fills caches.

        Args:
          tokens: Ids of the prompts, padded at the end.
          lengths: Number of tokens of each prompt.
          capacity: Number of tokens per sequence that the caches have room for.

        Returns:
          `(hidden state of each prompt's last token, caches)`.
        """
        positions = _positions(tokens)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
        h, caches, _ = self.hidden(tokens, Context(positions, segment_ids, Causal(), capacity=capacity))
        return jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0], caches

    def extend(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], caches: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs further tokens, which continue those in the caches.

        Args:
          tokens: Ids of the tokens.
          positions: Positions of the tokens.
          caches: Caches of all preceding tokens.

        Returns:
          `(hidden states, the extended caches)`.
        """
        h, caches, _ = self.hidden(tokens, Context(positions, None, Causal()), caches)
        return h, caches

    def __call__(self, batch: Mapping[str, jax.Array]) -> LossOut:
        return self.loss(batch)


def _positions(tokens: jax.Array) -> jax.Array:
    """Positions 0, 1, ... of each sequence, `[B, T]`."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)


def example_batch(batch_size: int, length: int) -> dict[str, jax.Array]:
    """A batch of zeros with the shapes and dtypes of a batch of data.

    Args:
      batch_size: Number of sequences, B.
      length: Tokens per sequence, T.

    Returns:
      The batch, all of whose tokens have segment id 1 and weight 1.
    """
    ints = jnp.zeros((batch_size, length), jnp.int32)
    return {
        "tokens": ints,
        "labels": ints,
        "segment_ids": jnp.ones_like(ints),
        "positions": ints,
        "weights": jnp.ones((batch_size, length), jnp.float32),
    }
