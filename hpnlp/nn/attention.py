"""Attention: projections around a mixer. Every mixer uses this module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

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
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.attention.positions.rope import Scaling, rope, yarn
from hpnlp.spec import Spec, build, parse_one, parse_period
from hpnlp.types import InputError, MixerInputs, MixerOutput, Projection, TokenStates, WithFurtherKeys


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
    if not mixer.carries:
        return context
    carry = mixer.initial_carry(x.shape[0], x.shape[-1], x.dtype)
    return dataclasses.replace(context, segment_ids=jnp.ones_like(context.positions), carry=carry)


class Sources(NamedTuple):
    """The tokens that the projections of a mixer read.

    Attributes:
      queries: The tokens of x, for projections with the source "x".
      values: The same tokens, with the states that values are projected from.
      keys: For the other sources: the tokens of the carry and after them those of x, or the memory. None if a cache holds
        their projections.
      further: Tokens that the mixer makes of those of the carry, projected by constant parameters; None for none.
    """

    queries: TokenStates
    values: TokenStates
    keys: TokenStates | None
    further: TokenStates | None = None


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
        mixer = self.make_mixer()
        if self.is_initializing():
            context = _initial_context(mixer, x, context)
        x = self.tensor_parallel.gather_tokens(x)
        tokens = TokenStates(x, context.positions, context.segment_ids)
        sources = self.sources(mixer, tokens, context, cache)
        if values is not None:
            values = dataclasses.replace(tokens, states=self.tensor_parallel.gather_tokens(values))
            sources = sources._replace(values=values)
        inputs = self._project(mixer, sources, context)
        out = self._mix(mixer, inputs, context, cache)
        report = self.tensor_parallel.report(mixer, out)
        taps = self.taps(inputs) if "attention" in context.taps else {}
        report = dataclasses.replace(report, carry=self._whole_carry(mixer, out.carry), taps=taps)
        if not mixer.needs:
            return self.tensor_parallel.local_tokens(out.o, 1), out.cache, report
        o = out.o.reshape(*x.shape[:-1], -1)
        y = Dense(x.shape[-1], ("heads", "embed"), self.out_bias, self.out_init, self.tensor_parallel, name="out")(o)
        return y, out.cache, report

    @nn.nowrap
    def make_mixer(self) -> Any:
        """The mixer, a submodule."""
        return build(self.mixer, MIXERS, "mixer", dropout=self.dropout, name="mixer")

    @nn.nowrap
    def sources(self, mixer: Any, tokens: TokenStates, context: Context, cache: Any) -> Sources:
        """The tokens that the projections read: those of x and, for a mixer with a carry, those of the carry before them."""
        if any(projection.source == "memory" for projection in mixer.needs.values()):
            raise InputError(f"{type(mixer).__name__} reads a memory, which only cross-attention has: set source='x'")
        if context.carry is None or all(projection.source == "x" for projection in mixer.needs.values()):
            return Sources(tokens, tokens, tokens)
        keys = context.carry.followed_by(tokens)
        return Sources(tokens, tokens, keys, mixer.further_keys(keys) if isinstance(mixer, WithFurtherKeys) else None)

    @nn.nowrap
    def taps(self, inputs: MixerInputs) -> dict[str, jax.Array]:
        """Queries and keys, for `Context.taps`; none of a mixer that lacks one of them."""
        return {} if inputs.q is None or inputs.k is None else {"queries": inputs.q, "keys": inputs.k}

    def _project(self, mixer: Any, sources: Sources, context: Context) -> MixerInputs:
        """The inputs of the mixer: the projections that it needs, positions and segments, and random numbers."""
        projected, keys = {}, sources.keys
        for name, projection in mixer.needs.items():
            of_x = sources.values if name == "v" else sources.queries
            tokens = of_x if projection.source == "x" else keys
            if tokens is None:
                continue
            y = self._heads_of(tokens, name, projection)
            if sources.further is not None and projection.source == "carry":
                y = jnp.concatenate([y, self._heads_of(sources.further, name, projection, constant=True)], axis=1)
            projected[name] = checkpoint_name(y, "projected")
        if keys is not None and sources.further is not None:
            keys = keys.followed_by(sources.further)
        dropping = self.dropout > 0.0 and not context.deterministic
        return MixerInputs(
            x=sources.queries.states,
            streams=self._dropout_streams(context) if dropping else None,
            **{name: projected.pop(name) for name in ("q", "k", "v") if name in projected},
            projections=projected,
            positions=context.positions,
            kv_positions=None if keys is None else keys.positions,
            segment_ids=context.segment_ids,
            kv_segment_ids=None if keys is None else keys.segment_ids,
            carry=context.carry,
            rng=self.make_rng("dropout") if dropping else None,
            draws=self.make_rng("draws") if mixer.traits.draws else None,
            deterministic=context.deterministic,
            capacity=context.capacity,
        )

    @nn.nowrap
    def _mix(self, mixer: Any, inputs: MixerInputs, context: Context, cache: Any) -> MixerOutput:
        """Mixes the tokens with each other, or with those of the cache."""
        if cache is not None or context.capacity is not None:
            check_method(mixer, "extend", "decoding", "decode with a mixer that has a cache of its own")
        with part("mixing"):
            if cache is None:
                return self.tensor_parallel.mix(mixer, inputs, context.mask)
            o, cache = mixer.extend(inputs, context.mask, cache)
            return MixerOutput(o, cache=cache)

    def _dropout_streams(self, context: Context) -> jax.Array:
        """int32 `[B, N]`: a number for each sequence and head, the same under every layout over devices."""
        assert context.ids is not None
        start = self.tensor_parallel.local_start("heads", self.heads)
        heads = start + jnp.arange(self.tensor_parallel.local_size("heads", self.heads))
        return context.ids[:, :1] * self.heads + heads[None].astype(jnp.int32)

    def _whole_carry(self, mixer: Any, carry: Any) -> Any:
        """A mixer's carry, where arrays that the axis of heads does not divide are the same on all devices of that axis."""
        if carry is None:
            return {}

        def whole(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
            return x if "heads" in axes or "kv_heads" in axes else self.tensor_parallel.same_on_all(x)

        return jax.tree.map(whole, carry, mixer.carry_axes)

    def _heads_of(self, tokens: TokenStates, name: str, projection: Projection, constant: bool = False) -> jax.Array:
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
