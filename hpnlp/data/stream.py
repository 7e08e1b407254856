"""From text on disk to batches: the config of a corpus, and `prepare`, which reads, splits, tokenises and caches it.

corpus = prepare(DataConfig(path="stdlib", seq_len=256, batch_size=16))
batches = corpus.train(seed=0)
batch = next(batches)  # tokens, labels, segment_ids, positions, weights: [16, 256]
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from typing import Any

from hpnlp import spec as specs
from hpnlp.data import sources, token_store, tokenizers
from hpnlp.data.corpus import PACKINGS, Batches, Corpus
from hpnlp.data.digest import Snapshot
from hpnlp.data.files import Progress, ignore_progress
from hpnlp.data.ingest import Ingest
from hpnlp.types import InputError, Tokenizer

__all__ = ["Batches", "Corpus", "DataConfig", "prepare", "tokenizer_digest"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text to read, and how it is split, tokenised and cut into batches.

    path: "stdlib" (source code of the running Python's standard library, without tests and site-packages; "stdlib+tests" with
      tests), a file, a directory or a glob. Several are separated by commas, and each file is read once. The extension of a
      file decides its format, which is JSONL, `.json` (an array of records or strings; other JSON is text), Parquet, `.npy`
      (token ids), or text. Text and JSON may be compressed, as `.gz` or `.zst`.
    weights: share of each source of `path` in the training tokens, to within 1 %; () reads every source once per epoch.
    tokenizer: "bytes", "words(CAP)", "words(CAP, by=whitespace)", "bpe(SIZE)", or the path of a tokenizer.json.
    text_field: field of records (JSONL, JSON arrays, Parquet) that holds the text. prompt_field: field that holds a prompt,
      which stands before the text and carries no loss; "" for no prompt.
    skip_bad_lines: leave out, and count in the summary, lines of text that are not UTF-8 and records that are not JSON or have
      no valid text. Otherwise these are errors, as far as the tokenizer needs UTF-8.
    seq_len: tokens per row. batch_size: rows per optimizer step, over all processes.
    heldout: fraction of documents held out, chosen by a hash of their names; one document if the fraction leaves no text on one
      side. A single text file counts as many documents, because it is cut into pieces at line ends. Fewer than 50 documents are
      cut in the same way if the fraction of their number is less than one, as for 2 files, or for 49 files and 0.02.
    heldout_path: text to hold out instead, all of it; files that are also under `path` are not trained on.
    heldout_bytes: evaluate on a fixed sample of the held-out documents of at most this many bytes, but at least one document; 0
      takes all. Documents over the limit are not trained on.
    packing: "concat" lays documents one after another and cuts rows when they are full; "fit" keeps documents whole, or in
      pieces of seq_len, and fills rows with documents that fit.
    cache: directory of tokenised text; "" is $HPNLP_CACHE, or hpnlp under $XDG_CACHE_HOME or ~/.cache.
    """

    path: str = "stdlib"
    weights: tuple[float, ...] = ()
    tokenizer: str = "bytes"
    text_field: str = "text"
    prompt_field: str = ""
    skip_bad_lines: bool = False
    seq_len: int = 256
    batch_size: int = 16
    heldout: float = 0.02
    heldout_path: str = ""
    heldout_bytes: int = 1_000_000
    packing: str = "concat"
    cache: str = ""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"data.{name}={getattr(self, name)}: expected at least 1")
        if not all(isinstance(weight, int | float) and 1e-100 <= weight <= 1e100 for weight in self.weights):
            raise InputError(
                f"data.weights={self.weights}: expected numbers over 0, 1e-100 to 1e100; remove a source from data.path to "
                "give it no weight"
            )
        if not self.heldout_path and not 0 < self.heldout < 1:
            raise InputError(
                f"data.heldout={self.heldout}: expected a fraction between 0 and 1; to train on all of data.path, pass "
                "data.heldout_path=PATH with other text"
            )
        if self.heldout_bytes < 0:
            raise InputError(f"data.heldout_bytes={self.heldout_bytes}: expected a number of bytes, or 0 for all")
        specs.lookup(PACKINGS, self.packing, "data.packing")


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
    ingest = _find_sources(config)
    root = token_store.cache_root(config.cache)
    if tokenizer is None and not tokenizers.is_trained(config.tokenizer):
        tokenizer = tokenizers.build(config.tokenizer)  # before text is read, so that a wrong path fails early
    snapshot = Snapshot(ingest.paths)
    content = [ingest.fingerprint(), snapshot.digest(root, progress)]
    tokenizer = tokenizer or _trained_tokenizer(config.tokenizer, ingest, root, content, snapshot, progress)
    is_cached = True

    def write(path: str) -> dict[str, Any]:
        nonlocal is_cached
        is_cached = False
        record = ingest.write(path, tokenizer, progress)
        snapshot.check()
        return record

    directory, record = token_store.cached(
        root, f"tokens-{token_store.key_of([content, tokenizer_digest(tokenizer)])}", write
    )
    return Corpus(config, tokenizer, directory, record, is_cached)


def _find_sources(config: DataConfig) -> Ingest:
    """Lists the files of the config's paths."""
    train = sources.find(config.path, "data.path")
    heldout = sources.find(config.heldout_path, "data.heldout_path") if config.heldout_path else ()
    if heldout:
        heldout_files = [file.path for source in heldout for file in source.files]
        train = sources.distinct(train, "data.path", heldout_files, "held out by data.heldout_path")
    if config.weights and len(config.weights) != len(train):
        raise InputError(
            f"data.weights has {len(config.weights)} weights and data.path {len(train)} sources: pass one per source, or none"
        )
    return Ingest(
        sources=train,
        heldout_sources=heldout,
        text_field=config.text_field,
        prompt_field=config.prompt_field,
        heldout=config.heldout,
        heldout_bytes=config.heldout_bytes,
        skip_bad_lines=config.skip_bad_lines,
    )


def _trained_tokenizer(
    spec: str, ingest: Ingest, root: str, content: Any, snapshot: Snapshot, progress: Progress
) -> Tokenizer:
    """Trains the tokenizer of `spec`, or finds it in the cache under `content`, a key of all text that is read."""

    def write(directory: str) -> dict[str, Any]:
        built = tokenizers.build(spec, ingest.training_texts(progress))
        built.save(os.path.join(directory, "tokenizer.json"))
        snapshot.check()
        return {}

    key = token_store.key_of([tokenizers.TRAINING_VERSION, spec, content])
    directory, _ = token_store.cached(root, f"tokenizer-{key}", write)
    return tokenizers.load(directory)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Hashes the files that a tokenizer saves, in a temporary directory.

    Args:
        tokenizer: The tokenizer.

    Returns:
        A digest in hexadecimal that is equal for tokenizers whose files are equal.

    Raises:
        InputError: The temporary directory cannot be written.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save(os.path.join(directory, "tokenizer.json"))
            for name in sorted(os.listdir(directory)):
                with open(os.path.join(directory, name), "rb") as file:
                    digest.update(file.read())
    except OSError as error:
        raise InputError(f"cannot write temporary files: {error}: free some space, or set TMPDIR elsewhere") from error
    return digest.hexdigest()
