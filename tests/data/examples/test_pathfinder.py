"""Generated images: labels of Pathfinder follow from the pixels, and digits differ from each other."""

import dataclasses

import numpy as np
import pytest

from hpnlp.data.examples import ClassificationConfig, prepare_examples
from hpnlp.data.examples.generated.images import drawn_digits, pathfinder
from hpnlp.data.examples.generated.images.raster import draw_segments


def components(pixels, reach):
    """Labels of the bright pixels, of which those within `reach` of each other are connected, by flooding."""
    points = np.argwhere(pixels > 40)
    label = np.full(len(points), -1)
    for start in range(len(points)):
        pending = [start] if label[start] < 0 else []
        while pending:
            near = np.hypot(*(points - points[pending.pop()]).T) <= reach
            pending += np.flatnonzero(near & (label < 0)).tolist()
            label[near] = start
    return points, label


@pytest.mark.parametrize(("stimulus", "count", "reach"), [(pathfinder.SMALL, 60, 2.85), (pathfinder.LARGE, 8, 4.5)])
def test_discs_are_joined_in_the_pixels_if_the_label_is_1(stimulus, count, reach):
    images = list(pathfinder.generate(dataclasses.replace(stimulus, count=count)))
    for image in images:
        assert image.pixels.shape == (stimulus.size, stimulus.size) and image.pixels.dtype == np.uint8
        points, label = components(image.pixels, reach)
        ends = [label[np.hypot(*(points - disc[::-1]).T).argmin()] for disc in image.discs]
        assert (ends[0] == ends[1]) == image.is_joined
    assert sum(image.is_joined for image in images) == count / 2


def test_the_distance_of_the_discs_does_not_give_the_label_away():
    images = list(pathfinder.generate(dataclasses.replace(pathfinder.SMALL, count=400)))
    distances = np.array([np.hypot(*(image.discs[0] - image.discs[1])) for image in images])
    ink = np.array([image.pixels.mean() for image in images])
    joined = np.array([image.is_joined for image in images])
    for feature in (distances, ink):
        thresholds = np.quantile(feature, np.linspace(0.05, 0.95, 19))
        best = max(abs(((feature > t) == joined).mean() - 0.5) for t in thresholds)
        assert best < 0.2


def test_images_become_one_token_per_pixel(cache, monkeypatch):
    monkeypatch.setattr(pathfinder, "SMALL", dataclasses.replace(pathfinder.SMALL, count=20))
    config = ClassificationConfig("pathfinder", tokenizer="pixels", seq_len=1024, batch_size=2, cache=str(cache))
    batch = next(prepare_examples(config).train(seed=0))
    assert batch["tokens"].shape == (2, 1024) and batch["segment_ids"].all() and batch["tokens"].max() == 255


def test_segments_cover_the_pixels_within_half_the_thickness():
    image = draw_segments(np.array([[[2.0, 3.0], [6.0, 3.0]], [[9.0, 9.0], [9.0, 9.0]]]), np.array([1.0, 3.0]), 10)
    assert (image[3, 2:7] == 1).all() and (image[2, 2:7] == 0).all() and image[8, 9] == image[9, 8] == 1
    assert not draw_segments(np.array([[[-9.0, 2.0], [-9.0, 4.0]]]), 1.0, 10).any()


def test_digits_are_told_apart_by_the_mean_of_their_images():
    draw = np.random.default_rng(0)
    images = np.array([[drawn_digits.image(digit, draw).ravel() for _ in range(60)] for digit in range(10)], float)
    images -= images.mean(-1, keepdims=True)
    images /= np.linalg.norm(images, axis=-1, keepdims=True)
    means = images[:, :40].mean(1)
    predicted = (images[:, 40:] @ means.T).argmax(-1)
    assert 0.25 < np.mean(predicted == np.arange(10)[:, None]) < 0.95
