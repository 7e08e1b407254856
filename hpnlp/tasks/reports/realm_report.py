"""The part of reports of language models with learned retrieval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpnlp.tasks.reports.reporting import NOT_FINITE, Ranking, Report, TaskReport, decimals, rank_on_same_examples

if TYPE_CHECKING:
    from hpnlp.data.examples.kinds.spans import ExamplesWithDocuments


class RealmReport(TaskReport):
    """The part of reports and comparisons of language models with learned retrieval."""

    numbers_compared: Mapping[str, bool] = {"heldout_loss": True, "heldout_utility": True}
    unit = "hidden token"

    def numbers(
        self, dataset: ExamplesWithDocuments, scores: Mapping[str, float], baselines: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Scores, numbers of texts and documents, and the identity of the held-out texts."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_examples": dataset.heldout_examples,
            "heldout_digest": dataset.heldout_digest,
            "documents": len(dataset.documents),
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        utility = f"Retrieved documents change log p of a hidden token by {report['heldout_utility']:+.3f} nats"
        share = report.get("heldout_retrieval_at_1")
        if share is None:
            return f"{utility}."
        retrieved = f"{100 * share:.1f} % of the held-out texts retrieve their document first"
        return f"{utility}, and {retrieved}, of {report['documents']:,}."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out texts", f"{report['heldout_examples']:,}"),
            ("documents", f"{report['documents']:,}"),
            ("held-out loss, nats", decimals(report["heldout_loss"])),
            ("held-out retrieval utility, nats per hidden token", decimals(report["heldout_utility"])),
            ("held-out texts that retrieve their document first", decimals(report.get("heldout_retrieval_at_1"))),
        ]

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by the loss on the same hidden tokens: those that most runs were scored on."""
        return rank_on_same_examples(reports, "loss")
