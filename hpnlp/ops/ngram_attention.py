"""Projected n-gram attention (PRADO): each channel of the n-grams of a text is pooled by attention weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.ops.weight import Weight

# Name of a kind of n-grams -> distances of its words from the first one.
NGRAMS: dict[str, tuple[int, ...]] = {
    "unigram": (0,),
    "bigram": (0, 1),
    "trigram": (0, 1, 2),
    "fourgram": (0, 1, 2, 3),
    "fivegram": (0, 1, 2, 3, 4),
    "skip1bigram": (0, 2),
    "skip2bigram": (0, 3),
}


@array_op("B", values="B T")
def ngram_attention(
    values: Float[Array, "B T D"],
    logits: Float[Array, "B T D"],
    value_kernel: Array | Weight,
    logit_kernel: Array | Weight,
    bias: Float[Array, " C"] | None,
    is_token: Bool[Array, "B T"],
    *,
    offsets: Sequence[int],
) -> Float[Array, "B C"]:
    """Values of the n-grams of each text, averaged with weights of the softmax over the text's n-grams, for each channel.

    An n-gram begins at every word of a text. It reads zeros in place of words behind the end of the text, so that padding
    changes nothing, and a text of one word has n-grams of every kind.

    Args:
      values: Features of the words, of which the values are convolutions.
      logits: Features of the words, of which the logits of the attention are convolutions.
      value_kernel: Matrix of the values, [n D, C]: rows of the first word of an n-gram, then of the second one, and so on. An
        array or a Weight.
      logit_kernel: Matrix of the logits, as `value_kernel`.
      bias: Biases of the values; None for none. Biases of the logits would change nothing.
      is_token: False for padding, which may hold NaN.
      offsets: Distances of the n words of an n-gram from the first one, as in NGRAMS, 0 first.

    Returns:
      float32; 0 for a text without words, which has no gradient.

    Raises:
      InputError: Shapes do not match.

    Cost:
      Two products of O(B T n D C), and memory for the windows, [B, T, n D].

    References:
      Kaliamoorthi et al. 2019, "PRADO: projection attention networks for document classification on-device", sec. 3.3.
    """
    rows = len(offsets) * values.shape[-1]
    if values.shape != logits.shape or {value_kernel.shape[0], logit_kernel.shape[0]} != {rows}:
        raise InputError(
            f"ngram_attention of values {values.shape} and logits {logits.shape} with kernels {tuple(value_kernel.shape)} and "
            f"{tuple(logit_kernel.shape)}: expected two [B, T, D] and two [{len(offsets)} D, C]"
        )
    v = _convolved(values, value_kernel, is_token, offsets)
    scores = _convolved(logits, logit_kernel, is_token, offsets)
    scores = jnp.where(is_token[..., None], scores, jnp.finfo(jnp.float32).min)
    share = jnp.where(is_token[..., None], jax.nn.softmax(scores, axis=1), 0.0)
    pooled = (share * v).sum(axis=1)
    if bias is not None:
        pooled = pooled + jnp.where(is_token.any(axis=1, keepdims=True), bias.astype(jnp.float32)[None], 0.0)
    return pooled


def _convolved(x: Array, kernel: Array | Weight, is_token: Array, offsets: Sequence[int]) -> Array:
    """float32 `[B, T, C]`."""
    length, last = x.shape[1], max(offsets)
    padded = jnp.pad(jnp.where(is_token[..., None], x, jnp.zeros((), x.dtype)), ((0, 0), (0, last), (0, 0)))
    windows = jnp.concatenate([padded[:, offset : offset + length] for offset in offsets], axis=-1)
    result = product(windows.reshape(-1, windows.shape[-1]), kernel)
    return result.reshape(*x.shape[:2], kernel.shape[1])
