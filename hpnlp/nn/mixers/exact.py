"""Exact softmax attention over a static pattern: every published pattern is this one mixer with a mask."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_decoding
from hpnlp.ops.attention import Full, Mask, PerHead, attend
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option

if TYPE_CHECKING:
    from hpnlp.ops.attention.decoding.kv_cache import KVCache


class ExactMixer(Mixer):
    """Softmax attention (Vaswani et al. 2017, eq. 1) over the pairs that both `pattern` and the mask of `__call__` allow.

    A pattern that depends on i - j alone is applied to indices in the sequence, which is equivalent to positions within each
    segment. Any other pattern is applied to `positions`, so that a document packed with others, or decoded, is treated like
    the document alone.

    Attributes:
      pattern: The mask of the mixer.

    Cost: as `attend`: products for the blocks with visible pairs, and memory linear in T and S.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()
    has_matrices: ClassVar[bool] = True

    pattern: Mask | PerHead = Full()  # noqa: RUF009  (frozen)
    dropout: float = option(0.0, "Rate of dropout on attention probabilities.", least=0, below=1)
    soft_cap: int | float | None = option(
        None, 'Scores become soft_cap * tanh(score / soft_cap) (Gemma Team 2024, "Gemma 2"); None for no cap.', above=0
    )
    scale: int | float | None = option(None, "Factor of the products of queries and keys; None for H ** -0.5.", above=0)

    @property
    def score_options(self) -> dict[str, Any]:
        return {"scale": self.scale, "soft_cap": self.soft_cap}

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
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
            scale=self.scale,
            soft_cap=self.soft_cap,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        assert isinstance(o, jax.Array)
        if inputs.capacity is None:
            return MixerOutput(o)
        from hpnlp.ops.attention.decoding.kv_cache import start_cache  # of decoding, which training does not load

        return MixerOutput(o, cache=start_cache(inputs.k, inputs.v, inputs.lengths(), mask, inputs.capacity))

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Mixes new tokens with all preceding ones; see `extend_cache`.

        Args:
          inputs: q, k and v of the new tokens. A sequence is one segment.
          mask: A static Mask.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        check_decoding(inputs, self.dropout)
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        mask = self.within(mask)
        from hpnlp.ops.attention.decoding.decode import ScoreTerms  # training does not load decoding

        terms = ScoreTerms(self.scale, self.soft_cap)
        return cache.extend(inputs.q, inputs.k, inputs.v, mask, terms)

    def partial(self, inputs: MixerInputs, mask: AnyMask) -> tuple[jax.Array, jax.Array]:
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
            scale=self.scale,
            soft_cap=self.soft_cap,
            return_lse=True,
        )

    def matrices(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        mask: AnyMask,
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B N T T"], Bool[Array, "B N T T"]]:
        """The matrices that `__call__` multiplies values by, without dropout; for a look at them.

        Args:
          q: Queries, as the mixer gets them.
          k: Keys of the same tokens.
          mask: A static Mask.
          segment_ids: Segments of the tokens; 0 marks padding, which sees nothing here and is not seen.
          positions: Positions of the tokens.

        Returns:
          `(float32 probabilities, the pairs that may attend)`; rows of queries that see no key are 0.

        Cost: O(B N T^2 H) time, and O(B N T^2) memory.
        """
        from hpnlp.ops.distillation import attention_scores

        mask = self.within(mask)
        positions_of_mask = None if mask.relative else positions
        scores, visible = attention_scores(
            q, k, mask, segment_ids, positions_of_mask, scale=self.scale, soft_cap=self.soft_cap
        )
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, lowest)), 0.0), visible

    def within(self, mask: AnyMask) -> Any:
        """Intersects the pattern with a mask.

        Args:
          mask: A static Mask.

        Returns:
          The mask of the pairs that both allow.
        """
        return self.pattern & mask


def exact_mixer(pattern: Callable[..., Mask | PerHead], **defaults: Any) -> Callable[..., ExactMixer]:
    """Makes an entry of MIXERS from a pattern.

    Args:
      pattern: A function that returns a mask, or a class of masks.
      **defaults: Defaults of its arguments, in place of those that it has.

    Returns:
      A function with the arguments of `pattern`, and `soft_cap`, `scale`, `dropout` and `name`, that returns an ExactMixer.
    """
    further = ("soft_cap", "scale", "dropout", "name")
    arguments = [
        p.replace(default=defaults.get(name, p.default)) for name, p in inspect.signature(pattern).parameters.items()
    ]
    signature, fields = inspect.Signature(arguments), inspect.signature(ExactMixer).parameters

    @functools.wraps(pattern, updated=())  # the attributes of a class are not those of a function
    def make_mixer(*args: Any, **kwargs: Any) -> ExactMixer:
        options = {name: kwargs.pop(name) for name in further if name in kwargs}
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return ExactMixer(pattern(*bound.args, **bound.kwargs), **options)

    # Spec strings are checked against the signature. `inspect` reads the attribute, which the type of functions lacks.
    options = [fields[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in further]
    make_mixer.__signature__ = signature.replace(  # pyright: ignore[reportAttributeAccessIssue]
        parameters=[*arguments, *options], return_annotation=ExactMixer
    )
    return make_mixer
