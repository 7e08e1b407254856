"""Classification of images by a convolutional network."""

from __future__ import annotations

import dataclasses

from hpnlp.data import tokenizers
from hpnlp.data.examples import ClassificationConfig, Examples
from hpnlp.data.reading.files import Progress
from hpnlp.data.tokenizers.pixels import PixelTokenizer
from hpnlp.models.convnet import ConvNet, ConvNetConfig, filled
from hpnlp.tasks.classification import BASELINES, ClassificationTask
from hpnlp.tasks.labelled.labels import PLANNED_CLASSES
from hpnlp.tasks.reports.label_report import LabelReport, Place
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError, option


@dataclasses.dataclass(frozen=True)
class ImagesConfig(ClassificationConfig):
    """Square greyscale images with one label each, as texts of one character for each pixel (`tokenizers.pixels.to_text`)."""

    path: str = option(
        "drawn_digits",
        'Images of GENERATED, such as "drawn_digits", "pathfinder" or cifar10:DIRECTORY, or records, as for '
        "task=classification.",
    )
    tokenizer: str = option("pixels", '"pixels", or the path of the tokenizer.json of a run with it.')
    seq_len: int = option(1024, "Pixels of an image, a square number.")
    linear_baselines: bool = option(
        False, "Fit linear models of words and of characters, which see pixels without their places."
    )


def image_name(place: Place) -> str:
    """A name of the image of a label, for tables of predictions.

    Args:
      place: The place of the label.

    Returns:
      Its number among the held-out images.
    """
    return f"held-out image {place.number}"


class ImageClassification(ClassificationTask):
    """Classification of images by a convolutional network."""

    name = "image_classification"
    model_config = ConvNetConfig
    data_config = ImagesConfig
    compares_as = "classification"
    report = LabelReport("image", BASELINES, image_name)

    def check_data(self, data: ImagesConfig) -> None:
        if tokenizers.is_trained(data.tokenizer) or not isinstance(tokenizers.build(data.tokenizer), PixelTokenizer):
            raise InputError(
                f"data.tokenizer={data.tokenizer!r}: images have a token for each pixel: set it to 'pixels'"
            )
        if data.pair_field:
            raise InputError(
                f"data.pair_field={data.pair_field!r}: a convolutional network reads single images: set it to ''"
            )
        super().check_data(data)

    def dataset(self, data: ImagesConfig, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Examples:
        self.check_data(data)
        examples = super().dataset(data, vocabulary, progress)
        for stored in examples.stored.values():
            for lengths in stored.lengths():
                other = lengths[lengths != data.seq_len]
                if other.size:
                    raise InputError(
                        f"data.path={data.path!r} has an image of {other[0]} pixels, and data.seq_len={data.seq_len}: scale "
                        "the images to one size, and set data.seq_len to their pixels"
                    )
        return examples

    def planned_sizes(self, config: RunConfig) -> Sizes:
        return Sizes(PixelTokenizer.vocab_size, classes=config.model.classes or PLANNED_CLASSES)

    def model(self, config: RunConfig, sizes: Sizes) -> ConvNet:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        return ConvNet(filled(config.model, sizes.classes, config.data.seq_len))
