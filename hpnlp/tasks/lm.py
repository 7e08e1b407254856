"""Causal language modelling: the next token of texts."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hpnlp.data.baselines import Baselines
from hpnlp.data.reading import sources
from hpnlp.data.reading.files import Progress
from hpnlp.data.stream import Corpus, DataConfig, prepare
from hpnlp.models.lm import LM, LMConfig
from hpnlp.models.stacks.layer_forms import carries
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.reports.lm_report import LanguageModelReport
from hpnlp.tasks.task import Batch, RunConfig, Sums, Task
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError


class LanguageModel(Task):
    """Causal language modelling: the next token of texts."""

    name = "lm"
    model_config = LMConfig
    data_config = DataConfig
    report = LanguageModelReport()

    def check_data(self, data: DataConfig) -> None:
        for field in ("path", "heldout_path"):
            if paths := getattr(data, field):
                sources.find(paths, f"data.{field}")

    def dataset(self, data: DataConfig, vocabulary: Vocabulary | None, progress: Progress | None = None) -> Corpus:
        return prepare(data, None if vocabulary is None else vocabulary.tokenizer, progress)

    def heldout(
        self, config: RunConfig, dataset: Corpus, *, limit: int | None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        return dataset.heldout(
            batch_size=config.data.batch_size,
            stride=config.train.eval_stride or None,
            limit=limit,
            process_index=process_index,
            process_count=process_count,
        )

    def heldout_documents(self, config: RunConfig, dataset: Corpus, limit: int | None) -> np.ndarray | None:
        return dataset.document_numbers(config.data.batch_size, config.train.eval_stride or None, limit)

    def model(self, config: RunConfig, sizes: Sizes) -> LM:
        model = config.model
        _check_order(config)
        for traits in model.traits:
            if not traits.isolates_segments:
                raise InputError(
                    f"model.mixer={model.mixer!r} mixes documents that share a sequence of the batch: choose another mixer"
                )
        if config.train.sample and not model.decodes:
            raise InputError(
                f"train.sample={config.train.sample} generates text at the end, which model.mixer={model.mixer!r} cannot: set "
                "train.sample=0, or choose another mixer"
            )
        filled = vocabularies.fill_sizes(model, sizes, config.data.seq_len)
        return LM(filled, sizes.stats and sizes.stats.padded(filled.vocab))

    def scores(
        self, config: RunConfig, dataset: Corpus, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """The loss in nats per token.

        With it `bits_per_byte` if all of the text was scored, the tokenizer loses none of it, and the output layer gives
        probabilities.
        """
        total, weight = sums["loss"]
        if not weight:
            raise InputError(
                f"train.eval_batches={config.train.eval_batches}: no token of the held-out text in these batches is "
                "predicted (prompts fill their sequences): raise it, 0 for all, or hold out other text"
            )
        scores = {"loss": float(total / weight)}
        if dataset.tokenizer.lossless and is_complete and gives_probabilities:
            scores["bits_per_byte"] = float(total) / math.log(2) / dataset.heldout_bytes
        return scores

    def scored_amounts(self, config: RunConfig, dataset: Corpus, limit: int | None) -> dict[str, int]:
        return {"bytes": dataset.heldout_bytes} if limit is None else {}

    def baseline(self, dataset: Corpus) -> Baselines:
        return Baselines(dataset)


def _check_order(config: RunConfig) -> None:
    """Raises InputError if the model or the evaluation does not fit the order of the data."""
    model, order = config.model, config.data.order
    check_stride(config)
    if config.data.length_deviation:
        raise InputError(
            f"data.length_deviation={config.data.length_deviation}: batches of random lengths are for recurrent networks: set "
            "it to 0, or task='rnn_lm'"
        )
    if order != "stream":
        if carries(model.mixer):
            raise InputError(
                f"data.order={order!r}: model.mixer={model.mixer!r} carries state from each batch to the next, which must "
                "continue its sequences: set data.order='stream', or choose another mixer"
            )
        return
    if model.position == "learned":
        raise InputError(
            "model.position='learned' ends after model.max_len tokens, and positions of data.order='stream' go on to the end "
            "of a document: set model.position='rope' or 'none'"
        )
    for mixer in model.mixers():
        if config.data.seq_len % (multiple := mixer.carry_multiple):
            raise InputError(
                f"data.seq_len={config.data.seq_len}: model.mixer={model.mixer!r} compresses tokens {multiple} at a time: set "
                f"it to a multiple of {multiple}"
            )


def check_stride(config: RunConfig) -> None:
    """Checks that sequences of an evaluation overlap only where they are independent of each other.

    Args:
      config: Config of the run.

    Raises:
      InputError: An evaluation stride with `data.order="stream"`.
    """
    if config.train.eval_stride and config.data.order == "stream":
        raise InputError(
            f"train.eval_stride={config.train.eval_stride}: sequences of data.order='stream' do not overlap: set "
            "train.eval_stride=0"
        )
