"""Block: a mixing branch and a feed-forward branch. All models are stacks of Blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float, PyTree

from hpnlp.cost.parts import part
from hpnlp.model_interfaces.layer_report import LayerReport
from hpnlp.model_interfaces.model_parallel import NO_TENSOR_PARALLEL, TensorParallel
from hpnlp.model_interfaces.ranges import LIMITS, rate_option
from hpnlp.nn.attention import Attention, Context
from hpnlp.nn.feed_forward import build_feed_forward, described_network
from hpnlp.nn.layers import NORMS, Initializer, dropout
from hpnlp.spec import Spec, lookup
from hpnlp.types import InputError, MixerInputs, check_options, option

NORM_PLACEMENTS = ("pre", "post", "sandwich")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Shape of a Block."""

    dim: int = option(256, "Model size D.", least=1, most=LIMITS["dim"])
    heads: int = option(4, "Number of query heads N.", least=1, most=2**14)
    kv_heads: int = option(0, "Number of key and value heads K, a divisor of N; 0 for N.", least=0, most=2**14)
    head_dim: int = option(0, "Head size H, 0 for D / N.", least=0, most=2**16)
    mixer: str = option(
        "full",
        'An entry of MIXERS, or several that the layers take in turn, as in "window(256,0)*5,full".',
    )
    block: str = option(
        "transformer",
        'An entry of BLOCKS: "transformer"; "lite(31, light)", attention on half of the features, and a convolution of this '
        'width, "light" or "dynamic", on the others; "evolved_encoder" or "evolved_decoder"; "bottleneck(128, 4)", attention '
        "and four feed-forward networks on 128 features (MobileBERT).",
    )
    mlp: str = option("swiglu", "Feed-forward network, an entry of FEED_FORWARDS.")
    mlp_dim: int = option(
        0,
        "Columns of the MLP; 0 for 4 D, or, if it is gated, 8 D / 3 rounded up to a multiple of 64.",
        least=0,
        most=2**20,
    )
    norm: str = option("rms", "An entry of NORMS.")
    norm_eps: float = option(1e-6, "Added to the variance in norms.", above=0)
    norm_placement: str = option(
        "pre",
        '"pre" for norms of what the branches read, and of the last layer\'s output; "post" for norms after each addition of a '
        'branch to the residual stream, and none at the end (Vaswani et al. 2017, BERT); "sandwich" for those of "pre" and '
        "norms of what the branches return (Ding et al. 2021, Gemma 2).",
        among=NORM_PLACEMENTS,
    )
    position: str = option("rope", '"rope", "learned" or "none".', among=("rope", "learned", "none"))
    rope_theta: float = option(10000.0, "The base of RoPE's wavelengths.", above=0)
    rope_scaling: str = option(
        "none",
        "An entry of ROPE_SCALINGS: linear(factor), ntk(factor), llama3(factor, low, high, length), yarn(factor, "
        "original_length).",
    )
    qk_norm: bool = option(False, "Norms of each head's queries and keys, before RoPE.")
    joint_qk_norm: bool = option(
        False,
        "Norms of the queries of all heads together, and of their keys, before RoPE (OLMoE); in place of qk_norm.",
    )
    qkv_bias: bool = option(False, "Biases on queries, keys and values.")
    out_bias: bool = option(False, "A bias on attention's output.")
    mlp_bias: bool = option(False, "Biases in MLPs.")
    memory_dim: int = option(
        0,
        "Features of the memory, such as hidden states of an encoder, which a third branch attends to; 0 for no such branch.",
        least=0,
        most=LIMITS["dim"],
    )
    dropout: float = rate_option("Rate of dropout on each branch's result and on attention probabilities.")

    def __post_init__(self) -> None:
        check_options(self, "model")
        if not self.head_dim and self.dim % self.heads:
            raise InputError(
                f"model.dim={self.dim} is not a multiple of model.heads={self.heads}: change one, or set model.head_dim"
            )
        if self.heads % self.kv_head_count:
            raise InputError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}: choose a divisor of it"
            )
        if self.position == "rope" and self.head_size % 2:
            raise InputError(
                f"RoPE rotates pairs of dimensions, but the head dimension is {self.head_size}: make it even"
            )
        if self.qk_norm and self.joint_qk_norm:
            raise InputError(
                "model.qk_norm=True, model.joint_qk_norm=True: queries and keys have one norm: set one to False"
            )
        try:
            described_network(self.mlp)  # kept for calls inside the methods of modules
        except InputError as error:
            raise error if "model.mlp" in str(error) else InputError(f"model.mlp={self.mlp!r}: {error}") from None

    @property
    def kv_head_count(self) -> int:
        """Number of key and value heads, K."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Size of a head, H."""
        return self.head_dim or self.dim // self.heads

    @property
    def expert_count(self) -> int:
        """Number of experts of the feed-forward network, 0 for an MLP."""
        return described_network(self.mlp).expert_count

    @property
    def mlp_size(self) -> int:
        """Number of columns of the MLP."""
        if self.mlp_dim:
            return self.mlp_dim
        return -(-8 * self.dim // (3 * 64)) * 64 if described_network(self.mlp).is_gated else 4 * self.dim


class Block(nn.Module):
    """Two branches: `mix` (attention) and `feed` (a feed-forward network). `__call__` adds them to a single stream.

    With `config.memory_dim`, a third branch between the two, `read`, attends to `Context.memory`. Each branch has a norm: of
    its input if `config.norm_placement` is "pre", of the sum that `__call__` makes if it is "post", and of its input and its
    result if it is "sandwich".

    Attributes:
      config: Sizes, and the kinds of mixer, feed-forward network, norm and position encoding.
      out_init: Initialiser of the projections that write to the residual stream.
      mixer: The mixer of this Block, one of `config.mixer`.
      tensor_parallel: Division of heads and MLP columns over devices.
    """

    config: BlockConfig
    out_init: Initializer
    mixer: Spec
    tensor_parallel: TensorParallel = NO_TENSOR_PARALLEL

    def setup(self) -> None:
        c = self.config
        norm = lookup(NORMS, c.norm, "model.norm")
        self.mix_norm = norm(c.norm_eps)
        options = self.attention_options()
        self.attention = Attention(**options)
        if c.memory_dim:
            from hpnlp.nn.mixers.cross import CrossAttention

            self.read_norm = norm(c.norm_eps)
            self.cross_attention = CrossAttention(**options)
        self.feed_norm = norm(c.norm_eps)
        self.mlp: Any = build_feed_forward(
            c.mlp,
            hidden=c.mlp_size,
            use_bias=c.mlp_bias,
            down_init=self.out_init,
            tensor_parallel=self.tensor_parallel,
        )
        if c.norm_placement == "sandwich":
            self.mix_result_norm, self.feed_result_norm = norm(c.norm_eps), norm(c.norm_eps)
            if c.memory_dim:
                self.read_result_norm = norm(c.norm_eps)

    @nn.nowrap
    def attention_options(self) -> dict[str, Any]:
        """Attributes of the Block's attention.

        Returns:
          Keyword arguments of Attention.
        """
        c = self.config
        return {
            "heads": c.heads,
            "kv_heads": c.kv_head_count,
            "head_dim": c.head_size,
            "mixer": self.mixer,
            "rope_theta": c.rope_theta if c.position == "rope" else None,
            "rope_scaling": c.rope_scaling,
            "qk_norm": c.qk_norm,
            "joint_qk_norm": c.joint_qk_norm,
            "norm": c.norm,
            "norm_eps": c.norm_eps,
            "use_bias": c.qkv_bias,
            "out_bias": c.out_bias,
            "out_init": self.out_init,
            "dropout": c.dropout,
            "tensor_parallel": self.tensor_parallel,
        }

    def mix(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """The mixing branch, without its residual.

        Args:
          x: Hidden states.
          context: Positions, segments and mask.
          cache: Cache of the tokens that precede x, or None.

        Returns:
          `(y [B, T, D], cache or None, report)`.
        """
        y, cache, report = self.attention(self._normed_input(self.mix_norm, x), context, cache)
        return self._drop(self._normed_result("mix", y), context), cache, report.in_branch("attention")

    def read(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """The branch that attends to the memory, without its residual.

        Args:
          x: Hidden states.
          context: The memory, and segments of the tokens.
          cache: Keys and values of the memory, or None.

        Returns:
          `(y [B, T, D], cache or None, report)`.
        """
        y, cache, report = self.cross_attention(self._normed_input(self.read_norm, x), context, cache)
        return self._drop(self._normed_result("read", y), context), cache, report.in_branch("cross_attention")

    def feed(self, x: Float[Array, "B T D"], context: Context) -> tuple[jax.Array, LayerReport]:
        """The feed-forward branch, without its residual.

        Args:
          x: Hidden states.
          context: Positions and segments of the tokens, and their ids for dropout.

        Returns:
          `(y [B, T, D], report)`.
        """
        x = self._normed_input(self.feed_norm, x)
        with part("feed_forward"):
            out = self.mlp(
                MixerInputs(
                    x=self.tensor_parallel.gather_tokens(x),
                    positions=context.positions,
                    segment_ids=context.segment_ids,
                    draws=self.make_rng("draws") if self.mlp.traits.draws else None,
                    ids=context.ids,
                    tokens=context.tokens,
                    deterministic=context.deterministic,
                    decoding=context.decoding,
                    taps=context.taps,
                )
            )
        y = self._drop(self._normed_result("feed", out.o), context)
        report = dataclasses.replace(self.tensor_parallel.report(self.mlp, out), taps=dict(out.taps))
        return y, report.in_branch("mlp")

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: PyTree = None
    ) -> tuple[jax.Array, Any, LayerReport]:
        """Adds the branches to a single stream, one after the other.

        Args:
          x: Hidden states.
          context: Positions, segments, mask and memory.
          cache: Cache of the tokens that precede x, or None; with a memory, the pair of this and the cache of `read`.

        Returns:
          `(x [B, T, D], cache or None, report)`.
        """
        if not self.config.memory_dim:
            y, cache, report = self.mix(x, context, cache)
            x = self._normed_sum(self.mix_norm, x + y)
        else:
            of_mix, of_read = cache or (None, None)
            y, of_mix, report = self.mix(x, context, of_mix)
            x = self._normed_sum(self.mix_norm, x + y)
            y, of_read, read_report = self.read(x, context, of_read)
            x = self._normed_sum(self.read_norm, x + y)
            cache, report = (of_mix, of_read), report.merged(read_report)
        y, feed_report = self.feed(x, context)
        return self._normed_sum(self.feed_norm, x + y), cache, report.merged(feed_report)

    def _normed_input(self, norm: nn.Module, x: jax.Array) -> jax.Array:
        return x if self.config.norm_placement == "post" else norm(x)

    def _normed_result(self, branch: str, y: jax.Array) -> jax.Array:
        return getattr(self, f"{branch}_result_norm")(y) if self.config.norm_placement == "sandwich" else y

    def _normed_sum(self, norm: nn.Module, x: jax.Array) -> jax.Array:
        return norm(x) if self.config.norm_placement == "post" else x

    def _drop(self, y: jax.Array, context: Context) -> jax.Array:
        dropping = self.config.dropout > 0.0 and not context.deterministic
        if not dropping:
            return y
        assert context.ids is not None
        return dropout(
            y, self.config.dropout, self.make_rng("dropout"), self.tensor_parallel.local_tokens(context.ids, 1)
        )
