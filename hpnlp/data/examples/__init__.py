"""Labelled examples on disk to batches: `prepare_examples(ClassificationConfig(...))` returns `Examples`."""

from typing import TYPE_CHECKING

from hpnlp.table import exports

if TYPE_CHECKING:
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

__getattr__ = exports(
    __name__,
    {
        "BagExamples": "bag_examples",
        "BagsConfig": "config",
        "ClassificationConfig": "config",
        "ExampleConfig": "config",
        "Examples": "dataset",
        "HashedTextsConfig": "config",
        "PairsConfig": "config",
        "Seq2SeqConfig": "config",
        "TaggingConfig": "config",
        "TreesConfig": "config",
        "check_paths": "prepare",
        "load_labels": "labels",
        "prepare_examples": "prepare",
        "save_labels": "labels",
    },
)
