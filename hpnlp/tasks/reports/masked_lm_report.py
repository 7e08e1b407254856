"""The part of reports of masked language models: accuracy on hidden tokens, and predictions of some of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpnlp.tasks.reports.reporting import (
    NOT_FINITE,
    Outcome,
    Ranking,
    Report,
    Section,
    TaskReport,
    code_cell,
    decimals,
    rank_on_same_examples,
    spread,
)

if TYPE_CHECKING:
    from hpnlp.tasks.masked_lm import MaskedText

SEQUENCES, EXAMPLES = 4, 8  # held-out sequences whose hidden tokens are predicted, and hidden tokens that are shown
CONTEXT = 24  # characters that are shown on each side of a hidden token


class MaskedReport(TaskReport):
    """The part of reports and comparisons of masked language models."""

    numbers_compared: Mapping[str, bool] = {"heldout_loss": True, "heldout_accuracy": True}
    unit = "masked token"

    def numbers(self, dataset: MaskedText, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, identity of the held-out text, and the accuracy of the most frequent token."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_bytes": dataset.corpus.heldout_bytes,
            "heldout_digest": dataset.heldout_digest,
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        text = f"The model predicts {100 * report['heldout_accuracy']:.1f} % of the hidden tokens of held-out text"
        frequent = report.get("frequent_accuracy")
        return f"{text}." if frequent is None else f"{text} (the most frequent token: {100 * frequent:.1f} %)."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out bytes", f"{report['heldout_bytes']:,}"),
            ("held-out loss, nats per masked token", decimals(report["heldout_loss"])),
            ("held-out accuracy", decimals(report["heldout_accuracy"])),
            ("the most frequent token, accuracy", decimals(report.get("frequent_accuracy"))),
        ]

    def section(self, outcome: Outcome) -> Section:
        """Some hidden tokens with their context and the model's prediction."""
        if outcome.params is None:
            return Section()
        return Section("\n".join(_examples(outcome)))

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by the loss on the same hidden tokens: those that most runs were scored on."""
        return rank_on_same_examples(reports, "loss")


def _examples(outcome: Outcome) -> Iterator[str]:
    """Lines of a table of hidden tokens, spread over some held-out sequences."""
    dataset, tokenizer = outcome.dataset, outcome.dataset.tokenizer
    batch = next(iter(dataset.heldout(batch_size=SEQUENCES, limit=1)))
    predicted = np.asarray(outcome.compiled("logits")(batch))[..., : tokenizer.vocab_size].argmax(axis=-1)
    original = np.where(batch["weights"] > 0, batch["labels"], batch["tokens"])
    places = np.argwhere(batch["weights"] > 0)
    yield "Some hidden tokens of held-out text:"
    yield ""
    yield "| hidden token | prediction | text before | text after |"
    yield "|---|---|---|---|"
    for row, column in places[spread(len(places), EXAMPLES)]:
        in_document = batch["segment_ids"][row] == batch["segment_ids"][row, column]
        texts = [
            original[row, column : column + 1],
            predicted[row, column : column + 1],
            original[row, :column][in_document[:column]],
            original[row, column + 1 :][in_document[column + 1 :]],
        ]
        token, guess, before, after = (tokenizer.decode(ids).decode("utf-8", "replace") for ids in texts)
        cells = [repr(token), repr(guess), repr(before[-CONTEXT:]), repr(after[:CONTEXT])]
        yield "| " + " | ".join(map(code_cell, cells)) + " |"
