"""Lengths of the batches of a run, which differ with `data.buckets`: the tokens and the FLOPs of its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpnlp import tasks
from hpnlp.parallel.layout import Layout
from hpnlp.types import InputError, Model

if TYPE_CHECKING:
    from hpnlp.training.config import Config
    from hpnlp.training.trainer import Trainer


@dataclasses.dataclass
class BatchLengths:
    """Number of steps with batches of each length, over all restarts of a run.

    Attributes:
      examples: Sequences of a batch.
      steps: Length T -> number of steps.
      untimed: Tokens of the batches of steps that were compiled, whose seconds are not those of training.
      padding: Tokens of all batches that are padding.
      untimed_padding: Those of them in the batches of steps that were compiled.
    """

    examples: int
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    untimed: int = 0
    padding: int = 0
    untimed_padding: int = 0

    @classmethod
    def restored(cls, progress: Mapping[str, Any], step: int, config: Config) -> BatchLengths:
        """Counts from a checkpoint.

        Args:
          progress: A dict with those of `record`; in a checkpoint that has none, all batches had `data.seq_len` tokens.
          step: Steps done.
          config: Config of the run.

        Returns:
          The counts.
        """
        counts = progress.get("batch_lengths", {str(config.data.seq_len): step})
        steps = {int(length): count for length, count in counts.items() if count}
        # Checkpoints of early versions lack these.
        names = ("untimed_tokens", "padding_tokens", "untimed_padding_tokens")
        return cls(config.data.batch_size, steps, *(progress.get(name, 0) for name in names))

    def record(self) -> dict[str, Any]:
        """The counts for a checkpoint.

        Returns:
          A JSON-able dict.
        """
        counts = {str(length): count for length, count in self.steps.items()}
        return {
            "batch_lengths": counts,
            "untimed_tokens": self.untimed,
            "padding_tokens": self.padding,
            "untimed_padding_tokens": self.untimed_padding,
        }

    def add(self, length: int, is_timed: bool = True, padding: float = 0.0) -> None:
        """Counts a step.

        Args:
          length: Tokens of a sequence of its batch, T.
          is_timed: False if the step was compiled.
          padding: Share of padding in its batch.
        """
        self.steps[length] = self.steps.get(length, 0) + 1
        self.padding += round(padding * self.examples * length)
        if not is_timed:
            self.untimed += self.examples * length
            self.untimed_padding += round(padding * self.examples * length)

    def tokens(self) -> int:
        """Tokens of all batches, padding included.

        Returns:
          The number.
        """
        return self.examples * sum(length * count for length, count in self.steps.items())

    def timed_tokens(self) -> int:
        """Tokens of the timed steps, that is, without the steps that compiled; padding included.

        Returns:
          The number.
        """
        return self.tokens() - self.untimed

    def real_timed_tokens(self) -> int:
        """Tokens of the timed steps without padding.

        Returns:
          The number.
        """
        return self.timed_tokens() - self.padding + self.untimed_padding

    def padding_share(self) -> float:
        """Share of padding in the tokens of all batches.

        Returns:
          A fraction of 1.
        """
        return self.padding / max(1, self.tokens())

    def flops_by_part(self, trainer: Trainer, longest: int) -> dict[str, float] | None:
        """Mean number of floating-point operations of a step, by part of the model.

        Args:
          trainer: A `step.Trainer`.
          longest: Length for a run without steps.

        Returns:
          Number by part, as of `Trainer.flops_by_part`; None where this returns None.
        """
        steps, total = self.steps or {longest: 1}, dict[str, float]()
        for length, count in steps.items():
            flops = trainer.flops_by_part(self.examples, length)
            if flops is None:
                return None
            for name, number in flops.items():
                total[name] = total.get(name, 0.0) + number * count / sum(steps.values())
        return total


def sequence_length(batch: Mapping[str, Any], longest: int) -> int:
    """Length of the sequences of a batch.

    Args:
      batch: Arrays of a batch.
      longest: `data.seq_len`.

    Returns:
      T of the array "tokens" `[B, T]`; `longest` without such an array.
    """
    return batch["tokens"].shape[1] if "tokens" in batch else longest


def padding_of(batch: Mapping[str, Any]) -> float:
    """Share of padding in a batch.

    Args:
      batch: Arrays of the examples of a process.

    Returns:
      Share of zeros in the array "segment_ids" `[B, T]`; 0 without such an array.
    """
    return float((batch["segment_ids"] == 0).mean()) if "segment_ids" in batch else 0.0


def check_buckets(config: Config, model: Model, layout: Layout) -> None:
    """Checks that a model and a plan can have batches of several lengths, if `data.buckets` asks for them.

    Args:
      config: Config of a run.
      model: The model, with its sizes filled in.
      layout: The plan on its devices.

    Raises:
      InputError: They cannot.
    """
    buckets = tasks.find(config.task).batch_widths(config.data)
    if buckets == 1:
        return
    differ = f"data.buckets={buckets} makes batches of different lengths, and "
    if (devices := layout.size("length")) > 1:
        raise InputError(
            f"{differ}plan.sequence={devices} divides sequences of one length: set data.buckets=1, or plan.sequence=1"
        )
    if length := model.config.fixed_length():
        raise InputError(f"{differ}the model takes sequences of {length} tokens only: set data.buckets=1")
