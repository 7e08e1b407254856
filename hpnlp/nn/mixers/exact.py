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
    """Softmax attention (Vaswani et al. 2017, eq. 1) over what both `pattern` and the mask of the call allow.

    A pattern that depends on i - j alone is over places in the row, which says the same as positions within a segment;
    another is over `positions`, so that a document among others in a row is seen as it is alone and while decoding.
    Cost: as `attend`, products for the blocks that the mask lets meet, memory linear in T and S.
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
        """The cache after a pass over `inputs` under `mask`, for rows of up to `capacity` tokens.

        A row's tokens are those whose segment id is over 0, and come first.
        """
        assert inputs.k is not None and inputs.v is not None
        batch, length = inputs.k.shape[:2]
        if inputs.segment_ids is None:
            lengths = jnp.full((batch,), length, jnp.int32)
        else:
            lengths = jnp.sum(inputs.segment_ids > 0, axis=1, dtype=jnp.int32)
        return start_cache(inputs.k, inputs.v, lengths, self.within(mask), capacity)

    def extend(self, inputs: MixerInputs, mask: Any, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes a few further tokens a row with all that came before: `(o [B, T, N, H], the longer cache)`.

        Of `inputs` it reads q, k and v: a row is one segment, and what it decodes is deterministic. See `extend_cache`.
        """
        if self.dropout and not inputs.deterministic:
            raise InputError("extend with dropout: a cache is for decoding, pass deterministic=True")
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        return extend_cache(inputs.q, inputs.k, inputs.v, self.within(mask), cache)

    def partial(self, inputs: MixerInputs, mask: Any) -> tuple[jax.Array, jax.Array]:
        """(o, float32 lse [B, T, N]) over the keys that are given, which `merge` joins with those of others.

        mask: all that holds, as `within` gives it. Keys are of the same length as queries, or of another.
        """
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
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
        """The pairs that the pattern and `mask` both allow."""
        return self.pattern & mask


def exact(pattern: Callable[..., Mask | PerHead]) -> Callable[..., ExactMixer]:
    """The table entry whose arguments are those of `pattern`."""
    own = inspect.signature(pattern)
    module = inspect.signature(ExactMixer).parameters
    extra = [module[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in ("dropout", "name")]

    @functools.wraps(pattern)
    def entry(*args: Any, dropout: float = 0.0, name: str | None = None, **kwargs: Any) -> ExactMixer:
        return ExactMixer(pattern(*args, **kwargs), dropout, name=name)

    signature = own.replace(parameters=[*own.parameters.values(), *extra], return_annotation=ExactMixer)
    entry.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return entry
