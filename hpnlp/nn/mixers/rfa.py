"""Random feature attention (RFA): attention with a Gaussian kernel, estimated by trigonometric features, and gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.errors import RangeError
from hpnlp.nn.layers import param
from hpnlp.nn.mixers.checks import check_mask
from hpnlp.nn.mixers.linear import extend, mix
from hpnlp.nn.mixers.random_projections import RandomProjections
from hpnlp.ops.attention import Causal
from hpnlp.ops.attention.linear import LinearState
from hpnlp.ops.attention.linear.random_attention import RFATerms, rfa_quotient, rfa_terms
from hpnlp.ops.attention.linear.random_features import projection_count
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection, option

# Gates begin at sigmoid(3) = 0.95, so that sums reach back about 20 tokens.
GATE_BIAS = 3.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RFAState:
    """The sums over preceding tokens that a query reads.

    Attributes:
      sums: Sums of products of keys and values, each with an additional feature of 1.
      mass: Sums of the factors of the tokens: their number, or the sum of 1 - g after decays.
    """

    sums: LinearState
    mass: LinearState


class RFAMixer(RandomProjections):
    """Random feature attention (`rfa_attention`), with a learned scale for each feature of a key head.

    With gates, `g_t = sigmoid(w_g . x_t + b_g)` for each key head, and recent tokens have more weight.

    Training and evaluation use the same projections, those of the buffer. (The paper chooses one of 200 sets in each step.)

    Cost: O(B N T (C + M) H) time, as linear attention with M features. The cache has `M (H + 1)` numbers per key head and
    sequence, whatever its length.

    References: Peng et al. 2021, "Random feature attention", arXiv 2103.02143, sec. 3.
    """

    gate: bool = option(False, "Learned gates, by which recent tokens have more weight; causal models only.")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            projection_count(self.features, "trigonometric")
        except InputError as error:
            raise RangeError(type(self).__name__, f"features={self.features}: {error}") from error

    @property
    def needs(self) -> Mapping[str, Projection]:
        """Queries, keys and values, and the logits of gates, one for each key head."""
        needs = {
            "q": Projection("heads", norm=True, rope=True),
            "k": Projection("kv_heads", norm=True, rope=True),
            "v": Projection("kv_heads"),
        }
        return needs | ({"gate": Projection("kv_heads", width=1)} if self.gate else {})

    @property
    def traits(self) -> MixerTraits:
        """Without gates, it mixes in both directions."""
        return MixerTraits(bidirectional=not self.gate)

    @nn.compact
    def _terms(self, inputs: MixerInputs) -> tuple[RFATerms, jax.Array | None]:
        """Operands of the linear attentions, and the logarithms of the gates."""
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        heads, dim = inputs.k.shape[2:]
        scale = param(self, "scale", nn.initializers.ones, (heads, dim), ("kv_heads", "head_dim"))
        log_gate = None
        if self.gate:
            bias = param(self, "gate_bias", nn.initializers.constant(GATE_BIAS), (heads,), ("kv_heads",))
            logits = inputs.projections["gate"][..., 0].astype(jnp.float32)
            log_gate = jax.nn.log_sigmoid(logits + bias[None, None])
        terms = rfa_terms(inputs.q, inputs.k, inputs.v, self.drawn("trigonometric", dim), scale, log_gate)
        return terms, log_gate

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.v is not None
        causal = self.within(mask) == Causal()
        terms, log_gate = self._terms(inputs)
        options = {"causal": causal} | ({} if log_gate is None else {"log_decay": log_gate})
        sums = mix(inputs, terms.q, terms.k, terms.v, **options)
        mass = mix(inputs, terms.queries, terms.factors, terms.values, **options)
        o = rfa_quotient(sums.o, mass.o).astype(inputs.v.dtype)
        return MixerOutput(o, cache=None if inputs.capacity is None else RFAState(sums.cache, mass.cache))

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: RFAState) -> tuple[jax.Array, RFAState]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: q, k, v and gates of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: State of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the state with these tokens)`.
        """
        assert inputs.v is not None
        check_mask("attention with random features and a cache", mask, Causal())
        terms, log_gate = self._terms(inputs)
        options = {} if log_gate is None else {"log_decay": log_gate}
        sums, state = extend(terms.q, terms.k, terms.v, cache.sums, **options)
        mass, mass_state = extend(terms.queries, terms.factors, terms.values, cache.mass, **options)
        return rfa_quotient(sums, mass).astype(inputs.v.dtype), RFAState(state, mass_state)

    def within(self, mask: AnyMask) -> Any:
        if self.gate:
            return check_mask("random feature attention with gates", mask, Causal())
        return super().within(mask)

    def advance(
        self, buffers: Mapping[str, jax.Array], statistics: Mapping[str, jax.Array], step: jax.Array, rng: jax.Array
    ) -> Any:
        """The buffers of the next step.

        Args:
          buffers: The projections.
          statistics: None.
          step: Number of steps done.
          rng: Key of the layer and the step.

        Returns:
          The new buffers.
        """
        return {"projections": self.redrawn(buffers["projections"], step, rng)}
