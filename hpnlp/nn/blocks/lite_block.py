"""Block of the Lite Transformer: attention on half of the features, a convolution on the other half."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import TensorParallel
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.blocks import BlockKind, attention_size, check_no_carry
from hpnlp.nn.layers import Initializer
from hpnlp.nn.mixers import MIXERS
from hpnlp.nn.mixers.convolution import MAX_WIDTH
from hpnlp.spec import Spec, build
from hpnlp.types import InputError, Projection, option


class LiteBlock(Block):
    """A Block whose mixing branch is long-short range attention.

    `config.mixer` mixes the first half of the normalised features, and a convolution of gated values the second half. The
    results of both are concatenated.

    Attributes:
      convolution: The mixer of the second half.

    References: Wu et al. 2020, "Lite Transformer with long-short range attention", sec. 4.
    """

    convolution: Spec = Spec("lightconv")  # noqa: RUF009  (frozen)

    def setup(self) -> None:
        super().setup()
        options = self.attention_options()
        options["mixer"] = self.convolution
        self.convolve = Attention(**options)

    def mix(self, x: jax.Array, context: Context, cache: PyTree = None) -> tuple[jax.Array, Any, LayerReport]:
        of_attention, of_convolution = cache or (None, None)
        near, far = jnp.split(self._normed_input(self.mix_norm, x), 2, axis=-1)[::-1]
        far, of_attention, report = self.attention(far, context, of_attention)
        near, of_convolution, _ = self.convolve(near, context, of_convolution)
        y = self._drop(self._normed_result("mix", jnp.concatenate([far, near], axis=-1)), context)
        return y, (of_attention, of_convolution), report.in_branch("attention")


@dataclasses.dataclass(frozen=True)
class LiteKind(BlockKind):
    """Blocks of the Lite Transformer."""

    width: int = option(31, "Number of tokens of the convolution.", least=1, most=MAX_WIDTH)
    conv: str = option(
        "light", "light for a lightweight convolution, dynamic for a dynamic one.", among=("light", "dynamic")
    )

    @property
    def convolution(self) -> Spec:
        """Spec of the mixer of half of the features."""
        return Spec(f"{self.conv}conv", (self.width,))

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

    def check_mixer(self, config: BlockConfig, mixer: Mixer) -> None:
        check_no_carry(config, mixer)

    def convolutions(self, config: BlockConfig) -> tuple[Any, ...]:
        return (build(self.convolution, MIXERS, "mixer", dropout=config.dropout, name=None),)

    def _mixing_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        (convolution,) = self.convolutions(config)
        return sum(attention_size(config, config.dim // 2, each) for each in (needs, convolution.needs))
