"""Pathfinder: images with two discs and dashed curves; the label is whether one curve joins the discs.

Each image has two long curves of the same number of dashes and shorter ones that distract. A disc marks an end of a curve.
Where the label is "1", the discs are at both ends of one long curve, otherwise at an end of each, so that nothing but
connection tells the labels apart. The dashes of a curve are closer to each other than to those of other curves.

References: Linsley et al. 2018, "Learning long-range spatial dependencies with horizontal gated recurrent units", sec. 2; Tay
et al. 2021, "Long Range Arena", sec. 2.2.4 and 2.2.5, reads images of 32 x 32 (Pathfinder) and 128 x 128 (Path-X) pixels as
sequences. This generator is another than theirs: accuracies do not compare with published ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.examples.generated.images.raster import draw_segments
from hpnlp.data.reading.sources import File
from hpnlp.data.tokenizers.pixels import to_text

_BATCH = 512  # images that are begun at once; most of them have no room for two long curves
_TURNS = 6  # directions that are tried for each dash


@dataclasses.dataclass(frozen=True)
class Stimulus:
    """Sizes of images, in pixels.

    Attributes:
      size: Height and width.
      dashes: Dashes of a long curve.
      short: Dashes of a distracting curve.
      distractors: Number of distracting curves; fewer where they have no room.
      dash: Length of a dash.
      gap: Distance between the ends of consecutive dashes.
      apart: Least distance between points of different curves, and of dashes of one curve that are not consecutive.
      thickness: Diameter of a dash.
      disc: Diameter of a disc.
      turn: Largest change of direction between dashes, in radians.
      count: Number of images.
    """

    size: int
    dashes: int
    short: int
    distractors: int
    dash: float
    gap: float
    apart: float
    thickness: float
    disc: float
    turn: float
    count: int

    @property
    def delay(self) -> int:
        """Number of consecutive dashes that are closer to each other than `apart`."""
        return 1 + int(1.5 * self.apart / (self.dash + self.gap))


SMALL = Stimulus(32, 7, 3, 4, dash=2.0, gap=1.4, apart=4.5, thickness=0.8, disc=2.4, turn=0.8, count=40_000)
LARGE = Stimulus(128, 15, 6, 8, dash=5.0, gap=3.0, apart=9.0, thickness=1.6, disc=5.0, turn=0.8, count=10_000)


class Image(NamedTuple):
    """An image with its label.

    Attributes:
      pixels: uint8 [size, size].
      discs: float [2, 2], (x, y) of the centres of the discs.
      is_joined: Whether a curve joins the discs.
    """

    pixels: np.ndarray
    discs: np.ndarray
    is_joined: bool


def examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates 40,000 images of 32 x 32 pixels.

    Records have "text", see `pixels.to_text`, "label", "1" if a curve joins the discs or else "0", and "group", the number of
    the record.
    """
    return _records(SMALL)


def large_examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates 10,000 images of 128 x 128 pixels."""
    return _records(LARGE)


def _records(stimulus: Stimulus) -> Iterator[dict[str, str]]:
    for number, image in enumerate(generate(stimulus)):
        yield {"text": to_text(image.pixels), "label": str(int(image.is_joined)), "group": str(number)}


def generate(stimulus: Stimulus, seed: int = 0) -> Iterator[Image]:
    """Generates `stimulus.count` images, half of which have joined discs.

    Cost: about 3 ms per image of SMALL, 12 ms of LARGE.
    """
    draw = np.random.default_rng(seed)
    made = 0
    while True:
        grid = _Grid(stimulus)
        first = _grow(stimulus, draw, grid, stimulus.dashes)
        complete = first.placed == stimulus.dashes
        grid.keep(complete)
        curves = [first.keep(complete), _grow(stimulus, draw, grid, stimulus.dashes)]
        usable = (curves[1].placed == stimulus.dashes) & _ends_apart(stimulus, curves)
        grid.keep(usable)
        curves = [curve.keep(usable) for curve in curves]
        curves += [_grow(stimulus, draw, grid, stimulus.short) for _ in range(stimulus.distractors)]
        for number in range(np.count_nonzero(usable)):
            of_image = [curve.segments[number, : curve.placed[number]] for curve in curves]
            yield _render(stimulus, draw, of_image, is_joined=made % 2 == 1)
            made += 1
            if made == stimulus.count:
                return


class _Curves(NamedTuple):
    """One curve in each image of a batch: segments [n, dashes, 2, 2], and the number of those that were placed [n]."""

    segments: np.ndarray
    placed: np.ndarray

    def keep(self, images: np.ndarray) -> _Curves:
        """The curves of the chosen images, bool [n]."""
        return _Curves(self.segments[images], self.placed[images])


class _Grid:
    """The pixels around placed dashes, in each image of a batch, which other curves must not touch."""

    def __init__(self, stimulus: Stimulus) -> None:
        self._size, self._edge = stimulus.size, stimulus.disc / 2
        # A point lies at most half a diagonal from the centre of its pixel.
        self._radius = stimulus.apart + 0.5**0.5
        self._reach = int(np.ceil(self._radius))
        self._offsets = np.stack(np.meshgrid(*[np.arange(-self._reach, self._reach + 1)] * 2), -1).reshape(-1, 2)
        side = self._size + 2 * self._reach
        self._taken = np.zeros((_BATCH, side, side), bool)

    @property
    def count(self) -> int:
        """Number of images, n."""
        return len(self._taken)

    def keep(self, images: np.ndarray) -> None:
        """Keeps the chosen images, bool [n]."""
        self._taken = self._taken[images]

    def is_free(self, points: np.ndarray) -> np.ndarray:
        """Whether points [n, ..., 2] lie within the image and near no dash."""
        within = np.all((points >= self._edge) & (points <= self._size - 1 - self._edge), axis=-1)
        x, y = np.moveaxis(np.clip(np.rint(points), 0, self._size - 1).astype(int) + self._reach, -1, 0)
        images = np.arange(self.count).reshape(-1, *[1] * (x.ndim - 1))
        return within & ~self._taken[images, y, x]

    def take(self, points: np.ndarray, where: np.ndarray) -> None:
        """Takes the surroundings of points [n, ..., 2] in the images `where`."""
        points = points[where][:, :, None]
        cells = np.rint(points).astype(int) + self._offsets
        near = np.hypot(*np.moveaxis(cells - points, -1, 0)) <= self._radius
        images = np.broadcast_to(np.flatnonzero(where)[:, None, None], near.shape)
        x, y = np.moveaxis(cells[near] + self._reach, -1, 0)
        self._taken[images[near], y, x] = True


def _ends_apart(stimulus: Stimulus, curves: Sequence[_Curves]) -> np.ndarray:
    """Whether discs would lie apart, at whichever ends of the long curves."""
    ends = np.concatenate([curve.segments[:, [0, -1], [0, 1]] for curve in curves], axis=1)
    pairs = np.triu_indices(len(ends[0]), 1)
    distances = np.linalg.norm(ends[:, pairs[0]] - ends[:, pairs[1]], axis=-1)
    return np.all(distances >= stimulus.apart + stimulus.disc, axis=1)


def _grow(stimulus: Stimulus, draw: np.random.Generator, grid: _Grid, dashes: int) -> _Curves:
    """Grows a curve in each image of a batch from a random place, one dash after another, until it has no room."""
    count = grid.count
    segments = np.zeros((count, dashes, 2, 2))
    placed = np.zeros(count, int)
    end = draw.uniform(0, stimulus.size - 1, (count, _TURNS, 2))
    angle = draw.uniform(0, 2 * np.pi, (count, _TURNS))
    pending: list[np.ndarray] = []
    growing: Any = np.ones(count, bool)
    rows = np.arange(count)
    for number in range(dashes):
        if number:
            angle = angle[:, None] + draw.uniform(-stimulus.turn, stimulus.turn, (count, _TURNS))
            end = end[:, None]
        step = np.stack([np.cos(angle), np.sin(angle)], -1)
        start = end + (stimulus.gap * step if number else 0)
        candidates = start[..., None, :] + np.linspace(0, stimulus.dash, 3)[:, None] * step[..., None, :]
        free = np.all(grid.is_free(candidates), axis=-1)
        choice = free.argmax(1)
        growing &= free[rows, choice]
        points, angle = candidates[rows, choice], angle[rows, choice]
        end = points[:, -1]
        segments[growing, number] = points[growing][:, [0, -1]]
        placed += growing
        # The last dashes are taken later, since the next one is closer to them than to others.
        pending.append(points)
        if number >= stimulus.delay:
            grid.take(pending[number - stimulus.delay], placed > number - stimulus.delay)
    for number in range(max(0, dashes - stimulus.delay), dashes):
        grid.take(pending[number], placed > number)
    return _Curves(segments, placed)


def _render(stimulus: Stimulus, draw: np.random.Generator, curves: Sequence[np.ndarray], is_joined: bool) -> Image:
    """Draws curves, and discs at two ends of the first two."""
    ends = [(curve[0, 0], curve[-1, 1]) for curve in curves[:2]]
    chosen = draw.integers(2, size=2)
    first = ends[chosen[0]]
    discs = np.stack(first if is_joined else [ends[0][chosen[0]], ends[1][chosen[1]]])
    segments = np.concatenate([*curves, np.stack([discs, discs], 1)])
    thickness = np.full(len(segments), stimulus.thickness)
    thickness[-2:] = stimulus.disc
    pixels = np.rint(255 * draw_segments(segments, thickness, stimulus.size)).astype(np.uint8)
    return Image(pixels, discs, is_joined)


PATHFINDER = Generated(examples)
PATH_X = Generated(large_examples)
