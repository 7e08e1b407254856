"""Attention: projections around a mixer. Every mixer uses this module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.layer_report import LayerReport, check_method
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.nn.layers import NORMS, Dense, dense_init
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.cross import CrossMixer
from hpnlp.nn.mixers.segment_memory import SegmentMemory
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.attention.positions.rope import Scaling, rope, yarn
from hpnlp.spec import Spec, build, parse_one, parse_period
from hpnlp.types import InputError, MixerInputs, MixerOutput, Projection, WithCarry, WithFurtherKeys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """Vectors that the tokens of a sequence attend to, such as the hidden states of an encoder.

    Attributes:
      states: `[B, S, M]`.
      segment_ids: int32 `[B, S]`: a token attends to the vectors of its own segment id; 0 marks padding.
    """

    states: Any
    segment_ids: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Inputs that all layers of one pass share.

    Attributes:
      positions: int32 `[B, T]`, positions of the tokens within their documents.
      segment_ids: int32 `[B, T]`, or None for one segment per sequence.
      mask: A static Mask, the query-key pairs that may attend.
      deterministic: True switches dropout off.
      capacity: If given, layers also return a cache with room for this number of tokens per sequence.
      ids: int32 `[B, T]`, a number for each token of the batch; dropout depends on it. None in evaluation.
      tokens: int32 `[B, T]`, ids of the words, if a feed-forward network reads them.
      decoding: True where a prompt is read or continued.
      order: The order of the tokens over the devices of a ring, from `ModelParallel.token_order`; None otherwise.
      memory: Memory of cross-attention; None for layers without, and where their caches hold its keys and values.
      carry: Carry of the layer's mixer, the only field in which layers differ; None for none.
      taps: Arrays that layers report: "hidden" for the hidden states that a layer returns, "attention" for the queries and keys
        of its mixer, "routing" for the gates of its experts.
    """

    positions: jax.Array
    segment_ids: jax.Array | None
    mask: AnyMask = dataclasses.field(metadata={"static": True})
    deterministic: bool = dataclasses.field(default=True, metadata={"static": True})
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})
    ids: jax.Array | None = None
    tokens: jax.Array | None = None
    decoding: bool = dataclasses.field(default=False, metadata={"static": True})
    order: Any = dataclasses.field(default=None, metadata={"static": True})
    memory: Memory | None = None
    carry: Any = None
    taps: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})


def _linear(factor: int | float) -> Scaling:
    return Scaling("linear", float(factor))


def _ntk(factor: int | float) -> Scaling:
    return Scaling("ntk", float(factor))


def _llama3(factor: int | float, low: int | float, high: int | float, length: int) -> Scaling:
    return Scaling("llama3", float(factor), float(low), float(high), length)


ROPE_SCALINGS: dict[str, Any] = {
    "none": lambda: Scaling(),
    "linear": _linear,
    "llama3": _llama3,
    "ntk": _ntk,
    "yarn": yarn,
}


def mixer_period(text: str) -> tuple[Spec, ...]:
    """The shortest period of the mixers that layers take in turn.

    Args:
      text: A spec string, as "window(256,0)*5,full".

    Returns:
      The mixers of one period, with repeats written out.
    """
    return parse_period(text, "model.mixer")


def _initial_context(mixer: Any, x: jax.Array, context: Context) -> Context:
    """The context of a layer that is initialised, with the carry of its mixer.

    The layer's report then has a carry, by which `layer_stack.stack_order` distinguishes layers with a carry from others.
    """
    if not isinstance(mixer, WithCarry):
        return context
    carry = mixer.initial_carry(x.shape[0], x.shape[-1], x.dtype)
    return dataclasses.replace(context, segment_ids=jnp.ones_like(context.positions), carry=carry)


class Attention(nn.Module):
    """Projects x to what the mixer needs, mixes, and projects back; a mixer that needs no projections gets and returns x.

    Attributes:
      heads: Number of query heads, N.
      kv_heads: Number of key and value heads, K; fewer than N for grouped queries (Ainslie et al. 2023, "GQA").
      head_dim: Head size, H.
      mixer: Entry of MIXERS.
      rope_theta: Base of RoPE's wavelengths; None for no RoPE. Rotates projections with `rope`.
      rope_scaling: Spec of ROPE_SCALINGS.
      qk_norm: Normalise each head's queries and keys before RoPE (Henry et al. 2020, with a learned scale in place of the
          vector length).
      joint_qk_norm: Normalise the queries of all heads together, and the keys, before RoPE (Muennighoff et al. 2024, "OLMoE").
      norm: Entry of NORMS, for these norms.
      norm_eps: Added to the variance in norms.
      use_bias: Biases on queries, keys and values.
      out_bias: Bias on the output projection.
      out_init: Initialiser of the output projection.
      dropout: Rate of dropout on attention probabilities.
      tensor_parallel: Division of the heads over devices.
      cross: Cross-attention to `Context.memory`, in place of `mixer`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    mixer: Spec = Spec("full")  # noqa: RUF009  (frozen)
    rope_theta: float | None = None
    rope_scaling: str = "none"
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-6
    use_bias: bool = False
    out_bias: bool = False
    out_init: Any = dense_init
    dropout: float = 0.0
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL
    cross: bool = False

    @nn.compact
    @part("projections")
    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None, values: Any = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """Applies attention.

        Args:
          x: Normalised hidden states.
          context: Positions, segments and mask.
          cache: Cache of the tokens that precede x, or None.
          values: Hidden states `[B, T, E]` of the same tokens, from which the values are projected; None for x. Not for mixers
            that compute values from a memory or a carry.

        Returns:
          `(y [B, T, D], cache or None, report)`.
        """
        if self.cross:
            mixer: Any = CrossMixer(self.dropout, name="mixer")
            if cache is None and context.memory is None:
                raise InputError("layers with cross-attention got no memory: pass one, or set model.memory_dim=0")
        else:
            mixer = build(self.mixer, MIXERS, "mixer", dropout=self.dropout, name="mixer")
        context = _initial_context(mixer, x, context) if self.is_initializing() else context
        x = self.tensor_parallel.gather_tokens(x)
        tokens = SegmentMemory(x, context.positions, context.segment_ids)
        keys, further = self._key_tokens(mixer, tokens, context)
        sources = {}
        if values is not None:
            states = self.tensor_parallel.gather_tokens(values)
            sources["v"] = SegmentMemory(states, context.positions, context.segment_ids)
        projected = {
            name: checkpoint_name(
                self._project(name, projection, sources.get(name, tokens), keys, further), "projected"
            )
            for name, projection in mixer.needs.items()
            if projection.source != "memory" or cache is None  # the cache holds the projections of the memory
        }
        if further is not None:
            keys = keys.followed_by(further.states, further.positions, further.segment_ids)
        dropping = self.dropout > 0.0 and not context.deterministic
        streams = self._dropout_streams(context) if dropping else None
        inputs = MixerInputs(
            x=x,
            **{name: projected.pop(name) for name in ("q", "k", "v") if name in projected},
            projections=projected,
            positions=context.positions,
            kv_positions=keys.positions,
            segment_ids=context.segment_ids,
            kv_segment_ids=keys.segment_ids,
            carry=None if self.cross else context.carry,
            rng=self.make_rng("dropout") if dropping else None,
            draws=self.make_rng("draws") if mixer.traits.draws else None,
            streams=streams,
            deterministic=context.deterministic,
            capacity=context.capacity,
        )
        if cache is not None or context.capacity is not None:
            check_method(mixer, "extend", "decoding", "decode with a mixer that has a cache of its own")
        with part("mixing"):
            if cache is None:
                out = self.tensor_parallel.mix(mixer, inputs, context.mask)
            else:
                o, cache = mixer.extend(inputs, context.mask, cache)
                out = MixerOutput(o, cache=cache)
        report = self.tensor_parallel.report(mixer, out)
        taps = {}
        if "attention" in context.taps and not self.cross and inputs.q is not None and inputs.k is not None:
            taps = {"queries": inputs.q, "keys": inputs.k}
        report = dataclasses.replace(report, carry=self._whole_carry(mixer, out.carry), taps=taps)
        if not mixer.needs:
            return self.tensor_parallel.local_tokens(out.o, 1), out.cache, report
        o = out.o.reshape(*x.shape[:-1], -1)
        y = Dense(x.shape[-1], ("heads", "embed"), self.out_bias, self.out_init, self.tensor_parallel, name="out")(o)
        return y, out.cache, report

    def _dropout_streams(self, context: Context) -> jax.Array:
        """int32 `[B, N]`: a number for each sequence and head, the same under every layout over devices."""
        assert context.ids is not None
        start = self.tensor_parallel.local_start("heads", self.heads)
        heads = start + jnp.arange(self.tensor_parallel.local_size("heads", self.heads))
        return context.ids[:, :1] * self.heads + heads[None].astype(jnp.int32)

    def _key_tokens(
        self, mixer: Any, tokens: SegmentMemory, context: Context
    ) -> tuple[SegmentMemory, SegmentMemory | None]:
        """The tokens that keys are computed from: those of x, after those of the carry; or the vectors of the memory.

        And further ones that the mixer makes of these, whose projections have constant parameters; None for none.
        """
        sources = [projection.source for projection in mixer.needs.values()]
        if "memory" in sources and context.memory is not None:
            memory = context.memory
            return SegmentMemory(memory.states.astype(tokens.states.dtype), tokens.positions, memory.segment_ids), None
        if "carry" in sources and context.carry is not None:
            keys = context.carry.followed_by(tokens.states, tokens.positions, tokens.segment_ids)
            return keys, mixer.further_keys(keys) if isinstance(mixer, WithFurtherKeys) else None
        return tokens, None

    def _whole_carry(self, mixer: Any, carry: Any) -> Any:
        """A mixer's carry, where arrays that the axis of heads does not divide are the same on all devices of that axis."""
        if carry is None:
            return {}

        def whole(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
            return x if "heads" in axes or "kv_heads" in axes else self.tensor_parallel.same_on_all(x)

        return jax.tree.map(whole, carry, mixer.carry_axes)

    def _project(
        self,
        name: str,
        projection: Projection,
        tokens: SegmentMemory,
        keys: SegmentMemory,
        further: SegmentMemory | None,
    ) -> jax.Array:
        """A projection of the states of its source."""
        y = self._heads_of(tokens if projection.source == "x" else keys, name, projection)
        if further is None or projection.source != "carry":
            return y
        return jnp.concatenate([y, self._heads_of(further, name, projection, constant=True)], axis=1)

    def _heads_of(self, tokens: SegmentMemory, name: str, projection: Projection, constant: bool = False) -> jax.Array:
        """The states of tokens, projected, split into heads, normalised and rotated; `constant` holds for the parameters."""
        x = tokens.states
        # The same mesh axes divide query and key heads.
        heads = self.tensor_parallel.local_size("heads", getattr(self, projection.axis))
        width = projection.width or self.head_dim
        dense = functools.partial(Dense, heads * width, ("embed", projection.axis), self.use_bias)
        y = self._layer(dense, name, constant)(x)
        if projection.norm and self.joint_qk_norm:
            norm = functools.partial(NORMS[self.norm], self.norm_eps, projection.axis)
            y = self._layer(norm, f"{name}_norm", constant)(y)
        y = y.reshape(*x.shape[:-1], heads, width)
        if projection.norm and self.qk_norm:
            norm = functools.partial(NORMS[self.norm], self.norm_eps, "head_dim")
            y = self._layer(norm, f"{name}_norm", constant)(y)
        if projection.rope and self.rope_theta is not None:
            scaling = build(parse_one(self.rope_scaling, "model.rope_scaling"), ROPE_SCALINGS, "RoPE scaling")
            y = rope(y, tokens.positions, theta=self.rope_theta, scaling=scaling)
        return y

    def _layer(self, make: Callable[..., nn.Module], name: str, constant: bool) -> Callable[[jax.Array], Any]:
        """A layer of this module; if constant, one with the parameters of the layer that has been called, without gradients."""
        if not constant:
            return cast(Callable[[jax.Array], Any], make(name=name))
        variables = {"params": jax.lax.stop_gradient(self.variables["params"][name])}
        return lambda x: make(parent=None).apply(variables, x)
