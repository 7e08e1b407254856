"""Masked language modelling: hidden tokens of a text, from the tokens on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpnlp.data import Corpus, DataConfig, prepare
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Classification
from hpnlp.data.masking import MaskedCorpus, check_mask
from hpnlp.data.reading import sources
from hpnlp.data.reading.files import Progress
from hpnlp.data.reading.token_store import json_hash
from hpnlp.models.encoder import Encoder, EncoderConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.predictions import TrainedModel
from hpnlp.tasks.reports.masked_lm_report import MaskedReport
from hpnlp.tasks.task import Batch, RunConfig, Sums, Task
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError, option


@dataclasses.dataclass(frozen=True)
class MaskedDataConfig(DataConfig):
    """Text to read, how it is split, tokenised and cut into batches, and the tokens that are hidden."""

    packing: str = option(
        "fit",
        '"fit" keeps documents whole, or in pieces of seq_len, and fills sequences with documents that fit; "concat" lays '
        "documents one after another and cuts sequences when they are full. Held-out text is always laid one after another.",
    )
    mask_rate: float = option(0.15, "Share of the tokens that are hidden and predicted.")
    mask_span: float = option(0.0, "Mean length of runs of hidden tokens, at least 1; 0 for single tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_mask(self.mask_rate, self.mask_span)
        except InputError as error:
            raise InputError(f"data.mask_{error}") from None
        if self.order != "shuffle":
            raise InputError(
                f"data.order={self.order!r} is for language models, whose tokens depend on earlier ones only: set it to "
                "'shuffle'"
            )
        if self.prompt_field:
            raise InputError(
                f"data.prompt_field={self.prompt_field!r}: masked tokens are predicted in prompts as well: set it to ''"
            )


class MaskedText(MaskedCorpus):
    """A corpus with hidden tokens, as the training loop reads it.

    Attributes:
      tokenizer: The tokenizer of the text.
      summary: Sizes of the corpus.
      heldout_digest: Digest of the held-out tokens and of how they are hidden.
    """

    def __init__(self, corpus: Corpus, config: MaskedDataConfig) -> None:
        super().__init__(corpus, config.mask_rate, config.mask_span)
        self.tokenizer = corpus.tokenizer
        self.summary = corpus.summary
        self.heldout_digest = json_hash([corpus.heldout_digest, config.mask_rate, config.mask_span])


class MaskedLanguageModel(Task):
    """Masked language modelling: hidden tokens of a text, from the tokens on both sides.

    The model has one more id than the tokenizer, that of the mask, unless the tokenizer has a mask of its own.
    """

    name = "masked_lm"
    model_config = EncoderConfig
    data_config = MaskedDataConfig
    report = MaskedReport()

    def input_kind(self, data: object) -> Kind:
        return Classification("text", "", "label")

    def encode(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        return trained.call("vectors", batch)

    def check_data(self, data: MaskedDataConfig) -> None:
        for field in ("path", "heldout_path"):
            if paths := getattr(data, field):
                sources.find(paths, f"data.{field}")

    def dataset(
        self, data: MaskedDataConfig, vocabulary: Vocabulary | None, progress: Progress | None = None
    ) -> MaskedText:
        return MaskedText(prepare(data, None if vocabulary is None else vocabulary.tokenizer, progress), data)

    def heldout(
        self,
        config: RunConfig,
        dataset: MaskedText,
        *,
        limit: int | None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        return dataset.heldout(
            batch_size=config.data.batch_size, limit=limit, process_index=process_index, process_count=process_count
        )

    def heldout_documents(self, config: RunConfig, dataset: MaskedText, limit: int | None) -> np.ndarray | None:
        return dataset.corpus.document_numbers(config.data.batch_size, None, limit)

    def planned_sizes(self, config: RunConfig) -> Sizes:
        limit = config.model.vocab - 1 if config.model.vocab else 0
        return vocabularies.planned_sizes(config.data.tokenizer, limit)

    def model(self, config: RunConfig, sizes: Sizes) -> Encoder:
        model = config.model
        self.check_no_stride(config)
        for field, expected in (("pooling", "none"), ("classes", 0)):
            if (value := getattr(model, field)) != expected:
                raise InputError(f"model.{field}={value!r}: task={self.name!r} predicts tokens: set it to {expected!r}")
        ids = sizes.masked_ids or sizes.ids + 1
        filled = vocabularies.fill_sizes(model, dataclasses.replace(sizes, ids=ids), config.data.seq_len)
        return Encoder(filled, sizes.stats and sizes.stats.padded(filled.vocab))

    def scores(
        self, config: RunConfig, dataset: MaskedText, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per masked token, and the share of masked tokens that is predicted."""
        if not sums["loss"][1]:
            raise InputError(
                f"train.eval_batches={config.train.eval_batches}: no held-out token of these batches is hidden: raise it, 0 "
                "for all, or raise data.mask_rate"
            )
        return {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy")}

    def scored_amounts(self, config: RunConfig, dataset: MaskedText, limit: int | None) -> dict[str, int]:
        return {"bytes": dataset.corpus.heldout_bytes} if limit is None else {}

    def baseline(self, dataset: MaskedText) -> MostFrequentToken:
        return MostFrequentToken(dataset)


class MostFrequentToken:
    """Accuracy of predicting one token everywhere."""

    def __init__(self, dataset: MaskedText) -> None:
        self._dataset = dataset

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Counts the hidden tokens of the held-out text.

        Args:
          log: Not called.

        Returns:
          `frequent_accuracy`, the share of the most frequent one.
        """
        counts = np.zeros(self._dataset.tokenizer.vocab_size, np.int64)
        for batch in self._dataset.heldout(batch_size=16):
            counts += np.bincount(batch["labels"][batch["weights"] > 0], minlength=len(counts))
        return {"frequent_accuracy": float(counts.max() / max(1, counts.sum()))}
