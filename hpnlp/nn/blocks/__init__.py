"""Kinds of Blocks. `model.block` names entries of BLOCKS."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.model_parallel import TensorParallel
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.nn.layers import Initializer
from hpnlp.spec import Spec, build, parse_one
from hpnlp.table import Table
from hpnlp.types import InputError, Projection, check_options


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of Blocks, whose fields are the arguments of the spec. This class is "transformer", a mixer and a network."""

    def __post_init__(self) -> None:
        check_options(self)

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

    def check_mixer(self, config: BlockConfig, mixer: object) -> None:
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
        return self._mixing_size(config, needs) + mlp + cross_size(config)

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        """Number of weights in the matrices of the branches before the feed-forward network, without cross-attention."""
        return attention_size(config, config.dim, needs)


def projection_columns(config: BlockConfig, needs: Mapping[str, Projection]) -> int:
    """Number of features of the projections, without that of the output."""
    heads = {"heads": config.heads, "kv_heads": config.kv_head_count}
    return sum(heads[need.axis] * (need.width or config.head_size) for need in needs.values())


def attention_size(config: BlockConfig, dim: int, needs: Mapping[str, Projection]) -> int:
    """Number of weights in the projections of attention on `dim` features."""
    output = config.heads * config.head_size if needs else 0
    return dim * (projection_columns(config, needs) + output)


def cross_size(config: BlockConfig) -> int:
    """Number of weights in a cross-attention: queries and output of size dim, keys and values of size memory_dim."""
    if not config.memory_dim:
        return 0
    return 2 * (config.dim * config.heads + config.memory_dim * config.kv_head_count) * config.head_size


def check_no_carry(config: BlockConfig, mixer: Mixer) -> None:
    """Raises InputError for mixers that carry state from batch to batch."""
    if mixer.carries:
        raise InputError(
            f"model.block={config.block!r}, model.mixer={config.mixer!r}: the mixer carries the states of all features from "
            "batch to batch, for one attention per layer: choose another mixer, or block='transformer'"
        )


BLOCKS: Table[Callable[..., BlockKind]] = Table(
    {
        "transformer": BlockKind,
        "lite": "hpnlp.nn.blocks.lite_block:LiteKind",
        "bottleneck": "hpnlp.nn.blocks.bottleneck_block:BottleneckKind",
        "evolved_encoder": "hpnlp.nn.blocks.evolved:EvolvedKind",
        "evolved_decoder": "hpnlp.nn.blocks.evolved:EvolvedDecoderKind",
    }
)


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
