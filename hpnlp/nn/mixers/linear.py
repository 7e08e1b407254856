"""Linear attention with a fixed feature map, and the steps that all mixers with a `LinearState` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.linear import LinearState, linear_attention, linear_attention_step
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


def mix(inputs: MixerInputs, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> MixerOutput:
    """Linear attention of the tokens of a mixer; with `MixerInputs.capacity`, also the state after each sequence.

    Args:
      inputs: Segments and capacity.
      q: `[B, T, N, M]`, queries after the feature map.
      k: `[B, T, K, M]`, keys after the feature map.
      v: `[B, T, K, H]`, values.
      **options: Further arguments of `linear_attention`.

    Returns:
      The output in q's dtype. Its cache is a `LinearState`.
    """
    if inputs.capacity is None:
        o: Any = linear_attention(q, k, v, segment_ids=inputs.segment_ids, **options)
        return MixerOutput(o)
    if inputs.segment_ids is not None:
        # Padding writes nothing and does not decay the state, so that the last state is that of the last token.
        is_token = (inputs.segment_ids > 0)[..., None]
        k = jnp.where(is_token[..., None], k, jnp.zeros((), k.dtype))
        for name in ("log_decay", "beta"):
            if (x := options.get(name)) is not None:
                x = jnp.broadcast_to(x[None, None], k.shape[:3]) if x.ndim == 1 else x
                options[name] = jnp.where(
                    is_token.reshape(*is_token.shape, *[1] * (x.ndim - 3)), x, jnp.zeros((), x.dtype)
                )
    result: Any = linear_attention(q, k, v, return_state=True, **options)
    o, state = result
    return MixerOutput(o, cache=state)


def extend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: LinearState, **options: Any
) -> tuple[jax.Array, LinearState]:
    """Linear attention of new tokens, each sequence one segment.

    Args:
      q: `[B, T, N, M]`, queries after the feature map.
      k: `[B, T, K, M]`, keys after the feature map.
      v: `[B, T, K, H]`, values.
      cache: State of the preceding tokens.
      **options: Further arguments of `linear_attention`; `normalize` follows from the state.

    Returns:
      `(o [B, T, N, H] in q's dtype, the state with these tokens)`.
    """
    if q.shape[1] > 1:
        options |= {"normalize": cache.z is not None, "state": cache, "return_state": True}
        result: Any = linear_attention(q, k, v, **options)
        return result
    options.pop("chunk", None)
    for name in ("log_decay", "beta"):
        if (x := options.get(name)) is not None and x.ndim > 1:
            options[name] = x[:, 0]
    o, cache = linear_attention_step(q[:, 0], k[:, 0], v[:, 0], cache, **options)
    return o[:, None], cache


def elu_plus_one(x: jax.Array) -> jax.Array:
    """The feature map elu(x) + 1.

    Args:
      x: An array.

    Returns:
      float32 x + 1 where x is positive and exp(x) elsewhere, so that features are positive.
    """
    x = x.astype(jnp.float32)
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


# Least sum of weights. Smaller sums occur where all features of a query or of its keys are about exp(-70).
MIN_WEIGHT = 1e-30


def chunk_option() -> Any:
    """The field `chunk` of a mixer, see `linear_attention`."""
    is_power_of_2 = "a power of 2", lambda chunk: chunk & (chunk - 1) == 0
    return option(64, "Number of tokens of a chunk, a power of 2.", least=1, rule=is_power_of_2)


class LinearMixer(Mixer):
    """Attention with the weights phi(q)^T phi(k), phi(x) = elu(x) + 1, divided by their sum (at least MIN_WEIGHT).

    Queries and keys that `model.position="rope"` rotates are rotated before phi.

    Cost: O(B N T (C + H) H) time for chunks of C tokens, and memory linear in T. The cache has `H (H + 1)` numbers per key
    head and sequence, whatever its length.

    References: Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, eq. 4 to 12. The paper does not scale
    queries.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    chunk: int = chunk_option()
    dropout: float = dropout_option("Ignored: linear attention computes no attention probabilities.", has_effect=False)

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        causal = self.within(mask) == Causal()
        q, k = elu_plus_one(inputs.q), elu_plus_one(inputs.k)
        out = mix(inputs, q, k, inputs.v, causal=causal, normalize=True, eps=MIN_WEIGHT, chunk=self.chunk)
        return MixerOutput(out.o.astype(inputs.v.dtype), cache=out.cache)

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
        check_mask("linear attention with a cache", mask, Causal())
        q, k = elu_plus_one(inputs.q), elu_plus_one(inputs.k)
        o, cache = extend(q, k, inputs.v, cache, eps=MIN_WEIGHT, chunk=self.chunk)
        return o.astype(inputs.v.dtype), cache

    def within(self, mask: AnyMask) -> Any:
        return check_mask("linear attention", mask, Causal(), Full(), reason="it sums over all preceding tokens")
