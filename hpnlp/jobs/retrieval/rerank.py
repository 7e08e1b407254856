"""Ranks the texts that a search found again, by a cross-encoder, which reads a query and a text together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import cast

from hpnlp.jobs.predictor import Example, Predictor
from hpnlp.tasks.predictions import LabelPrediction
from hpnlp.types import InputError

# Names, in lower case, of the label that says that the texts of a pair belong together.
MATCHING = ("1", "yes", "true", "match", "relevant", "duplicate", "paraphrase", "equivalent")


def find_label(predictor: Predictor, name: str = "") -> str:
    """The label of a cross-encoder that says that the texts of a pair belong together.

    Args:
      predictor: A run of task classification on pairs of texts.
      name: The label; "" for the only one that is named as an entry of MATCHING, in any case.

    Returns:
      The label.

    Raises:
      InputError: The run does not predict labels of pairs of texts, has a single label, or has no such label; or, without
        `name`, none or several of its labels are named so.
    """
    directory, task = predictor.directory, predictor.run.config.task
    if predictor.prediction_type is not LabelPrediction:
        raise InputError(f"{directory} is of task={task!r}: a cross-encoder is a run of task='classification' on pairs")
    columns = predictor.kind.inputs
    if len(columns) != 2:
        raise InputError(
            f"{directory} reads single texts ({columns[0].name}): a cross-encoder reads pairs: train one with data.pair_field"
        )
    labels = predictor.run.vocabulary.labels or ()
    if len(labels) < 2:
        raise InputError(
            f"{directory} has one label, whose probability is always 1: name a run with two labels or more"
        )
    matching = [label for label in labels if (label == name if name else label.lower() in MATCHING)]
    if len(matching) != 1:
        listed = ", ".join(labels)
        if name:
            raise InputError(f"{directory} has no label {name!r}: expected one of {listed}")
        raise InputError(
            f"{directory} has the labels {listed}: {'several' if matching else 'none'} of them are named as a label of texts "
            f"that belong together ({', '.join(MATCHING)}): name the label, as with --label={labels[0]}"
        )
    return matching[0]


def rerank(
    predictor: Predictor,
    queries: Sequence[str],
    candidates: Sequence[Sequence[tuple[float, int, Example]]],
    label: str = "",
    batch_size: int = 64,
) -> list[list[tuple[float, int, Example]]]:
    """Orders the candidates of each query by a cross-encoder's probability that query and text belong together.

        model = hpnlp.load("runs/pairs")
        best = rerank(model, queries, texts.search(store, encoder, queries, 50))

    Args:
      predictor: A run of task classification on pairs: the query is the first text of a pair, and the candidate the second.
        Pairs longer than `data.seq_len` tokens are cut, with a warning.
      queries: The queries.
      candidates: `(score, number, text)` for each query, as `texts.search` returns them.
      label: As `name` of `find_label`.
      batch_size: Largest number of pairs of a batch.

    Returns:
      `(probability, number, text)` of the candidates of each query, the most probable first, and equal ones in their order.
      Pairs of which a text has no tokens are left out.

    Raises:
      InputError: As `find_label`; or a query or candidate is not a single text.
    """
    label = find_label(predictor, label)
    texts = [(query, text) for query, hits in zip(queries, candidates, strict=True) for _, _, text in hits]
    for pair in texts:
        for text in pair:
            if not isinstance(text, str):
                raise InputError(f"{text!r:.80} is not a single text, and a cross-encoder compares a text with another")
    predictions, cut = predictor.predict_valid(texts, batch_size, lambda number, error: None)
    if cut:
        warnings.warn(predictor.cut_message(cut, len(texts)), stacklevel=2)
    ranked, start = [], 0
    for hits in candidates:
        rows = []
        for position, (_, number, text) in enumerate(hits, start):
            if (prediction := cast(LabelPrediction | None, predictions.get(position))) is not None:
                rows.append((prediction.probabilities[label], number, text))
        ranked.append(sorted(rows, key=lambda row: -row[0]))
        start += len(hits)
    return ranked
