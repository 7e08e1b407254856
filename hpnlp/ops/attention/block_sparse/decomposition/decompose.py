"""Cost-based decomposition of a mask into sub-masks, each computed over its own selection or permutation of the tokens.

Strided and dilated patterns allow only keys whose position has the query's residue modulo n: with the residue classes as
examples of the batch, they become full masks or windows. Patterns that allow few keys, or that few queries have, are computed
for these tokens alone. The remainder of the mask keeps the order of the tokens. Sub-masks are disjoint, so that their partial
results can be merged. The cost model decides which patterns become sub-masks, and how large the tiles of each are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hpnlp.ops.attention.block_sparse.block_mask import active_tiles
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, estimate_keys_read, make_schedule
from hpnlp.ops.attention.masks.base import And, Mask, Not, Or, Places


@dataclasses.dataclass(frozen=True)
class TokenSelection:
    """The tokens over which a sub-mask is computed, and their order. The default is all tokens in their own order.

    Attributes:
      stride: If over 1, the tokens are permuted: the residue classes of the positions modulo `stride` become examples of the
        batch. `queries` and `keys` are then None.
      queries: Positions of the queries, ascending; None for all.
      keys: Positions of the keys, ascending; None for all.
    """

    stride: int = 1
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None

    def shape(self, length: int, keys: int) -> tuple[int, int]:
        """Number of selected tokens of a T x S mask.

        Args:
          length: Number of queries, T.
          keys: Number of keys, S.

        Returns:
          The number of queries and of keys; for permuted tokens, in each residue class, rounded up.
        """
        if self.stride > 1:
            return -(-length // self.stride), -(-keys // self.stride)
        return length if self.queries is None else len(self.queries), keys if self.keys is None else len(self.keys)

    def restrict(self, mask: Mask) -> Mask:
        """The mask as a function of indices into the selected tokens, from which active tiles are found.

        Args:
          mask: A mask over positions.

        Returns:
          The mask over indices. For permuted tokens, its `tile` is sound for all residue classes at once, and its `at` may be
          undefined.
        """
        if self.stride > 1:
            return mask.fold(self.stride)[0]
        return mask if self == ALL_TOKENS else _SelectedMask(mask, self)


ALL_TOKENS = TokenSelection()


@dataclasses.dataclass(frozen=True)
class SubMask:
    """A part of a mask that is computed by one schedule.

    Attributes:
      mask: The allowed pairs, a function of positions, or of positions divided by `selection.stride` if
        `over_quotients`.
      selection: The tokens over which the sub-mask is computed.
      schedule: The schedule, over indices into the selected tokens.
      over_quotients: True if every residue class has the same mask over positions divided by `selection.stride`.
    """

    mask: Mask
    selection: TokenSelection
    schedule: BlockSchedule
    over_quotients: bool


@functools.lru_cache(maxsize=256)
def decompose(
    mask: Mask,
    length: int,
    keys: int,
    block_size: int | tuple[int, int] | None,
    heads: int,
    undivided: bool,
    divide_all: bool = False,
) -> tuple[SubMask, ...]:
    """The cheapest decomposition of a T x S mask into disjoint sub-masks, by the cost model.

    Args:
      mask: The mask.
      length: Number of queries, T.
      keys: Number of keys, S.
      block_size: Queries and keys in a block, one number, or two, which are taken as they are; None for the cheapest of
        `cost_model.tile_sizes()`.
      heads: Number of (batch, head) pairs that run together, at most.
      undivided: Whether the mask must stay in one part, over all tokens in their own order.
      divide_all: Whether all patterns that have a selection of their own become sub-masks, whatever the cost.

    Returns:
      The sub-masks, whose union is `mask`.

    Cost: O(2^n) estimates for the n different selections of the mask's patterns.
    """
    terms = {} if undivided else _terms_by_selection(mask, length, keys)
    selections = [selection for selection in terms if selection != ALL_TOKENS]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(selections, size) for size in range(len(selections) + 1)
    )
    if divide_all:
        subsets = [tuple(selection for selection in selections if () not in (selection.queries, selection.keys))]

    def cost(candidate: Iterable[tuple[Mask, TokenSelection]]) -> float:
        costs = (_best_tiles(part, selection, length, keys, block_size)[0] for part, selection in candidate)
        return sum(costs, 0.0)

    best = min((_disjoint(mask, terms, chosen) for chosen in subsets), key=cost)
    return tuple(_sub_mask(part, selection, length, keys, block_size, heads) for part, selection in best)


# Patterns of a mask and the selections that suit them.


def _terms_by_selection(mask: Mask, length: int, keys: int) -> dict[TokenSelection, list[Mask]]:
    """The mask's union terms by the selection that suits each; at most one selection of queries and one of keys."""
    terms: dict[TokenSelection, list[Mask]] = {}
    for term in mask.union_terms():
        terms.setdefault(_suitable_selection(term, length, keys), []).append(term)
    for name in ("queries", "keys"):
        same = [selection for selection in terms if getattr(selection, name) is not None]
        if len(same) > 1:
            union = sorted(set(itertools.chain.from_iterable(getattr(selection, name) for selection in same)))
            joined = [term for selection in same for term in terms.pop(selection)]
            terms[dataclasses.replace(ALL_TOKENS, **{name: tuple(union)})] = joined
    return terms


def _suitable_selection(term: Mask, length: int, keys: int) -> TokenSelection:
    """The few queries of a term, its residue classes, its few keys, or all tokens; the first that the term has."""
    factors = term.factors()
    for factor in factors:
        indices = factor.query_indices(length)
        if indices is not None and len(indices) <= cost_model.MAX_SELECTED_TOKENS:
            return TokenSelection(queries=tuple(indices))
    stride = math.lcm(*(factor.residue_period() for factor in factors))
    if stride > 1:
        return TokenSelection(stride=stride) if stride <= min(length, keys) else ALL_TOKENS
    for factor in factors:
        indices = factor.key_indices(keys)
        if indices is not None and len(indices) <= max(cost_model.MAX_SELECTED_TOKENS, keys // 2):
            return TokenSelection(keys=tuple(indices))
    return ALL_TOKENS


def _disjoint(
    mask: Mask, terms: dict[TokenSelection, list[Mask]], chosen: Sequence[TokenSelection]
) -> list[tuple[Mask, TokenSelection]]:
    """Disjoint masks with their selections, if the terms of `chosen` run apart and all others over all tokens."""
    if not chosen:
        return [(mask, ALL_TOKENS)]
    remaining = [term for selection in terms if selection not in chosen for term in terms[selection]]
    masks: list[tuple[Mask, TokenSelection]] = []
    earlier: list[Mask] = []
    for selection, members in ((ALL_TOKENS, remaining), *((selection, terms[selection]) for selection in chosen)):
        if members:
            part = functools.reduce(Or, members)
            for term in earlier:
                part = And(part, Not(term))
            masks.append((part, selection))
            earlier += members
    return masks


@dataclasses.dataclass(frozen=True)
class _SelectedMask(Mask):
    """A mask over indices into the selected queries and keys."""

    mask: Mask
    selection: TokenSelection

    def at(self, q: Places, k: Places) -> Any:
        return self.mask.at(_positions(q, self.selection.queries), _positions(k, self.selection.keys))

    def tile(self, q0: Places, q1: Places, k0: Places, k1: Places) -> tuple[Any, Any]:
        rows, keys = self.selection.queries, self.selection.keys
        return self.mask.tile(_positions(q0, rows), _positions(q1, rows), _positions(k0, keys), _positions(k1, keys))


def _positions(indices: Places, selected: tuple[int, ...] | None) -> Any:
    """The positions at indices into `selected`; indices beyond the last are in the padding and give the last."""
    return indices if selected is None else _as_array(selected)[np.minimum(indices, len(selected) - 1)]


@functools.lru_cache(maxsize=64)
def _as_array(positions: tuple[int, ...]) -> np.ndarray:
    return np.asarray(positions, np.int64)


# Costs, tile sizes and schedules of sub-masks.


@functools.lru_cache(maxsize=1024)
def _best_tiles(
    mask: Mask, selection: TokenSelection, length: int, keys: int, block_size: int | tuple[int, int] | None
) -> tuple[float, tuple[int, int]]:
    """Estimated cost of a sub-mask in scores per head, and the tile (queries, keys) with which it costs this."""
    queries, selected_keys = selection.shape(length, keys)
    if not queries or not selected_keys:
        return 0.0, cost_model.TILE_SIZES[-1]
    local = selection.restrict(mask)
    candidates: list[tuple[float, tuple[int, int]]] = []
    exact = isinstance(block_size, tuple)
    pair = block_size if isinstance(block_size, tuple) else (block_size or 0,) * 2
    for block, key_block in (pair,) if block_size else cost_model.tile_sizes():
        if not exact:
            block, key_block = _clipped(block, queries), _clipped(key_block, selected_keys)
        keys_read = _estimate_total_keys_read(local, queries, selected_keys, block, key_block)
        candidates.append((keys_read * block * cost_model.score_cost(block, key_block), (block, key_block)))
    cost, tile = min(candidates, key=lambda candidate: candidate[0])
    cost *= selection.stride
    if selection != ALL_TOKENS:
        merged = length if selection.queries is None else queries
        cost += cost_model.sub_mask_overhead(merged, (length + keys) / 2 if selection.stride > 1 else 0.0)
    return cost, tile


def _clipped(block: int, length: int) -> int:
    """The block size, or the power of two that holds all tokens if that is less."""
    return min(block, 1 << (length - 1).bit_length())


def _estimate_total_keys_read(mask: Mask, length: int, keys: int, block: int, key_block: int) -> float:
    """Keys that all query blocks read together, from a sample of them."""
    count = -(-length // block)
    inner = np.zeros(0, int)
    if count > 2:
        inner = np.linspace(1, count - 2, min(cost_model.SAMPLED_QUERY_BLOCKS, count - 2)).astype(int)
        inner = np.unique(inner)
    sample = np.unique(np.concatenate([[0], inner, [count - 1]]))
    tiles = active_tiles(mask, length, keys, block, key_block, sample)
    keys_read = estimate_keys_read(np.bincount(tiles.rows, minlength=count), key_block)
    # The first and the last query block count for themselves: global tokens are usually there.
    inner_keys = keys_read[inner].sum() / max(inner.size, 1) * max(count - 2, 0)
    return float(inner_keys + keys_read[0] + (keys_read[-1] if count > 1 else 0))


def _sub_mask(
    mask: Mask, selection: TokenSelection, length: int, keys: int, block_size: int | tuple[int, int] | None, heads: int
) -> SubMask:
    """The sub-mask with its schedule."""
    _, (block, key_block) = _best_tiles(mask, selection, length, keys, block_size)
    queries, selected_keys = selection.shape(length, keys)
    tiles = active_tiles(selection.restrict(mask), queries, selected_keys, block, key_block)
    # A tile that reaches beyond the last token, in the sequence or in a residue class, has hidden pairs.
    last_query, last_key = (tiles.rows + 1) * block, (tiles.columns + 1) * key_block
    inside = (last_query <= queries) & (last_key <= selected_keys)
    if selection.stride > 1:
        inside &= (last_query * selection.stride <= length) & (last_key * selection.stride <= keys)
    tiles = dataclasses.replace(tiles, every=tiles.every & inside)
    schedule = make_schedule(tiles, queries, block, key_block, heads * selection.stride)
    over_quotients = False
    if selection.stride > 1:
        folded, over_quotients = mask.fold(selection.stride)
        mask = folded if over_quotients else mask
    return SubMask(mask, selection, schedule, over_quotients)
