"""Classification of trees by Tree-LSTMs."""

from __future__ import annotations

import dataclasses

from hpnlp.data.examples import TreesConfig
from hpnlp.models.classifiers.tree_classifier import TreeClassifier, TreeClassifierConfig
from hpnlp.tasks.classification import BASELINES, ClassificationTask
from hpnlp.tasks.reports.label_report import LabelReport, whole_text
from hpnlp.tasks.task import RunConfig
from hpnlp.tasks.vocabulary import Sizes
from hpnlp.types import InputError


class TreeClassification(ClassificationTask):
    """Classification of trees by Tree-LSTMs."""

    name = "tree_classification"
    model_config = TreeClassifierConfig
    data_config = TreesConfig
    compares_as = "classification"
    report = LabelReport("a tree", BASELINES, whole_text)

    def model(self, config: RunConfig, sizes: Sizes) -> TreeClassifier:
        self.check_no_stride(config)
        self.check_classes(config, sizes)
        model, data = config.model, config.data
        if model.vocab and model.vocab < sizes.ids:
            raise InputError(
                f"model.vocab={model.vocab} is less than the tokenizer's {sizes.ids}: set it to 0, or to at least {sizes.ids}"
            )
        if model.max_children and model.max_children < data.max_children:
            raise InputError(
                f"model.max_children={model.max_children} is less than data.max_children={data.max_children}: set it to 0"
            )
        return TreeClassifier(
            dataclasses.replace(
                model,
                vocab=model.vocab or sizes.ids,
                classes=sizes.classes,
                max_children=model.max_children or data.max_children,
            )
        )
