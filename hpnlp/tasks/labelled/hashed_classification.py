"""Classification of texts by projection networks, which read hashes of words."""

from __future__ import annotations

import dataclasses

from hpnlp.data.examples import HashedTextsConfig
from hpnlp.models.classifiers.hashed_classifier import HashedClassifier, HashedClassifierConfig
from hpnlp.tasks.classification import ClassificationTask
from hpnlp.tasks.labelled.labels import PLANNED_CLASSES
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes


class HashedClassification(ClassificationTask):
    """Classification of texts by projection networks, which read hashes of words."""

    name = "hashed_classification"
    model_config = HashedClassifierConfig
    data_config = HashedTextsConfig
    compares_as = "classification"

    @property
    def is_served(self) -> bool:
        return True

    def planned_sizes(self, config: RunConfig) -> Sizes:
        return Sizes(0, classes=config.model.classes or PLANNED_CLASSES)

    def model(self, config: RunConfig, sizes: Sizes) -> HashedClassifier:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        return HashedClassifier(dataclasses.replace(config.model, classes=sizes.classes))
