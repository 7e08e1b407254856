"""Recurrent classifier: a label of each text, by a stack of recurrent layers in one direction or both."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp import compatibility
from hpnlp.model_interfaces.ranges import LIMITS, classes_option, rate_option
from hpnlp.models.backbone import DTYPES
from hpnlp.models.classifiers.pooled_classifier import PooledClassifier
from hpnlp.models.prediction import Batch
from hpnlp.models.stacks.unstacked import Unstacked
from hpnlp.nn.layers import Embed
from hpnlp.nn.pooling import POOLINGS
from hpnlp.nn.rnn import RecurrentInputs
from hpnlp.nn.rnn_stack import RecurrentStack, StackConfig
from hpnlp.spec import lookup
from hpnlp.types import InputError, option


@dataclasses.dataclass(frozen=True)
class RecurrentClassifierConfig(Unstacked, StackConfig):
    """A recurrent classifier of texts."""

    description: ClassVar[str] = "a recurrent network"
    undivided: ClassVar[str] = "which reads tokens one after another"
    not_recomputed: ClassVar[str] = "recurrent layers are not recomputed"

    cells: str = option(
        "lstm(128)",
        'Layers from the inputs to the outputs, entries of nn.rnn.CELLS with the widths of one direction, as in "lstm(128)*2".',
    )
    bidirectional: bool = option(
        True, "Each layer reads the text in both directions, and its outputs stand side by side."
    )
    pooling: str = option(
        "max",
        "An entry of POOLINGS: how the outputs of a text become one vector.",
        among=POOLINGS,
    )
    vocab: int = option(0, "Rows V of the embedding table, 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    embed_dim: int = option(128, "Features of the embedding.", least=1, most=LIMITS["dim"])
    classes: int = classes_option()
    input_dropout: float = rate_option("Dropout of the embeddings.", 0.3)
    dropout: float = rate_option("Dropout of the pooled outputs.", 0.3)
    dtype: str = option("float32", "Dtype of the activations; parameters and states stay float32.")

    def __post_init__(self) -> None:
        super().__post_init__()
        lookup(DTYPES, self.dtype, "model.dtype")
        for name in ("activation_penalty", "temporal_penalty"):
            if getattr(self, name):
                raise InputError(
                    f"model.{name}={getattr(self, name)} is a penalty of language models (task=rnn_lm): set it to 0"
                )

    @property
    def directions(self) -> int:
        """Number of directions in which layers read."""
        return 2 if self.bidirectional else 1

    @property
    def layers(self) -> int:
        """Number of recurrent layers."""
        return len(self.widths())

    @property
    def dim(self) -> int:
        """Features of the outputs."""
        return self.directions * self.widths()[-1]

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the layers' products.

        Args:
          batch_size: Texts of a batch.
          length: Tokens of a text.

        Returns:
          The number of FLOPs.
        """
        weights, dim = 0, self.embed_dim
        for layer in self.layer_modules():
            weights += self.directions * layer.matrix_size(dim)
            dim = self.directions * layer.features
        return 6.0 * batch_size * (length * weights + self.dim * self.classes)


class RecurrentClassifier(PooledClassifier):
    """Embeddings, a stack of recurrent layers, pooling over the tokens, and a softmax over classes.

    Layers stop at the last token of each text, and the other direction begins there. They read embeddings times the root of
    their width, as `models.rnn.RNN`.
    """

    def setup(self) -> None:
        c = self.config
        compatibility.check(dataclasses.replace(c.facts(), remat=self.remat))
        self.embed = Embed(c.vocab, c.embed_dim)
        self.stack = RecurrentStack(c, c.bidirectional)
        self.setup_head(c.dim)

    def states(self, batch: Batch, ids: Array, rng: Array | None, deterministic: bool) -> Float[Array, "B T D"]:
        """Outputs of the layers; 0 for padding.

        Args:
          batch: Tokens and segment_ids: a text, and padding after it.
          ids: A number for each token.
          rng: Not read: the stack has dropout of its own.
          deterministic: No dropout.

        Returns:
          The outputs.
        """
        c = self.config
        dtype = DTYPES[c.dtype]
        x = self.embed(batch["tokens"], dtype) * jnp.asarray(c.embed_dim**0.5, dtype)
        lengths = jnp.sum(batch["segment_ids"] > 0, axis=1, dtype=jnp.int32)
        inputs = RecurrentInputs(lengths=lengths, ids=None if deterministic else ids, deterministic=deterministic)
        return self.stack(x, inputs)[0]

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of texts, B.
          length: Tokens of a text, T.

        Returns:
          Texts without padding.
        """
        return {
            "tokens": jnp.zeros((batch_size, length), jnp.int32),
            "segment_ids": jnp.ones((batch_size, length), jnp.int32),
            "labels": jnp.zeros((batch_size,), jnp.int32),
            "weights": jnp.ones((batch_size,), jnp.float32),
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch",) for labels and weights, otherwise ("batch", "length")."""
        of_tokens, of_texts = ("batch", "length"), ("batch",)
        return {"tokens": of_tokens, "segment_ids": of_tokens, "labels": of_texts, "weights": of_texts}
