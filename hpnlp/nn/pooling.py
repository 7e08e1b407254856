"""Layers between hidden states and an output layer: pooling of a sequence, and the dense layer of a head."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import NORMS, Dense, embed_init, param

POOLINGS = ("mean", "first", "max", "attention")

# The activation of each kind of HeadTransform. The kinds in NORMED have a norm after it.
TRANSFORMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu_norm": lambda x: jax.nn.gelu(x, approximate=False),
    "relu_norm": jax.nn.relu,
}
NORMED = ("gelu_norm", "relu_norm")


class Pooling(nn.Module):
    """One vector of a sequence, from the hidden states of its tokens, in float32. Padding does not count.

    Attributes:
      kind: "mean"; "first", the hidden state of the first token; "max", of each feature; or "attention", the mean weighted by
        the softmax of a learned query's products with the hidden states.
    """

    kind: str

    @nn.compact
    def __call__(
        self, h: Float[Array, "B T D"], segment_ids: Int[Array, "B T"], ids: Int[Array, "B T"]
    ) -> Float[Array, "B D"]:
        """Pools.

        Args:
          h: Hidden states, in any order of the tokens.
          segment_ids: 0 for padding.
          ids: Numbers of the tokens, rising in the order of the sequence.

        Returns:
          The pooled states, in the dtype of h; 0 for a sequence without tokens, which has no gradient.
        """
        is_token, states = segment_ids > 0, h.astype(jnp.float32)
        if self.kind == "max":
            states = jnp.where(is_token[..., None], states, jnp.finfo(jnp.float32).min)
            pooled = jnp.where(is_token.any(axis=1, keepdims=True), states.max(axis=1), 0.0)
            return pooled.astype(h.dtype)
        if self.kind == "first":
            share = (ids == ids.min(axis=1, keepdims=True)).astype(jnp.float32)
        elif self.kind == "mean":
            share = is_token.astype(jnp.float32)
        else:
            query = param(self, "query", embed_init, (h.shape[-1],), ("hidden",))
            scores = (states * query[None, None]).sum(axis=-1)
            share = jax.nn.softmax(jnp.where(is_token, scores, jnp.finfo(jnp.float32).min), axis=1)
        share = jnp.where(is_token, share, 0.0)
        share = share / jnp.maximum(share.sum(axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        # Padding may hold any number; it must not reach a gradient as 0 times infinity.
        states = jnp.where(is_token[..., None], states, 0.0)
        return (share[..., None] * states).sum(axis=1).astype(h.dtype)


class HeadTransform(nn.Module):
    """A dense layer, an activation and, for the kinds in NORMED, a norm.

    Attributes:
      kind: Entry of TRANSFORMS.
      norm: Entry of NORMS; a layer norm takes the place of "affine", which normalises nothing.
      norm_eps: Added to the variance in norms.
    """

    kind: str
    norm: str
    norm_eps: float

    @nn.compact
    def __call__(self, h: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        h = TRANSFORMS[self.kind](Dense(h.shape[-1], ("embed", "hidden"), use_bias=True, name="dense")(h))
        if self.kind not in NORMED:
            return h
        return NORMS["layer" if self.norm == "affine" else self.norm](self.norm_eps, name="norm")(h)
