"""Performers: softmax attention estimated by positive random features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.errors import RangeError
from hpnlp.nn.layers import buffer
from hpnlp.nn.mixers.checks import check_mask
from hpnlp.nn.mixers.linear import extend, mix
from hpnlp.nn.mixers.random_projections import RandomProjections
from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.linear import LinearState
from hpnlp.ops.attention.linear.random_attention import MIN_WEIGHT, softmax_features
from hpnlp.ops.attention.linear.random_features import KINDS, optimal_rho, projection_count
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, option

AVERAGE = 0.9  # factor of the average of |q + k|^2 over steps


class PerformerMixer(RandomProjections):
    """Softmax attention estimated by positive random features (`random_feature_attention`).

    Training and evaluation use the same projections, those of the buffer. Optimal features have a parameter for each key head,
    which follows from the average of |q + k|^2 over training steps. Before the first step, it is that of queries and keys whose
    entries have variance 1.

    Cost: O(B N T (C + M) H) time, as linear attention with M features. The cache has `M (H + 1)` numbers per key head and
    sequence, whatever its length.

    References:
      Choromanski et al. 2021, "Rethinking attention with Performers", arXiv 2009.14794.
      Likhosherstov et al. 2022, "Chefs' random tables", arXiv 2205.15317 (optimal features).
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    kind: str = option(
        "positive", "Feature map: positive (FAVOR+), hyperbolic or optimal, see `log_features`.", among=KINDS
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            projection_count(self.features, self.kind)
        except InputError as error:
            raise RangeError(type(self).__name__, f"features={self.features}: {error}") from error

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Sums for the average of |q + k|^2; none unless features are optimal."""
        if self.kind != "optimal":
            return {}
        return {"squares": ("kv_heads",), "queries": ("kv_heads", None), "keys": ("kv_heads", None), "tokens": ()}

    @nn.compact
    def _features(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        w, rho = self.drawn(self.kind, q.shape[-1]), None
        if self.kind == "optimal":
            initial = nn.initializers.constant(2 * q.shape[-1] ** 0.5)
            rho = optimal_rho(buffer(self, "gamma", initial, k.shape[2:3], ("kv_heads",)), q.shape[-1])
        return softmax_features(q, k, w, self.kind, rho)

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        causal = self.within(mask) == Causal()
        q, k = self._features(inputs.q, inputs.k)
        out = mix(inputs, q, k, inputs.v, causal=causal, normalize=True, eps=MIN_WEIGHT)
        return MixerOutput(out.o.astype(inputs.v.dtype), statistics=self._statistics(inputs), cache=out.cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: LinearState) -> tuple[jax.Array, LinearState]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: q, k and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: State of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the state with these tokens)`.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        check_mask("attention with random features and a cache", mask, Causal())
        q, k = self._features(inputs.q, inputs.k)
        o, cache = extend(q, k, inputs.v, cache, eps=MIN_WEIGHT)
        return o.astype(inputs.v.dtype), cache

    def _statistics(self, inputs: MixerInputs) -> dict[str, jax.Array]:
        if self.kind != "optimal":
            return {}
        assert inputs.q is not None and inputs.k is not None
        (batch, length, heads, dim), kv_heads = inputs.k.shape[:2] + inputs.q.shape[2:], inputs.k.shape[2]
        real = jnp.ones((batch, length), bool) if inputs.segment_ids is None else inputs.segment_ids > 0
        q, k = (
            jnp.where(real[..., None, None], jax.lax.stop_gradient(x).astype(jnp.float32), jnp.float32(0))
            for x in (inputs.q, inputs.k)
        )
        q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
        squares = jnp.square(q).sum(axis=(0, 1, 4)).mean(axis=1) + jnp.square(k).sum(axis=(0, 1, 3))
        return {
            "squares": squares,
            "queries": q.sum(axis=(0, 1)).mean(axis=1),
            "keys": k.sum(axis=(0, 1)),
            "tokens": real.sum(dtype=jnp.float32),
        }

    def advance(
        self, buffers: Mapping[str, jax.Array], statistics: Mapping[str, jax.Array], step: jax.Array, rng: jax.Array
    ) -> Any:
        """The buffers of the next step.

        Args:
          buffers: The projections and, for optimal features, the average of |q + k|^2.
          statistics: Sums over the batch.
          step: Number of steps done.
          rng: Key of the layer and the step.

        Returns:
          The new buffers.
        """
        w = buffers["projections"]
        new = {"projections": self.redrawn(w, step, rng)}
        if self.kind == "optimal":
            count = jnp.maximum(statistics["tokens"], 1.0)
            products = jnp.sum(statistics["queries"] * statistics["keys"], axis=-1) / (count * count)
            # Mean over all pairs of queries and keys of the batch; features read queries and keys multiplied by H^(-1/4).
            gamma = (statistics["squares"] / count + 2.0 * products) * jnp.float32(w.shape[1] ** -0.5)
            average = AVERAGE * buffers["gamma"] + (1 - AVERAGE) * gamma
            new["gamma"] = jnp.where(statistics["tokens"] > 0, average, buffers["gamma"])
        return new
