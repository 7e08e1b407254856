"""The part of reports of sequence-to-sequence models: exact matches on both sets of scored examples, and decoded texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hpnlp.data.examples.dataset import CHALLENGE, HELDOUT, Examples
from hpnlp.tasks.reports.decoded_targets import decoded_targets
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

EXAMPLES = 6  # shown of each set
MAX_TEXT = 100  # characters of a text
# Field of report.json with a score of the examples that are scored apart -> name of the score.
APART = {"heldout_challenge_exact_match": "exact match", "heldout_challenge_accuracy": "token accuracy"}
# Set of examples -> field of report.json with the exact matches of a linear model.
LINEAR = {HELDOUT: "linear_exact_match", CHALLENGE: "linear_challenge_exact_match"}
# Set of examples -> its name in reports.
NAMES = {HELDOUT: "held out", CHALLENGE: "scored apart"}


class Seq2SeqReport(TaskReport):
    """The part of reports and comparisons of sequence-to-sequence models."""

    numbers_compared: Mapping[str, bool] = {
        "heldout_exact_match": True,
        "heldout_loss": True,
        "heldout_examples": False,
    }
    unit = "target token"

    def numbers(self, dataset: Examples, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, and identity of the held-out examples."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        count, matches = report["heldout_examples"], report["heldout_exact_match"]
        text = f"The model produces {100 * matches:.1f} % of the targets of {count:,} held-out examples exactly"
        linear = report.get(LINEAR[HELDOUT])
        text += "" if linear is None else f" (a linear model of words: {100 * linear:.1f} %)"
        apart = report.get("heldout_challenge_exact_match")
        return f"{text}." if apart is None else f"{text}, and {100 * apart:.1f} % of those that are scored apart."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out examples", f"{report['heldout_examples']:,}"),
            ("held-out exact match", decimals(report["heldout_exact_match"])),
            *(
                (f"linear model of words, exact match, {NAMES[name]}", decimals(report[field]))
                for name, field in LINEAR.items()
                if report.get(field) is not None
            ),
            ("held-out token accuracy", decimals(report["heldout_accuracy"])),
            *(
                (f"{name} of examples scored apart", decimals(report[field]))
                for field, name in APART.items()
                if field in report
            ),
            (f"held-out loss, nats per {self.unit}", decimals(report["heldout_loss"])),
        ]

    def section(self, outcome: Outcome) -> Section:
        """Texts that greedy decoding produces, if the mixers of the decoder can decode."""
        if outcome.params is None or not outcome.model.config.decodes:
            return Section()
        return Section("\n".join(_examples(outcome)))

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by exact match on the same examples: those that most runs were scored on."""
        return rank_on_same_examples(reports, "exact_match", higher_is_better=True)


def _examples(outcome: Outcome) -> Iterator[str]:
    """Lines of a table of sources, targets and decoded texts, spread over the examples of each set."""
    dataset, tokenizer = outcome.dataset, outcome.dataset.tokenizer
    chosen = []
    for name in dataset.heldout_sets:
        chosen += [(name, number) for number in spread(dataset.stored[name].count, EXAMPLES)]
    batches = [
        dataset.kind.batch(dataset.stored[name], [number], 1, tokenizer, dataset.seq_len) for name, number in chosen
    ]
    batch = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    decoded = decoded_targets(outcome.model, outcome.params, batch, tokenizer, outcome.config.data.target_len)
    yield "Targets that greedy decoding produces:"
    yield ""
    yield "| set | source | target | decoded | |"
    yield "|---|---|---|---|---|"
    for (name, number), ids in zip(chosen, decoded, strict=True):
        source, target = (dataset.stored[name].text(number, part).decode() for part in range(2))
        text = tokenizer.decode(ids).decode("utf-8", "replace")
        expected = tokenizer.decode(dataset.stored[name].part(number, 1)).decode("utf-8", "replace")
        texts = (text_cell(shown, MAX_TEXT) for shown in (source, target, text))
        yield "| " + " | ".join([NAMES[name], *texts, "right" if text == expected else "wrong"]) + " |"
