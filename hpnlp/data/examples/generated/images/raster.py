"""Drawing of line segments and discs in greyscale images."""

from __future__ import annotations

import numpy as np


def draw_segments(segments: np.ndarray, thickness: np.ndarray | float, size: int) -> np.ndarray:
    """Coverage of an image by line segments with round ends; edges are one pixel wide.

    Args:
      segments: float [n, 2, 2], (x, y) of both ends in pixels; the centre of the first pixel is (0, 0).
      thickness: Diameter of each segment in pixels, a number or float [n]. A segment without length is a disc.
      size: Height and width of the image.

    Returns:
      float64 [size, size] of 0 to 1, by (y, x).
    """
    image = np.zeros((size, size))
    radii = np.broadcast_to(np.asarray(thickness, np.float64) / 2, len(segments))
    for (a, b), radius in zip(np.asarray(segments, np.float64), radii, strict=True):
        low = np.maximum(np.floor(np.minimum(a, b) - radius - 1), 0).astype(int)
        high = np.minimum(np.ceil(np.maximum(a, b) + radius + 1), size - 1).astype(int) + 1
        if (high <= low).any():
            continue
        x, y = np.arange(low[0], high[0]) - a[0], np.arange(low[1], high[1])[:, None] - a[1]
        (dx, dy), length = b - a, max(float(np.sum((b - a) ** 2)), 1e-12)
        along = np.clip((x * dx + y * dy) / length, 0, 1)
        distance = np.hypot(x - along * dx, y - along * dy)
        part = image[low[1] : high[1], low[0] : high[0]]
        np.maximum(part, np.clip(radius + 0.5 - distance, 0, 1), out=part)
    return image
