"""Kinds of Blocks. `model.block` names entries of BLOCKS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpnlp.layer_report import has_state
from hpnlp.model_parallel import TensorParallel
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.bottleneck_block import BottleneckBlock
from hpnlp.nn.evolved import EvolvedBlock, EvolvedConv, EvolvedDecoderBlock, EvolvedEncoderBlock
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.nn.layers import Initializer
from hpnlp.nn.lite_block import LiteBlock
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.light_convolution import check_width
from hpnlp.spec import Spec, build, did_you_mean, parse_one
from hpnlp.types import InputError, Projection

# Largest sizes of `bottleneck`.
MAX_WIDTH, MAX_NETWORKS = 2**18, 16


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of Blocks: an entry of BLOCKS makes it. This class is "transformer", a mixer and a feed-forward network."""

    # Whether layers are the two branches `mix` and `feed`, as reversible residuals need.
    has_two_branches: ClassVar[bool] = True

    def make(self, config: BlockConfig, out_init: Initializer, mixer: Spec, tensor_parallel: TensorParallel) -> Block:
        """Makes a Block.

        Args:
          config: Sizes and parts, from `resolved`.
          out_init: Initialiser of the projections that write to the residual stream.
          mixer: The mixer of the Block.
          tensor_parallel: Division of heads and columns over devices.

        Returns:
          The module, without a parent.
        """
        return Block(config, out_init, mixer, tensor_parallel, parent=None)

    def resolved(self, config: BlockConfig) -> BlockConfig:
        """Replaces sizes of 0 whose default depends on the kind.

        Args:
          config: The config of a Block.

        Returns:
          The config with these sizes.

        Raises:
          InputError: The kind does not support a size.
        """
        return config

    def check_mixer(self, config: BlockConfig, mixer: Any) -> None:
        """Checks that the kind supports a mixer.

        Args:
          config: The config of a Block.
          mixer: Its mixer.

        Raises:
          InputError: The kind does not support the mixer.
        """
        return None

    def convolutions(self, config: BlockConfig) -> tuple[Any, ...]:
        """The mixers of a Block besides that of `config.mixer`.

        Args:
          config: The config of a Block.

        Returns:
          Modules.
        """
        return ()

    def matrix_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        """Number of weights in the matrices of a Block.

        Args:
          config: The config of a Block, from `resolved`.
          needs: `needs` of its mixer.

        Returns:
          The number, without biases, norms and the mixer's own parameters.
        """
        mlp = build_feed_forward(config.mlp, hidden=config.mlp_size).matrix_size(config.dim)
        return self._mixing_size(config, needs) + mlp + _cross_size(config)

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        """Number of weights in the matrices of the branches before the feed-forward network, without cross-attention."""
        return _attention_size(config, config.dim, needs)


@dataclasses.dataclass(frozen=True)
class LiteKind(BlockKind):
    """Blocks of the Lite Transformer.

    Attributes:
      convolution: Spec of the mixer of half of the features.
    """

    convolution: Spec

    def make(self, config: BlockConfig, out_init: Initializer, mixer: Spec, tensor_parallel: TensorParallel) -> Block:
        return LiteBlock(config, out_init, mixer, tensor_parallel, self.convolution, parent=None)

    def resolved(self, config: BlockConfig) -> BlockConfig:
        if config.dim % 2 or not config.head_dim and config.dim % (2 * config.heads):
            raise InputError(
                f"model.block={config.block!r}, model.dim={config.dim}: each half of the features has model.heads="
                f"{config.heads} heads: make dim a multiple of {2 * config.heads}, or set model.head_dim"
            )
        head_dim, mlp_dim = config.head_dim or config.dim // (2 * config.heads), config.mlp_dim or config.dim
        return dataclasses.replace(config, head_dim=head_dim, mlp_dim=mlp_dim)

    def check_mixer(self, config: BlockConfig, mixer: Any) -> None:
        _check_no_carry(config, mixer)

    def convolutions(self, config: BlockConfig) -> tuple[Any, ...]:
        return (build(self.convolution, MIXERS, "mixer", dropout=config.dropout, name=None),)

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        (convolution,) = self.convolutions(config)
        return sum(_attention_size(config, config.dim // 2, each) for each in (needs, convolution.needs))


@dataclasses.dataclass(frozen=True)
class EvolvedKind(BlockKind):
    """Cells of the Evolved Transformer.

    Attributes:
      module: The class of the cell.
    """

    has_two_branches: ClassVar[bool] = False

    module: type[EvolvedBlock]

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
        return _attention_size(config, config.dim, needs) + (2 * 2 + 8 + 3 + 4) * config.dim**2 // 2


@dataclasses.dataclass(frozen=True)
class EvolvedDecoderKind(EvolvedKind):
    """Decoder cells of the Evolved Transformer, whose first attention has heads of half of the size."""

    def resolved(self, config: BlockConfig) -> BlockConfig:
        divisor = 4 if config.position == "rope" else 2
        if config.head_size % divisor:
            raise InputError(
                f"model.block={config.block!r}: the first attention of a layer has heads of half of the head dimension "
                f"{config.head_size}, which model.position={config.position!r} needs to be a multiple of {divisor}: change "
                "model.heads or model.head_dim"
            )
        return super().resolved(config)

    def check_mixer(self, config: BlockConfig, mixer: Any) -> None:
        _check_no_carry(config, mixer)
        if has_state(mixer):
            raise InputError(
                f"model.block={config.block!r}, model.mixer={config.mixer!r}: the mixer has statistics or buffers, which a "
                "layer keeps for one attention, and this Block has two: choose another mixer, or block='evolved_encoder'"
            )

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        half = {"heads": 2 * config.heads, "kv_heads": 2 * config.kv_head_count, "head_dim": config.head_size // 2}
        wide = _attention_size(dataclasses.replace(config, **half), config.dim, needs)
        # Products of the convolutions with D x 2D, D x D/2 and 2D x D weights.
        convolutions = (4 + 1 + 4) * config.dim**2 // 2
        return wide + convolutions + _attention_size(config, config.dim, needs) + _cross_size(config)


@dataclasses.dataclass(frozen=True)
class BottleneckKind(BlockKind):
    """Blocks of MobileBERT.

    Attributes:
      width: Features within a Block.
      networks: Number of feed-forward networks.
      shared: Values are projected from all features, and queries and keys from a reduction of their own.
    """

    has_two_branches: ClassVar[bool] = False

    width: int
    networks: int
    shared: bool

    def make(self, config: BlockConfig, out_init: Initializer, mixer: Spec, tensor_parallel: TensorParallel) -> Block:
        sizes = {"width": self.width, "networks": self.networks, "shared": self.shared}
        return BottleneckBlock(config, out_init, mixer, tensor_parallel, **sizes, parent=None)

    def resolved(self, config: BlockConfig) -> BlockConfig:
        if not config.head_dim and self.width % config.heads:
            raise InputError(
                f"model.block={config.block!r}: its width {self.width} is not a multiple of model.heads={config.heads}: change "
                "one, or set model.head_dim"
            )
        if config.norm_placement != "post":
            raise InputError(
                f"model.block={config.block!r}, model.norm_placement={config.norm_placement!r}: norms follow the additions in "
                "these Blocks: set model.norm_placement='post'"
            )
        if config.memory_dim:
            raise InputError(
                f"model.block={config.block!r}, model.memory_dim={config.memory_dim}: these Blocks have no cross-attention: "
                "choose another block"
            )
        head_dim = config.head_dim or self.width // config.heads
        return dataclasses.replace(config, head_dim=head_dim, mlp_dim=config.mlp_dim or 4 * self.width)

    def check_mixer(self, config: BlockConfig, mixer: Any) -> None:
        _check_no_carry(config, mixer)
        if self.networks > 1 and has_state(build_feed_forward(config.mlp, hidden=config.mlp_size)):
            raise InputError(
                f"model.block={config.block!r}, model.mlp={config.mlp!r}: the network has statistics or buffers, which a layer "
                f"keeps for one network, and this Block has {self.networks}: choose another network"
            )

    def matrix_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        mlp = build_feed_forward(config.mlp, hidden=config.mlp_size).matrix_size(self.width)
        values = {name: need for name, need in needs.items() if name == "v" and self.shared}
        # Values are projected from D features in place of `width`.
        extra = _projection_columns(config, values) * (config.dim - self.width)
        reductions = 3 if self.shared else 2
        bottlenecks = reductions * self.width * config.dim
        return _attention_size(config, self.width, needs) + extra + self.networks * mlp + bottlenecks


def _projection_columns(config: BlockConfig, needs: Mapping[str, Projection]) -> int:
    """Number of features of the projections, without that of the output."""
    heads = {"heads": config.heads, "kv_heads": config.kv_head_count}
    return sum(heads[need.axis] * (need.width or config.head_size) for need in needs.values())


def _attention_size(config: BlockConfig, dim: int, needs: Mapping[str, Projection]) -> int:
    """Number of weights in the projections of attention on `dim` features."""
    output = config.heads * config.head_size if needs else 0
    return dim * (_projection_columns(config, needs) + output)


def _cross_size(config: BlockConfig) -> int:
    """Number of weights in a cross-attention: queries and output of size dim, keys and values of size memory_dim."""
    if not config.memory_dim:
        return 0
    return 2 * (config.dim * config.heads + config.memory_dim * config.kv_head_count) * config.head_size


def _check_no_carry(config: BlockConfig, mixer: Any) -> None:
    """Raises InputError for mixers that carry state from batch to batch."""
    if hasattr(mixer, "initial_carry"):
        raise InputError(
            f"model.block={config.block!r}, model.mixer={config.mixer!r}: the mixer carries the states of all features from "
            "batch to batch, for one attention per layer: choose another mixer, or block='transformer'"
        )


def lite(width: int = 31, conv: str = "light") -> LiteKind:
    """Entry of BLOCKS: the Lite Transformer.

    Args:
      width: Number of tokens of the convolution.
      conv: light for a lightweight convolution, dynamic for a dynamic one.

    Returns:
      The kind.

    Raises:
      InputError: An unknown convolution, or a width out of range.
    """
    if conv not in ("light", "dynamic"):
        raise InputError(f"model.block=lite({width}, {conv}): {did_you_mean(conv, ('light', 'dynamic'))}")
    return LiteKind(
        Spec({"light": "lightconv", "dynamic": "dynamicconv"}[conv], (check_width("model.block=lite", width),))
    )


def bottleneck(width: int = 128, networks: int = 4, shared: bool = True) -> BottleneckKind:
    """Entry of BLOCKS: MobileBERT.

    Args:
      width: Features within a Block.
      networks: Number of feed-forward networks.
      shared: True for values of all features, and queries and keys of a reduction of their own; False for queries, keys and
        values of the features to which attention is added.

    Returns:
      The kind.

    Raises:
      InputError: A size out of range.
    """
    if not 1 <= width <= MAX_WIDTH:
        raise InputError(f"model.block=bottleneck({width}): expected a width of 1 to {MAX_WIDTH}")
    if not 1 <= networks <= MAX_NETWORKS:
        raise InputError(f"model.block=bottleneck({width}, {networks}): expected 1 to {MAX_NETWORKS} networks")
    return BottleneckKind(width, networks, shared)


BLOCKS: dict[str, Callable[..., BlockKind]] = {
    "transformer": lambda: BlockKind(),
    "lite": lite,
    "bottleneck": bottleneck,
    "evolved_encoder": lambda: EvolvedKind(EvolvedEncoderBlock),
    "evolved_decoder": lambda: EvolvedDecoderKind(EvolvedDecoderBlock),
}


def block_kind(text: str) -> BlockKind:
    """The kind of a Block.

    Args:
      text: `model.block`, a spec string.

    Returns:
      The kind.

    Raises:
      InputError: Unknown name, or wrong arguments.
    """
    return build(parse_one(text, "model.block"), BLOCKS, "model.block")
