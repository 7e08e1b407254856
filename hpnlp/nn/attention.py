"""The one Attention module: projections around a mixer."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from hpnlp.nn.layers import NORMS, Dense, dense_init
from hpnlp.nn.mixers import MIXERS
from hpnlp.ops.attention.positions.rope import Scaling, rope, yarn
from hpnlp.spec import Spec, build, parse, parse_one
from hpnlp.types import NO_TENSOR_PARALLEL, Aux, MixerInputs, TensorParallel, check_method


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer of one pass shares.

    positions `[B, T]`, segment_ids `[B, T]` or None for one segment a row. mask: who may attend to whom. deterministic:
    no dropout. capacity: where given, the pass also returns a cache with room for that many tokens a row. ids `[B, T]`: a
    number for each token of the batch, by which dropout tells them apart. order: where devices share rows, what these know of
    the order that the tokens are in, as `Placement.order` gives it.
    """

    positions: jax.Array
    segment_ids: jax.Array | None
    mask: Any = dataclasses.field(metadata={"static": True})
    deterministic: bool = dataclasses.field(default=True, metadata={"static": True})
    capacity: int | None = dataclasses.field(default=None, metadata={"static": True})
    ids: jax.Array | None = None
    order: Any = dataclasses.field(default=None, metadata={"static": True})


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


def alternation(text: str) -> tuple[Spec, ...]:
    """The mixers that layers take in turn: the shortest period of a spec string, its repeats written out."""
    specs = tuple(
        dataclasses.replace(spec, repeat=1) for spec in parse(text, "model.mixer") for _ in range(spec.repeat)
    )
    lengths = (n for n in range(1, len(specs)) if specs == specs[:n] * (len(specs) // n))
    return specs[: next(lengths, len(specs))]


class Attention(nn.Module):
    """Projects x to the queries, keys and values that the mixer asks for, mixes, and projects back.

    Grouped queries where kv_heads < heads; RoPE where `rope_theta` is given and the mixer wants it; `qk_norm` normalises
    each head's query and key before RoPE (Henry et al. 2020, with a learned scale in place of the length).
    """

    heads: int
    kv_heads: int
    head_dim: int
    mixer: Spec = Spec("full")  # noqa: RUF009  (frozen)
    rope_theta: float | None = None
    rope_scaling: str = "none"
    qk_norm: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-6
    use_bias: bool = False
    out_bias: bool = False
    out_init: Any = dense_init
    dropout: float = 0.0
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], context: Context, cache: Any = None) -> tuple[jax.Array, Any, Aux]:
        """`(y [B, T, D], cache or None, aux)`. With a cache, x continues the tokens in it."""
        mixer = build(self.mixer, MIXERS, "mixer", dropout=self.dropout, name="mixer")
        x = self.tensor_parallel.gather_tokens(x)
        projected = {name: checkpoint_name(self._project(x, name, context, mixer), "projected") for name in mixer.needs}
        dropping = self.dropout > 0.0 and not context.deterministic
        streams = None
        if dropping:
            assert context.ids is not None
            numbers = self.tensor_parallel.local_start("heads", self.heads) + jnp.arange(
                self.tensor_parallel.local_size("heads", self.heads)
            )
            streams = context.ids[:, :1] * self.heads + numbers[None].astype(jnp.int32)
        inputs = MixerInputs(
            x=x,
            **projected,
            positions=context.positions,
            kv_positions=context.positions,
            segment_ids=context.segment_ids,
            kv_segment_ids=context.segment_ids,
            rng=self.make_rng("dropout") if dropping else None,
            streams=streams,
            deterministic=context.deterministic,
        )
        aux: Aux = {}
        if cache is not None or context.capacity is not None:
            for method in ("init_cache", "extend"):
                check_method(mixer, method, "decoding", "decode with a mixer that has a cache of its own")
        if cache is not None:
            o, cache = mixer.extend(inputs, context.mask, cache)
        else:
            out = self.tensor_parallel.mix(mixer, inputs, context.mask)
            o, aux = out.o, out.aux
            cache = None if context.capacity is None else mixer.init_cache(inputs, context.mask, context.capacity)
        o = o.reshape(*x.shape[:-1], -1)
        y = Dense(x.shape[-1], ("heads", "embed"), self.out_bias, self.out_init, self.tensor_parallel, name="out")(o)
        return y, cache, aux

    def _project(self, x: jax.Array, name: str, context: Context, mixer: Any) -> jax.Array:
        heads, axis = (self.heads, "heads") if name == "q" else (self.kv_heads, "kv_heads")
        heads = self.tensor_parallel.local_size("heads", heads)
        y = Dense(heads * self.head_dim, ("embed", axis), self.use_bias, name=name)(x)
        y = y.reshape(*x.shape[:-1], heads, self.head_dim)
        if name == "v":
            return y
        if self.qk_norm:
            y = NORMS[self.norm](self.norm_eps, "head_dim", name=f"{name}_norm")(y)
        if self.rope_theta is not None and mixer.wants_rope:
            scaling = build(parse_one(self.rope_scaling, "model.rope_scaling"), ROPE_SCALINGS, "RoPE scaling")
            y = rope(y, context.positions, theta=self.rope_theta, scaling=scaling)
        return y
