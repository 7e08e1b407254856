"""Pictures of masks: allowed pairs, active tiles, and the predicted cost relative to dense attention."""

from __future__ import annotations

import dataclasses
import enum
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.ops.attention import Mask, PerHead
from hpnlp.ops.attention.block_sparse.block_mask import BlockMask, active_tiles, evaluate_tiles
from hpnlp.ops.attention.block_sparse.decomposition import cost_model
from hpnlp.ops.attention.masks.per_head import check_mask
from hpnlp.types import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A picture has a pixel for each pair if there are at most MAX_PIXEL_PAIRS, and at most MAX_CELLS pixels per side otherwise.
MAX_PIXEL_PAIRS, MAX_CELLS = 1024 * 1024, 128
# Pairs of partly allowed tiles that are evaluated at most; beyond, the density is estimated from random rows of the tiles.
MAX_COUNTED_PAIRS = 1 << 25
# Random pairs for which `at` and `tile` of a mask of more than MAX_PIXEL_PAIRS pairs are compared.
CHECKED_PAIRS = 1 << 18
# Tiles of T x S at most, active or not.
MAX_TILES = 1 << 20


class PairKind(enum.IntEnum):
    """Treatment of a pair by the executor, which gives its color."""

    SKIPPED = 0
    HIDDEN = 1
    EVALUATED = 2
    FULL_TILE = 3


LABELS = {
    PairKind.SKIPPED: "inactive tile: skipped",
    PairKind.HIDDEN: "hidden pair in an active tile: computed, not used",
    PairKind.EVALUATED: "allowed pair in a partly allowed tile",
    PairKind.FULL_TILE: "fully allowed tile: mask not evaluated",
}
COLORS = {
    PairKind.SKIPPED: (245, 245, 243),
    PairKind.HIDDEN: (244, 190, 116),
    PairKind.EVALUATED: (30, 64, 124),
    PairKind.FULL_TILE: (38, 134, 130),
}
_COLOR_TABLE = np.array([COLORS[kind] for kind in PairKind], np.float64)


@dataclasses.dataclass(frozen=True)
class View:
    """The mask of one or more heads over T x S, cut into square tiles.

    Attributes:
      title: Name of the mask.
      head_names: The heads that have this mask, such as "heads 0-3"; "" if all heads have the same mask.
      length: Number of queries, T.
      keys: Number of keys, S.
      block: Queries and keys in a tile.
      heads: Number of heads that have this mask; 1 if all heads have the same mask.
      tiles: Number of tiles.
      active: Number of active tiles.
      full: Number of tiles in which every pair is known to be allowed. They are active.
      density: Share of the pairs that is allowed.
      exact: Whether `density` is exact, not an estimate from random rows of the tiles.
      cell: Queries and keys per pixel of the image.
      image: uint8 `[rows, columns, 3]`.
    """

    title: str
    head_names: str
    length: int
    keys: int
    block: int
    heads: int
    tiles: int
    active: int
    full: int
    density: float
    exact: bool
    cell: int
    image: np.ndarray

    @property
    def visited(self) -> float:
        """Share of the tiles that is active: the predicted cost relative to dense attention."""
        return self.active / self.tiles


def draw(
    masks: Mapping[str, Mask | PerHead] | Mask | PerHead,
    out: str | Path,
    *,
    length: int = 256,
    keys: int | None = None,
    block: int | None = None,
) -> str:
    """Writes a PNG with a panel for each mask, or for each distinct head of a mask.

    Args:
      masks: One mask, or masks by title.
      out: Path of the file.
      length: Number of queries, T.
      keys: Number of keys, S; None, the default, for T.
      block: Queries and keys in a tile; None, the default, for the largest power of two up to 1/16 of the longer side and 128.

    Returns:
      A Markdown table of the active tiles and the allowed pairs of each panel.

    Raises:
      InputError: A size is below 1, there are more than 2^20 tiles, `tile` of a mask contradicts its `at` (checked for every
        pair of up to 1024 x 1024, and for 2^18 random pairs of more), a mask is nested too deeply, or `out` cannot be written.

    Cost: finding the active tiles, and evaluating `at` for at most 2^25 pairs. Memory grows with the active tiles, not with
      T S.
    """
    keys = length if keys is None else keys
    views = {}
    masks = masks if isinstance(masks, Mapping) else {repr(masks): masks}
    for title, mask in masks.items():
        try:
            views[title] = make_views(title, mask, length, keys, block)
        except RecursionError as error:
            raise InputError(f"{title!r:.80} is nested too deeply to be drawn: combine fewer masks") from error
    figure = _figure([view for panels in views.values() for view in panels])
    try:
        figure.savefig(out, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InputError(f"cannot draw {out} ({error}): name a file that can be written, as pattern.png") from error
    return _table(views)


def make_views(title: str, mask: Mask | PerHead, length: int, keys: int, block: int | None = None) -> list[View]:
    """A view of each distinct head of a mask.

    Args:
      title: Name of the mask.
      mask: The mask.
      length: Number of queries, T.
      keys: Number of keys, S.
      block: Queries and keys in a tile, or None, as in `draw`.

    Returns:
      The views; a single one if the mask is not a PerHead.

    Raises:
      InputError: A size is below 1, there are more than 2^20 tiles, or `tile` contradicts `at`, as in `draw`.
    """
    if block is None:
        block = max(1, min(128, 1 << max(max(length, keys) // 16, 1).bit_length() - 1))
    for name, size in (("length", length), ("keys", keys), ("block", block)):
        if size < 1:
            raise InputError(f"{name}={size}: expected at least 1")
        if size >= 2**31:  # positions are 32 bits wide
            raise InputError(f"{name}={size}: expected at most {2**31 - 1}")
    tiles = -(-length // block) * -(-keys // block)
    if tiles > MAX_TILES:
        larger = block * math.ceil(math.sqrt(tiles / MAX_TILES))
        raise InputError(f"{length} x {keys} in blocks of {block} are {tiles:,} tiles: pass block={larger} or more")
    check_mask(mask)
    if mask.heads is None:  # a Mask and no PerHead, which pyright does not conclude
        return [_view(title, "", mask, 1, length, keys, block)]  # pyright: ignore[reportArgumentType]
    groups = mask.by_head(mask.heads)
    return [
        _view(title, _head_names(heads), head_mask, len(heads), length, keys, block)
        for head_mask, heads in groups.items()
    ]


def _view(title: str, head_names: str, mask: Mask, heads: int, length: int, keys: int, block: int) -> View:
    tiles = active_tiles(mask, length, keys, block, block)
    counts, exact = _allowed_pairs(mask, tiles, length, keys, block)
    _check_tiles(mask, tiles, length, keys, block)
    if length * keys <= MAX_PIXEL_PAIRS:
        cell, image = 1, _image_of_pairs(mask, tiles, length, keys, block)
    else:
        cell, image = _image_of_cells(tiles, counts, length, keys, block)
    return View(
        title,
        head_names,
        length,
        keys,
        block,
        heads,
        tiles=-(-length // block) * -(-keys // block),
        active=tiles.rows.size,
        full=int(tiles.every.sum()),
        density=float(counts.sum() / (length * keys)),
        exact=exact,
        cell=cell,
        image=image,
    )


def _tile_sizes(tiles: BlockMask, length: int, keys: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Number of queries and of keys of each tile; less in the last ones."""
    return np.minimum(length - tiles.rows * block, block), np.minimum(keys - tiles.columns * block, block)


def _allowed_pairs(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> tuple[np.ndarray, bool]:
    """Number of allowed pairs of each active tile, float64 `[tiles]`, and whether the numbers are exact."""
    height, width = _tile_sizes(tiles, length, keys, block)
    counts = (height * width).astype(np.float64)
    partial = np.flatnonzero(~tiles.every)
    rows_per_tile = max(min(block, MAX_COUNTED_PAIRS // max(partial.size * block, 1)), 1)
    exact, rng = rows_per_tile == block, np.random.default_rng(0)
    step = max(cost_model.MAX_EVALUATED_PAIRS // (rows_per_tile * block), 1)
    for start in range(0, partial.size, step):
        part = partial[start : start + step]
        rows = np.broadcast_to(np.arange(rows_per_tile), (part.size, rows_per_tile))
        weight = np.ones((part.size, 1))
        if not exact:  # a random row out of each of `rows_per_tile` equal parts of the tile
            weight = height[part][:, None] / rows_per_tile
            rows = ((rows + rng.random(rows.shape)) * weight).astype(np.int64)
        q = (tiles.rows[part][:, None] * block + rows)[:, :, None]
        k = (tiles.columns[part][:, None] * block + np.arange(block))[:, None, :]
        counts[part] = (mask.at(q, k) & (q < length) & (k < keys)).sum(axis=(1, 2)) * weight[:, 0]
    return counts, exact


def _check_tiles(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> None:
    """Raises InputError if `tile` contradicts `at` in blocks of this size or of a size that `attend` may choose."""
    q, k = _checked_pairs(tiles, length, keys, block)
    allowed = mask.at(q, k)
    for rows, columns in dict.fromkeys(((block, block), *cost_model.TILE_SIZES)):
        numbers, tile = np.unique(q // rows * keys + k // columns, return_inverse=True)
        q0, k0 = numbers // keys * rows, numbers % keys * columns
        q1, k1 = np.minimum(q0 + rows, length) - 1, np.minimum(k0 + columns, keys) - 1
        some_pair, every_pair = evaluate_tiles(mask, numbers.shape, q0, q1, k0, k1)
        wrong = np.flatnonzero(allowed & ~some_pair[tile] | ~allowed & every_pair[tile])
        if wrong.size:
            pair = wrong[0]
            n = tile[pair]
            raise InputError(
                f"{type(mask).__name__}: `at` {'allows' if allowed[pair] else 'does not allow'} query {q[pair]} and key "
                f"{k[pair]}, but `tile` returns {'some=False' if allowed[pair] else 'every=True'} for queries {q0[n]} to "
                f"{q1[n]} and keys {k0[n]} to {k1[n]}: correct one of them"
            )


def _checked_pairs(tiles: BlockMask, length: int, keys: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys of all pairs, or of random ones if there are many, half of them in active tiles."""
    if length * keys <= MAX_PIXEL_PAIRS:
        q, k = np.indices((length, keys)).reshape(2, -1)
        return q, k
    rng = np.random.default_rng(0)
    q, k = (rng.integers(0, size, CHECKED_PAIRS) for size in (length, keys))
    if tiles.rows.size:
        tile = rng.integers(0, tiles.rows.size, CHECKED_PAIRS // 2)
        half = slice(0, tile.size)
        q[half] = np.minimum(tiles.rows[tile] * block + q[half] % block, length - 1)
        k[half] = np.minimum(tiles.columns[tile] * block + k[half] % block, keys - 1)
    return q, k


def _image_of_pairs(mask: Mask, tiles: BlockMask, length: int, keys: int, block: int) -> np.ndarray:
    """An image with a pixel for each pair."""
    kinds = np.zeros((-(-length // block), -(-keys // block)), np.int8)
    kinds[tiles.rows, tiles.columns] = np.where(tiles.every, PairKind.FULL_TILE, PairKind.HIDDEN)
    kinds = kinds.repeat(block, axis=0).repeat(block, axis=1)[:length, :keys]
    kinds[(kinds == PairKind.HIDDEN) & mask.to_dense(length, keys)] = PairKind.EVALUATED
    return _COLOR_TABLE[kinds].astype(np.uint8)


def _image_of_cells(tiles: BlockMask, counts: np.ndarray, length: int, keys: int, block: int) -> tuple[int, np.ndarray]:
    """An image with a pixel for each square of tiles, and the number of positions per pixel.

    A pixel has the mean color of its pairs. The shares of active and of allowed pairs enter by their square roots, so that
    small shares are visible.
    """
    rows, columns = -(-length // block), -(-keys // block)
    side = -(-max(rows, columns) // MAX_CELLS)
    shape = -(-rows // side), -(-columns // side)
    cell = tiles.rows // side * shape[1] + tiles.columns // side
    height, width = _tile_sizes(tiles, length, keys, block)
    heights, widths = (
        np.diff(np.minimum(np.arange(cells + 1) * side * block, size))
        for cells, size in zip(shape, (length, keys), strict=True)
    )
    area = np.outer(heights, widths)

    def share(pairs: np.ndarray) -> np.ndarray:
        return np.bincount(cell, pairs, shape[0] * shape[1]).reshape(*shape, 1) / area[..., None]

    computed, allowed, full = share(height * width), share(counts), share(counts * tiles.every)
    skipped_color, hidden_color, evaluated_color, full_color = _COLOR_TABLE
    allowed_color = (full * full_color + (allowed - full) * evaluated_color) / np.maximum(allowed, 1e-9)
    active_color = hidden_color + np.sqrt(allowed / np.maximum(computed, 1e-9)) * (allowed_color - hidden_color)
    image = skipped_color + np.sqrt(computed) * (active_color - skipped_color)
    return side * block, image.round().clip(0, 255).astype(np.uint8)


def _head_names(heads: Sequence[int]) -> str:
    """Consecutive heads as ranges, such as `"heads 0-3, 6"`."""
    first = [head for head in heads if head - 1 not in heads]
    last = [head for head in heads if head + 1 not in heads]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True)]
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(runs)}"


def _percent(share: float, exact: bool = True) -> str:
    return f"{'' if exact else '~'}{100 * share:.3g} %"


def _figure(views: Sequence[View]) -> Any:
    """A matplotlib figure with one panel for each view, and a legend."""
    # Without pyplot, so that a notebook's backend stays as it is.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns = len(views) if len(views) < 4 else min(4, math.ceil(math.sqrt(len(views))))
    rows = -(-len(views) // columns)
    figure = Figure(figsize=(max(3.9 * columns, 5.2), 4.7 * rows + 0.4), layout="compressed")
    for number, view in enumerate(views):
        _panel(figure.add_subplot(rows, columns, number + 1), view)
    patches = [
        Patch(facecolor=f"#{bytes(COLORS[kind]).hex()}", edgecolor="0.6", label=LABELS[kind]) for kind in PairKind
    ]
    legend_columns = {1: 1, 2: 2, 3: 2}.get(columns, 4)
    figure.legend(handles=patches, loc="outside lower center", ncols=legend_columns, fontsize=8, frameon=False)
    return figure


def _panel(axes: Axes, view: View) -> None:
    """Draws a view with its title, ticks and figures."""
    stretched = max(view.length, view.keys) > 4 * min(view.length, view.keys)
    rows, columns = (view.cell * pixels for pixels in view.image.shape[:2])
    axes.imshow(view.image, extent=(0, columns, rows, 0), aspect="auto" if stretched else "equal")
    axes.set(xlim=(0, view.keys), ylim=(view.length, 0))
    title = textwrap.wrap(view.title, 44, max_lines=3, break_on_hyphens=False)
    title += [view.head_names] if view.head_names else []
    axes.set_title("\n".join(title), size=9, family="monospace", parse_math=False)
    axes.set_ylabel("query", size=9)
    caption = [
        "key",
        f"tiles of {view.block} x {view.block}: {view.active:,} of {view.tiles:,} active, {view.full:,} fully allowed",
        f"share of dense: tiles {_percent(view.visited)}, pairs {_percent(view.density, view.exact)}",
    ]
    if view.cell > 1:
        caption.append(f"a pixel is {view.cell} x {view.cell} pairs; small shares are emphasized")
    axes.set_xlabel("\n".join(caption), size=8)
    for axis, size in ((axes.xaxis, view.keys), (axes.yaxis, view.length)):
        axis.set_ticks(sorted({size * quarter // 4 for quarter in range(5)}))
        if view.cell == 1 and size // view.block <= 64:
            axis.remove_overlapping_locs = False
            axis.set_ticks(range(view.block, size, view.block), minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(labelsize=8)
    axes.tick_params(which="minor", length=0)


def _table(views: Mapping[str, Sequence[View]]) -> str:
    """A Markdown table with a row for each view, and a row of means for each mask that differs between heads."""
    header = ["pattern", "T x S", "block", "active tiles", "fully allowed", "tiles / dense", "pairs / dense"]
    rows = [header, ["---"] * len(header)]
    rows += [[cell.replace("|", "\\|") for cell in row] for row in _table_rows(views)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows) + "\n"


def _table_rows(views: Mapping[str, Sequence[View]]) -> Iterator[list[str]]:
    """The rows of `_table`, as cells."""
    for title, panels in views.items():
        for view in panels:
            name = f"{title}, {view.head_names}" if view.head_names else title
            counts = [f"{view.active:,} of {view.tiles:,}", f"{view.full:,}"]
            shares = [_percent(view.visited), _percent(view.density, view.exact)]
            yield [name, f"{view.length} x {view.keys}", str(view.block), *counts, *shares]
        if len(panels) > 1:
            heads = sum(view.heads for view in panels)
            visited = sum(view.heads * view.visited for view in panels) / heads
            density = sum(view.heads * view.density for view in panels) / heads
            shares = [_percent(visited), _percent(density, all(view.exact for view in panels))]
            yield [f"{title}, mean of {heads} heads", "", "", "", "", *shares]
