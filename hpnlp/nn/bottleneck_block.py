"""Block of MobileBERT: attention and several feed-forward networks on fewer features than those of the model."""

from __future__ import annotations

from typing import Any

import jax

from hpnlp.layer_report import LayerReport
from hpnlp.nn.attention import Context
from hpnlp.nn.block import Block
from hpnlp.nn.feed_forward import build_feed_forward
from hpnlp.nn.layers import NORMS, Dense
from hpnlp.parts import part
from hpnlp.types import MixerInputs


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

    def __call__(self, x: jax.Array, context: Context, cache: Any = None) -> tuple[jax.Array, Any, LayerReport]:
        h = self.inner_norm(self.inner(x))
        if self.shared:
            queries = self.query_input_norm(self.query_input(x))
            y, cache, report = self.attention(queries, context, cache, values=x)
        else:
            y, cache, report = self.attention(h, context, cache)
        h = self.mix_norm(h + y)
        report = report.of_branch("attention")
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
