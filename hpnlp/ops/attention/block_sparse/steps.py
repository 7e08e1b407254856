"""The loop over the steps of a schedule, and which pairs are visible in each step, for executors that scan tiles."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from hpnlp.ops.attention.block_sparse import tile
from hpnlp.ops.attention.block_sparse.array_blocks import (
    IN_BOUNDS,
    PairBlocks,
    split_heads,
    take_key_blocks,
    take_run,
    to_blocks,
)
from hpnlp.ops.attention.block_sparse.operands import ExecutorOperands, Options, TokenInfo
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, TileGroup, TileState
from hpnlp.ops.attention.block_sparse.tile import QueryResiduals, TileMask
from hpnlp.ops.helpers.custom_vjp import tied, vary_alike
from hpnlp.types import AnyArray

# States of a step: no pair is visible; all pairs are visible; pairs must be tested; all pairs of the keys that exist are
# visible.
EMPTY, FULL, TESTED, PADDED = range(4)


def residual_blocks(residuals: QueryResiduals, block: int, heads: tuple[int, int]) -> QueryResiduals:
    """Residuals in blocks; padding has lse +inf, as rows that see nothing.

    Args:
      residuals: Residuals of the queries, [B, T, N, ...].
      block: Queries in a block.
      heads: (K, G).

    Returns:
      [blocks, B, K, G, block, ...] each.
    """
    return QueryResiduals(
        to_blocks(residuals.q, block, heads, 0.0),
        to_blocks(residuals.do, block, heads, 0.0),
        to_blocks(residuals.lse, block, heads, jnp.inf),
        to_blocks(residuals.lse_low, block, heads, 0.0),
        to_blocks(residuals.delta, block, heads, 0.0),
    )


@dataclasses.dataclass(frozen=True)
class GroupSteps:
    """The steps of a group of tiles, for one `lax.scan`.

    Attributes:
      tile_masks: The tile masks of the chunk.
      states: The state of each step, int32 [n]; numpy where the schedule alone decides, which has no EMPTY steps.
      inputs: Inputs of the steps: first query block int32 [n], key blocks int32 [n, R, w] and state int32 [n].
      unroll: Steps in one iteration of the loop.
    """

    tile_masks: TileMasks
    states: Any
    inputs: tuple[Array, Array, Array]
    unroll: int

    def body(self, step: Callable[[GroupSteps, Any, Any], tuple[Any, None]]) -> Callable[[Any, Any], tuple[Any, None]]:
        """The body of the loop: `step(self, sums, inputs)` for steps that are not EMPTY."""
        if isinstance(self.states, np.ndarray):
            return functools.partial(step, self)

        def skip_empty(sums: Any, inputs: Any) -> tuple[Any, None]:
            return lax.cond(inputs[2] > EMPTY, lambda x: step(self, x, inputs), lambda x: (x, None), sums)

        return skip_empty

    def tile(self, sums: Any, inputs: tuple[Array, Array, Array]) -> tuple[Array, Array, TileMask, Any]:
        """(first query block, key blocks, tile mask, bias function) of a step; the last two as `TileMasks.step_mask`."""
        # Marked as varying once here, because JAX would otherwise insert it at each of their uses.
        first, keys, *_ = vary_alike(*inputs[:2], *jax.tree.leaves(sums))
        return first, keys, *self.tile_masks.step_mask(first, keys, inputs[2], self.states)


class TileMasks:
    """Makes the TileMask of each step of a chunk from the operands in blocks.

    Args:
      options: Static settings of the executor.
      operands: Run-time operands of the chunk.
      schedule: The steps.
      kv_heads: Key heads of the chunk.
      bias: The PairBias of a step, as a function of its query block and key blocks; None without one.

    Attributes:
      queries: Properties of the queries, [query blocks, B or 1, block] each.
      keys: Properties of the keys, [key blocks, B or 1, key_block] each.
      dense: The dense mask in blocks, or None.
    """

    def __init__(
        self,
        options: Options,
        operands: ExecutorOperands,
        schedule: BlockSchedule,
        kv_heads: int,
        bias: Callable[[Array, Array], Array] | None = None,
    ) -> None:
        self._options, self._operands, self._schedule, self._bias = options, operands, schedule, bias
        self.dense = _pair_blocks(operands.dense, schedule, kv_heads)
        self.queries = _token_blocks(operands.queries, schedule.block)
        self.keys = _token_blocks(operands.keys, schedule.key_block)
        # [1, B or 1, K, G] each
        self._streams: Any = None if operands.streams is None else split_heads(operands.streams, kv_heads)[None]
        self._heads: Any = None if operands.heads is None else split_heads(operands.heads, kv_heads)[None]
        self._bounds = functools.cache(self._block_bounds)

    def steps(self, group: TileGroup) -> GroupSteps:
        """The steps of a group of tiles of equal shape."""
        states = self._states(group)
        # Two steps at a time take a tenth less time, since XLA:CPU's products of a few rows keep only one core busy.
        unroll = 2 if jax.default_backend() == "cpu" and states.shape[0] % 2 == 0 else 1
        inputs = tied((jnp.asarray(group.first), jnp.asarray(group.keys), jnp.asarray(states)), self.queries.index)
        return GroupSteps(self, states, inputs, unroll)

    def _states(self, group: TileGroup) -> Any:
        """`GroupSteps.states`: EMPTY where bounds of the run-time operands show that no pair is visible."""
        operands, queries = self._operands, self._operands.queries
        if all(x is None for x in (operands.lengths, queries.segment, queries.position, queries.is_global)):
            where = np.where if isinstance(group.state, np.ndarray) else jnp.where
            state = group.state.astype(np.int32)
            must_test = (state == int(TileState.EVALUATE_MASK)) | (operands.dense is not None)
            return where(must_test, TESTED, where(state == int(TileState.HIDE_PADDING), PADDED, FULL)).astype(np.int32)
        keys = jnp.asarray(group.keys)
        runs = jnp.asarray(group.first)[:, None] + jnp.arange(keys.shape[1], dtype=jnp.int32)[None]

        def q_bounds(name: str, reduce: Callable[..., Array]) -> Array:
            return self._bounds("queries", name, reduce).at[runs].get(**IN_BOUNDS)[:, :, None]

        def k_bounds(name: str, reduce: Callable[..., Array]) -> Array:
            return self._bounds("keys", name, reduce).at[keys].get(**IN_BOUNDS)

        active = keys[..., None] >= 0  # [n, R, w, B]
        if not operands.mask_is_static:  # the schedule then has all tiles
            at = "position_in_mask"
            corners = q_bounds(at, jnp.min), q_bounds(at, jnp.max), k_bounds(at, jnp.min), k_bounds(at, jnp.max)
            active = active & self._options.mask.tile(*corners)[0]
        if queries.is_global is not None:
            active = active | q_bounds("is_global", jnp.any) | k_bounds("is_global", jnp.any)
        if queries.segment is not None:
            active = active & (q_bounds("segment", jnp.min) <= k_bounds("segment", jnp.max))
            active = active & (k_bounds("segment", jnp.min) <= q_bounds("segment", jnp.max))
        if operands.lengths is not None:
            active = active & (k_bounds("index", jnp.min) < operands.lengths[None, None, None])
        return jnp.where(active.any(axis=(1, 2, 3)), TESTED, EMPTY).astype(jnp.int32)

    def step_mask(self, first: Array, keys: Array, state: Array, states: Any) -> tuple[TileMask, Any]:
        """The TileMask of a step, and for a bias function the bias as a function of the arrays that it closes over.

        Args:
          first: int32 [], the first query block.
          keys: int32 [R, w], the key blocks.
          state: The state of the step.
          states: The states of all steps of its group.

        Returns:
          (the tile mask, the function or None).
        """
        options, operands = self._options, self._operands
        query_info = take_run(self.queries, first, keys.shape[0])
        key_info = jax.tree.map(lambda x: take_key_blocks(x, keys, -1), self.keys)
        exists = jnp.repeat(keys >= 0, self._schedule.key_block, axis=1)[:, None]
        key_info = dataclasses.replace(key_info, index=jnp.where(exists, key_info.index, -1))

        def test() -> Array:
            dense = None if self.dense is None else self.dense.take(first, keys)
            lengths = None if operands.lengths is None else operands.lengths[None]
            visible: Any = tile.visible_pairs(options.mask, query_info, key_info, lengths, dense)
            inside = (query_info.index >= 0)[..., :, None] & (key_info.index >= 0)[..., None, :]
            return visible & inside[..., None, None, :, :]

        kept = None
        if operands.seed is not None:
            kept = tile.kept_weights(options, operands.seed, self._streams, query_info, key_info)
        inside = (key_info.index >= 0)[..., None, None, None, :]
        tile_mask = TileMask(self._visible(test, inside, state, states), kept)
        if self._bias is not None:
            return dataclasses.replace(tile_mask, bias=self._bias(first, keys)), None
        if options.bias_jaxpr is None:
            return tile_mask, None

        def bias(closed_over: PyTree) -> Array:
            return tile.bias_of_function(options, closed_over, self._heads, query_info, key_info)

        return dataclasses.replace(tile_mask, bias=bias(operands.bias)), bias

    def _visible(self, test: Callable[[], Array], inside: Array, state: Array, states: AnyArray) -> Array | None:
        """`test()` for TESTED steps and `inside`, the keys that exist, for others; None where all steps are FULL.

        The test is a branch of its own, so that XLA does not evaluate the mask again for each head and each pass over the
        scores, which takes a quarter of the time of a window. The barrier keeps XLA from undoing the branch where it is
        always taken.
        """
        if isinstance(states, np.ndarray) and (states == FULL).all():
            return None
        if isinstance(states, np.ndarray) and not (states == TESTED).any():
            return inside
        like = jax.eval_shape(test)
        arrays = jax.tree.leaves((self.queries, self.keys, self._operands.lengths, self._operands.dense))

        def all_inside() -> Array:
            return vary_alike(jnp.broadcast_to(inside, like.shape), *arrays)[0]

        return lax.cond(lax.optimization_barrier(state) == TESTED, test, all_inside)

    def _block_bounds(self, side: str, name: str, reduce: Callable[..., Array]) -> Array:
        """[blocks, B]: `reduce` over each block of a property of the "queries" or "keys", padding left out."""
        tokens: TokenInfo = getattr(self._operands, side)
        block = self._schedule.block if side == "queries" else self._schedule.key_block
        x, int32 = getattr(tokens, name), jnp.iinfo(jnp.int32)
        fill = jnp.asarray({jnp.any: False, jnp.min: int32.max, jnp.max: int32.min}[reduce], x.dtype)
        return reduce(to_blocks(jnp.where(tokens.index >= 0, x, fill), block, fill=fill), axis=2)


def _pair_blocks(x: Array | None, schedule: BlockSchedule, kv_heads: int) -> PairBlocks | None:
    """An operand [B, N, T, S] in blocks."""
    return None if x is None else PairBlocks(split_heads(x, kv_heads), schedule.block, schedule.key_block)


def _token_blocks(tokens: TokenInfo, block: int) -> TokenInfo:
    """Properties of tokens in blocks; padding has index -1."""
    index = to_blocks(tokens.index, block, fill=-1)
    return dataclasses.replace(jax.tree.map(lambda x: to_blocks(x, block), tokens), index=index)
