"""Block of MobileBERT: attention and several feed-forward networks on fewer features than those of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jaxtyping import PyTree

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.branch import Mixer
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import TensorParallel
from hpnlp.nn.attention import Context
from hpnlp.nn.block import Block, BlockConfig
from hpnlp.nn.blocks import BlockKind, attention_size, check_no_carry, projection_columns
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.nn.layers import NORMS, Dense, Initializer
from hpnlp.spec import Spec
from hpnlp.types import InputError, MixerInputs, Projection, option

# Largest sizes of `bottleneck`.
MAX_WIDTH, MAX_NETWORKS = 2**18, 16


class BottleneckBlock(Block):
    """A Block on `width` features between two dense layers, with one residual of D features around it.

    A dense layer and a norm reduce the hidden states to `width` features, to which attention and the feed-forward networks are
    added, each with a norm of the sum. A last dense layer leads back to D features, which are added to the hidden states and
    normalised. Dropout applies to its result, and to attention probabilities.

    Attributes:
      width: Features within the Block.
      networks: Number of feed-forward networks.
      shared: Queries and keys are projected from another reduction to `width` features, and values from all D features;
        otherwise all of them from the features to which attention is added.

    References: Sun et al. 2020, "MobileBERT: a compact task-agnostic BERT for resource-limited devices", sec. 3.1 to 3.3.
    """

    width: int = 128
    networks: int = 4
    shared: bool = True

    def setup(self) -> None:
        super().setup()
        c, norm = self.config, NORMS[self.config.norm]
        self.inner, self.inner_norm = Dense(self.width, ("embed", "hidden"), c.mlp_bias), norm(c.norm_eps)
        if self.shared:
            self.query_input = Dense(self.width, ("embed", "hidden"), c.mlp_bias)
            self.query_input_norm = norm(c.norm_eps)
        options = {"hidden": c.mlp_size, "use_bias": c.mlp_bias, "tensor_parallel": self.tensor_parallel}
        self.inner_mlps = [build_feed_forward(c.mlp, **options) for _ in range(self.networks - 1)]
        self.inner_mlp_norms = [norm(c.norm_eps) for _ in self.inner_mlps]
        self.outer = Dense(c.dim, ("hidden", "embed"), c.mlp_bias, self.out_init)
        self.outer_norm = norm(c.norm_eps)

    def __call__(self, x: jax.Array, context: Context, cache: PyTree = None) -> tuple[jax.Array, Any, LayerReport]:
        h = self.inner_norm(self.inner(x))
        if self.shared:
            queries = self.query_input_norm(self.query_input(x))
            y, cache, report = self.attention(queries, context, cache, values=x)
        else:
            y, cache, report = self.attention(h, context, cache)
        h = self.mix_norm(h + y)
        report = report.in_branch("attention")
        for mlp, norm in zip([*self.inner_mlps, self.mlp], [*self.inner_mlp_norms, self.feed_norm], strict=True):
            with part("feed_forward"):
                out = mlp(
                    MixerInputs(
                        x=self.tensor_parallel.gather_tokens(h),
                        positions=context.positions,
                        segment_ids=context.segment_ids,
                        deterministic=context.deterministic,
                    )
                )
            h = norm(h + out.o)
        return self.outer_norm(x + self._drop(self.outer(h), context)), cache, report


@dataclasses.dataclass(frozen=True)
class BottleneckKind(BlockKind):
    """Blocks of MobileBERT."""

    has_two_branches: ClassVar[bool] = False

    width: int = option(128, "Features within a Block.", least=1, most=MAX_WIDTH)
    networks: int = option(4, "Number of feed-forward networks.", least=1, most=MAX_NETWORKS)
    shared: bool = option(
        True,
        "True for values of all features, and queries and keys of a reduction of their own; False for queries, keys and values "
        "of the features to which attention is added.",
    )

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

    def check_mixer(self, config: BlockConfig, mixer: Mixer) -> None:
        check_no_carry(config, mixer)
        if self.networks > 1 and build_feed_forward(config.mlp, hidden=config.mlp_size).has_state:
            raise InputError(
                f"model.block={config.block!r}, model.mlp={config.mlp!r}: the network has statistics or buffers, which a layer "
                f"keeps for one network, and this Block has {self.networks}: choose another network"
            )

    def matrix_size(self, config: BlockConfig, needs: Mapping[str, Projection]) -> int:
        mlp = build_feed_forward(config.mlp, hidden=config.mlp_size).matrix_size(self.width)
        values = {name: need for name, need in needs.items() if name == "v" and self.shared}
        # Values are projected from D features in place of `width`.
        extra = projection_columns(config, values) * (config.dim - self.width)
        reductions = 3 if self.shared else 2
        bottlenecks = reductions * self.width * config.dim
        return attention_size(config, self.width, needs) + extra + self.networks * mlp + bottlenecks
