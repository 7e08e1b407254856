"""Builds datastores of texts, and searches them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from hpnlp.atomic_file import replaced
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.jobs.predictor import Example, Predictor
from hpnlp.jobs.vector_files import write_vectors
from hpnlp.models.variables import weights_digest
from hpnlp.retrieval import datastore as stores
from hpnlp.retrieval.datastore import Datastore, Record
from hpnlp.types import InputError


def texts_digest(texts: Iterable[Example]) -> tuple[int, str]:
    """`(number, digest)` of texts, from which all shards are divided."""
    digest, count = hashlib.blake2b(digest_size=8), 0
    for count, text in enumerate(texts, 1):  # noqa: B007  (read after the loop)
        digest.update(json.dumps(text).encode() + b"\n")
    return count, digest.hexdigest()


def build_shard(
    predictor: Predictor,
    texts: Iterable[tuple[str, Example]],
    source: tuple[int, str],
    out: str | Path,
    part: tuple[int, int] = (0, 1),
    batch_size: int = 64,
    report_bad: Callable[[str], None] = lambda place: None,
    report_done: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Record, int]:
    """Writes a shard: texts and their vectors.

    Args:
      predictor: A model whose texts have vectors.
      texts: Places, for messages, and texts of all shards.
      source: Result of `texts_digest` of these texts.
      out: Directory of the shard, see `datastore.prepare_directory`.
      part: `(number of the shard from 0, number of shards)`.
      batch_size: Largest number of texts of a batch.
      report_bad: Called with the place of a text without tokens, whose vector is zeros.
      report_done: Called with the number of texts that are written and that of the shard.

    Returns:
      The record, and the number of texts that were cut.

    Raises:
      InputError: There are no texts, or fewer than shards, the model has no vectors, or the directory cannot be written.
    """
    (total, digest), (shard, shards) = source, part
    if not total:
        raise InputError("there are no texts to encode: name a file with texts")
    if shards > total:
        raise InputError(f"shards={shards}: expected at most {total}, the number of texts")
    first, last = (-(-total * i // shards) for i in (shard, shard + 1))
    directory = stores.prepare_directory(out)
    with replaced(directory / stores.TEXTS) as lines, replaced(directory / stores.VECTORS) as file:

        def read_shard() -> Iterator[tuple[str, Example]]:
            for number, (place, text) in enumerate(texts):
                if first <= number < last:
                    lines.write(json.dumps(text).encode() + b"\n")
                    yield place, text

        done: Callable[[int], None] = lambda count: report_done(count, last - first)  # noqa: E731
        is_of_pairs = (
            predictor.run.config.task == "dual_encoder"
        )  # queries are first texts, and what they find second ones
        vectors, cut = write_vectors(
            predictor, read_shard(), file, "float16", batch_size, report_bad, done, is_of_pairs
        )
    if vectors.count != last - first:
        raise InputError("the files of texts changed while they were read: build the shard again")
    record = Record(
        "texts",
        os.path.abspath(predictor.directory),
        predictor.run.step,
        weights_digest(predictor.run.params),
        tokenizer_digest(predictor.run.tokenizer),
        digest,
        shard,
        shards,
        vectors.count,
        vectors.dim,
    )
    stores.write_record(directory, record)
    return record, cut


def search(
    store: Datastore, predictor: Predictor, queries: list[Example], count: int
) -> list[list[tuple[float, int, Example]]]:
    """The texts whose vectors have the largest products with those of queries.

    Args:
      store: A datastore of texts.
      predictor: The model that made its vectors.
      queries: Texts.
      count: Number of texts for each query.

    Returns:
      `(score, number, text)` of the best texts of each query, best first, with the numbers of texts from 0; fewer than `count`
      if an approximate index reads fewer.

    Raises:
      InputError: The datastore is of another model, or a query has no tokens.
    """
    run = predictor.run
    store.check_run(predictor.directory, weights_digest(run.params), tokenizer_digest(run.tokenizer))
    scores, ids = map(np.asarray, store.index.search(predictor.encode(queries), min(count, store.record.count)))
    texts = store.texts(sorted(set(ids.ravel().tolist()) - {-1}))
    return [
        [(score, number, texts[number]) for score, number in zip(row, numbers, strict=True) if number >= 0]
        for row, numbers in zip(scores.tolist(), ids.tolist(), strict=True)
    ]
