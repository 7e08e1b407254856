"""In which orders of the tokens a mask runs, and in which blocks: what each pattern of it costs there decides.

Strided and dilated patterns see every n-th token: with the residue classes of the positions as rows of a batch, they are
full or windows. Patterns that see few keys, or that few queries have, run on these alone. What is left keeps its order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from hpnlp.ops.attention.block_sparse import cost_model
from hpnlp.ops.attention.block_sparse.block_mask import live
from hpnlp.ops.attention.block_sparse.schedule import BlockSchedule, plan, visit_keys
from hpnlp.ops.attention.masks.base import And, Mask, Not, Or


@dataclasses.dataclass(frozen=True)
class Order:
    """stride: over 1, the residue classes of the positions are rows of the batch. rows, keys: the queries and the keys that
    a part runs on, ascending; None for all."""

    stride: int = 1
    rows: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """Pairs that run together. mask: what is asked, of quotients by the stride where `quotients`, else of positions."""

    mask: Mask
    order: Order
    blocks: BlockSchedule
    quotients: bool


@functools.lru_cache(maxsize=256)
def parts(
    mask: Mask, length: int, keys: int, block_size: int | None, heads: int, one: bool, every: bool = False
) -> tuple[Part, ...]:
    """The disjoint parts of a T x S mask, the cheapest way. heads: batch x heads. one: whether it must stay in one part.
    every: whether all terms that have an order of their own run in it, whatever it costs."""
    groups = {} if one else _groups(mask, length, keys)
    special = [order for order in groups if order != Order()]
    best: tuple[float, list[tuple[Mask, Order]]] = (math.inf, [])
    choices = itertools.chain.from_iterable(itertools.combinations(special, n) for n in range(len(special) + 1))
    if every:
        choices = [tuple(order for order in special if () not in (order.rows, order.keys))]
    for chosen in choices:
        split = _disjoint(mask, groups, chosen)
        cost = sum(_cost(part, order, length, keys, block_size)[0] for part, order in split)
        best = min(best, (cost, split), key=lambda entry: entry[0])
    return tuple(_part(part, order, length, keys, block_size, heads) for part, order in best[1])


def _disjoint(mask: Mask, groups: dict[Order, list[Mask]], chosen: tuple[Order, ...]) -> list[tuple[Mask, Order]]:
    """What is not in the chosen orders first, in its own; each part without what an earlier one holds."""
    if not chosen:
        return [(mask, Order())]
    rest = [term for order, terms in groups.items() if order not in chosen for term in terms]
    found, before = [], []
    for order, terms in ((Order(), rest), *((order, groups[order]) for order in chosen)):
        if terms:
            part = functools.reduce(Or, terms)
            found.append((functools.reduce(lambda a, b: And(a, Not(b)), before, part), order))
            before += terms
    return found


def _groups(mask: Mask, length: int, keys: int) -> dict[Order, list[Mask]]:
    """The mask's terms by the order that suits each."""
    groups: dict[Order, list[Mask]] = {}
    for term in mask.union_terms():
        groups.setdefault(_order(term, length, keys), []).append(term)
    few = [order for order in groups if order.rows is not None or order.keys is not None]
    for name in ("rows", "keys"):  # one part for all terms on some rows, one for all on some keys
        same = [order for order in few if getattr(order, name) is not None]
        if len(same) > 1:
            union = sorted(set(itertools.chain.from_iterable(getattr(order, name) for order in same)))
            groups[dataclasses.replace(Order(), **{name: tuple(union)})] = list(
                itertools.chain.from_iterable(groups.pop(o) for o in same)
            )
    return groups


def _order(term: Mask, length: int, keys: int) -> Order:
    factors, stride = term.factors(), 1
    for factor in factors:
        indices = factor.query_indices(length)
        if indices is not None and len(indices) <= cost_model.FEW:
            return Order(rows=tuple(indices))
    for factor in factors:
        stride = math.lcm(stride, factor.residue_period())
    if stride > 1:
        return Order(stride=stride) if stride <= min(length, keys) else Order()
    for factor in factors:
        indices = factor.key_indices(keys)
        if indices is not None and len(indices) <= max(cost_model.FEW, keys // 2):
            return Order(keys=tuple(indices))
    return Order()


@dataclasses.dataclass(frozen=True)
class _Chosen(Mask):
    """A mask over the numbers of chosen queries and keys."""

    mask: Mask
    order: Order

    def _places(self, x: Any, indices: tuple[int, ...] | None) -> Any:
        return x if indices is None else _array(indices)[np.minimum(x, len(indices) - 1)]

    def at(self, q: Any, k: Any) -> Any:
        return self.mask.at(self._places(q, self.order.rows), self._places(k, self.order.keys))

    def tile(self, q0: Any, q1: Any, k0: Any, k1: Any) -> tuple[Any, Any]:
        rows, keys = self.order.rows, self.order.keys
        q0, q1, k0, k1 = (self._places(x, of) for x, of in ((q0, rows), (q1, rows), (k0, keys), (k1, keys)))
        return self.mask.tile(q0, q1, k0, k1)


@functools.lru_cache(maxsize=64)
def _array(indices: tuple[int, ...]) -> np.ndarray:
    return np.asarray(indices, np.int64)


def _local(mask: Mask, order: Order, length: int, keys: int) -> tuple[Mask, int, int]:
    """The mask in its order, and how many queries and keys there are."""
    if order.stride > 1:
        return mask.fold(order.stride)[0], -(-length // order.stride), -(-keys // order.stride)
    if order == Order():
        return mask, length, keys
    rows, columns = order.rows, order.keys
    return _Chosen(mask, order), length if rows is None else len(rows), keys if columns is None else len(columns)


@functools.lru_cache(maxsize=1024)
def _cost(mask: Mask, order: Order, length: int, keys: int, block_size: int | None) -> tuple[float, tuple[int, int]]:
    """Scores to compute a head, what is beside them counted as such, and the best blocks."""
    local, rows, columns = _local(mask, order, length, keys)
    if not rows or not columns:
        return 0.0, (64, 64)
    best = (math.inf, (64, 64))
    for block, key_block in ((block_size, block_size),) if block_size else cost_model.block_sizes():
        block, key_block = (min(size, 1 << (n - 1).bit_length()) for size, n in ((block, rows), (key_block, columns)))
        price = next(price for least, price in cost_model.PRICES.items() if min(block, key_block) >= least)
        count = -(-rows // block)
        inner = (
            np.unique(np.linspace(1, count - 2, min(cost_model.SAMPLE, count - 2)).astype(int))
            if count > 2
            else np.zeros(0, int)
        )
        sample = np.unique(np.concatenate([[0], inner, [count - 1]]))
        found = np.bincount(live(local, rows, columns, block, key_block, sample).rows, minlength=count)
        # The first and the last row stand for themselves: they are where the global tokens are.
        scores = visit_keys(found, key_block)
        each = (
            scores[inner].sum() / max(inner.size, 1) * max(count - 2, 0) + scores[0] + (scores[-1] if count > 1 else 0)
        )
        best = min(best, (float(each) * block * price, (block, key_block)), key=lambda entry: entry[0])
    cost = best[0] * order.stride
    if order != Order():
        cost += cost_model.MERGING * (length if order.rows is None else rows) + cost_model.FOLDING * (
            length + keys
        ) / 2 * (order.stride > 1)
    return cost, best[1]


def _part(mask: Mask, order: Order, length: int, keys: int, block_size: int | None, heads: int) -> Part:
    block, key_block = _cost(mask, order, length, keys, block_size)[1]
    local, rows, columns = _local(mask, order, length, keys)
    tiles = live(local, rows, columns, block, key_block)
    # What is cut off at the end of a block of queries or keys, and of a residue class, is not there.
    inside = ((tiles.rows + 1) * block <= rows) & ((tiles.columns + 1) * key_block <= columns)
    if order.stride > 1:
        inside &= ((tiles.rows + 1) * block * order.stride <= length) & (
            (tiles.columns + 1) * key_block * order.stride <= keys
        )
    tiles = dataclasses.replace(tiles, every=tiles.every & inside)
    blocks = plan(tiles, rows, block, key_block, heads * order.stride)
    quotients = order.stride > 1 and mask.fold(order.stride)[1]
    return Part(mask.fold(order.stride)[0] if quotients else mask, order, blocks, quotients)
