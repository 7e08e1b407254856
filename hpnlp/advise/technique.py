"""One way to make a model or its use faster or smaller."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from hpnlp import tasks
from hpnlp.compress.recipe import parse_recipe
from hpnlp.compress.stages import STRUCTURE
from hpnlp.cost.traced_time import TracedTime
from hpnlp.nn.output import is_normalized
from hpnlp.planner.compressed import ModelOutline
from hpnlp.training.config import Config, flat, with_changes
from hpnlp.types import InputError


class Goal(enum.StrEnum):
    """A quantity that is to become less."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    TRAINING = "training"
    MEMORY = "memory"
    DISK = "disk"


class Needs(enum.StrEnum):
    """The work before the quality of a technique can be judged."""

    NOTHING = "nothing"
    BATCHES = "training batches"
    TRAINING = "training"


# The profile in which a goal's time is measured.
PROGRAMS = {Goal.LATENCY: "loss", Goal.THROUGHPUT: "loss", Goal.TRAINING: "training"}


@dataclasses.dataclass(frozen=True)
class Technique:
    """A change of a run.

    Attributes:
      name: The change as a user writes it: a recipe of `hpnlp compress`, or a field and its value.
      group: Heading in tables.
      goals: What becomes less, if it works.
      needs: What it needs.
      shortens: Parts of the model whose time it can shorten, entries of `cost.parts.PARTS`; () if it changes the whole program,
        as a dtype does.
      changes: Fields of the config -> values; of a technique without a recipe.
      page: Page of the documentation, within docs/guide.
    """

    name: str
    group: str
    goals: tuple[Goal, ...]
    needs: Needs
    shortens: tuple[str, ...] = ()
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    page: str = ""

    @property
    def is_recipe(self) -> bool:
        """Whether the technique changes the weights of a trained model, by `hpnlp compress`."""
        return not self.changes

    @property
    def family(self) -> str:
        """Techniques of one family replace each other, as two formats of numbers do."""
        if not self.is_recipe:
            return next(iter(self.changes))
        stage = parse_recipe(self.name)[0]
        return self.name.partition("(")[0] if stage.changes == STRUCTURE else stage.changes

    def refusal(self, outline: ModelOutline | None, config: Config) -> str:
        """The reason why a run cannot have the technique.

        Args:
          outline: The model of the run without its weights; None for a compressed run.
          config: Config of the run.

        Returns:
          The reason, "" if there is none. Some reasons show only when the changed model is built.
        """
        if self.is_recipe:
            if outline is None:
                return "the run is compressed already: name the run that it was made of"
            return outline.refusal(self.name).removeprefix(f"{self.name}: ")
        values = flat(config)
        if unknown := [name for name in self.changes if name not in values]:
            return f"{config.task} has no {unknown[0]}"
        if all(values[name] == value for name, value in self.changes.items()):
            return "the run has it"
        output = self.changes.get("model.output")
        metric = tasks.find(config.task).primary_metric(values)[0]
        if (
            output is not None
            and metric == "loss"
            and is_normalized(output) is not is_normalized(values["model.output"])
        ):
            return (
                f"its loss and that of {values['model.output']} do not compare: one is not of a distribution over words"
            )
        try:
            changed = with_changes(config, self.changes)
            tasks.find(config.task).planned_sizes(changed)
        except InputError as error:
            return str(error)
        return ""

    def bound(self, traced: TracedTime) -> float | None:
        """The largest factor by which a program can become faster.

        Args:
          traced: Time of the program by part.

        Returns:
          The factor if the parts of the technique take no time; None for a technique that changes the whole program.
        """
        return traced.bound(*self.shortens) if self.shortens else None
