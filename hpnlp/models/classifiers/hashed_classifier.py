"""Projection networks: a label of each text from hashes of its words, without a table of words (PRADO, pQRNN)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp import compatibility
from hpnlp.model_interfaces.ranges import LIMITS, classes_option, rate_option
from hpnlp.models.classifiers.pooled_classifier import PooledClassifier
from hpnlp.models.prediction import Batch
from hpnlp.models.stacks.unstacked import Unstacked
from hpnlp.nn.rnn import RecurrentInputs
from hpnlp.nn.text_encoders import ENCODERS, Bottleneck, TextEncoder
from hpnlp.ops.word_projection import HASH_WORDS
from hpnlp.spec import build, parse_one
from hpnlp.types import InputError, check_options, option


@dataclasses.dataclass(frozen=True)
class HashedClassifierConfig(Unstacked):
    """A projection network of texts."""

    description: ClassVar[str] = "a projection network"
    undivided: ClassVar[str] = "whose texts are not divided"
    not_recomputed: ClassVar[str] = "a projection network computes its largest arrays again in any case"

    encoder: str = option(
        "prado(bigram=64, trigram=64)",
        "An entry of ENCODERS: prado with the channels of unigram, bigram, trigram, fourgram, fivegram, skip1bigram and "
        'skip2bigram, or "pqrnn(features, layers=2, width=3, zoneout=0.1)".',
    )
    projection: int = option(
        512,
        "Ternary features F of a word.",
        least=1,
        most=LIMITS["dim"],
        rule=("a multiple of 64", lambda features: features % 64 == 0),
    )
    bottleneck: int = option(
        64, "Features of the dense layers that read the ternary features.", least=1, most=LIMITS["dim"]
    )
    classes: int = classes_option()
    dropout: float = rate_option("Dropout of the features of the dense layers.", 0.5)
    dtype: str = option("float32", 'Dtype of the activations: "float32".')

    def __post_init__(self) -> None:
        check_options(self, "model")
        if self.dtype != "float32":
            raise InputError(
                f"model.dtype={self.dtype!r}: projection networks are small, and float32 only: leave it out"
            )
        self.text_encoder()

    def text_encoder(self) -> TextEncoder:
        """The encoder.

        Returns:
          A module, which is not bound to a parent.

        Raises:
          InputError: Unknown name, or wrong arguments.
        """
        return build(parse_one(self.encoder, "model.encoder"), ENCODERS, "encoder", name="encoder", parent=None)

    @property
    def layers(self) -> int:
        """Number of layers of the dense kind that read the ternary features: one."""
        return 1

    @property
    def dim(self) -> int:
        """Features of the vector of a text."""
        return self.text_encoder().dim()

    @property
    def vocab(self) -> int:
        """Number of ids of words: none, words are hashes."""
        return 0

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the products.

        Args:
          batch_size: Texts of a batch.
          length: Words of a text.

        Returns:
          The number of FLOPs.
        """
        encoder = self.text_encoder()
        weights = self.projection * encoder.branches * self.bottleneck + encoder.matrix_size(self.bottleneck)
        return 6.0 * batch_size * (length * weights + encoder.dim() * self.classes)


class HashedClassifier(PooledClassifier):
    """Ternary features of words, dense layers, an encoder of ENCODERS, and a softmax over classes.

    A batch is that of `data.examples.kinds.hashed.HashedTexts`. The ternary features have no parameters, and are computed from
    the hashes for some words at a time, in the forward and in the backward pass.
    """

    def setup(self) -> None:
        c = self.config
        compatibility.check(dataclasses.replace(c.facts(), remat=self.remat))
        encoder = c.text_encoder()
        self.bottleneck = Bottleneck(c.projection, c.bottleneck, encoder.branches, c.dropout)
        self.encoder = encoder.clone(parent=self, name="encoder")
        self.setup_output(encoder.dim())

    def features(self, batch: Batch, deterministic: bool) -> Float[Array, "B D"]:
        """Vectors of texts.

        Args:
          batch: As for `loss`.
          deterministic: No dropout and no zoneout; otherwise the rng "dropout" is used.

        Returns:
          float32.
        """
        segment_ids = batch["segment_ids"]
        ids = jnp.arange(segment_ids.size, dtype=jnp.int32).reshape(segment_ids.shape)
        rng = None if deterministic or not self.config.dropout else self.make_rng("dropout")
        words = self.bottleneck(batch["tokens"], ids, rng)
        lengths = jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)
        inputs = RecurrentInputs(lengths=lengths, ids=None if deterministic else ids, deterministic=deterministic)
        return self.encoder(words, segment_ids, inputs)

    def rows(self, batch: Batch) -> dict[tuple[str, ...], jax.Array]:
        """No rows of tables are looked up.

        Args:
          batch: Not read.

        Returns:
          No tables.
        """
        return {}

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of texts, B.
          length: Words of a text, T.

        Returns:
          Texts without padding.
        """
        return {
            "tokens": jnp.zeros((batch_size, length, HASH_WORDS), jnp.int32),
            "segment_ids": jnp.ones((batch_size, length), jnp.int32),
            "labels": jnp.zeros((batch_size,), jnp.int32),
            "weights": jnp.ones((batch_size,), jnp.float32),
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch",) for labels and weights, otherwise ("batch", "length")."""
        of_tokens, of_texts = ("batch", "length"), ("batch",)
        return {"tokens": of_tokens, "segment_ids": of_tokens, "labels": of_texts, "weights": of_texts}
