"""The encoder: a bidirectional Backbone that labels tokens or sequences, as BERT does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp import compatibility
from hpnlp.cost.parts import part
from hpnlp.model_interfaces.ranges import LIMITS, classes_option
from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.prediction import Batch, PredictionModel, classification_metrics
from hpnlp.models.shared.body import BodyStart
from hpnlp.nn.attention import Context
from hpnlp.nn.layers import Dense, Embed, dropout
from hpnlp.nn.pooling import POOLINGS, TRANSFORMS, HeadTransform, Pooling
from hpnlp.ops.convolutions.convolution import token_windows
from hpnlp.ops.table_rows import is_row_subset
from hpnlp.types import InputError, LossOut, option


@dataclasses.dataclass(frozen=True)
class EncoderConfig(BackboneConfig):
    """A bidirectional encoder, with a label for each token or for each sequence."""

    body: ClassVar[str] = "encoder"
    starts: ClassVar[Mapping[str, tuple[BodyStart, ...]]] = {
        "encoder": (BodyStart(),),
        "towers": (BodyStart(source="tower"),),
    }
    body_params: ClassVar[tuple[str, ...]] = (*BackboneConfig.body_params, "embed_projection", "token_types")
    head_fields: ClassVar[tuple[str, ...]] = (
        "pooling",
        "classes",
        "token_types",
        "transform",
        "output",
        "tied",
        "dropout",
    )

    layers: int = option(4, "Number of Blocks L; 0 leaves the embeddings as they are.", least=0, most=LIMITS["layers"])
    pooling: str = option(
        "none",
        '"none" for a label of each token; an entry of POOLINGS for one label of each sequence, from its pooled hidden states.',
        among=("none", *POOLINGS),
    )
    classes: int = classes_option("to predict ids of the vocabulary, as for masked tokens")
    token_types: int = option(
        0, "Number of token types: 2 to tell the texts of a pair apart, 0 for none.", least=0, most=LIMITS["vocab"]
    )
    embed_dim: int = option(
        0,
        "Features of the embeddings of tokens, which a dense layer leads to D features; 0 for D and no such layer.",
        least=0,
        most=LIMITS["dim"],
    )
    trigram: bool = option(
        False,
        "The dense layer after the embeddings reads those of the next, the same and the previous token (MobileBERT).",
    )
    transform: str = option(
        "none",
        'Layer before the output layer: a dense layer, followed by "tanh" (BERT\'s pooler) or "relu" (DistilBERT\'s); or by an '
        'activation and a norm, "gelu_norm" (BERT\'s prediction of masked tokens) or "relu_norm" (MobileBERT\'s).',
        among=("none", *TRANSFORMS),
    )
    output: str = option("full(use_bias=True)", "Output layer, an entry of OUTPUTS.")
    tied: bool = option(False, "The output layer shares the embedding table, if its rows are words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        facts = dataclasses.replace(self.trait_facts(), encodes=True, labels_tokens=self.pooling == "none")
        compatibility.check(facts)
        if self.tied and self.classes:
            raise InputError(
                f"model.tied=True shares the embedding with an output layer over words, and model.classes={self.classes}: set "
                "model.tied=False"
            )
        self._check_embeddings()

    def _check_embeddings(self) -> None:
        """Raises InputError for sizes of the embeddings that do not fit the model."""
        if self.tied and self.embed_dim > self.dim:
            raise InputError(
                f"model.tied=True, model.embed_dim={self.embed_dim}: the output layer shares at most model.dim={self.dim} "
                "features of an embedding: set model.tied=False, or reduce model.embed_dim"
            )
        if self.embed_scale and (self.embed_dim or self.trigram):
            raise InputError(
                "model.embed_scale=True scales embeddings, which model.embed_dim or model.trigram lead through a dense layer: "
                "set model.embed_scale=False"
            )

    @property
    def embedding_size(self) -> int:
        """Features of the embeddings of tokens."""
        return self.embed_dim or self.dim

    def outputs(self) -> tuple[int, str]:
        """Outputs of the head.

        Returns:
          Their number, and the logical name of their axis: `(V, "vocab")` or `(classes, "labels")`.
        """
        return (self.classes, "labels") if self.classes else (self.vocab, "vocab")

    def sizes(self) -> dict[str, tuple[int, str]]:
        """Sizes of the logical axes that a mesh may divide, as `BackboneConfig.sizes`, with the classes."""
        return super().sizes() | ({"labels": (self.classes, "model.classes")} if self.classes else {})


class Encoder(PredictionModel):
    """A bidirectional encoder with an output layer over classes or the vocabulary.

    A batch is a mapping with tokens, segment_ids and positions, int32 `[B, T]`; token_types, int32 `[B, T]`, if the config has
    token types and sequences are pairs of texts, otherwise all types are 0; labels, int32, and weights, float32. Tokens attend
    to all tokens of the same segment id; 0 marks padding. Without pooling, labels and weights are `[B, T]`. With pooling, they
    are `[B]`, and a sequence is one text or pair of texts.

    Attributes:
      config: Sizes and parts of the model, an EncoderConfig.
    """

    def setup(self) -> None:
        super().setup()
        c = self.config
        if c.pooling != "none" and not c.classes:
            raise InputError(
                f"model.classes=0, model.pooling={c.pooling!r}: a label of a sequence is no word: set model.classes to the "
                "number of classes, or model.pooling=none"
            )
        # Without pooling, of the `vectors` alone: a mean has no parameters.
        self.pool = Pooling("mean" if c.pooling == "none" else c.pooling)
        if c.token_types:
            self.token_types = Embed(c.token_types, c.dim, axis="token_types")
        if c.trigram or c.embedding_size != c.dim:
            self.embed_projection = Dense(c.dim, ("embed", "hidden"), use_bias=True)
        if c.transform != "none":
            self.transform = HeadTransform(c.transform, c.norm, c.norm_eps)

    def loss(self, batch: Batch, deterministic: bool = True, taps: tuple[str, ...] = ()) -> LossOut:
        """The loss of a batch.

        Args:
          batch: Tokens, segment_ids, positions, labels and weights, and token_types if the config has some.
          deterministic: No dropout and no sampling in the output layer; otherwise the rngs "dropout" and "output" are used.
          taps: Names of logits and states to return, see `tapped`.

        Returns:
          The loss summed over tokens or sequences, in nats, with the auxiliary losses and metrics of the layers and
          "accuracy". Training reports the accuracy only for classes, because that over a vocabulary takes a third of the
          products of the loss, and only if all rows of the output layer's table are trained. Evaluations of models with at most
          `prediction.MAX_CONFUSED` classes also report "confusion", the weights `[C, C]` by label and predicted class.
        """
        states, batch, indices, report = self.states(batch, deterministic, taps)
        h = self._head_states(states, batch, deterministic)
        rng = None if deterministic else self.make_rng("output")
        out = self.output_loss(h, batch, indices, rng)
        aux = {**report.aux, **out.aux}
        if deterministic or (self.config.classes and not is_row_subset(self.table)):
            aux |= classification_metrics(batch, self.best(h), self.config.classes, deterministic)
        tapped = self.tapped(taps, states, h, report)
        return LossOut(out.sum, out.weight, aux, self.reported_statistics(report), taps=tapped)

    def logits(self, batch: Batch) -> Float[Array, "B *T C"]:
        """Logits of the labels of a batch, on one device.

        Args:
          batch: Tokens, segment_ids and positions, and token_types if the config has some.

        Returns:
          Float32 logits of each token `[B, T, C]`, or of each sequence `[B, C]`.
        """
        h, batch, _, _ = self.states(batch, deterministic=True)
        h = self._head_states(h, batch, deterministic=True)
        return self.output.logits(self.table, h.reshape(-1, h.shape[-1])).reshape(*h.shape[:-1], -1)

    def vectors(self, batch: Batch) -> Float[Array, "B D"]:
        """Vectors of the sequences of a batch: the last layer's states, pooled as for labels, or their mean without pooling.

        Args:
          batch: As for `logits`.

        Returns:
          In the model's dtype.
        """
        h, batch, _, _ = self.states(batch, deterministic=True)
        return self.pool(h, batch["segment_ids"], batch["ids"])

    def token_features(self, x: jax.Array, context: Context) -> jax.Array:
        """Embeddings after the dense layer that `embed_dim` and `trigram` add.

        Args:
          x: Embeddings of the tokens, `[B, T, E]`.
          context: Segments of the tokens: a neighbour of another segment counts as 0.

        Returns:
          `[B, T, D]`.

        Raises:
          InputError: Neighbours are on other devices of a ring.
        """
        if self.config.trigram:
            if context.order is not None:
                raise InputError(
                    "model.trigram=True reads neighbouring tokens, and a ring of devices (plan.sequence over 1 with "
                    "plan.exchange=ring) changes their order: set plan.exchange=heads, or plan.sequence=1"
                )
            x = token_windows(x, 3, context.segment_ids, ahead=1)
        return self.embed_projection(x) if self.config.trigram or self.config.embedding_size != self.config.dim else x

    def added_embeddings(self, batch: Batch) -> jax.Array | None:
        """Embeddings of token types, if the config has some; of type 0 for a batch of single texts without token_types."""
        if not self.config.token_types:
            return None
        types = batch.get("token_types")
        return self.token_types(jnp.zeros_like(batch["tokens"]) if types is None else types)

    @part("output")
    def _head_states(self, h: jax.Array, batch: Batch, deterministic: bool) -> jax.Array:
        """Pooled and transformed hidden states, with dropout before a classifier."""
        c, ids = self.config, batch["ids"]
        if c.pooling != "none":
            h = self.pool(h, batch["segment_ids"], ids)
            ids = ids.min(axis=1)
        h = self.transform(h) if c.transform != "none" else h
        if deterministic or c.dropout == 0.0 or not c.classes:
            return h
        rng = self.make_rng("dropout")
        return dropout(h, c.dropout, rng, ids) if h.ndim == 3 else dropout(h[None], c.dropout, rng, ids[None])[0]

    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch of zeros with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of sequences, B.
          length: Tokens per sequence, T.

        Returns:
          The batch, all of whose tokens have segment id 1, and whose weights are 1.
        """
        sizes = {"batch": batch_size, "length": length}
        shapes = {name: tuple(sizes[axis] for axis in axes) for name, axes in self.batch_axes().items()}
        batch = {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}
        ones = {"segment_ids": jnp.ones_like(batch["segment_ids"]), "weights": jnp.ones(shapes["weights"], jnp.float32)}
        return batch | ones

    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical names of the axes of the arrays of a batch.

        Returns:
          ("batch",) for labels and weights of sequences; otherwise ("batch", "length"). Batches with labels of tokens have no
          token_types.
        """
        names = ("tokens", "segment_ids", "positions", "labels", "weights")
        axes: dict[str, tuple[str, ...]] = dict.fromkeys(names, ("batch", "length"))
        if self.config.pooling == "none":
            return axes
        types = {"token_types": ("batch", "length")} if self.config.token_types else {}
        return axes | types | {"labels": ("batch",), "weights": ("batch",)}

    def __call__(self, batch: Mapping[str, Any]) -> LossOut:
        return self.loss(batch)
