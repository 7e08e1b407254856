"""Images of digits of line segments, distorted and with noise, in place of a published set of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.examples.generated.images.raster import draw_segments
from hpnlp.data.reading.sources import File
from hpnlp.data.tokenizers.pixels import to_text

SIZE = 32
COUNT = 20_000

# Polygonal strokes of each digit, by (x, y) from the top left (0, 0) to the bottom right (4, 6).
_STROKES: tuple[tuple[tuple[tuple[int, int], ...], ...], ...] = (
    (((1, 0), (3, 0), (4, 2), (4, 4), (3, 6), (1, 6), (0, 4), (0, 2), (1, 0)),),
    (((1, 1), (2, 0), (2, 6)), ((1, 6), (3, 6))),
    (((0, 1), (1, 0), (3, 0), (4, 1), (4, 2), (0, 6), (4, 6)),),
    (((0, 0), (4, 0), (2, 2), (4, 4), (3, 6), (1, 6), (0, 5)),),
    (((3, 6), (3, 0), (0, 4), (4, 4)),),
    (((4, 0), (0, 0), (0, 2), (3, 2), (4, 4), (3, 6), (0, 6)),),
    (((3, 0), (1, 1), (0, 4), (1, 6), (3, 6), (4, 4), (3, 3), (0, 4)),),
    (((0, 0), (4, 0), (1, 6)),),
    (((2, 3), (0, 1), (1, 0), (3, 0), (4, 1), (0, 5), (1, 6), (3, 6), (4, 5), (2, 3)),),
    (((4, 2), (1, 3), (0, 2), (1, 0), (3, 0), (4, 2), (3, 5), (1, 6)),),
)


def examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates 20,000 images of 32 x 32 pixels.

    Records have "text", see `pixels.to_text`, "label", the digit, and "group", the number of the record.
    """
    draw = np.random.default_rng(0)
    for number in range(COUNT):
        digit = int(draw.integers(10))
        yield {"text": to_text(image(digit, draw)), "label": str(digit), "group": str(number)}


def image(digit: int, draw: np.random.Generator) -> np.ndarray:
    """Draws a digit, scaled, rotated, sheared and moved at random, with lines that distract and noise: uint8 [SIZE, SIZE]."""
    strokes = [np.array(stroke, np.float64) - (2, 3) for stroke in _STROKES[digit]]
    segments = np.concatenate([np.stack([stroke[:-1], stroke[1:]], 1) for stroke in strokes])
    angle, shear = draw.uniform(-0.35, 0.35), draw.uniform(-0.3, 0.3)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    scale = np.diag(draw.uniform(2.2, 3.6, 2))
    segments = segments @ (rotation @ np.array([[1, shear], [0, 1]]) @ scale).T
    segments += SIZE / 2 - 0.5 + draw.uniform(-3, 3, 2)
    ink = draw_segments(segments, draw.uniform(1.5, 3.0), SIZE)
    lines = draw.uniform(0, SIZE, (2, 1, 2)) + draw.uniform(-5, 5, (2, 2, 2))
    other = 0.6 * draw_segments(lines, 1.5, SIZE)
    low, high = draw.uniform(0, 80), draw.uniform(150, 255)
    grey = low + (high - low) * np.maximum(ink, other) + draw.normal(0, 12, (SIZE, SIZE))
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8)


DRAWN_DIGITS = Generated(examples)
