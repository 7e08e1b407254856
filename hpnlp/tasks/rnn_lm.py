"""Causal language modelling by recurrent networks."""

from __future__ import annotations

from typing import Any

from hpnlp.models.rnn import RNN, RNNConfig, filled
from hpnlp.tasks.lm import LanguageModel, check_stride
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes


def _no_dropout(config: RunConfig) -> str:
    model = config.model
    if model.input_dropout or model.layer_dropout or model.output_dropout:
        return ""
    return "it is of dropout of inputs, layers and outputs, all of which are 0: set one of the rates as well"


def _one_layer(config: RunConfig) -> str:
    if len(config.model.widths()) > 1:
        return ""
    return f"model.cells={config.model.cells!r} has one layer: leave it out"


class RecurrentLanguageModel(LanguageModel):
    """Causal language modelling by recurrent networks: the next token of texts.

    With `data.order="stream"` a batch begins with the states after the one before, and otherwise with the initial states.
    """

    name = "rnn_lm"
    model_config = RNNConfig
    compares_as = "lm"
    unused_fields = (
        (("model.variational",), _no_dropout),
        (("model.layer_dropout",), _one_layer),
    )

    def model(self, config: RunConfig, sizes: Sizes) -> Any:
        check_stride(config)
        model = filled(config.model, sizes.ids)
        stats = sizes.stats and sizes.stats.padded(model.vocab)
        return RNN(model, stats, keeps_state=config.data.order == "stream")
