"""From labelled examples on disk to batches: `prepare_examples` reads, splits, tokenises and caches them.

Example::

    examples = prepare_examples(ClassificationConfig(path="reviews.csv", seq_len=256, batch_size=16))
    batches = examples.train(seed=0)
    batch = next(batches)  # tokens, segment_ids, positions, token_types: [16, 256]; labels, weights: [16]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hpnlp.data import tokenizers
from hpnlp.data.examples import generated
from hpnlp.data.examples.config import ExampleConfig
from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.ingest import ExampleIngest
from hpnlp.data.ingest import prepared
from hpnlp.data.reading import sources, token_store
from hpnlp.data.reading.files import Progress, ignore_progress
from hpnlp.data.reading.rows import FORMATS
from hpnlp.data.reading.split import Folds
from hpnlp.types import InputError, Tokenizer

Made = TypeVar("Made", bound=Examples)


def prepare_examples(
    config: ExampleConfig,
    labels: Sequence[str] | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
    opened_as: Callable[..., Made] = Examples,
) -> Made:
    """Reads, splits and tokenises the examples of a config, or finds the result in the cache.

    Args:
      config: The config, whose class decides about the kind of the examples.
      labels: Names of the only classes that labels may have, in the order of their ids, for example those of a run that is
          resumed; None for the classes of the training examples.
      tokenizer: Used in place of `config.tokenizer`, for example the saved tokenizer of a run that is resumed.
      progress: Called as `progress(step, bytes_done, bytes_total)` while examples are read.
      opened_as: `Examples`, or a class that derives from it.

    Returns:
      The examples.

    Raises:
      InputError: The examples, the config or the cache is invalid.

    Cost: one pass over the examples, and one more if a vocabulary is made. Memory does not grow with their number.
    """
    progress = progress or ignore_progress
    root = token_store.cache_root(config.cache)
    if tokenizer is None and not tokenizers.is_trained(config.tokenizer):
        tokenizer = tokenizers.build(config.tokenizer)  # before examples are read, so that a wrong path fails early
    ingest = find_sources(config, root, labels)
    return opened_as(config, *prepared(ingest, config.tokenizer, tokenizer, root, "examples", progress, labels))


def check_paths(config: ExampleConfig) -> None:
    """Checks that the files of a config exist. Reads the first example of published data, and generates none.

    Raises:
      InputError: A path does not exist, or no file is left to read in it.
    """
    _check_parts(config)
    for field in ("path", "heldout_path", "challenge_path"):
        paths = getattr(config, field)
        if field == "path" and generated.is_generated(paths):
            generated.check_published(paths)
        elif paths:
            sources.find(paths, f"data.{field}", FORMATS)


def _check_parts(config: ExampleConfig) -> None:
    """Raises InputError if `data.folds` is set for generated examples with their own held-out set."""
    if config.folds and generated.has_heldout(config.path):
        raise InputError(
            f"data.folds={config.folds}: data.path={config.path!r} has held-out examples of its own, which no part replaces: "
            "set data.folds=0 (no --folds), or pass records of your own"
        )


def find_sources(config: ExampleConfig, root: str, labels: Sequence[str] | None) -> ExampleIngest:
    """Lists the files of a config's paths, with the options that decide how they are read and split.

    Generated examples are written to the cache `root`. Raises InputError if there is no file to read.
    """
    _check_parts(config)
    train, heldout, challenge, group_field = generated.find(config.path, root)
    if not train:
        train = sources.find(config.path, "data.path", FORMATS)
    if config.heldout_path:
        heldout = sources.find(config.heldout_path, "data.heldout_path", FORMATS)
    if config.challenge_path:
        challenge = sources.find(config.challenge_path, "data.challenge_path", FORMATS)
    for argument, others in (("heldout_path", heldout), ("challenge_path", challenge)):
        train = sources.without_scored(train, others, f"data.{argument}")
    return ExampleIngest(
        kind=config.kind(),
        train=train,
        heldout=heldout,
        challenge=challenge,
        group_field=config.group_field or group_field,
        heldout_fraction=config.heldout,
        heldout_examples=config.heldout_examples,
        skip_bad_lines=config.skip_bad_lines,
        fold_labels=config.fold_labels,
        labels=None if labels is None else tuple(labels),
        folds=Folds(config.folds, config.fold),
    )
