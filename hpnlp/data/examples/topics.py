"""Topics of bags by non-negative matrix factorisation, in place of labels (extra `sklearn`)."""

from __future__ import annotations

import dataclasses
import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples.store import StoredExamples, spread
from hpnlp.data.reading import token_store
from hpnlp.data.tokenizers import tokenizer_digest
from hpnlp.spec import build, parse_one
from hpnlp.types import REQUIRED, InputError, Tokenizer, check_options, option

FITTED = 50_000  # largest number of training bags that topics are fitted to, spread evenly
SHOWN = 3  # words in the name of a topic


@dataclasses.dataclass(frozen=True)
class Topics:
    """The topic of each bag that has the largest weight, of `count` topics."""

    count: int = option(REQUIRED, "Number of topics; one has no negatives.", least=2)
    seed: int = option(0, "Seed of the factorisation.", least=0)

    def __post_init__(self) -> None:
        check_options(self)


POSITIVES: dict[str, Callable[..., Topics | None]] = {"labels": lambda: None, "topics": Topics}


def parse_positives(text: str) -> Topics | None:
    """The source of positives of a config.

    Args:
      text: `data.positives`, an entry of POSITIVES, as in "topics(20)".

    Returns:
      The topics; None for the labels of the records.

    Raises:
      InputError: Unknown names, or arguments out of range.
    """
    return build(parse_one(text, "data.positives"), POSITIVES, "data.positives")


def find_topics(
    topics: Topics, stored: Mapping[str, StoredExamples], tokenizer: Tokenizer, root: str
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Finds topics of training bags, and the topic of each bag.

    A bag is its TF-IDF (sublinear, of unit length) over tokens, and a topic a row of the factor of tokens. Of each bag, the
    topic counts whose part in the factorisation has the largest norm.

    Args:
      topics: Number and seed.
      stored: Name of a set -> its bags; topics are fitted to those of "train".
      tokenizer: Their tokenizer.
      root: Directory of the cache, which keeps the topics.

    Returns:
      `(names, topics)`: the number of each topic with its heaviest words; and name of a set -> int32 `[n]`.

    Raises:
      InputError: scikit-learn is missing; there are fewer bags or words than topics, or a topic that is no training bag's.

    References:
      Lee and Seung 1999, "Learning the parts of objects by non-negative matrix factorization".
    """
    digests = [[name, stored[name].digest] for name in sorted(stored)]
    key = token_store.json_hash(["topics", 1, topics.count, topics.seed, digests, tokenizer_digest(tokenizer)])

    def write(directory: str) -> dict[str, Any]:
        names, numbers = _fit(topics, stored, tokenizer)
        for name, of_bags in numbers.items():
            np.save(os.path.join(directory, f"{name}.npy"), of_bags)
        return {"names": names}

    directory, record = token_store.cached(root, f"topics-{key}", write)
    return tuple(record["names"]), {name: np.load(os.path.join(directory, f"{name}.npy")) for name in stored}


def _fit(
    topics: Topics, stored: Mapping[str, StoredExamples], tokenizer: Tokenizer
) -> tuple[list[str], dict[str, np.ndarray]]:
    try:
        decomposition: Any = importlib.import_module("sklearn.decomposition")
        text: Any = importlib.import_module("sklearn.feature_extraction.text")
        exceptions: Any = importlib.import_module("sklearn.exceptions")
    except ImportError as error:
        raise InputError(
            f"data.positives='topics({topics.count})' needs the package scikit-learn: pip install scikit-learn, or set "
            "data.positives='labels'"
        ) from error
    counts = {name: _counts(bags, tokenizer.vocab_size) for name, bags in stored.items()}
    train = counts["train"][spread(counts["train"].shape[0], FITTED)]
    words = int(np.count_nonzero(train.getnnz(axis=0)))
    for number, noun in ((train.shape[0], "training bags"), (words, "different words in training bags")):
        if number < topics.count:
            raise InputError(
                f"data.positives='topics({topics.count})': there are {number} {noun}: expected at most as many topics"
            )
    weighting = text.TfidfTransformer(sublinear_tf=True).fit(train)
    model = decomposition.NMF(topics.count, init="nndsvda", random_state=topics.seed)
    with warnings.catch_warnings():
        # Also a factorisation that has not converged gives each bag a topic.
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        model.fit(weighting.transform(train))
        sizes = np.linalg.norm(model.components_, axis=1)
        numbers = {
            name: (model.transform(weighting.transform(x)) * sizes).argmax(axis=1).astype(np.int32)
            if x.shape[0]
            else np.zeros(0, np.int32)
            for name, x in counts.items()
        }
    used = np.bincount(numbers["train"], minlength=topics.count)
    if not used.all():
        raise InputError(
            f"data.positives='topics({topics.count})': {np.count_nonzero(used == 0)} topics are the main one of no training "
            f"bag: expected at most {np.count_nonzero(used)} topics, or another seed"
        )
    return [_name(number, row, tokenizer) for number, row in enumerate(model.components_, 1)], numbers


def _counts(bags: StoredExamples, vocab: int) -> Any:
    """Occurrences of each token in each bag, a sparse matrix [bags, tokens]."""
    from scipy import sparse

    rows = [bags.part(number, 0).astype(np.int64) for number in range(bags.count)]
    ends = np.cumsum([0, *map(len, rows)])
    ids = np.concatenate([*rows, np.zeros(0, np.int64)])
    matrix = sparse.csr_matrix((np.ones(len(ids)), ids, ends), shape=(bags.count, vocab))
    matrix.sum_duplicates()
    return matrix


def _name(number: int, row: np.ndarray, tokenizer: Tokenizer) -> str:
    """Name of a topic, from the words with the largest weights."""
    texts = (tokenizer.decode([int(i)]).decode("utf-8", "replace").strip() for i in np.argsort(-row, kind="stable"))
    heaviest = [text for text, _ in zip((text for text in texts if text), range(SHOWN), strict=False)]
    return f"topic {number}: {' '.join(heaviest)}"
