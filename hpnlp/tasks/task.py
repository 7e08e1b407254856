"""The interface of tasks: data, model, scores, and the section of the report."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from hpnlp.data import Batches
from hpnlp.data.reading.files import Progress
from hpnlp.models.shared.body import ConfigOfModel
from hpnlp.tasks import vocabulary as vocabularies
from hpnlp.tasks.reports.reporting import TaskReport
from hpnlp.tasks.vocabulary import Sizes, Vocabulary
from hpnlp.types import InputError, Model, Tokenizer

if TYPE_CHECKING:
    from hpnlp.data.config import DataConfig
    from hpnlp.data.examples.config import ExampleConfig
    from hpnlp.data.examples.kind import Kind
    from hpnlp.tasks.field_rules import Rule
    from hpnlp.tasks.predictions import Prediction, TrainedModel

Batch = Mapping[str, np.ndarray]

# Name of a metric -> (weighted sum, sum of the weights) over the examples of an evaluation, in float64. Sums may be arrays.
Sums = Mapping[str, tuple[Any, Any]]


@runtime_checkable
class RunConfig(Protocol):
    """The sections of a run's config (`training.config.Config`) that tasks read."""

    @property
    def model(self) -> Any: ...

    @property
    def data(self) -> Any: ...

    @property
    def optimizer(self) -> Any: ...

    @property
    def train(self) -> Any: ...


@runtime_checkable
class Dataset(Protocol):
    """Data of a run, such as `data.Corpus`.

    Attributes:
      tokenizer: The tokenizer of its texts.
      summary: Lines on its sizes, and on what is not read.
      heldout_digest: Digest of the held-out examples: scores of runs with the same digest compare.
    """

    tokenizer: Tokenizer
    summary: str
    heldout_digest: str

    def train(self, *, seed: int, process_index: int = 0, process_count: int = 1) -> Batches:
        """Iterates endlessly over training batches; see `data.Corpus.train`."""
        ...


@runtime_checkable
class Baseline(Protocol):
    """A measurement of other methods on the same data, which may run beside the training."""

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Ends the measurement.

        Args:
          log: Called with a message if that takes long, or if figures are missing.

        Returns:
          Fields of report.json.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    """Arrays that a model reads and that training does not change, such as the parameters of a teacher or a retrieval index.

    Checkpoints hold the source and the digest, and not the arrays.

    Attributes:
      source: Origin of the arrays for messages, a path or a name.
      digest: Digest of their content: a run resumes with arrays of the same digest only.
      values: Tree of arrays like the collection "frozen" of the model (`nn.layers.frozen`); the same in every process.
    """

    source: str
    digest: str
    values: Any


class Task(abc.ABC):
    """A task: what is learned from which data, and how it is scored and reported.

    Attributes:
      name: Its name in TASKS.
      model_config: Dataclass of the config section `model`.
      data_config: Dataclass of the config section `data`. It has at least the fields path, heldout_path, tokenizer, seq_len
        and batch_size.
      metric: The primary metric, a name of `scores`: for early stopping, the best checkpoint, and the ranking of runs; of runs
        that have it, see `primary_metric`.
      higher_is_better: Direction of the primary metric.
      report: The task's part of reports and comparisons.
      compares_as: Name of the task whose runs have scores of the same meaning, so that `hpnlp compare` ranks the runs of both;
        "" for the task itself.
      reads_examples: Whether the data config is an `ExampleConfig`.
      label_fields: Fields of the data config that name the field of the labels, on which the classes depend.
      prediction: Class of the results of `predict`; None for a task whose models predict nothing from texts.
      unused_fields: Rules about fields of this task that have no effect, beside those of all tasks.
      vocabulary_files: Files of a run directory without which `load_vocabulary` returns None.
    """

    name: ClassVar[str]
    model_config: ClassVar[type[ConfigOfModel]]
    data_config: ClassVar[type]
    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    report: ClassVar[TaskReport]
    compares_as: ClassVar[str] = ""
    reads_examples: ClassVar[bool] = False
    label_fields: ClassVar[tuple[str, ...]] = ()
    prediction: ClassVar[type[Prediction] | None] = None
    unused_fields: ClassVar[tuple[Rule, ...]] = ()
    vocabulary_files: ClassVar[tuple[str, ...]] = ("tokenizer.json",)

    @abc.abstractmethod
    def check_data(self, data: DataConfig | ExampleConfig) -> None:
        """Checks the parts of the data config that can be checked without reading data, such as that its files exist.

        Args:
          data: The section `data` of a config.

        Raises:
          InputError: A field is not valid.
        """

    def may_lack_labels(self, data: DataConfig | ExampleConfig) -> bool:
        """Whether examples may lack labels, so that the vocabulary of a teacher is needed to read them.

        Args:
          data: The section `data` of a config.

        Returns:
          `data.unlabelled`; False for data without this field.
        """
        return False

    def batch_widths(self, data: DataConfig | ExampleConfig) -> int:
        """Number of widths of training batches.

        Args:
          data: The section `data` of a config.

        Returns:
          `data.buckets`; 1 for data without this field.
        """
        return 1

    def has_own_heldout(self, data: DataConfig | ExampleConfig) -> bool:
        """Whether `data.path` names examples with held-out examples of their own.

        Args:
          data: The section `data` of a config.

        Returns:
          False where some of the examples are held out.
        """
        return False

    def guessed_fields(self, data: Mapping[str, Any]) -> dict[str, str]:
        """Fields of the data config that differ from their defaults in the files of `data.path`, such as names of columns.

        Args:
          data: Fields of the section `data`.

        Returns:
          Field -> value; empty if the config fits the files, or nothing can be told.
        """
        return {}

    @abc.abstractmethod
    def dataset(
        self, data: DataConfig | ExampleConfig, vocabulary: Vocabulary | None, progress: Progress | None = None
    ) -> Dataset:
        """Reads the data, or finds them in the cache.

        Args:
          data: The section `data` of a config.
          vocabulary: The vocabulary of a run that is resumed, or that training starts from; None to make one from the data.
          progress: Called while data are read.

        Returns:
          The data.

        Raises:
          InputError: The data or their config are not valid.
        """

    @abc.abstractmethod
    def heldout(
        self, config: RunConfig, dataset: Dataset, *, limit: int | None, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        """Iterates over the held-out examples once.

        Args:
          config: Config of the run.
          dataset: Result of `dataset`.
          limit: Largest number of batches, spread over the examples; None for all.
          process_index: Index of this process.
          process_count: Number of processes, each of which gets a part of every batch.

        Returns:
          The batches, filled with examples of weight 0.
        """

    def heldout_documents(self, config: RunConfig, dataset: Dataset, limit: int | None) -> np.ndarray | None:
        """The documents or groups to which the held-out examples belong: their scores are not independent of each other.

        Args:
          config: Config of the run.
          dataset: Result of `dataset`.
          limit: As for `heldout`.

        Returns:
          int64 [batches, data.batch_size], the number of the document of each example of all batches of `heldout` over all
          processes, and -1 for the examples of weight 0 that fill a batch; None if each example stands for itself.
        """
        return None

    def further_heldout(
        self, config: RunConfig, dataset: Dataset, *, process_index: int = 0, process_count: int = 1
    ) -> dict[str, Iterator[Batch]]:
        """Iterators over examples that are scored at the end, apart from the held-out ones.

        Args:
          config: Config of the run.
          dataset: Result of `dataset`.
          process_index: Index of this process.
          process_count: Number of processes.

        Returns:
          Name of a set of examples -> its batches, as from `heldout`.
        """
        return {}

    def scored_amounts(self, config: RunConfig, dataset: Dataset, limit: int | None) -> dict[str, int]:
        """Amounts of held-out data that an evaluation scores.

        Args:
          config: Config of the run.
          dataset: Result of `dataset`.
          limit: As for `heldout`.

        Returns:
          Name of a unit, such as "examples" or "bytes" -> the number of them; empty where it is not known.
        """
        return {}

    def unknown_labels(self, dataset: Dataset) -> list[str]:
        """Numbers of held-out examples that are not scored because the run has no class of their label.

        Args:
          dataset: Result of `dataset`.

        Returns:
          Lines with the number, the share and a place; none for data without labels.
        """
        return []

    def left_out(self, dataset: Dataset) -> list[str]:
        """Counts of what else is not scored, such as records that cannot be read.

        Args:
          dataset: Result of `dataset`.

        Returns:
          Lines with the counts.
        """
        return []

    def vocabulary(self, dataset: Dataset) -> Vocabulary:
        """The vocabulary of a dataset, which the run directory keeps.

        Args:
          dataset: Result of `dataset`.

        Returns:
          The vocabulary.
        """
        return Vocabulary(dataset.tokenizer)

    def load_vocabulary(self, workdir: Path) -> Vocabulary | None:
        """Reads the vocabulary of a run directory.

        Args:
          workdir: The run directory.

        Returns:
          The vocabulary, or None if the directory lacks a part of it.

        Raises:
          InputError: A file cannot be read.
        """
        return vocabularies.load(workdir)

    def planned_sizes(self, config: RunConfig) -> Sizes:
        """Sizes of the vocabulary that the planner expects of data that it does not read.

        Args:
          config: Config of a run.

        Returns:
          The largest sizes that the data may have.
        """
        return vocabularies.planned_sizes(config.data.tokenizer, config.model.vocab)

    @abc.abstractmethod
    def model(self, config: RunConfig, sizes: Sizes) -> Model:
        """The model of a config, with the sizes that depend on the data filled in.

        Args:
          config: Config of the run.
          sizes: Sizes of the vocabulary.

        Returns:
          The model.

        Raises:
          InputError: The model does not fit the data, or cannot do what the task or an option of the run needs.
        """

    def frozen(self, config: RunConfig) -> Frozen | None:
        """The frozen variables of the model.

        Args:
          config: Config of the run.

        Returns:
          The variables; None for a model without any.

        Raises:
          InputError: They cannot be read.
        """
        return None

    def check_no_stride(self, config: RunConfig) -> None:
        """Checks that a config has no evaluation stride, for tasks whose examples do not overlap.

        Args:
          config: Config of the run.

        Raises:
          InputError: `train.eval_stride` is set.
        """
        if config.train.eval_stride:
            raise InputError(
                f"train.eval_stride={config.train.eval_stride} is for language models: set it to 0 for task={self.name!r}"
            )

    @abc.abstractmethod
    def scores(
        self, config: RunConfig, dataset: Dataset, sums: Sums, *, is_complete: bool, gives_probabilities: bool
    ) -> dict[str, float]:
        """Scores of an evaluation.

        Args:
          config: Config of the run.
          dataset: Result of `dataset`.
          sums: What the model's loss reports, summed over the evaluated batches.
          is_complete: Whether these were all held-out examples.
          gives_probabilities: Whether the loss is -log p(label).

        Returns:
          Name -> score; "loss" and the primary metric are among them.

        Raises:
          InputError: No example has a weight.
        """

    def primary_metric(self, fields: Mapping[str, Any]) -> tuple[str, bool]:
        """The primary metric of a run.

        Args:
          fields: Fields of its config, "section.field" -> value, as in report.json.

        Returns:
          Its name and whether higher is better: by default `metric` and `higher_is_better`.
        """
        return self.metric, self.higher_is_better

    @property
    def is_served(self) -> bool:
        """Whether `hpnlp export` writes runs as directories that are served without hpnlp."""
        return False

    def input_kind(self, data: DataConfig | ExampleConfig) -> Kind | None:
        """Form of the texts that a trained model reads to predict or encode them.

        Args:
          data: The section `data` of a config.

        Returns:
          The kind, whose `inputs` are read; None for a task whose models do neither. A task with a kind overrides `predict` or
          `encode`.
        """
        return None

    def text_kind(self, data: DataConfig | ExampleConfig) -> Kind | None:
        """Form of the texts that `encode` reads: by default that of `input_kind`.

        Args:
          data: The section `data` of a config.

        Returns:
          The kind; None for a task whose models have no vectors.
        """
        return self.input_kind(data)

    def predict(self, trained: TrainedModel, batch: Batch, values: Sequence[Mapping[str, Any]]) -> Sequence[Prediction]:
        """Predictions for a batch of examples without labels.

        Args:
          trained: The model of a run.
          batch: A batch of `input_kind`, filled with padding after the examples.
          values: Config field -> value of each example (`data.examples.kinds.unlabelled.Unlabelled`).

        Returns:
          One prediction for each example.

        Raises:
          InputError: Models of this task predict nothing from texts.
        """
        raise InputError(
            f"a run of task={self.name!r} has no labels, targets or pairs to predict: use hpnlp generate for language models, "
            "hpnlp neighbours for word embeddings, and hpnlp encode for vectors of encoders"
        )

    def encode(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        """Vectors of texts.

        Args:
          trained: The model of a run.
          batch: A batch of `text_kind`, filled with padding after the examples.

        Returns:
          float32 [B, D].

        Raises:
          InputError: Models of this task have no vector of a text.
        """
        raise InputError(
            f"a run of task={self.name!r} has no vectors of texts: use a run of classification, tagging, masked_lm or "
            "dual_encoder"
        )

    def encode_partners(self, trained: TrainedModel, batch: Batch) -> np.ndarray:
        """Vectors of texts as the second ones of pairs; arguments and result as of `encode`.

        Raises:
          InputError: Models of this task have no pairs.
        """
        raise InputError(
            f"a run of task={self.name!r} has no partners of texts, as a dual encoder has: leave partners out"
        )

    def baseline(self, dataset: Dataset) -> Baseline | None:
        """Starts the measurement of other methods on the same data.

        Args:
          dataset: Result of `dataset`.

        Returns:
          The measurement, or None if there is none.
        """
        return None
