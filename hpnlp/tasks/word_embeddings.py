"""Word embeddings: vectors of words from the words around them, by skip-gram or CBOW."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data.stream import Corpus, DataConfig
from hpnlp.models.word_vectors import WordVectors, WordVectorsConfig
from hpnlp.ops.weight import dense
from hpnlp.retrieval.word_vectors import WordVectorTable, token_vectors
from hpnlp.tasks.lm import LanguageModel
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
)
from hpnlp.tasks.task import RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError, option

SHOWN, NEIGHBOURS = 8, 6  # words of a report, and neighbours of each


@dataclasses.dataclass(frozen=True)
class WordVectorsDataConfig(DataConfig):
    """Text to read, and how it is split, tokenised and cut into batches: by default into words, always shuffled, no prompts."""

    tokenizer: str = option(
        "words(20000)",
        '"words(CAP)", "words(CAP, by=whitespace)", "bpe(SIZE)", "bytes", or the path of a tokenizer.json. Subsampling and '
        "unigram noise need the counts that words keeps.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_field:
            raise InputError(
                f"data.prompt_field={self.prompt_field!r}: words of prompts have vectors, too: set it to ''"
            )
        if self.order != "shuffle":
            raise InputError(f"data.order={self.order!r}: windows end with a sequence: set it to 'shuffle'")


class WordVectorsReport(TaskReport):
    """The part of reports and comparisons of word embeddings."""

    numbers_compared: Mapping[str, bool] = {"heldout_pair_accuracy": True, "heldout_loss": True}
    unit = "prediction"

    def numbers(self, dataset: Corpus, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """Scores, and identity of the held-out text."""
        return {
            **{f"heldout_{name}": value for name, value in scores.items()},
            "heldout_bytes": dataset.heldout_bytes,
            "heldout_digest": dataset.heldout_digest,
            **baselines,
        }

    def verdict(self, report: Report) -> str:
        if report["heldout_loss"] is None:
            return NOT_FINITE
        share = 100 * report["heldout_pair_accuracy"]
        return f"In {share:.1f} % of cases, adjacent words of held-out text are more similar than words from different places."

    def rows(self, report: Report) -> list[tuple[str, str]]:
        return [
            ("held-out bytes", f"{report['heldout_bytes']:,}"),
            ("held-out pair accuracy", decimals(report["heldout_pair_accuracy"])),
            ("held-out loss, nats per prediction", decimals(report["heldout_loss"])),
        ]

    def section(self, outcome: Outcome) -> Section:
        """The nearest neighbours of some words."""
        if outcome.params is None:
            return Section()
        table = trained_vectors(outcome.params, outcome.dataset.tokenizer)
        words = [word for word in table.words if word.isalpha() and len(word) > 3][:SHOWN]
        lines = [
            "Nearest neighbours of the most frequent words of at least four letters:",
            "",
            "| word | neighbours |",
            "|---|---|",
        ]
        for word in words:
            near = ", ".join(code_cell(name) for name, _ in table.neighbours(word, NEIGHBOURS))
            lines.append(f"| {code_cell(word)} | {near} |")
        return Section("\n".join(lines) if words else "")

    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Ranks runs by pair accuracy on the same held-out text, which compares between output layers as losses do not."""
        return rank_on_same_examples(reports, "pair_accuracy", higher_is_better=True)

    def commands(self, workdir: Path, config: RunConfig) -> dict[str, list[str]]:
        return {"list the neighbours of a word": ["neighbours", str(workdir), "WORD"]}


def _no_subsampling(config: RunConfig) -> str:
    return "" if config.model.subsample else "model.subsample=0 drops no word: leave it out, or set model.subsample"


class WordEmbeddings(LanguageModel):
    """Word embeddings: vectors of words from the words around them, by skip-gram or CBOW."""

    name = "word_embeddings"
    model_config = WordVectorsConfig
    data_config = WordVectorsDataConfig
    metric = "pair_accuracy"
    higher_is_better = True
    report = WordVectorsReport()
    unused_fields = ((("model.subsample_form",), _no_subsampling),)

    def model(self, config: RunConfig, sizes: Sizes) -> Any:
        self.check_no_stride(config)
        model = config.model
        if model.vocab and model.vocab < sizes.ids:
            raise InputError(
                f"model.vocab={model.vocab} is less than the tokenizer's {sizes.ids}: set it to 0, or to at least {sizes.ids}"
            )
        filled = dataclasses.replace(model, vocab=model.vocab or sizes.ids)
        return WordVectors(filled, sizes.stats and sizes.stats.padded(filled.vocab))

    def scores(
        self, config: RunConfig, dataset: Corpus, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """The loss in nats per prediction, and `pair_accuracy`: see `models.word_vectors.WordVectors.loss`."""
        (total, weight), (right, pairs) = sums["loss"], sums["pair_accuracy"]
        if not weight or not pairs:
            raise InputError(
                f"train.eval_batches={config.train.eval_batches}: the held-out text in these batches has no adjacent words to "
                "compare: raise it, 0 for all, or hold out other text"
            )
        return {"loss": float(total / weight), "pair_accuracy": float(right / pairs)}

    def baseline(self, dataset: Corpus) -> None:
        return None


def trained_vectors(params: Any, tokenizer: Any) -> WordVectorTable:
    """The word vectors of a run.

    Args:
      params: Parameters of a model with an embedding, also a compressed one.
      tokenizer: Its tokenizer.

    Returns:
      The vectors of all words but special ones.

    Raises:
      InputError: The model embeds no tokens.
    """
    table = params.get("embed", {}).get("table") if isinstance(params, Mapping) else None
    if table is None:
        raise InputError("the model has no embedding of tokens: name a run of another task, or --vectors=FILE")
    return token_vectors(np.asarray(dense(table), np.float32), tokenizer)
