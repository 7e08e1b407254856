"""Scores of linear models and TF-IDF of scikit-learn, which a trained model should exceed (extra `sklearn`)."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.dataset import Examples
from hpnlp.data.examples.store import UNLABELLED, StoredExamples, spread
from hpnlp.types import InputError

# Largest number of training examples that baselines read, spread evenly: features of more examples take gigabytes.
MAX_TRAINED = 50_000


def linear_accuracy(examples: Examples, name: str = "heldout", seed: int = 0) -> dict[str, float | None]:
    """Trains linear classifiers on bags of words and of characters.

    The classifiers are logistic regressions, fitted by `SGDClassifier`, over TF-IDF of words and pairs of words, and over
    TF-IDF of runs of 2 to 5 characters within words. Each text of a pair has its own features. At most MAX_TRAINED training
    examples are read.

    Args:
      examples: Examples with one label each.
      name: The examples to score, one of `Examples.heldout_sets`.
      seed: Seed of the order of the training examples.

    Returns:
      "words" and "characters" -> share of the examples whose label is predicted; None if the training examples have a single
      class, or no two of them share a feature.

    Raises:
      InputError: scikit-learn is missing.

    Cost: memory for the training texts that are read and their features.
    """
    text, linear = _import("feature_extraction.text"), _import("linear_model")
    train, scored = examples.stored["train"], examples.stored[name]
    labels = train.all_labels()
    numbers = np.flatnonzero(labels != UNLABELLED)
    numbers = numbers[spread(len(numbers), MAX_TRAINED)]
    texts, targets = list(train.texts(numbers)), labels[numbers]
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


# Name of the features -> options of TfidfVectorizer. Words are runs of letters and digits, also of a single one.
_FEATURES = {
    "words": {"token_pattern": r"\w+", "ngram_range": (1, 2), "min_df": 2},
    "characters": {"analyzer": "char_wb", "ngram_range": (2, 5), "min_df": 2},
}


def _features(texts: Sequence[tuple[bytes, ...]], vectorizers: Sequence[Any], fit: bool) -> Any:
    """Features of the examples: those of each of their texts, concatenated."""
    from scipy import sparse

    columns = [[row[part].decode() for row in texts] for part in range(len(vectorizers))]
    pairs = zip(vectorizers, columns, strict=True)
    return sparse.hstack([v.fit_transform(column) if fit else v.transform(column) for v, column in pairs]).tocsr()


def tfidf_recall(
    examples: Examples, name: str = "heldout", top: Sequence[int] = (1, 10), limit: int = 1000, by: str = "words"
) -> dict[int, float | None]:
    """Finds the second text of each pair by the cosine similarity of TF-IDF, among the second texts of all pairs.

    Document frequencies are those of at most MAX_TRAINED training pairs.

    Args:
      examples: Examples of pairs.
      name: The examples to score, one of `Examples.heldout_sets`.
      top: Numbers of retrieved texts.
      limit: Maximum number of pairs to score, the first ones.
      by: "words", in lower case, where identifiers such as `read_file` and `readFile` are two words; or "tokens" of the
        examples' tokenizer.

    Returns:
      k -> share of the pairs whose second text is among the k most similar; equally similar texts count as more similar. None
      if the training pairs have no words.

    Raises:
      InputError: scikit-learn is missing.

    Cost: one pass over the training texts that are read; memory for `limit`^2 similarities.
    """
    ranks = tfidf_ranks(examples, name, limit, by)
    return {k: None if ranks is None else float(np.mean(ranks <= k)) for k in top}


def tfidf_ranks(examples: Examples, name: str = "heldout", limit: int = 1000, by: str = "words") -> np.ndarray | None:
    """Rank of the second text of each pair by the cosine similarity of TF-IDF, among the second texts of all pairs.

    Arguments, errors and cost: see `tfidf_recall`.

    Returns:
      int64 `[n]`, 1 for the most similar; equally similar texts count as more similar. None if the training pairs have no
      words.
    """
    text = _import("feature_extraction.text")
    train, scored = examples.stored["train"], examples.stored[name]
    split = {"words": _words, "tokens": lambda text: examples.tokenizer.encode(text).tolist()}[by]
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, analyzer=list, dtype=np.float32)
    try:
        vectorizer.fit(split(part) for texts in train.texts(train.spread(MAX_TRAINED)) for part in texts[:2])
    except ValueError:  # no word
        return None
    texts = list(scored.texts(range(min(limit, scored.count))))
    queries, keys = (vectorizer.transform([split(row[part]) for row in texts]) for part in range(2))
    scores = (queries @ keys.T).toarray()
    return np.sum(scores >= np.diag(scores)[:, None], axis=1)


def tfidf_bag_accuracy(examples: Examples, name: str = "heldout") -> float | None:
    """Labels bags of texts by the most similar class: the mean of the TF-IDF of the words of its training bags.

    Args:
      examples: Examples of `bags.LabelledBags`.
      name: The examples to score, one of `Examples.heldout_sets`.

    Returns:
      Share of the bags whose label is that of the most similar class; None if the training bags have no words.

    Raises:
      InputError: scikit-learn is missing.
    """
    text = _import("feature_extraction.text")
    vectorizer = text.TfidfVectorizer(sublinear_tf=True, analyzer=lambda texts: _words(texts[0]), dtype=np.float32)
    train, scored = examples.stored["train"], examples.stored[name]
    numbers = train.spread(MAX_TRAINED)
    try:
        x = vectorizer.fit_transform(train.texts(numbers))
    except ValueError:  # no word
        return None
    labels = np.array([train.labels(int(number))[0] for number in numbers])
    classes = np.stack([x[labels == label].sum(axis=0).A1 for label in np.unique(labels)])
    classes /= np.linalg.norm(classes, axis=1, keepdims=True) + 1e-12
    best = np.unique(labels)[np.asarray(vectorizer.transform(scored.texts()) @ classes.T).argmax(axis=1)]
    return float(np.mean(best == [scored.labels(number)[0] for number in range(scored.count)]))


# Borders of words within an identifier such as readHTTPHeader; words.
_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[^\W_]+")


def _words(text: bytes) -> list[str]:
    return _WORD.findall(_CASE.sub(" ", text.decode()).lower())


def linear_exact_match(examples: Examples, names: Sequence[str] = ("heldout",)) -> dict[str, float]:
    """Predicts each piece of a target by a linear model of the pieces of the source and their places.

    A piece is a run of letters, a digit, or another character. The features are the pieces at each place of the source, counted
    from its beginning and from its end. For each place of the target, a ridge regression scores the pieces. An end piece
    follows the last piece of a target.

    Args:
      examples: Examples with a source and a target.
      names: The sets of examples to score, of `Examples.heldout_sets`.

    Returns:
      Name of a set -> share of the targets of which all pieces are predicted; empty if the training sources have no pieces.

    Raises:
      InputError: scikit-learn is missing.

    Cost: at most MAX_TRAINED training examples are read. Of longer targets, the first MAX_PIECES pieces are compared.
    """
    text, linear = _import("feature_extraction.text"), _import("linear_model")
    vectorizer = text.CountVectorizer(analyzer=_places, max_features=_MAX_FEATURES, dtype=np.float32)
    train = examples.stored["train"]
    sources, targets = _columns(train, train.spread(MAX_TRAINED))
    pieces = [_target(target) for target in targets]
    known = collections.Counter((place, piece) for target in pieces for place, piece in enumerate(target))
    columns = {key: i for i, (key, _) in enumerate(known.most_common(_MAX_FEATURES))}
    try:
        x = vectorizer.fit_transform(sources)
    except ValueError:  # no piece
        return {}
    y = np.zeros((len(pieces), len(columns)), np.float32)
    for row, target in enumerate(pieces):
        y[row, [columns[key] for key in enumerate(target) if key in columns]] = 1
    model = linear.Ridge(alpha=1.0, solver="cholesky", fit_intercept=False).fit(x, y)
    result = {}
    for name in names:
        sources, targets = _columns(examples.stored[name])
        predicted = _best_pieces(model.predict(vectorizer.transform(sources)), columns)
        result[name] = float(np.mean([p == _target(t) for p, t in zip(predicted, targets, strict=True)]))
    return result


_PIECE = re.compile(r"[^\W\d_]+|\d|\S")
_END = ""  # the piece after the last one
MAX_PIECES = 32
_MAX_FEATURES = 1500  # the most frequent pairs of place and piece, of sources and of targets


def _columns(stored: StoredExamples, numbers: Iterable[int] | None = None) -> Iterator[tuple[str, ...]]:
    """The first texts of the examples with these numbers, all by default, and the second ones."""
    return zip(*([text.decode() for text in texts] for texts in stored.texts(numbers)), strict=True)


def _places(text: str) -> list[tuple[int, str]]:
    """Pieces of a source with their places, which are negative when counted from the end."""
    pieces = _PIECE.findall(text)
    return [*enumerate(pieces), *((place - len(pieces), piece) for place, piece in enumerate(pieces))]


def _target(text: str) -> list[str]:
    """Pieces of a target and the end piece, at most MAX_PIECES."""
    return [*_PIECE.findall(text), _END][:MAX_PIECES]


def _best_pieces(scores: np.ndarray, columns: Mapping[tuple[int, str], int]) -> list[list[str]]:
    """The pieces with the highest scores at each place, up to the end of the target."""
    best = []
    for place in range(MAX_PIECES):
        at = [(piece, column) for (other, piece), column in columns.items() if other == place]
        if at:
            choice = scores[:, [column for _, column in at]].argmax(axis=1)
            best.append([at[i][0] for i in choice])
    rows = [list(row) for row in zip(*best, strict=True)]
    return [row[: row.index(_END) + 1] if _END in row else row for row in rows]


def _import(module: str) -> Any:
    """Imports a module of scikit-learn, which is an optional dependency."""
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise InputError("this baseline needs the scikit-learn package: pip install scikit-learn") from error
