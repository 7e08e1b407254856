"""Causal language modelling by recurrent networks."""

from __future__ import annotations

from typing import Any

from hpnlp.models.rnn import RNN, RNNConfig, filled
from hpnlp.tasks.lm import LanguageModel, check_stride
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes


class RecurrentLanguageModel(LanguageModel):
    """Causal language modelling by recurrent networks: the next token of texts.

    With `data.order="stream"` a batch begins with the states after the one before, and otherwise with the initial states.
    """

    name = "rnn_lm"
    model_config = RNNConfig
    compares_as = "lm"

    def model(self, config: RunConfig, sizes: Sizes) -> Any:
        check_stride(config)
        model = filled(config.model, sizes.ids)
        stats = sizes.stats and sizes.stats.padded(model.vocab)
        return RNN(model, stats, keeps_state=config.data.order == "stream")
