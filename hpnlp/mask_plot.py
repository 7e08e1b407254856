"""Pictures of masks: who may see whom, which tiles are live, and what that costs beside dense attention."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.ops.attention import Mask, PerHead
from hpnlp.ops.attention.block_sparse import cost_model
from hpnlp.ops.attention.block_sparse.block_mask import BlockMask, active_tiles, evaluate_tiles
from hpnlp.ops.attention.masks.per_head import check_mask
from hpnlp.types import InputError

# Up to so many pairs a picture shows each; beyond, so many cells to a side.
ELEMENTS, CELLS = 1024 * 1024, 128
# How many pairs of partly allowed tiles are asked for at most; rows are drawn at random where there are more.
ASKED = 1 << 25
# How many pairs of a large mask are held against what it says of tiles.
TRIED = 1 << 18
# The most tiles of T x S, live or not.
TILES = 1 << 20

# What a pair can be, and its colour.
KINDS = {
    "dead tile: never visited": (245, 245, 243),
    "hidden, in a live tile: computed for nothing": (244, 190, 116),
    "allowed, in a partly allowed tile": (30, 64, 124),
    "allowed, in a whole tile: no test of elements": (38, 134, 130),
}
_DEAD, _HIDDEN, _ALLOWED, _WHOLE = np.array(list(KINDS.values()), np.float64)


@dataclasses.dataclass(frozen=True)
class View:
    """A mask over T x S as the executor meets it in square tiles.

    which: the heads that have it, as "heads 0-3", and heads: how many; "" and 1 where all have.
    tiles, live, whole: numbers of tiles; whole ones are live, and all of their pairs are allowed.
    density: the share of pairs that is allowed; estimated from random rows of the tiles where not `exact`.
    image: uint8 [rows, columns, 3], a pixel for `cell` x `cell` pairs.
    """

    title: str
    which: str
    length: int
    keys: int
    block: int
    heads: int
    tiles: int
    live: int
    whole: int
    density: float
    exact: bool
    cell: int
    image: np.ndarray

    @property
    def visited(self) -> float:
        """Live tiles over all tiles: the predicted cost beside dense attention."""
        return self.live / self.tiles


def draw(
    masks: Mapping[str, Mask | PerHead] | Mask | PerHead,
    out: str | Path,
    *,
    length: int = 256,
    keys: int | None = None,
    block: int | None = None,
) -> str:
    """Writes a PNG with a panel for each mask, or for each different head of one, and returns a table of their costs.

    masks: by title, or one mask. length, keys: T and S; S = T where None. block: rows and keys of a tile; None takes the
    power of two up to a sixteenth of the longer side, at most 128. Raises InputError on sizes below 1, on more tiles than
    can be drawn, on a mask whose `tile` contradicts its `at` (every pair of up to 1024 x 1024 is looked at, and 2 ** 18
    random ones of more), and where `out` cannot be written.
    Cost: that of finding the live tiles, and of at most 2 ** 25 pairs; memory grows with the live tiles, not with T x S.
    """
    keys = length if keys is None else keys
    views = {}
    masks = masks if isinstance(masks, Mapping) else {repr(masks): masks}
    for title, mask in masks.items():
        try:
            views[title] = look(title, mask, length, keys, block)
        except RecursionError as error:
            raise InputError(f"{title!r:.80} is nested too deeply to be drawn: combine fewer masks") from error
    figure = _figure([view for of in views.values() for view in of])
    try:
        figure.savefig(out, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {out} ({error}): name a file that can be written, as pattern.png") from error
    return _table(views)


def look(title: str, mask: Mask | PerHead, length: int, keys: int, block: int | None = None) -> list[View]:
    """A view for each different head of a mask; arguments and errors as in `draw`."""
    block = max(1, min(128, 1 << max(max(length, keys) // 16, 1).bit_length() - 1)) if block is None else block
    for name, size in (("length", length), ("keys", keys), ("block", block)):
        if size < 1:
            raise InputError(f"{name}={size}: expected at least 1")
    tiles = -(-length // block) * -(-keys // block)
    if tiles > TILES:
        larger = block * math.ceil(math.sqrt(tiles / TILES))
        raise InputError(f"{length} x {keys} in blocks of {block} are {tiles:,} tiles: pass block={larger} or more")
    check_mask(mask)
    if mask.heads is None:
        return [_look(title, "", mask, 1, length, keys, block)]  # pyright: ignore[reportArgumentType]
    groups = mask.by_head(mask.heads)
    return [_look(title, _heads(of), each, len(of), length, keys, block) for each, of in groups.items()]


def _look(title: str, which: str, mask: Mask, heads: int, length: int, keys: int, block: int) -> View:
    tiles = active_tiles(mask, length, keys, block, block)
    rows, columns = -(-length // block), -(-keys // block)
    seen, exact = _seen(mask, tiles, length, keys, block)
    _agree(mask, tiles, length, keys, block)
    if length * keys <= ELEMENTS:
        cell, image = 1, _elements(mask, tiles, length, keys, block)
    else:
        cell, image = _cells(tiles, seen, length, keys, block)
    count, whole = tiles.rows.size, int(tiles.every.sum())
    density = float(seen.sum() / (length * keys))
    return View(title, which, length, keys, block, heads, rows * columns, count, whole, density, exact, cell, image)


def _sides(tiles: BlockMask, length: int, keys: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and keys of each tile; the last ones may be smaller."""
    return np.minimum(length - tiles.rows * block, block), np.minimum(keys - tiles.columns * block, block)


def _seen(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> tuple[np.ndarray, bool]:
    """float64 [tiles]: how many pairs of each live tile are allowed; and whether all of them were asked for."""
    height, width = _sides(tiles, length, keys, block)
    seen = (height * width).astype(np.float64)
    partly = np.flatnonzero(~tiles.every)
    asked = max(min(block, ASKED // max(partly.size * block, 1)), 1)
    exact, rng = asked == block, np.random.default_rng(0)
    step = max(cost_model.MAX_EVALUATED_PAIRS // (asked * block), 1)
    for start in range(0, partly.size, step):
        part = partly[start : start + step]
        rows = np.broadcast_to(np.arange(asked), (part.size, asked))
        weight = np.ones((part.size, 1))
        if not exact:  # one row at random out of each of `asked` equal parts of the tile
            weight = height[part][:, None] / asked
            rows = ((rows + rng.random(rows.shape)) * weight).astype(np.int64)
        q = (tiles.rows[part][:, None] * block + rows)[:, :, None]
        k = (tiles.columns[part][:, None] * block + np.arange(block))[:, None, :]
        seen[part] = (mask.at(q, k) & (q < length) & (k < keys)).sum(axis=(1, 2)) * weight[:, 0]
    return seen, exact


def _agree(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> None:
    """Raises where `tile` contradicts `at`, in blocks of this size and of those that `attend` may choose: for any pair, or,
    where there are many, for random ones, half of them in live tiles."""
    if length * keys <= ELEMENTS:
        q, k = np.indices((length, keys)).reshape(2, -1)
    else:
        rng = np.random.default_rng(0)
        q, k = (rng.integers(0, size, TRIED) for size in (length, keys))
        if tiles.rows.size:
            of = rng.integers(0, tiles.rows.size, TRIED // 2)
            near = tiles.rows[of] * block + q[: of.size] % block, tiles.columns[of] * block + k[: of.size] % block
            q[: of.size], k[: of.size] = np.minimum(near[0], length - 1), np.minimum(near[1], keys - 1)
    see = mask.at(q, k)
    for rows, columns in dict.fromkeys(((block, block), *cost_model.TILE_SIZES)):
        ids, of = np.unique(q // rows * keys + k // columns, return_inverse=True)
        q0, k0 = ids // keys * rows, ids % keys * columns
        ends = np.minimum(q0 + rows, length) - 1, np.minimum(k0 + columns, keys) - 1
        some, every = evaluate_tiles(mask, ids.shape, q0, ends[0], k0, ends[1])
        wrong = np.flatnonzero(see & ~some[of] | ~see & every[of])
        if wrong.size:
            at, told = wrong[0], ("all of it is", "nothing of it is")
            raise InputError(
                f"{type(mask).__name__}: query {q[at]} and key {k[at]} are {'' if see[at] else 'not '}allowed by `at`, but "
                f"`tile` says of queries {q0[of[at]]} to {ends[0][of[at]]} and keys {k0[of[at]]} to {ends[1][of[at]]} that "
                f"{told[int(see[at])]} allowed: mend one of them"
            )


def _elements(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> np.ndarray:
    """A pixel for each pair."""
    state = np.zeros((-(-length // block), -(-keys // block)), np.int8)
    state[tiles.rows, tiles.columns] = np.where(tiles.every, 2, 1)
    state = state.repeat(block, axis=0).repeat(block, axis=1)[:length, :keys]
    see = mask.to_dense(length, keys)
    image = np.select([(state == 1) & see, state == 1, state == 2], [2, 1, 3], 0)
    return np.stack([_DEAD, _HIDDEN, _ALLOWED, _WHOLE])[image].astype(np.uint8)


def _cells(tiles: BlockMask, seen: np.ndarray, length: int, keys: int, block: int) -> tuple[int, np.ndarray]:
    """A pixel for a square of tiles: positions to a side, and the mean colour, with little made more so as to be seen."""
    rows, columns = -(-length // block), -(-keys // block)
    side = -(-max(rows, columns) // CELLS)
    shape = -(-rows // side), -(-columns // side)
    cell = tiles.rows // side * shape[1] + tiles.columns // side
    height, width = _sides(tiles, length, keys, block)
    area = np.outer(
        *(
            np.diff(np.minimum(np.arange(n + 1) * side * block, size))
            for n, size in zip(shape, (length, keys), strict=True)
        )
    )

    def share(pairs: np.ndarray) -> np.ndarray:
        return np.bincount(cell, pairs, shape[0] * shape[1]).reshape(*shape, 1) / area[..., None]

    visited, allowed, whole = share(height * width), share(seen), share(seen * tiles.every)
    dark = (whole * _WHOLE + (allowed - whole) * _ALLOWED) / np.maximum(allowed, 1e-9)
    tint = _HIDDEN + np.sqrt(allowed / np.maximum(visited, 1e-9)) * (dark - _HIDDEN)
    image = _DEAD + np.sqrt(visited) * (tint - _DEAD)
    return side * block, image.round().clip(0, 255).astype(np.uint8)


def _heads(heads: Sequence[int]) -> str:
    """`"heads 0-3, 6"`."""
    first = [head for head in heads if head - 1 not in heads]
    last = [head for head in heads if head + 1 not in heads]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True)]
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(runs)}"


def _percent(share: float, exact: bool = True) -> str:
    return f"{'' if exact else '~'}{100 * share:.3g} %"


def _figure(views: Sequence[View]) -> Any:
    # Without pyplot, so that a notebook's backend stays as it is.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    across = len(views) if len(views) < 4 else min(4, math.ceil(math.sqrt(len(views))))
    down = -(-len(views) // across)
    figure = Figure(figsize=(max(3.9 * across, 5.2), 4.7 * down + 0.4), layout="compressed")
    for number, view in enumerate(views):
        _panel(figure.add_subplot(down, across, number + 1), view)
    patches = [Patch(facecolor=f"#{bytes(color).hex()}", edgecolor="0.6", label=name) for name, color in KINDS.items()]
    columns = {1: 1, 2: 2, 3: 2}.get(across, 4)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    return figure


def _panel(axes: Any, view: View) -> None:
    stretched = max(view.length, view.keys) > 4 * min(view.length, view.keys)
    rows, columns = (view.cell * pixels for pixels in view.image.shape[:2])
    axes.imshow(view.image, extent=(0, columns, rows, 0), aspect="auto" if stretched else "equal")
    axes.set(xlim=(0, view.keys), ylim=(view.length, 0))
    title = textwrap.wrap(view.title, 44, max_lines=3, break_on_hyphens=False)
    axes.set_title("\n".join([*title, *filter(None, [view.which])]), size=9, family="monospace", parse_math=False)
    axes.set_ylabel("query", size=9)
    lines = [
        f"tiles of {view.block} x {view.block}: {view.live:,} of {view.tiles:,} live, {view.whole:,} whole",
        f"cost beside dense: tiles {_percent(view.visited)}, pairs {_percent(view.density, view.exact)}",
    ]
    lines += [f"a pixel is {view.cell} x {view.cell} pairs; small shares are made stronger"] * (view.cell > 1)
    axes.set_xlabel("\n".join(["key", *lines]), size=8)
    for axis, size in ((axes.xaxis, view.keys), (axes.yaxis, view.length)):
        axis.set_ticks(sorted({size * quarter // 4 for quarter in range(5)}))
        if view.cell == 1 and size // view.block <= 64:
            axis.remove_overlapping_locs = False
            axis.set_ticks(range(view.block, size, view.block), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(labelsize=8)
    axes.tick_params(which="minor", length=0)


def _table(views: Mapping[str, Sequence[View]]) -> str:
    header = ["pattern", "T x S", "block", "live tiles", "whole", "tiles / dense", "pairs / dense"]
    lines = []
    for title, of in views.items():
        for view in of:
            size, counts = f"{view.length} x {view.keys}", [f"{view.live:,} of {view.tiles:,}", f"{view.whole:,}"]
            shares = [_percent(view.visited), _percent(view.density, view.exact)]
            lines.append([", ".join(filter(None, [title, view.which])), size, str(view.block), *counts, *shares])
        if len(of) > 1:
            heads = sum(view.heads for view in of)
            means = (sum(view.heads * share for view, share in zip(of, shares, strict=True)) / heads
                     for shares in ([view.visited for view in of], [view.density for view in of]))  # fmt: skip
            exact = (True, all(view.exact for view in of))
            lines.append([f"{title}, mean of {heads} heads", "", "", "", "", *map(_percent, means, exact)])
    rows = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"
