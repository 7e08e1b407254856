"""Attention to blocks of earlier tokens that each query chooses by their content: MoBA and native sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import Dense, param
from hpnlp.nn.mixers.checks import check_decoding, check_mask, dropout_option
from hpnlp.ops.attention import Causal, Window, attend, merge
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.ops.attention.selected_blocks import (
    BlockCache,
    ChosenBlocks,
    DocumentBlocks,
    attend_blocks,
    attend_positions,
    block_positions,
    block_summaries,
    choose_blocks,
    document_blocks,
    own_block_attention,
    start_block_cache,
)
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option

# Position of a block that does not exist: after every token.
NEVER = 2**30


class MobaMixer(Mixer):
    """Causal attention of each token to its own block and to the earlier blocks that it scores highest.

    A document is divided into blocks of `block` tokens, counted from its first token. Each query head attends to the tokens of
    its own block up to the query, and to all tokens of the `top` complete earlier blocks with the highest q . mean of the
    block's keys. The choice has no gradient. With `top` of at least the number of blocks, this is causal softmax attention.

    Cost: O(B T N H (top + 1) block) time, and B N T^2 / block scores for the choice; partial results of B T N top H float32
    numbers, on a CPU of one key head at a time. The cache holds all keys and values, and a mean for each block; a decoding
    step reads the means and the chosen blocks.

    References: Lu et al. 2025, "MoBA: Mixture of block attention for long-context LLMs", arXiv 2502.13189, sec. 2.2. The
    paper's number of blocks includes the own one.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)

    block: int = option(128, "Number of tokens of a block.", least=1)
    top: int = option(3, "Number of earlier blocks that a query attends to, in addition to its own.", least=0)
    dropout: float = dropout_option()

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        self.within(mask)
        q, k, v = inputs.q, inputs.k, inputs.v
        blocks = document_blocks(inputs.segment_ids, q.shape[0], q.shape[1], self.block)
        chosen = choose_blocks(q, block_summaries(k, blocks), blocks, self.top, segment_ids=inputs.segment_ids)
        o = _own_and_chosen(q, k, v, blocks, chosen, _dropout(inputs, self.dropout))
        cache = None
        if inputs.capacity is not None:
            cache = start_block_cache(k, v, inputs.lengths(), self.block, inputs.capacity)
        return MixerOutput(o, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: BlockCache) -> tuple[jax.Array, BlockCache]:
        """Mixes new tokens with those of their own blocks and the chosen ones.

        Args:
          inputs: q, k and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        q, positions, longer = _extended(self, inputs, cache)
        self.within(mask)
        chosen = choose_blocks(q, longer.k_summaries, longer.blocks(), self.top, indices=positions)
        return attend_positions(q, longer.k, longer.v, block_positions(chosen, positions, self.block)), longer

    def within(self, mask: AnyMask) -> Any:
        """The pairs that may influence each other.

        Args:
          mask: `Causal()`.

        Returns:
          `Causal()`: any earlier token may be in a chosen block.

        Raises:
          InputError: Another mask.
        """
        return check_mask("moba", mask, Causal())


class NsaMixer(Mixer):
    """Causal attention in three branches, to summaries of blocks, to chosen blocks and to a window, added with learned gates.

    - compressed: softmax attention to one key and one value for each complete block up to the query: the mean of the block's
      keys and values, or their sum with learned weights for each place in a block and each key head;
    - selected: softmax attention to the tokens of the query's own block up to the query, and of `top` complete earlier blocks:
      the first one of the document, and those to whose summaries the query heads of a key head give the highest probabilities
      in the compressed branch, summed. All query heads of a key head choose the same blocks;
    - window: the last `window` tokens, the query included.

    The output is the sum of the branches times gates in (0, 1), a sigmoid of a linear function of x for each head and branch.

    Differences to the paper: blocks of the compressed and of the selected branch are the same and do not overlap; the three
    branches share keys and values; a weighted sum stands for the MLP that compresses a block.

    Cost: O(B T N H ((top + 1) block + window + T / block)) time; partial results of B T N top H float32 numbers, on a CPU
    of one key head at a time. The cache holds all keys and values, and a summary of each block; a decoding step reads the
    summaries, the chosen blocks and the window.

    References: Yuan et al. 2025, "Native sparse attention: Hardware-aligned and natively trainable sparse attention", arXiv
    2502.11089, eq. 5 to 12.
    """

    needs: ClassVar[Mapping[str, Projection]] = MobaMixer.needs
    traits: ClassVar[MixerTraits] = MixerTraits(bidirectional=False)

    block: int = option(64, "Number of tokens of a block.", least=1)
    top: int = option(4, "Number of earlier blocks in the selected branch, in addition to the query's own.", least=0)
    window: int = option(256, "Number of tokens in the window, the current one included.", least=1)
    compression: str = option("mean", "How a block becomes one key and one value.", among=("mean", "learned"))
    dropout: float = dropout_option()

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None
        self.within(mask)
        q, k, v, segment_ids = inputs.q, inputs.k, inputs.v, inputs.segment_ids
        dropout, weights = _dropout(inputs, self.dropout), self._weights(k.shape[2])
        blocks = document_blocks(segment_ids, q.shape[0], q.shape[1], self.block)
        keys, values = (block_summaries(x, blocks, w) for x, w in zip((k, v), weights, strict=True))
        compressed, lse = _to_summaries(q, keys, values, blocks, segment_ids, dropout)
        chosen = choose_blocks(q, keys, blocks, self.top, segment_ids=segment_ids, lse=lse)
        selected = _own_and_chosen(q, k, v, blocks, chosen, dropout)
        window: Any = attend(
            q, k, v, Window(self.window - 1, 0), segment_ids=segment_ids, kv_segment_ids=segment_ids, **dropout
        )
        cache = None
        if inputs.capacity is not None:
            lengths = inputs.lengths()
            cache = start_block_cache(k, v, lengths, self.block, inputs.capacity, *weights, has_v_summaries=True)
        return MixerOutput(self._gated(inputs.x, compressed, selected, window), cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: BlockCache) -> tuple[jax.Array, BlockCache]:
        """Mixes new tokens with summaries, chosen blocks and the window.

        Args:
          inputs: x, q, k and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on.
        """
        self.within(mask)
        q, positions, longer = _extended(self, inputs, cache, *self._weights(cache.k_summaries.shape[2]))
        keys, values, kv_heads = longer.k_summaries, longer.v_summaries, longer.k_summaries.shape[2]
        compressed, lse = _to_summaries(q, keys, values, longer.blocks(), None, {}, positions)
        chosen = choose_blocks(q, keys, longer.blocks(), self.top, indices=positions, lse=lse)
        selected = attend_positions(q, longer.k, longer.v, block_positions(chosen, positions, self.block))
        last = positions[..., None] - jnp.arange(self.window, dtype=jnp.int32)[None, None]
        last = jnp.broadcast_to(jnp.maximum(last, -1)[:, :, None], (*positions.shape, kv_heads, self.window))
        window = attend_positions(q, longer.k, longer.v, last)
        return self._gated(inputs.x, compressed, selected, window), longer

    def within(self, mask: AnyMask) -> Any:
        """The pairs that may influence each other.

        Args:
          mask: `Causal()`.

        Returns:
          `Causal()`.

        Raises:
          InputError: Another mask.
        """
        return check_mask("nsa", mask, Causal())

    @nn.compact
    def _weights(self, kv_heads: int) -> tuple[jax.Array | None, jax.Array | None]:
        """Weights of the places in a block for keys and for values, `[K, block]` each; None for means."""
        if self.compression == "mean":
            return None, None
        init = nn.initializers.constant(1 / self.block)
        axes, shape = ("kv_heads", "positions"), (kv_heads, self.block)
        return param(self, "k_weights", init, shape, axes), param(self, "v_weights", init, shape, axes)

    @nn.compact
    def _gated(self, x: jax.Array | None, *branches: jax.Array) -> jax.Array:
        """Sum of branches `[B, T, N, H]` times their gates."""
        assert x is not None
        o = branches[0]
        gates = Dense(o.shape[2] * len(branches), ("embed", "heads"), name="gates")(x)
        gates = jax.nn.sigmoid(gates.astype(jnp.float32)).reshape(*o.shape[:3], len(branches))
        total = sum(gates[..., i, None] * branch.astype(jnp.float32) for i, branch in enumerate(branches))
        return jnp.asarray(total).astype(o.dtype)


def _dropout(inputs: MixerInputs, rate: float) -> dict[str, Any]:
    """Arguments of `attend` for dropout."""
    if inputs.deterministic or not rate:
        return {}
    return {"dropout_rate": rate, "rng": inputs.rng, "streams": inputs.streams}


def _own_and_chosen(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: DocumentBlocks, chosen: jax.Array, dropout: dict[str, Any]
) -> jax.Array:
    """Attention to the tokens of the own block up to the query and of the chosen blocks together."""
    within = own_block_attention(q, k, v, blocks, **dropout)
    if k.shape[1] < blocks.block or not chosen.shape[3]:
        return within[0]
    others = attend_blocks(q, k, v, ChosenBlocks(blocks.starts, chosen, blocks.block), **dropout)
    return merge(within, others)[0]


def _to_summaries(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: DocumentBlocks,
    segment_ids: jax.Array | None,
    dropout: dict[str, Any],
    positions: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention `(o, lse)` to the summaries of the blocks that end at the query or before it."""
    ends = jnp.where(blocks.starts < 0, NEVER, blocks.starts + (blocks.block - 1))
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32)[None], q.shape[:2])
    result: Any = attend(
        q,
        k.astype(q.dtype),
        v.astype(q.dtype),
        Causal(),
        positions=positions,
        kv_positions=ends,
        segment_ids=segment_ids,
        kv_segment_ids=blocks.segment_ids,
        return_lse=True,
        **dropout,
    )
    return result


def _extended(
    mixer: MobaMixer | NsaMixer, inputs: MixerInputs, cache: BlockCache, *weights: jax.Array | None
) -> tuple[jax.Array, jax.Array, BlockCache]:
    """`(q, positions, the cache with the new tokens)`."""
    check_decoding(inputs, mixer.dropout)
    assert inputs.q is not None and inputs.k is not None and inputs.v is not None
    return inputs.q, cache.positions(inputs.q.shape[1]), cache.extended(inputs.k, inputs.v, *weights)
