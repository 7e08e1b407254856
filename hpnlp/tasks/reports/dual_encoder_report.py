"""The part of reports of dual encoders that learn from negatives: recall and mean reciprocal rank, and examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples.dataset import HELDOUT, Examples
from hpnlp.data.examples.kind import TokenisedExamples
from hpnlp.tasks.reports.reporting import (
    NOT_FINITE,
    Outcome,
    Ranking,
    Report,
    Section,
    TaskReport,
    decimals,
    rank_on_same_examples,
    spread,
    text_cell,
)

TOP = (1, 10)  # numbers of retrieved texts whose recall is reported
# Beginning of fields of report.json -> objects that TF-IDF counts.
TFIDF = {"tfidf": "words", "token_tfidf": "tokens"}
APART = "heldout_challenge_accuracy"  # field of report.json with a score of the pairs of data.challenge_path
MAX_PAIRS = 10_000  # held-out pairs that are ranked, the first ones: their similarities take 400 MB
EXAMPLES = 4  # shown of each kind, hits and misses
MAX_TEXT = 80  # characters of a text


class RetrievalReport(TaskReport):
    """The part of reports and comparisons of dual encoders whose loss compares with negatives."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_accuracy": True,
        "heldout_loss": True,
        "heldout_recall_at_10": True,
        "heldout_examples": False,
    }
    unit = "pair"

    def numbers(self, dataset: Examples, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, identity of the held-out pairs, and recall of TF-IDF on them.

        Recall of the model is None until `section` has ranked the pairs.
        """
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            **{f"heldout_{name}": None for name in (*(f"recall_at_{k}" for k in TOP), "mrr")},
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        count, recall = report["heldout_examples"], report["heldout_recall_at_10"]
        if count <= TOP[-1]:
            return (
                f"{count:,} held-out pairs are too few to rank them: hold out more than {TOP[-1]}, by data.heldout, "
                "data.heldout_examples or data.heldout_path."
            )
        if recall is None:
            share = f"{100 * report['heldout_accuracy']:.1f} %"
            return f"The partner of {share} of {count:,} held-out texts is the most similar one of its batch."
        text = (
            f"The partner of {100 * recall:.1f} % of the held-out texts is among the 10 most similar of "
            f"{min(count, MAX_PAIRS):,}"
        )
        tfidf = {objects: report.get(f"{name}_recall_at_10") for name, objects in TFIDF.items()}
        others = [f"TF-IDF of {objects} {100 * value:.1f} %" for objects, value in tfidf.items() if value is not None]
        return f"{text} ({', '.join(others)})." if others else f"{text}."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out pairs", f"{report['heldout_examples']:,}"),
            *((f"recall at {k}", decimals(report[f"heldout_recall_at_{k}"])) for k in TOP),
            *(
                (f"TF-IDF of {objects}, recall at {k}", decimals(report.get(f"{name}_recall_at_{k}")))
                for name, objects in TFIDF.items()
                for k in TOP
            ),
            ("mean reciprocal rank", decimals(report["heldout_mrr"])),
            ("held-out accuracy within batches", decimals(report["heldout_accuracy"])),
            *([("challenge pairs, accuracy within batches", decimals(report[APART]))] if APART in report else []),
            (
                f"held-out triplet loss per {self.unit}"
                if report.get("config", {}).get("model.loss") == "triplet"
                else f"held-out loss within batches, nats per {self.unit}",
                decimals(report["heldout_loss"]),
            ),
        ]

    def section(self, outcome: Outcome) -> Section:
        """Recall over all held-out pairs, and texts with the partner that is the most similar one."""
        if outcome.params is None:
            return Section()
        scores = similarities(outcome)
        ranks = partner_ranks(scores)
        numbers = {f"heldout_{name}": value for name, value in retrieval_scores(ranks).items()}
        return Section("\n".join(_examples(outcome, scores, ranks)), numbers=numbers)

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by recall at 10 over the same held-out pairs: those that most runs were scored on."""
        return rank_on_same_examples(reports, "recall_at_10", higher_is_better=True)


def similarities(outcome: Outcome) -> np.ndarray:
    """Cosine similarities of the first held-out pairs, at most MAX_PAIRS.

    Args:
      outcome: Result of a run.

    Returns:
      float32 `[N, N]`: of the first text of each pair with the second text of each pair.
    """
    stored = outcome.dataset.stored[HELDOUT]
    texts, partners = vectors(outcome, stored, min(stored.count, MAX_PAIRS))
    return texts @ partners.T


def vectors(outcome: Outcome, pairs: TokenisedExamples, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of pairs of texts.

    Args:
      outcome: Result of a run.
      pairs: Pairs of texts.
      count: Number of pairs, the first ones.

    Returns:
      Vectors of the first texts, and of their partners, float32 `[count, D]`.
    """
    dataset, embed, rows = outcome.dataset, outcome.compiled("embed"), outcome.config.data.batch_size
    batches = []
    for start in range(0, count, rows):
        numbers = range(start, min(start + rows, count))
        batch = dataset.kind.batch(pairs, numbers, rows, dataset.tokenizer, dataset.seq_len)
        batches.append([np.asarray(x)[: len(numbers)] for x in embed(batch)])
    texts, partners = map(np.concatenate, zip(*batches, strict=True))
    return texts, partners


def spearman(similarities: np.ndarray, grades: np.ndarray) -> float:
    """Spearman's rank correlation; equal values have the mean of their ranks.

    Args:
      similarities: `[n]`.
      grades: `[n]`, not all equal.

    Returns:
      The correlation; NaN if similarities are not finite, or all are equal.
    """
    from scipy import stats

    return pearson(*(stats.rankdata(x, method="average", nan_policy="propagate") for x in (similarities, grades)))


def pearson(similarities: np.ndarray, grades: np.ndarray) -> float:
    """Pearson's correlation.

    Args:
      similarities: `[n]`.
      grades: `[n]`.

    Returns:
      The correlation; NaN if values are not finite, or all values of an argument are equal.
    """
    x, y = (x.astype(np.float64) - x.mean(dtype=np.float64) for x in (similarities, grades))
    norm = np.sqrt(np.dot(x, x) * np.dot(y, y))
    return float(np.dot(x, y) / norm) if norm > 0 else math.nan


def partner_ranks(scores: np.ndarray) -> np.ndarray:
    """Rank of each text's own partner among all partners.

    Args:
      scores: `[N, N]`, similarities of texts (rows) and partners; the partner of text i is i.

    Returns:
      int `[N]`, 1 for the most similar. Partners that are equally similar come first; similarities that are not finite give
      the rank N.
    """
    positives = np.diag(scores)[:, None]
    return np.where(np.isfinite(positives[:, 0]), np.sum(scores >= positives, axis=1), len(scores))


def retrieval_scores(ranks: np.ndarray) -> dict[str, float]:
    """Recall and mean reciprocal rank.

    Args:
      ranks: Rank of each text's partner, from 1.

    Returns:
      `recall_at_K` for each K of TOP, and `mrr`.
    """
    return {f"recall_at_{k}": float(np.mean(ranks <= k)) for k in TOP} | {"mrr": float(np.mean(1 / ranks))}


def _examples(outcome: Outcome, scores: np.ndarray, ranks: np.ndarray) -> Iterator[str]:
    """Lines of a table of texts, spread over the hits and over the misses."""
    stored = outcome.dataset.stored[HELDOUT]
    yield f"Held-out texts whose partner is the most similar one, and texts whose partner has a rank over {TOP[-1]}:"
    yield ""
    yield "| rank of the partner | text | its partner | the most similar partner |"
    yield "|---|---|---|---|"
    for places in (np.flatnonzero(ranks == 1), np.flatnonzero(ranks > TOP[-1])):
        for i in places[spread(len(places), EXAMPLES)].tolist():
            best = int(scores[i].argmax())
            texts = (stored.text(i, 0), stored.text(i, 1), stored.text(best, 1))
            yield "| " + " | ".join([str(ranks[i]), *(text_cell(text.decode(), MAX_TEXT) for text in texts)]) + " |"
