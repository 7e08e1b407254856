"""Losses that compare the examples of a batch, with the activation memory of a part of the batch (GradCache)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from hpnlp.ops.helpers.arrays import split_examples
from hpnlp.types import Aux, LossOut, Statistics

Batch = Mapping[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Vectors of the examples of a batch.

    Attributes:
      vectors: A tree of arrays whose first axis is that of the examples.
      aux: Losses and metrics of the layers, as (sum, weight).
      statistics: Sums over the tokens, as those of a `LossOut`.
    """

    vectors: Any
    aux: Aux = dataclasses.field(default_factory=dict)
    statistics: Statistics = dataclasses.field(default_factory=dict)


@runtime_checkable
class ComparingModel(Protocol):
    """A Model whose loss is a function of the vectors of all examples, each of which depends on its example only.

    `loss(batch, deterministic)` equals `compare(encode(batch, arange(B), deterministic), batch)`. With
    `optimizer.accumulate` over 1, training encodes the parts of a batch one after another, if the property
    `compares_examples` of the model's config is True.
    """

    def encode(self, batch: Batch, numbers: Int[Array, " b"], deterministic: bool) -> Encoded:
        """Vectors of examples.

        Args:
          batch: Arrays of a part of the batch.
          numbers: Numbers of the examples in the whole batch, on which dropout depends.
          deterministic: No dropout.

        Returns:
          The vectors, with the results of the layers.
        """
        ...

    def compare(self, encoded: Encoded, batch: Batch) -> LossOut:
        """The loss of vectors.

        Args:
          encoded: Vectors of all examples, with the results of the layers.
          batch: The whole batch.

        Returns:
          The loss, with the losses, metrics and statistics of the layers.
        """
        ...


def encode_in_parts(encode: Callable[[Batch, jax.Array], Encoded], batch: Batch, count: int) -> Encoded:
    """Encodes the parts of a batch one after another, and again in the backward pass.

    Gradients of a function of all vectors are those of the whole batch. The backward pass receives the gradient with respect
    to the vectors, encodes each part a second time with the same dropout, and adds up the gradients of the parts.

    Args:
      encode: `encode(arrays of a part, int32 numbers of its examples in the batch)`, a pure function.
      batch: Arrays whose first axis is that of the examples.
      count: Number of parts.

    Returns:
      The vectors of all examples in the order of the batch; losses, metrics and statistics summed over the parts.

    Cost: one more forward pass. Activations of one part, and the vectors of all examples, are in memory.

    References:
      Gao, Zhang, Han and Callan 2021, "Scaling deep contrastive learning batch size under memory limited setup".
    """
    numbers = jnp.arange(jax.tree.leaves(batch)[0].shape[0], dtype=jnp.int32)
    inputs = jax.tree.map(lambda x: split_examples(x, count), (dict(batch), numbers))
    body = jax.checkpoint(lambda _, part: (None, encode(*part)), prevent_cse=False)
    _, encoded = jax.lax.scan(body, None, inputs)
    vectors = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), encoded.vectors)
    aux, statistics = jax.tree.map(lambda x: x.sum(axis=0), (encoded.aux, encoded.statistics))
    return Encoded(vectors, aux, statistics)
