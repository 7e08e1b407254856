"""From text on disk to batches: `prepare` reads, splits, tokenises and caches the text of a config.

`Corpus` orders the batches, also where `data.order="stream"`.

Example::

    corpus = prepare(DataConfig(path="stdlib", seq_len=256, batch_size=16))
    batches = corpus.train(seed=0)
    batch = next(batches)  # tokens, labels, segment_ids, positions, weights: [16, 256]
"""

from __future__ import annotations

from hpnlp.data import tokenizers
from hpnlp.data.batches import Batches
from hpnlp.data.config import DataConfig
from hpnlp.data.corpus import Corpus
from hpnlp.data.ingest import prepared
from hpnlp.data.reading import sources, token_store
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.reading.split import Folds
from hpnlp.data.text_ingest import TextIngest
from hpnlp.types import InputError, Tokenizer

__all__ = ["Batches", "Corpus", "DataConfig", "prepare"]


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None, progress: Progress | None = None) -> Corpus:
    """Reads, splits and tokenises the text of a config, or finds the result in the cache.

    Args:
      config: The config.
      tokenizer: Used in place of `config.tokenizer`, for example the saved tokenizer of a run that is resumed.
      progress: Called as `progress(step, bytes_done, bytes_total)` while text is read.

    Returns:
      The corpus.

    Raises:
      InputError: The text, the config or the cache is invalid.

    Cost: one pass over the text, and one more if a vocabulary is made. Memory does not grow with the text.
    """
    progress = progress or ignore_progress
    ingest = find_sources(config)
    root = token_store.cache_root(config.cache)
    if tokenizer is None and not tokenizers.is_trained(config.tokenizer):
        tokenizer = tokenizers.build(config.tokenizer)  # before text is read, so that a wrong path fails early
    if tokenizer is not None and not tokenizer.decodes:
        raise InputError(
            f"data.tokenizer={config.tokenizer!r}: hashes cannot be decoded to text: set it to 'bytes', 'words(30000)' or "
            "'bpe(8192)', or choose a task with labels"
        )
    return Corpus(config, *prepared(ingest, config.tokenizer, tokenizer, root, "tokens", progress))


def find_sources(config: DataConfig) -> TextIngest:
    """Lists the files of a config's paths, with the options that decide how they are read and split.

    Raises InputError if there is no file to read, or the weights do not fit.
    """
    train = sources.find(config.path, "data.path")
    heldout = sources.find(config.heldout_path, "data.heldout_path") if config.heldout_path else ()
    train = sources.without_scored(train, heldout, "data.heldout_path")
    if config.weights and len(config.weights) != len(train):
        raise InputError(
            f"data.weights has {len(config.weights)} weights and data.path {len(train)} sources: pass one per source, or none"
        )
    return TextIngest(
        sources=train,
        heldout_sources=heldout,
        text_field=config.text_field,
        prompt_field=config.prompt_field,
        heldout=config.heldout,
        heldout_bytes=config.heldout_bytes,
        skip_bad_lines=config.skip_bad_lines,
        folds=Folds(config.folds, config.fold),
    )
