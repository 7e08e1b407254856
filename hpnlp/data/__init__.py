"""From text on disk to batches: `prepare(DataConfig(...))` returns a `Corpus`, whose `train` and `heldout` yield batches."""

from hpnlp.data.stream import Batches, Corpus, DataConfig, prepare

__all__ = ["Batches", "Corpus", "DataConfig", "prepare"]
