"""Cells of the Evolved Transformer: Blocks with gated linear units and branches of wide convolutions besides attention.

References: So et al. 2019, "The evolved transformer", fig. 3. Widths and the places of norms are those of the paper's code
(tensor2tensor, `models/evolved_transformer.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import TensorParallel
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.blocks import BlockKind, attention_size, check_no_carry, cross_size
from hpnlp.nn.layers import NORMS, Dense, Initializer, dense_init, param
from hpnlp.nn.mixers.cross import CrossAttention
from hpnlp.ops.attention import Causal, Full, Window
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.convolutions.convolution import depthwise_conv, last_tokens, token_windows
from hpnlp.spec import Spec
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection


class EvolvedConv(Mixer):
    """Base of the convolutions of a cell: two stages with a norm between them, `outer(norm(inner(x)))`. A Mixer.

    Under a causal mask, both stages read earlier tokens and the current one; otherwise, they are centred.

    Attributes:
      dim: Model size D, even.
      norm: Entry of NORMS.
      norm_eps: Added to the variance in the norm.
      use_bias: Biases on products with matrices.
      out_init: Initialiser of the last matrix.
    """

    needs: ClassVar[Mapping[str, Projection]] = {}
    traits: ClassVar[MixerTraits] = MixerTraits()
    widths: ClassVar[tuple[int, int]]  # tokens that the stages read, odd numbers

    dim: int
    norm: str
    norm_eps: float
    use_bias: bool
    out_init: Initializer

    def inner(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        """The first stage, `[B, T, F]`."""
        raise NotImplementedError

    def outer(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        """The second stage, `[B, T, D]`."""
        raise NotImplementedError

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.x is not None
        self.within(mask)
        x, causal = inputs.x, mask == Causal()
        middle = self.inner_norm(self.inner(x, inputs.segment_ids, causal))
        o = self.outer(middle, inputs.segment_ids, causal)
        if inputs.capacity is None:
            return MixerOutput(o)
        lengths, (first, second) = inputs.lengths(), self.widths
        return MixerOutput(o, cache=(last_tokens(x, lengths, first - 1), last_tokens(middle, lengths, second - 1)))

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: Any) -> tuple[jax.Array, Any]:
        """Convolves new tokens.

        Args:
          inputs: x of the new tokens `[B, T, D]`. A sequence is one segment.
          mask: `Causal()`.
          cache: The last inputs of each stage, `[B, W - 1, D]` and `[B, W - 1, F]`.

        Returns:
          `(o [B, T, D], the cache of the tokens that follow)`.
        """
        assert inputs.x is not None
        count = inputs.x.shape[1]
        x = jnp.concatenate([cache[0], inputs.x], axis=1)
        middle = self.inner_norm(self.inner(x, None, True)[:, -count:])
        middle = jnp.concatenate([cache[1], middle], axis=1)
        o = self.outer(middle, None, True)[:, -count:]
        return o, (x[:, count:], middle[:, count:])

    def within(self, mask: AnyMask) -> Any:
        """The window of the convolutions.

        Args:
          mask: `Causal()` or `Full()`.

        Returns:
          The mask of the pairs that influence each other.

        Raises:
          InputError: Another mask.
        """
        reach = sum(self.widths) - 2
        if mask == Causal():
            return Window(reach, 0)
        if mask == Full():
            return Window(reach // 2)
        raise InputError(f"the convolutions of model.block cannot apply the mask {mask}: pass Causal() or Full()")

    def _dense(self, features: int, init: Initializer | None = None) -> Dense:
        return Dense(features, ("embed", "hidden"), self.use_bias, init or dense_init)

    def _taps(self, name: str, width: int, dim: int) -> jax.Array:
        init = nn.initializers.normal(width**-0.5)
        return param(self, name, init, (width, dim), ("taps", "embed"))

    def _norm(self) -> Any:
        return NORMS[self.norm](self.norm_eps)


class EvolvedEncoderConv(EvolvedConv):
    """`relu(dense to 4D) + relu(convolution of width 3 to D / 2)`, a norm, and a separable convolution of width 9 to D / 2.

    Fewer features are padded with zeros. Cost: 7.5 D^2 weights.
    """

    widths: ClassVar[tuple[int, int]] = (3, 9)

    def setup(self) -> None:
        self.wide, self.narrow = self._dense(4 * self.dim), self._dense(self.dim // 2)
        self.inner_norm = self._norm()
        self.taps = self._taps("taps", 9, 4 * self.dim)
        self.out = self._dense(self.dim // 2, self.out_init)

    def inner(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        windows = token_windows(x, 3, segment_ids, ahead=_ahead(3, causal))
        return _added(jax.nn.relu(self.wide(x)), jax.nn.relu(self.narrow(windows)))

    def outer(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        y = self.out(depthwise_conv(x, self.taps, segment_ids, ahead=_ahead(9, causal)))
        return _padded(y, self.dim)


class EvolvedDecoderConv(EvolvedConv):
    """Separable convolutions of widths 11 (to 2D, with a relu) and 7 (to D / 2), whose sum is normalised, and one of 7 to D.

    Fewer features are padded with zeros. Cost: 4.5 D^2 weights.
    """

    widths: ClassVar[tuple[int, int]] = (11, 7)

    def setup(self) -> None:
        self.wide_taps, self.narrow_taps = self._taps("wide_taps", 11, self.dim), self._taps("narrow_taps", 7, self.dim)
        self.wide, self.narrow = self._dense(2 * self.dim), self._dense(self.dim // 2)
        self.inner_norm = self._norm()
        self.taps = self._taps("taps", 7, 2 * self.dim)
        self.out = self._dense(self.dim, self.out_init)

    def inner(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        wide = depthwise_conv(x, self.wide_taps, segment_ids, ahead=_ahead(11, causal))
        narrow = depthwise_conv(x, self.narrow_taps, segment_ids, ahead=_ahead(7, causal))
        return _added(jax.nn.relu(self.wide(wide)), self.narrow(narrow))

    def outer(self, x: jax.Array, segment_ids: jax.Array | None, causal: bool) -> jax.Array:
        return self.out(depthwise_conv(x, self.taps, segment_ids, ahead=_ahead(7, causal)))


class EvolvedBlock(Block):
    """Base of the cells: a branch of convolutions, and the branches of a Block after it.

    Attributes:
      convolution: The convolutions of the cell.
    """

    convolution: ClassVar[type[EvolvedConv]]

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.conv_norm = NORMS[c.norm](c.norm_eps)
        self.convolutions = self.convolution(c.dim, c.norm, c.norm_eps, c.mlp_bias, self.out_init)

    def convolve(self, x: jax.Array, context: Context, cache: PyTree = None) -> tuple[jax.Array, Any]:
        """The branch of convolutions, without its residual.

        Args:
          x: Hidden states `[B, T, D]`.
          context: Segments and mask.
          cache: Cache of the tokens that precede x, or None.

        Returns:
          `(y [B, T, D], cache or None)`.
        """
        h = self.tensor_parallel.gather_tokens(self._normed_input(self.conv_norm, x))
        inputs = MixerInputs(x=h, segment_ids=context.segment_ids, capacity=context.capacity)
        if cache is None:
            out = self.convolutions(inputs, context.mask)
            o, cache = out.o, out.cache
        else:
            o, cache = self.convolutions.extend(inputs, context.mask, cache)
        return self._drop(self.tensor_parallel.local_tokens(o, 1), context), cache


class EvolvedEncoderBlock(EvolvedBlock):
    """The encoder cell: a gated linear unit, convolutions, attention and a feed-forward network, each with a residual."""

    convolution: ClassVar[type[EvolvedConv]] = EvolvedEncoderConv

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.glu_norm = NORMS[c.norm](c.norm_eps)
        self.glu_value = Dense(c.dim, ("embed", "hidden"), c.mlp_bias, self.out_init)
        self.glu_gate = Dense(c.dim, ("embed", "hidden"), c.mlp_bias)

    def __call__(self, x: jax.Array, context: Context, cache: PyTree = None) -> tuple[jax.Array, Any, LayerReport]:
        of_convolution, of_block = cache or (None, None)
        h = self._normed_input(self.glu_norm, x)
        y = self._drop(self.glu_value(h) * jax.nn.sigmoid(self.glu_gate(h)), context)
        x = self._normed_sum(self.glu_norm, x + y)
        y, of_convolution = self.convolve(x, context, of_convolution)
        x = self._normed_sum(self.conv_norm, x + y)
        x, of_block, report = super().__call__(x, context, of_block)
        return x, (of_convolution, of_block), report


class EvolvedDecoderBlock(EvolvedBlock):
    """The decoder cell: attention with twice the heads, convolutions, attention and a feed-forward network.

    With `config.memory_dim`, cross-attention is added to the first attention, and follows the second one as in a Block.
    """

    convolution: ClassVar[type[EvolvedConv]] = EvolvedDecoderConv

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.wide_norm = NORMS[c.norm](c.norm_eps)
        options = self.attention_options()
        options |= {"heads": 2 * c.heads, "kv_heads": 2 * c.kv_head_count, "head_dim": c.head_size // 2}
        self.wide_attention = Attention(**options)
        if c.memory_dim:
            self.first_cross_attention = CrossAttention(**self.attention_options())

    def __call__(self, x: jax.Array, context: Context, cache: PyTree = None) -> tuple[jax.Array, Any, LayerReport]:
        of_wide, of_cross, of_convolution, of_block = cache or (None,) * 4
        h = self._normed_input(self.wide_norm, x)
        y, of_wide, _ = self.wide_attention(h, context, of_wide)
        if self.config.memory_dim:
            of_memory, of_cross, _ = self.first_cross_attention(h, context, of_cross)
            y = y + of_memory
        x = self._normed_sum(self.wide_norm, x + self._drop(y, context))
        y, of_convolution = self.convolve(x, context, of_convolution)
        x = self._normed_sum(self.conv_norm, x + y)
        x, of_block, report = super().__call__(x, context, of_block)
        return x, (of_wide, of_cross, of_convolution, of_block), report


def _ahead(width: int, causal: bool) -> int:
    """Number of later tokens that a convolution of an odd width reads."""
    return 0 if causal else width // 2


def _padded(x: jax.Array, features: int) -> jax.Array:
    """Appends features of 0."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, features - x.shape[2])])


def _added(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """Adds an array of fewer features to the first features of another."""
    return wide + _padded(narrow, wide.shape[2])


@dataclasses.dataclass(frozen=True)
class EvolvedKind(BlockKind):
    """Encoder cells of the Evolved Transformer."""

    has_two_branches: ClassVar[bool] = False
    module: ClassVar[type[EvolvedBlock]] = EvolvedEncoderBlock

    def make(self, config: BlockConfig, out_init: Initializer, mixer: Spec, tensor_parallel: TensorParallel) -> Block:
        return self.module(config, out_init, mixer, tensor_parallel, parent=None)

    def resolved(self, config: BlockConfig) -> BlockConfig:
        if config.dim % 2:
            raise InputError(
                f"model.block={config.block!r}, model.dim={config.dim}: convolutions have half of the features: make it even"
            )
        if config.norm_placement == "sandwich":
            raise InputError(
                f"model.block={config.block!r}, model.norm_placement='sandwich': these Blocks have no norms of what branches "
                "return: set model.norm_placement to 'pre' or 'post'"
            )
        return config

    def convolutions(self, config: BlockConfig) -> tuple[EvolvedConv, ...]:
        kind = self.module.convolution
        return (kind(config.dim, config.norm, config.norm_eps, config.mlp_bias, lambda *_: None, name=None),)

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        # A gated linear unit, and products of the convolutions with D x 4D, 3D x D/2 and 4D x D/2 weights.
        return attention_size(config, config.dim, needs) + (2 * 2 + 8 + 3 + 4) * config.dim**2 // 2


@dataclasses.dataclass(frozen=True)
class EvolvedDecoderKind(EvolvedKind):
    """Decoder cells of the Evolved Transformer, whose first attention has heads of half of the size."""

    module: ClassVar[type[EvolvedBlock]] = EvolvedDecoderBlock

    def resolved(self, config: BlockConfig) -> BlockConfig:
        divisor = 4 if config.position == "rope" else 2
        if config.head_size % divisor:
            raise InputError(
                f"model.block={config.block!r}: the first attention of a layer has heads of half of the head dimension "
                f"{config.head_size}, which model.position={config.position!r} needs to be a multiple of {divisor}: change "
                "model.heads or model.head_dim"
            )
        return super().resolved(config)

    def check_mixer(self, config: BlockConfig, mixer: Mixer) -> None:
        check_no_carry(config, mixer)
        if mixer.has_state:
            raise InputError(
                f"model.block={config.block!r}, model.mixer={config.mixer!r}: the mixer has statistics or buffers, which a "
                "layer keeps for one attention, and this Block has two: choose another mixer, or block='evolved_encoder'"
            )

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        half = {"heads": 2 * config.heads, "kv_heads": 2 * config.kv_head_count, "head_dim": config.head_size // 2}
        wide = attention_size(dataclasses.replace(config, **half), config.dim, needs)
        # Products of the convolutions with D x 2D, D x D/2 and 2D x D weights.
        convolutions = (4 + 1 + 4) * config.dim**2 // 2
        return wide + convolutions + attention_size(config, config.dim, needs) + cross_size(config)
