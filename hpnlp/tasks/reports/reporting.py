"""The interface of a task's part of reports and of comparisons of runs."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hpnlp.models.variables import collections
from hpnlp.parallel.memory import host_offload

if TYPE_CHECKING:
    from hpnlp.tasks.task import Dataset, RunConfig

Report = Mapping[str, Any]  # content of report.json

# The verdict on a run whose held-out loss is not finite.
NOT_FINITE = "The held-out loss is not finite: the model is of no use. Lower optimizer.learning_rate, and train anew."


@dataclasses.dataclass(frozen=True)
class Heatmap:
    """A matrix of counts, which reports draw.

    Attributes:
      counts: `[R, C]`.
      rows: Names of the rows.
      columns: Names of the columns.
      ylabel: Label of the rows.
      xlabel: Label of the columns.
    """

    counts: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    ylabel: str
    xlabel: str


@dataclasses.dataclass(frozen=True)
class Section:
    """A task's section of report.md.

    Attributes:
      text: Markdown, which refers to the pictures by their file names; "" for no section.
      pictures: File name -> picture.
      numbers: Fields of report.json that are computed for the section.
      draw: Function that draws other pictures, of which it gets the directory; None for none.
    """

    text: str = ""
    pictures: Mapping[str, Heatmap] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    draw: Callable[[Path], None] | None = None


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Scores by which runs are compared.

    Attributes:
      label: Name of the score.
      scores: Run -> score.
      unscored: Run without a score -> reason.
      higher_is_better: Direction of the score.
      digits: Format of the score in the table.
      is_ratio: Whether equal ratios of scores are equal differences of quality, so that plots have a logarithmic axis.
      remark: Sentence on why scores do not compare; "" if they do.
      metric: Name of the score of single examples whose mean decides the score, for intervals; "" if there is none.
      slopes: Run -> derivative of its score by that mean; 1 for runs that are absent.
    """

    label: str
    scores: Mapping[str, float]
    unscored: Mapping[str, str]
    higher_is_better: bool = False
    digits: str = ".4f"
    is_ratio: bool = False
    remark: str = ""
    metric: str = ""
    slopes: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run, as far as a task's section of the report needs it.

    Attributes:
      config: Config of the run, a `training.config.Config`.
      dataset: Its data.
      model: Its model.
      params: Parameters of the model; None if they are spread over the devices of several processes.
      sums: Loss, metrics and auxiliary losses over all held-out examples: name -> (sum, weight).
    """

    config: Any
    dataset: Any
    model: Any
    params: Any
    sums: Mapping[str, Any]

    def compiled(self, method: str, *arguments: Any) -> Callable[[Mapping[str, np.ndarray]], Any]:
        """Compiles a method of the model.

        Args:
          method: Name of a method that takes a batch.
          *arguments: Further arguments of the method.

        Returns:
          The method with the run's parameters, as a function of the arrays of a batch; those that the model does not read are
          left out.
        """
        weights = collections(host_offload.to_device(self.params))
        apply = jax.jit(lambda weights, batch: self.model.apply(weights, batch, *arguments, method=method))
        return lambda batch: apply(weights, {name: batch[name] for name in self.model.batch_axes()})


class TaskReport(abc.ABC):
    """A task's part of reports and comparisons.

    Attributes:
      numbers_compared: Numbers of report.json that `rank` reads -> whether they may be None, for scores that are not finite.
      unit: The objects that a loss is the mean over, as "token".
      samples_text: Whether the report has generated text, of `train.sample` bytes.
    """

    numbers_compared: Mapping[str, bool]
    unit: str
    samples_text: bool = False

    @abc.abstractmethod
    def numbers(self, dataset: Dataset, scores: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        """The task's fields of report.json.

        Args:
          dataset: Data of the run.
          scores: Scores on all held-out examples.
          baselines: Result of the task's `Baseline`.

        Returns:
          Name -> JSON value; numbers that are not finite become None.
        """

    def compared(self, config: Mapping[str, Any]) -> Mapping[str, bool]:
        """Numbers of report.json that `rank` reads of a run.

        Args:
          config: Config of the run, "section.field" -> value.

        Returns:
          By default `numbers_compared`.
        """
        return self.numbers_compared

    def fault(self, report: Report) -> str:
        """The first reason why a report cannot be compared, beside missing `numbers_compared`; "" if it can.

        By default, a report needs the digest of its held-out examples, by which `rank_on_same_examples` identifies them.

        Args:
          report: Content of report.json, with a section `config`.

        Returns:
          The reason.
        """
        digest = report.get("heldout_digest")
        return "" if isinstance(digest, str) else f"heldout_digest is {digest!r:.40}"

    @abc.abstractmethod
    def verdict(self, report: Report) -> str:
        """The result of a run in a sentence or two.

        Args:
          report: Content of report.json.

        Returns:
          The sentences.
        """

    @abc.abstractmethod
    def rows(self, report: Report) -> list[tuple[str, str]]:
        """The task's rows of the table in report.md.

        Args:
          report: Content of report.json.

        Returns:
          `(name, value)` of each row.
        """

    def section(self, outcome: Outcome) -> Section:
        """The task's section of report.md.

        Args:
          outcome: Result of the run.

        Returns:
          Text and pictures.
        """
        return Section()

    def levels(self, report: Report) -> dict[str, float]:
        """Losses of baselines, as lines in the plot of the run's losses.

        Args:
          report: Content of report.json.

        Returns:
          Label -> loss.
        """
        return {}

    def commands(self, workdir: Path, config: RunConfig) -> dict[str, list[str]]:
        """Commands of the task that a report proposes first.

        Args:
          workdir: The run directory.
          config: Config of the run.

        Returns:
          Purpose -> arguments of `hpnlp`.
        """
        return {}

    @abc.abstractmethod
    def rank(self, reports: Mapping[str, Report]) -> Ranking:
        """Scores of several runs of the task.

        Args:
          reports: Run -> content of report.json.

        Returns:
          The scores.
        """


def decimals(value: int | float | None, digits: str = ".4f") -> str:
    """A number in a table.

    Args:
      value: The number, or None.
      digits: Format of the number.

    Returns:
      The number as text; "-" for None.
    """
    return "-" if value is None else f"{value:{digits}}"


def three_digits(value: float) -> str:
    """A positive number in a table.

    Args:
      value: The number.

    Returns:
      Three significant digits, or all digits before the point from 1,000 on.
    """
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def code_cell(text: str) -> str:
    """A text as code in a cell of a Markdown table.

    Args:
      text: The text, in one line.

    Returns:
      Markdown.
    """
    return f"`{text.replace('`', chr(39))}`".replace("|", r"\|")


def text_cell(text: str, limit: int) -> str:
    """The beginning of a text as code in a cell of a Markdown table.

    Args:
      text: The text, in which whitespace is shown as single spaces.
      limit: Maximum number of characters; "..." follows a text that is cut.

    Returns:
      Markdown.
    """
    shown = " ".join(text[: 4 * limit].split())
    return code_cell(f"{shown[:limit]}{'...' * (len(shown) > limit)}")


def spread(count: int, limit: int) -> list[int]:
    """Indices that are spread evenly over a sequence, its first and last element among them.

    Args:
      count: Length of the sequence.
      limit: Maximum number of indices, at least 2.

    Returns:
      The indices, ascending; none for an empty sequence.
    """
    return np.unique(np.linspace(0, count - 1, limit).astype(int)).tolist() if count else []


def rank_on_same_examples(reports: Mapping[str, Report], metric: str, higher_is_better: bool = False) -> Ranking:
    """Ranks runs by a held-out score on the same labels of the same examples: those that most runs were scored on.

    Sequences of another length may cut labels off, or hide other tokens, so that the number of labels differs.

    Args:
      reports: Run -> content of report.json, with `heldout_digest` and `scored_weight`.
      metric: Name of the score.
      higher_is_better: Direction of the score.

    Returns:
      The ranking.
    """
    field = f"heldout_{metric}"
    unscored = {
        name: "its held-out loss is not finite"
        for name, report in reports.items()
        if None in (report["heldout_loss"], report[field])
    }
    scored = {
        name: (report["heldout_digest"], report.get("scored_weight"))
        for name, report in reports.items()
        if name not in unscored
    }
    most_common = max(scored.values(), key=list(scored.values()).count, default=None)
    elsewhere = "scored on other held-out examples, or on other labels of them, than the runs above"
    unscored |= {name: elsewhere for name, labels in scored.items() if labels != most_common}
    scores = {name: report[field] for name, report in reports.items() if name not in unscored}
    return Ranking(f"held-out {metric}", scores, unscored, higher_is_better, metric=metric)
