"""Classification of texts by recurrent networks."""

from __future__ import annotations

import dataclasses

from hpnlp.models.classifiers.rnn_classifier import RecurrentClassifier, RecurrentClassifierConfig
from hpnlp.tasks.classification import ClassificationTask
from hpnlp.tasks.rnn_lm import RecurrentLanguageModel
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError


class RecurrentClassification(ClassificationTask):
    """Classification of texts by recurrent networks."""

    name = "rnn_classification"
    model_config = RecurrentClassifierConfig
    compares_as = "classification"
    unused_fields = RecurrentLanguageModel.unused_fields

    def model(self, config: RunConfig, sizes: Sizes) -> RecurrentClassifier:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        model = config.model
        if model.vocab and model.vocab < sizes.ids:
            raise InputError(
                f"model.vocab={model.vocab} is less than the tokenizer's {sizes.ids}: set it to 0, or to at least {sizes.ids}"
            )
        return RecurrentClassifier(dataclasses.replace(model, vocab=model.vocab or sizes.ids, classes=sizes.classes))
