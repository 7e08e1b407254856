"""Logits from hidden states and word vectors, losses from statistics of logits, and the options of both."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from hpnlp.ops.helpers.arrays import accepts_numpy


@dataclasses.dataclass(frozen=True)
class LogitsSpec:
    """Static options of the chunked cross-entropy: block sizes, the form of the logits and the form of the loss."""

    #: Words of a block where a block holds the logits of all tokens (`statistics`).
    vocab_block: int
    #: Tokens of a chunk where a chunk holds the logits of all words (`weighted_sum`); unused, 0, otherwise.
    chunk_tokens: int = 0
    #: Words of a block within a chunk of tokens; unused, 0, in `statistics`.
    chunk_vocab_block: int = 0
    #: Logits become soft_cap * tanh(logit / soft_cap), before the temperature; None for no cap.
    soft_cap: float | None = None
    #: Logits are divided by this.
    temperature: float = 1.0
    #: Share of the target distribution that is spread evenly over all words.
    label_smoothing: float = 0.0
    #: Weight of the square of the log-sum-exp in the loss.
    z_loss: float = 0.0
    #: Whether the sum of a token's logits is computed; 0 is returned otherwise.
    with_logit_sum: bool = False
    #: Whether the word with the largest logit is computed; 0 is returned otherwise.
    with_argmax: bool = False

    def logits(self, h: Float[Array, "N D"], w: Float[Array, "c D"], bias: Float[Array, " c"] | None) -> Array:
        """Logits of tokens over a block of words.

        Args:
          h: [N, D] hidden states.
          w: [c, D] word vectors.
          bias: [c] added to the products; None for no bias.

        Returns:
          [N, c] float32 logits.
        """
        s = product(h, w)
        return self.scale(s if bias is None else s + bias.astype(jnp.float32)[None])

    def scale(self, s: Array) -> Array:
        """Applies the soft cap and the temperature.

        Args:
          s: Products of states and word vectors, with the bias, of any shape.

        Returns:
          The logits.
        """
        if self.soft_cap is not None:
            s = self.soft_cap * jnp.tanh(s / self.soft_cap)
        return s if self.temperature == 1.0 else s / self.temperature

    def scale_gradient(self, s: Array, ds: Array) -> Array:
        """Gradient of the input of `scale`.

        Args:
          s: The output of `scale`.
          ds: The gradient of the output, of the same shape.

        Returns:
          The gradient of the input.
        """
        if self.soft_cap is not None:
            ds = ds * (1.0 - (s * (self.temperature / self.soft_cap)) ** 2)
        return ds if self.temperature == 1.0 else ds / self.temperature

    def losses(
        self, other_lse: Float[Array, " N"], target: Float[Array, " N"], logit_sum: Float[Array, " N"], words: int
    ) -> Float[Array, " N"]:
        """Losses of tokens from the statistics of their logits (see `LogitStatistics`).

        Args:
          other_lse: [N] log-sum-exp of the logits of all words but the label.
          target: [N] logit of the label.
          logit_sum: [N] sum of all logits; used with label smoothing only.
          words: Size of the vocabulary.

        Returns:
          [N] float32 losses in nats.
        """
        losses = jax.nn.softplus(other_lse - target)
        if self.label_smoothing == 0 == self.z_loss:
            return losses
        lse = jnp.logaddexp(other_lse, target)
        if self.label_smoothing != 0:
            losses = (1.0 - self.label_smoothing) * losses + self.label_smoothing * (lse - logit_sum / words)
        return losses + self.z_loss * lse**2


class LogitStatistics(NamedTuple):
    """Numbers of each token from which its loss follows.

    Attributes:
      other_lse: [N] float32, log-sum-exp of the logits of all words but the label; -inf where there is no other word.
      target: [N] float32, the label's logit; 0 where the label is not among the words.
      logit_sum: [N] float32, sum of all logits; 0 unless `LogitsSpec.with_logit_sum`.
      argmax: [N] int32, first word with the largest logit; 0 unless `LogitsSpec.with_argmax`.
    """

    other_lse: Any
    target: Any
    logit_sum: Any
    argmax: Any


@jax.custom_jvp
def product(h: Float[Array, "N D"], w: Float[Array, "c D"]) -> Float[Array, "N c"]:
    """Computes h w^T in float32.

    Tangents, and therefore their transposes, are products in the dtype of h: float32 products would run on the slow units of
    a GPU.

    Args:
      h: [N, D] hidden states.
      w: [c, D] word vectors; cast to the dtype of h.

    Returns:
      [N, c] products, float32.
    """
    return _product(h, w.astype(h.dtype), jnp.float32)


@product.defjvp
@accepts_numpy
def _(primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
    (h, w), (dh, dw) = primals, tangents
    by_h, by_w = (_product(a, b.astype(h.dtype), h.dtype) for a, b in ((dh, w), (h, dw)))
    return product(h, w), (by_h + by_w).astype(jnp.float32)


def _product(h: Array, w: Array, dtype: DTypeLike) -> Array:
    return lax.dot_general(h, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
