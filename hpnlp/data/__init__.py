"""From text on disk to batches: `prepare(DataConfig(...))` returns a `Corpus`, whose `train` and `heldout` yield batches."""

from typing import TYPE_CHECKING

from hpnlp.table import exports

if TYPE_CHECKING:
    from hpnlp.data.batches import Batches
    from hpnlp.data.config import DataConfig
    from hpnlp.data.corpus import Corpus
    from hpnlp.data.stream import prepare

__all__ = ["Batches", "Corpus", "DataConfig", "prepare"]

__getattr__ = exports(
    __name__,
    {"Batches": "batches", "Corpus": "corpus", "DataConfig": "config", "prepare": "stream"},
)
