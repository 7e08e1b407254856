"""Sequence to sequence: a target text from a source text."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpnlp.data.examples import Seq2SeqConfig as Seq2SeqDataConfig
from hpnlp.models.seq2seq import Seq2Seq, Seq2SeqConfig
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.examples import ExampleTask
from hpnlp.tasks.seq2seq_report import Seq2SeqReport
from hpnlp.tasks.task import RunConfig, Sums
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError


class SequenceToSequence(ExampleTask):
    """Sequence to sequence: a target text from a source text."""

    name = "seq2seq"
    model_config = Seq2SeqConfig
    data_config = Seq2SeqDataConfig
    metric, higher_is_better = "exact_match", True
    report = Seq2SeqReport()

    def model(self, config: RunConfig, sizes: Sizes) -> Seq2Seq:
        self.check_no_stride(config)
        filled = vocabularies.fill_sizes(config.model, sizes, config.data.seq_len)
        data_len, target_len = config.data.target_len, filled.target_len or config.data.target_len
        if filled.position == "learned" and data_len > target_len:
            raise InputError(
                f"data.target_len={data_len} is longer than model.target_len={target_len} learned positions: change one"
            )
        stats = sizes.stats and sizes.stats.padded(filled.vocab)
        return Seq2Seq(dataclasses.replace(filled, target_len=target_len), stats)

    def scores(
        self, config: RunConfig, dataset: Any, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Mean loss in nats per target token, and the shares of tokens and of whole targets that are predicted."""
        return {name: float(sums[name][0] / sums[name][1]) for name in ("loss", "accuracy", "exact_match")}
