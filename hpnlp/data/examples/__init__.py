"""Labelled examples on disk to batches: `prepare_examples(ClassificationConfig(...))` returns `Examples`."""

from hpnlp.data.examples.bag_examples import BagExamples
from hpnlp.data.examples.config import (
    BagsConfig,
    ClassificationConfig,
    ExampleConfig,
    HashedTextsConfig,
    PairsConfig,
    Seq2SeqConfig,
    TaggingConfig,
    TreesConfig,
)
from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.labels import load_labels, save_labels
from hpnlp.data.examples.prepare import check_paths, prepare_examples

__all__ = [
    "BagExamples",
    "BagsConfig",
    "ClassificationConfig",
    "ExampleConfig",
    "Examples",
    "HashedTextsConfig",
    "PairsConfig",
    "Seq2SeqConfig",
    "TaggingConfig",
    "TreesConfig",
    "check_paths",
    "load_labels",
    "prepare_examples",
    "save_labels",
]
