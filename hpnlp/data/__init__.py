"""Text from disk to batches: `prepare(DataConfig(...))` gives a `Corpus`, whose `train` and `heldout` give batches."""

from hpnlp.data.stream import Batches, Corpus, DataConfig, prepare

__all__ = ["Batches", "Corpus", "DataConfig", "prepare"]
