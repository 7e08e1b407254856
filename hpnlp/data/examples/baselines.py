"""Scores of linear models of scikit-learn on the same examples, which a trained model should beat (extra `sklearn`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.dataset import Examples
from hpnlp.types import InputError

# Training examples that baselines read, spread evenly: features of more take gigabytes.
MAX_TRAINED = 50_000


def linear_accuracy(examples: Examples, name: str = "heldout", seed: int = 0) -> dict[str, float | None]:
    """Trains linear classifiers on bags of words and of characters.

    The classifiers are logistic regressions, fitted by `SGDClassifier`, over TF-IDF of words (with their pairs) and of runs
    of 2 to 5 characters within words. The texts of a pair are features of their own. At most MAX_TRAINED training examples are
    read.

    Args:
      examples: Examples with one label each.
      name: The examples to score, one of `Examples.heldout_sets`.
      seed: Seed of the order of the training examples.

    Returns:
      "words" and "characters" -> share of the examples whose label is predicted; None if the training examples have a single
      class, or no feature that two of them share.

    Raises:
      InputError: scikit-learn is missing.

    Cost: the training texts that are read in memory; seconds for 10,000 texts.
    """
    text, linear = _import("feature_extraction.text"), _import("linear_model")
    train, scored = examples.stored["train"], examples.stored[name]
    numbers = train.spread(MAX_TRAINED)
    texts, targets = list(train.texts(numbers)), train.all_labels()[numbers]
    result: dict[str, float | None] = dict.fromkeys(_FEATURES)
    for features, options in _FEATURES.items():
        vectorizers = [text.TfidfVectorizer(sublinear_tf=True, **options) for _ in range(train.parts)]
        try:
            x = _features(texts, vectorizers, fit=True)
            model = linear.SGDClassifier(loss="log_loss", alpha=1e-5, random_state=seed).fit(x, targets)
        except ValueError:  # no feature, or a single class
            continue
        predicted = model.predict(_features(list(scored.texts()), vectorizers, fit=False))
        result[features] = float(np.mean(predicted == scored.all_labels()))
    return result


# Name of a bag -> options of TfidfVectorizer. Words are runs of letters and digits, of one character too.
_FEATURES = {
    "words": {"token_pattern": r"\w+", "ngram_range": (1, 2), "min_df": 2},
    "characters": {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2},
}


def _features(texts: Sequence[tuple[bytes, ...]], vectorizers: Sequence[Any], fit: bool) -> Any:
    """Features of each text of the examples, side by side."""
    from scipy import sparse

    columns = [[row[part].decode() for row in texts] for part in range(len(vectorizers))]
    pairs = zip(vectorizers, columns, strict=True)
    return sparse.hstack([v.fit_transform(column) if fit else v.transform(column) for v, column in pairs]).tocsr()


def tfidf_recall(
    examples: Examples, name: str = "heldout", top: Sequence[int] = (1, 10), limit: int = 1000
) -> dict[int, float | None]:
    """Finds the second text of each pair by the cosine similarity of TF-IDF over words, among the second texts of all pairs.

    Identifiers such as `read_file` count as their parts. Document frequencies are those of at most MAX_TRAINED training pairs.

    Args:
      examples: Examples of pairs.
      name: The examples to score, one of `Examples.heldout_sets`.
      top: Numbers of retrieved texts.
      limit: Maximum number of pairs to score, the first ones.

    Returns:
      k -> share of the pairs whose second text is among the k most similar; equally similar texts count as more similar. None
      if the training pairs have no word.

    Raises:
      InputError: scikit-learn is missing.

    Cost: one pass over the training texts that are read; `limit`^2 similarities.
    """
    text = _import("feature_extraction.text")
    train, scored = examples.stored["train"], examples.stored[name]
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, token_pattern=r"[^\W_]+", dtype=np.float32)
    try:
        vectorizer.fit(part.decode() for texts in train.texts(train.spread(MAX_TRAINED)) for part in texts)
    except ValueError:  # no word
        return dict.fromkeys(top)
    texts = list(scored.texts(range(min(limit, scored.count))))
    queries, keys = (vectorizer.transform([row[part].decode() for row in texts]) for part in range(2))
    scores = (queries @ keys.T).toarray()
    rank = np.sum(scores >= np.diag(scores)[:, None], axis=1)  # 1 for the best; ties count against the pair
    return {k: float(np.mean(rank <= k)) for k in top}


def _import(module: str) -> Any:
    """A module of scikit-learn, which is no dependency."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise InputError("this baseline needs the scikit-learn package: pip install scikit-learn") from error
