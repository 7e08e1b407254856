"""Compressive Transformer: memories that leave the segment memory are compressed, and kept for longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import dense_init, param
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.nn.mixers.relative_positions import RelativePositions
from hpnlp.ops.attention import Causal, Operands
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.attention.memory.compression import most_used, pool_memories, reconstruction_errors
from hpnlp.ops.attention.memory.relative import received_attention
from hpnlp.types import (
    MixerInputs,
    MixerOutput,
    MixerTraits,
    Projection,
    Statistics,
    TokenStates,
    option,
)

MEMORY_AXES = TokenStates(("batch", None, "embed"), ("batch", None), ("batch", None))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressiveMemory:
    """Compressed and recent tokens of each sequence, oldest first; or, in place of each array, the logical names of its axes.

    Attributes:
      compressed: C compressed memories, each with the position and the segment of the last of its tokens.
      recent: The M tokens that follow them.
      usage: float32 `[B, M]`, "received": the attention that each recent token received, summed over queries and averaged over
          heads; "queries": the number of queries that saw it. Empty where compression does not depend on it.
    """

    compressed: TokenStates
    recent: TokenStates
    usage: Any

    def followed_by(self, tokens: TokenStates) -> TokenStates:
        """The C + M memories and the T tokens that follow, with states of the dtype of the latter."""
        return self.compressed.followed_by(self.recent.followed_by(tokens))


class CompressiveMixer(Mixer):
    """Softmax attention to compressed memories, to a segment memory and to earlier tokens, with relative positions.

    The carry holds the last M hidden states that the mixer read and, before them, C compressed memories. When T tokens are
    added, the T oldest of the M + T tokens leave the memory, and are compressed to T / c memories, which replace the oldest
    compressed ones. If c does not divide T, the oldest T mod c tokens are lost; tasks refuse such a length. A compressed memory
    belongs to the document of the last of its tokens, and depends on no other document.

    Every token attends to all memories and to all earlier tokens of its sequence. Distances count memories, so that a
    compressed memory is one step away from the next, as in the paper. Without a carry, the mixer is causal attention.

    With `how="conv"`, the convolution is trained by the attention-reconstruction loss alone ("reconstruction_loss"): the mean
    square of the difference between attention to the tokens that leave and attention to their compressed form, by content,
    with hidden states, projections and queries as constants. No other loss reaches the convolution, because no gradient
    passes through a carry, and the reconstruction loss reaches nothing else.

    Cost: that of attention to C + M + T keys with relative positions, and the projections of C + M more tokens to keys and
    values. "conv" adds T D^2 multiplications per sequence and attention to T + T / c keys; "most_used" a second forward and
    backward pass of the scores.

    References: Rae et al. 2020, "Compressive Transformers for long-range sequence modelling", arXiv 1911.05507, sec. 3.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True),
        "k": Projection("kv_heads", norm=True, source="carry"),
        "v": Projection("kv_heads", source="carry"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False, decodes=False)

    memory: int = option(128, "Number of recent tokens M that are kept as they are.", least=1)
    compressed: int = option(128, "Number of compressed memories C.", least=1)
    rate: int = option(3, "Tokens per compressed memory c.", least=1)
    how: str = option(
        "conv",
        "conv, a learned convolution of width and stride c; mean or max of c tokens; or most_used, which keeps the T / c "
        "tokens of the T that leave which received the most attention.",
        among=("conv", "mean", "max", "most_used"),
    )
    dropout: float = dropout_option()

    @property
    def divides_heads(self) -> bool:
        """Whether devices can have different heads. The usage of a token is a sum over all heads."""
        return self.how != "most_used"

    @property
    def carry_multiple(self) -> int:
        """Number of tokens by which the length of a batch that continues another must be divisible."""
        return self.rate

    @property
    def carry_axes(self) -> CompressiveMemory:
        """Logical axes of the carry."""
        names = ("received", "queries") if self.how == "most_used" else ()
        return CompressiveMemory(MEMORY_AXES, MEMORY_AXES, dict.fromkeys(names, ("batch", None)))

    @property
    def statistic_axes(self) -> Mapping[str, tuple[str | None, ...]]:
        """Axes of the statistics of the reconstruction loss, which only the convolution has."""
        return {"reconstruction_errors": ("heads",), "reconstructed_tokens": ()} if self.how == "conv" else {}

    def setup(self) -> None:
        self.relative = RelativePositions()

    def initial_carry(self, batch: int, dim: int, dtype: DTypeLike) -> CompressiveMemory:
        """The memory before the first tokens.

        Args:
          batch: Number of sequences B.
          dim: Features of the hidden states D.
          dtype: Dtype of the hidden states.

        Returns:
          A memory without tokens: zeros, with segment id 0.
        """

        def empty(count: int) -> TokenStates:
            ids = jnp.zeros((batch, count), jnp.int32)
            return TokenStates(jnp.zeros((batch, count, dim), dtype), ids, ids)

        usage = {name: jnp.zeros((batch, self.memory), jnp.float32) for name in self.carry_axes.usage}
        return CompressiveMemory(empty(self.compressed), empty(self.memory), usage)

    def further_keys(self, tokens: TokenStates) -> TokenStates | None:
        """The compressed form of the tokens that leave the memory, whose keys and values the reconstruction loss reads.

        Args:
          tokens: The C + M + T memories of `CompressiveMemory.followed_by`.

        Returns:
          T / c memories, through which a gradient reaches the convolution only; None for compression without parameters.
        """
        return self._pooled(self._leaving(tokens, self.compressed)) if self.how == "conv" else None

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        self.within(mask)
        assert inputs.x is not None and inputs.q is not None and inputs.k is not None
        if self.how == "conv":
            self._kernel(inputs.x.shape[-1])  # also where no memory is compressed
        further = 0
        if inputs.carry is not None and self.how == "conv":
            further = inputs.x.shape[1] // self.rate
        visible = _without_last(inputs, further)
        assert visible.k is not None
        o = self.relative(visible, visible.k.shape[1], 0.0 if inputs.deterministic else self.dropout)
        carry = None if inputs.carry is None else self._next_carry(visible)
        return MixerOutput(o, statistics=self._statistics(inputs, further), carry=carry)

    def auxiliary_loss(self, statistics: Statistics) -> dict[str, jax.Array]:
        """The attention-reconstruction loss of one layer.

        Args:
          statistics: Its statistics, summed over the batch.

        Returns:
          "reconstruction_loss", for the convolution: the mean square over tokens, heads and features.
        """
        if self.how != "conv":
            return {}
        errors, tokens = statistics["reconstruction_errors"], statistics["reconstructed_tokens"]
        return {"reconstruction_loss": jnp.mean(errors) / jnp.maximum(tokens, 1.0)}

    def within(self, mask: AnyMask) -> Any:
        """The mask of the pairs of one sequence that influence each other.

        Args:
          mask: `Causal()`.

        Returns:
          `Causal()`.

        Raises:
          InputError: The mask is not `Causal()`, so that it is not defined for the memories.
        """
        return check_mask("a compressive memory", mask, Causal())

    @nn.compact
    def _kernel(self, dim: int) -> Any:
        return param(self, "kernel", dense_init, (self.rate * dim, dim), ("embed", "hidden"))

    def _pooled(self, tokens: TokenStates) -> TokenStates:
        """Compressed memories of consecutive tokens."""
        states = jax.lax.stop_gradient(tokens.states)
        kernel = self._kernel(states.shape[-1]) if self.how == "conv" else None
        states, ids = pool_memories(states, tokens.segment_ids, self.rate, self.how, kernel)
        return TokenStates(states, tokens.positions[:, self.rate - 1 :: self.rate], ids)

    def _leaving(self, tokens: PyTree, first: int) -> Any:
        """The tokens that leave the memory, a multiple of the rate. `first`: number of compressed memories before them."""
        length = jax.tree.leaves(tokens)[0].shape[1] - first - self.memory
        return jax.tree.map(lambda x: x[:, first + length % self.rate : first + length], tokens)

    def _next_carry(self, inputs: MixerInputs) -> CompressiveMemory:
        """The carry after the tokens of x."""
        old: CompressiveMemory = inputs.carry
        tokens = old.recent.followed_by(TokenStates(inputs.x, inputs.positions, inputs.segment_ids))
        leaving, usage = self._leaving(tokens, 0), {}
        if self.how == "most_used":
            usage = self._usage(inputs, tokens.segment_ids)
            of_leaving = self._leaving(usage, 0)
            mean = of_leaving["received"] / jnp.maximum(of_leaving["queries"], 1.0)
            kept = most_used(mean, leaving.segment_ids, self.rate)
            new = jax.tree.map(lambda x: _take(x, kept), leaving)
        else:
            new = self._pooled(leaving)
        compressed = _last(old.compressed.followed_by(new), self.compressed)
        carry = CompressiveMemory(compressed, _last(tokens, self.memory), _last(usage, self.memory))
        return jax.lax.stop_gradient(jax.tree.map(lambda x, before: x.astype(before.dtype), carry, old))

    def _usage(self, inputs: MixerInputs, ids: jax.Array) -> dict[str, jax.Array]:
        """Usage of the recent tokens and those of x, `[B, M + T]`; ids: their segments."""
        assert inputs.q is not None and inputs.k is not None and inputs.segment_ids is not None
        operands = Operands(segment_ids=inputs.segment_ids, kv_segment_ids=inputs.kv_segment_ids)
        embeddings = self.relative.embeddings(inputs, inputs.k.shape[1])
        received = received_attention(inputs.q, inputs.k, *embeddings, operands)
        length = inputs.q.shape[1]
        places = jnp.arange(length, dtype=jnp.int32)[:, None] - jnp.arange(-self.memory, length, dtype=jnp.int32)[None]
        sees = (places >= 0)[None] & (inputs.segment_ids[:, :, None] == ids[:, None])
        added = {"received": received[:, -ids.shape[1] :], "queries": jnp.sum(sees, axis=1, dtype=jnp.float32)}
        return jax.tree.map(lambda old, new: jnp.pad(old, ((0, 0), (0, length))) + new, inputs.carry.usage, added)

    def _statistics(self, inputs: MixerInputs, further: int) -> dict[str, jax.Array]:
        """Sums of the reconstruction loss; 0 where no memory is compressed."""
        if self.how != "conv":
            return {}
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        if not further:
            errors = jnp.sum(jnp.where(False, inputs.q, 0).astype(jnp.float32), axis=(0, 1, 3))
            return {"reconstruction_errors": errors, "reconstructed_tokens": jnp.float32(0)}
        assert inputs.segment_ids is not None and inputs.kv_segment_ids is not None
        keys = inputs.k, inputs.v, inputs.kv_segment_ids
        old = self._leaving(jax.tree.map(lambda x: x[:, :-further], keys), self.compressed)
        new = jax.tree.map(lambda x: x[:, -further:], keys)
        errors, tokens = reconstruction_errors(inputs.q, old, new, inputs.segment_ids)
        return {"reconstruction_errors": errors, "reconstructed_tokens": tokens}


def _last(tokens: PyTree, count: int) -> Any:
    return jax.tree.map(lambda x: x[:, x.shape[1] - count :], tokens)


def _take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """Elements of the second axis, for each sequence."""
    return jnp.take_along_axis(x, indices.reshape(*indices.shape, *[1] * (x.ndim - 2)), axis=1)


def _without_last(inputs: MixerInputs, count: int) -> MixerInputs:
    """The inputs without the last keys."""
    if not count:
        return inputs
    names = ("k", "v", "kv_positions", "kv_segment_ids")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name)[:, :-count] for name in names})
