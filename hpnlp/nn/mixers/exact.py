"""Exact softmax attention over a static pattern: every published pattern is this one mixer with a mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.ops.attention import Full, Mask, PerHead, attend
from hpnlp.ops.attention.decoding.kv_cache import KVCache, extend_cache, start_cache
from hpnlp.types import InputError, MixerInputs, MixerOutput


class ExactMixer(nn.Module):
    """Softmax attention (Vaswani et al. 2017, eq. 1) over the pairs that both `pattern` and the mask of `__call__` allow.

    A pattern that depends on i - j alone is applied to indices in the sequence, which is equivalent to positions within each
    segment. Any other pattern is applied to `positions`, so that a document packed with others, or decoded, is treated like
    the document alone.

    Attributes:
      pattern: The mask of the mixer.
      dropout: Rate of dropout on attention probabilities.
      needs: The projections that the mixer reads.
      wants_rope: Whether RoPE is applied to queries and keys.

    Cost: as `attend`: products for the blocks with visible pairs, and memory linear in T and S.
    """

    needs: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    wants_rope: ClassVar[bool] = True

    pattern: Mask | PerHead = Full()  # noqa: RUF009  (frozen)
    dropout: float = 0.0

    def __call__(self, inputs: MixerInputs, mask: Any) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        mask = self.within(mask)
        rate = 0.0 if inputs.deterministic else self.dropout
        o: Any = attend(
            inputs.q,
            inputs.k,
            inputs.v,
            mask,
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            positions=None if mask.relative else inputs.positions,
            kv_positions=None if mask.relative else inputs.kv_positions,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        assert isinstance(o, jax.Array)
        return MixerOutput(o)

    def init_cache(self, inputs: MixerInputs, mask: Any, capacity: int) -> KVCache:
        """Creates a cache of a prompt.

        Args:
          inputs: k and v of the prompt; segment_ids, of which the first tokens have a positive id and padding has 0, or None
              for a prompt without padding.
          mask: A static Mask.
          capacity: Number of tokens per sequence that the cache has room for.

        Returns:
          The cache.
        """
        assert inputs.k is not None and inputs.v is not None
        batch, length = inputs.k.shape[:2]
        if inputs.segment_ids is None:
            lengths = jnp.full((batch,), length, jnp.int32)
        else:
            lengths = jnp.sum(inputs.segment_ids > 0, axis=1, dtype=jnp.int32)
        return start_cache(inputs.k, inputs.v, lengths, self.within(mask), capacity)

    def extend(self, inputs: MixerInputs, mask: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes further tokens with all preceding ones; see `extend_cache`.

        Args:
          inputs: q, k and v of the further tokens. A sequence is one segment.
          mask: A static Mask.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        if self.dropout and not inputs.deterministic:
            raise InputError("extend with dropout: decoding is deterministic, pass deterministic=True")
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        return extend_cache(inputs.q, inputs.k, inputs.v, self.within(mask), cache)

    def partial(self, inputs: MixerInputs, mask: Any) -> tuple[jax.Array, jax.Array]:
        """Partial attention over some of the keys, which `merge` joins with the results over other keys.

        Args:
          inputs: q, and k and v of the same or another length.
          mask: The complete mask, as `within` returns it.

        Returns:
          `(o [B, T, N, H], float32 lse [B, T, N])`.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        # `attend` returns a pair because of return_lse, which its type does not express.
        return attend(  # pyright: ignore[reportReturnType]
            inputs.q,
            inputs.k,
            inputs.v,
            mask,
            segment_ids=inputs.segment_ids,
            kv_segment_ids=inputs.kv_segment_ids,
            positions=None if mask.relative else inputs.positions,
            kv_positions=None if mask.relative else inputs.kv_positions,
            return_lse=True,
        )

    def within(self, mask: Any) -> Any:
        """Intersects the pattern with a mask.

        Args:
          mask: A static Mask.

        Returns:
          The mask of the pairs that both allow.
        """
        return self.pattern & mask


def exact_mixer(pattern: Callable[..., Mask | PerHead]) -> Callable[..., ExactMixer]:
    """Makes an entry of MIXERS from a pattern.

    Args:
      pattern: A function that returns a mask.

    Returns:
      A function with the arguments of `pattern`, and `dropout` and `name`, that returns an ExactMixer.
    """
    signature = inspect.signature(pattern)
    module_parameters = inspect.signature(ExactMixer).parameters
    further = [module_parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in ("dropout", "name")]

    @functools.wraps(pattern)
    def make_mixer(*args: Any, dropout: float = 0.0, name: str | None = None, **kwargs: Any) -> ExactMixer:
        return ExactMixer(pattern(*args, **kwargs), dropout, name=name)

    # Spec strings are checked against the signature. `inspect` reads the attribute, which the type of functions lacks.
    parameters = [*signature.parameters.values(), *further]
    make_mixer.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=parameters, return_annotation=ExactMixer
    )
    return make_mixer
