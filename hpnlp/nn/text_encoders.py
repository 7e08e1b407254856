"""Encoders of texts whose words are ternary features: PRADO's n-gram attention and pQRNN's recurrent layers.

ENCODERS lists the encoders by their name in `model.encoder`. Each has options of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.model_interfaces.ranges import rate_option
from hpnlp.nn.layers import LayerNorm, dense_init, dropout, param
from hpnlp.nn.pooling import Pooling
from hpnlp.nn.rnn import QRNN, RecurrentInputs, Regularization
from hpnlp.ops.ngram_attention import NGRAMS, ngram_attention
from hpnlp.ops.word_projection import projected_product
from hpnlp.types import InputError, check_options, option

MAX_WIDTH = 2**16


class Bottleneck(nn.Module):
    """Dense layers of the ternary features of words, each with a layer norm of its own, a ReLU and dropout.

    Attributes:
      projection: Ternary features F of a word.
      features: Features of the result of each layer.
      branches: Number of layers, which are computed by one product.
      rate: Dropout.
    """

    projection: int
    features: int
    branches: int
    rate: float

    @nn.compact
    def __call__(
        self, hashes: Int[Array, "B T 4"], ids: Int[Array, "B T"], rng: Array | None
    ) -> list[Float[Array, "B T D"]]:
        """Computes the features of words.

        Args:
          hashes: Hashes of the words.
          ids: A number for each word, on which dropout depends.
          rng: Key of dropout; None for none.

        Returns:
          The result of each layer.
        """
        shape = (self.projection, self.branches * self.features)
        products = projected_product(hashes, param(self, "kernel", dense_init, shape, ("embed", "hidden")))
        results = []
        for index, x in enumerate(jnp.split(products, self.branches, axis=-1)):
            x = jax.nn.relu(LayerNorm(name=f"norm_{index}")(x))
            results.append(dropout(x, self.rate, None if rng is None else jax.random.fold_in(rng, index), ids))
        return results


class TextEncoder(nn.Module):
    """The vector of a text, from features of its words. Subclasses are the entries of ENCODERS.

    Attributes:
      branches: Number of arrays of features that the encoder reads.
    """

    branches: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_options(self)
        super().__post_init__()

    def dim(self) -> int:
        """Features of the vector."""
        raise NotImplementedError

    def matrix_size(self, features: int) -> int:
        """Number of weights that multiply each word.

        Args:
          features: Features of a word.

        Returns:
          The number.
        """
        raise NotImplementedError

    def __call__(
        self, words: Sequence[Float[Array, "B T D"]], segment_ids: Int[Array, "B T"], inputs: RecurrentInputs
    ) -> Float[Array, "B F"]:
        """Encodes texts.

        Args:
          words: Features of the words, one array for each branch.
          segment_ids: 0 for padding, which stands after the words.
          inputs: Lengths and dropout.

        Returns:
          float32.
        """
        raise NotImplementedError


def _channels_option(ngrams: str, default: int = 0) -> Any:
    return option(default, f"Channels of {ngrams}; 0 for none.", least=0, most=MAX_WIDTH)


class NgramEncoder(TextEncoder):
    """Projected n-gram attention: the channels of each kind of n-grams side by side; see `ops.ngram_attention`.

    References:
      Kaliamoorthi et al. 2019, "PRADO: projection attention networks for document classification on-device".
    """

    unigram: int = _channels_option("single words")
    bigram: int = _channels_option("two words", 64)
    trigram: int = _channels_option("three words", 64)
    fourgram: int = _channels_option("four words")
    fivegram: int = _channels_option("five words")
    skip1bigram: int = _channels_option("two words with one between them")
    skip2bigram: int = _channels_option("two words with two between them")

    branches: ClassVar[int] = 2

    def channels(self) -> dict[str, int]:
        """Kind of n-grams -> channels, of the kinds that have some."""
        return {name: getattr(self, name) for name in NGRAMS if getattr(self, name)}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels():
            raise InputError(f"model.encoder: prado without channels: expected some of one kind of {', '.join(NGRAMS)}")

    def dim(self) -> int:
        return sum(self.channels().values())

    def matrix_size(self, features: int) -> int:
        return sum(2 * len(NGRAMS[name]) * features * count for name, count in self.channels().items())

    @nn.compact
    def __call__(
        self, words: Sequence[Float[Array, "B T D"]], segment_ids: Int[Array, "B T"], inputs: RecurrentInputs
    ) -> Float[Array, "B F"]:
        values, logits = words
        pooled = []
        for name, count in self.channels().items():
            kernels = _NgramKernels(len(NGRAMS[name]) * values.shape[-1], count, name=name)()
            pooled.append(ngram_attention(values, logits, *kernels, segment_ids > 0, offsets=NGRAMS[name]))
        return jnp.concatenate(pooled, axis=-1)


class _NgramKernels(nn.Module):
    """The parameters values/kernel, logits/kernel and bias of one kind of n-grams."""

    rows: int
    channels: int

    @nn.compact
    def __call__(self) -> tuple[Array, Array, Array]:
        values, logits = (_Kernel(self.rows, self.channels, name=name)() for name in ("values", "logits"))
        return values, logits, param(self, "bias", nn.initializers.zeros, (self.channels,), ("hidden",))


class _Kernel(nn.Module):
    rows: int
    channels: int

    @nn.compact
    def __call__(self) -> Array:
        return param(self, "kernel", dense_init, (self.rows, self.channels), ("embed", "hidden"))


class RecurrentEncoder(TextEncoder):
    """Quasi-recurrent layers in both directions, and the mean of their outputs by attention weights.

    References:
      Kaliamoorthi et al. 2021, "Distilling large language models into tiny and effective students using pQRNN".
    """

    features: int = option(64, "Features of the state of one direction.", least=1, most=MAX_WIDTH)
    layers: int = option(2, "Number of layers.", least=1, most=64)
    width: int = option(3, "Words that a gate reads.", least=1, most=64)
    zoneout: float | int = rate_option(
        "Share p of the state that a step of the first layer leaves as it was; that of layer l is p^l.", 0.1
    )

    def dim(self) -> int:
        return 2 * self.features

    def matrix_size(self, features: int) -> int:
        inputs = features + (self.layers - 1) * self.dim()
        return 2 * self.width * inputs * 3 * self.features

    @nn.compact
    def __call__(
        self, words: Sequence[Float[Array, "B T D"]], segment_ids: Int[Array, "B T"], inputs: RecurrentInputs
    ) -> Float[Array, "B F"]:
        (x,) = words
        for index in range(self.layers):
            held = Regularization(zoneout_cell=self.zoneout ** (index + 1))
            options = {"width": self.width, "pooling": "fo", "regularization": held}
            directions = {"forward": False, "backward": True}
            layers = [
                QRNN(self.features, **options, reverse=reverse, name=f"layer_{index}_{name}")
                for name, reverse in directions.items()
            ]
            x = jnp.concatenate([layer(x, inputs)[0] for layer in layers], axis=-1)
        numbers = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape[:2])
        return Pooling("attention", name="pool")(x, segment_ids, numbers)


ENCODERS: dict[str, type[TextEncoder]] = {"prado": NgramEncoder, "pqrnn": RecurrentEncoder}
