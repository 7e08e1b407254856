"""A language model with a continuous cache, for evaluation (Grave et al. 2017)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from hpnlp.model_interfaces.layer_report import CARRY
from hpnlp.models.mixtures.wrapper import ModelWrapper
from hpnlp.ops.softmax.continuous_cache import cache_distribution, cache_log_prob
from hpnlp.ops.softmax.scored_words import interpolate
from hpnlp.spec import build, parse_one
from hpnlp.types import LossOut, check_options, option

NO_WORD = -1  # word of an entry that is empty


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """A continuous cache."""

    size: int = option(500, "Number of tokens before the present one whose states and words are kept.", least=1)
    theta: int | float = option(0.3, "Inverse temperature of the similarities.", least=0)
    weight: int | float = option(0.1, "Share of the cache in the probabilities.", least=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)


def find(spec: str) -> CacheConfig:
    """The cache of a spec.

    Args:
      spec: As in "continuous(500, 0.3, 0.1)" or "continuous(size=500, theta=0.3, weight=0.1)".

    Returns:
      The cache.

    Raises:
      InputError: The spec is not valid.
    """
    return build(parse_one(spec, "cache"), {"continuous": CacheConfig}, "cache")


@dataclasses.dataclass(frozen=True)
class CachedModel(ModelWrapper):
    """A language model whose probabilities are mixed with those of a cache of its hidden states.

    The states before a batch, and the words after them, are part of the carry, so that batches continue each other. A document
    does not empty the cache.

    Attributes:
      inner: A Model with `predicts_next_words`.
      cache: The cache.
    """

    cache: CacheConfig = CacheConfig()  # noqa: RUF009  (frozen)

    def apply(self, variables: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Applies the methods `loss` and `log_probs`.

        Args:
          variables: The Model's variables, with a carry as of `initial_carry`.
          *args: A batch and, for `loss`, `deterministic`.
          **kwargs: `method` "loss" or "log_probs", and `rngs`.

        Returns:
          Result of the method.
        """
        method = kwargs.pop("method", "loss")
        if method not in ("loss", "log_probs"):
            return self.inner.apply(variables, *args, method=method, **kwargs)
        carry = variables.get(CARRY)
        of_inner = {name: tree for name, tree in variables.items() if name != CARRY}
        if carry is not None and self.inner.initial_carry(1) is not None:
            layers = {
                name: tree for name, tree in carry["layers"].items() if name not in ("cache_states", "cache_words")
            }
            of_inner[CARRY] = {"layers": layers}
        batch, *further = args
        deterministic = bool(further[0]) if further else True
        h, inner_carry = self.inner.apply(of_inner, batch, deterministic, method="token_states", **kwargs)
        keys, words, visible = self._entries(carry, h, batch)
        if method == "log_probs":
            return self._log_probs(of_inner, h, keys, words, visible)
        losses = self.inner.apply(of_inner, h, batch["labels"], method="label_losses")
        cached = cache_log_prob(h, keys, words, visible, batch["labels"], self.cache.theta)
        losses = -interpolate(-losses, cached, self._weight(visible))
        weights = batch["weights"].astype(jnp.float32)
        total = jnp.where(weights == 0, 0.0, weights * losses).sum()
        new_carry = None
        if carry is not None:
            kept = {
                "cache_states": keys[None, :, -self.cache.size :],
                "cache_words": words[None, :, -self.cache.size :],
            }
            layers = {} if inner_carry is None else inner_carry["layers"]
            new_carry = jax.lax.stop_gradient({"layers": {**layers, **kept}})
        return LossOut(total, weights.sum(), {}, {}, new_carry)

    def _entries(self, carry: PyTree, h: Array, batch: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """`(states [B, S + T, D], words [B, S + T], visible [B, T, S + T])` of the entries before and in a batch."""
        count, length, size = h.shape[0], h.shape[1], self.cache.size
        words = jnp.where(batch["weights"] > 0, batch["labels"], NO_WORD).astype(jnp.int32)
        if carry is None:
            keys = jnp.zeros((count, size, h.shape[2]), jnp.float32)
            before = jnp.full((count, size), NO_WORD, jnp.int32)
        else:
            keys, before = carry["layers"]["cache_states"][0], carry["layers"]["cache_words"][0]
        keys = jnp.concatenate([keys, h.astype(jnp.float32)], axis=1)
        words = jnp.concatenate([before, words], axis=1)
        entry, token = jnp.arange(size + length)[None], size + jnp.arange(length)[:, None]
        # The word that follows the state of a token is its label, which later tokens know.
        recent = (entry < token) & (entry >= token - size)
        return keys, words, recent[None] & (words != NO_WORD)[:, None, :]

    def _log_probs(self, variables: Mapping[str, Any], h: Array, keys: Array, words: Array, visible: Array) -> Array:
        """Log-probabilities of all words, `[B, T, V]`."""
        flat = h.reshape(-1, h.shape[-1])
        logits = self.inner.apply(variables, flat, method="next_logits").reshape(*h.shape[:2], -1)
        log_prob = jax.nn.log_softmax(logits, axis=-1)
        shares = cache_distribution(h, keys, words, visible, logits.shape[-1], self.cache.theta)
        cached = jnp.where(shares > 0, jnp.log(jnp.where(shares > 0, shares, 1.0)), -jnp.inf)
        return interpolate(log_prob, cached, jnp.broadcast_to(self._weight(visible)[..., None], cached.shape))

    def _weight(self, visible: Array) -> Array:
        """Share of the cache in the probabilities of each token, `[B, T]`: none for a token that sees no entry."""
        return jnp.where(visible.any(axis=-1), self.cache.weight, 0.0)

    def initial_carry(self, batch_size: int) -> Any:
        """The carry before the first batch: that of the model, and an empty cache.

        Args:
          batch_size: Sequences of a batch.

        Returns:
          The carry.
        """
        inner, size = self.inner.initial_carry(batch_size), self.cache.size
        states = jnp.zeros((1, batch_size, size, self.inner.config.dim), jnp.float32)
        words = jnp.full((1, batch_size, size), NO_WORD, jnp.int32)
        layers = {} if inner is None else inner["layers"]
        return {"layers": {**layers, "cache_states": states, "cache_words": words}}

    def carry_axes(self) -> Any:
        """Logical axes of the carry, as of the Model."""
        layers = {} if self.inner.initial_carry(1) is None else self.inner.carry_axes()["layers"]
        axes = ("layers", "batch", None)
        return {"layers": {**layers, "cache_states": (*axes, None), "cache_words": axes}}
