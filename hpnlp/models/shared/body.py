"""Bodies: the parts of models that models of other tasks may start from (`train.init_from`).

The body of a stack is everything of it but its head: embeddings, layers and final norm, with their buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Start:
    """A stack of a model that may start from the body of a stack of another model.

    Attributes:
      stack: Name of the stack in `BackboneConfig.stacks`.
      source: Name of the stack of the other model.
      fields: Field of the stack's config -> field of the model's config that sets it, where the names differ.
      embed: Key of the token embedding among the model's parameters, where the stack may share it with others.
      pooling: Whether the pooling belongs to the body too, so that both stacks must have the same.
      output: Whether the output layer starts from that of the source as well, if both are equal.
    """

    stack: str = ""
    source: str = ""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    embed: str = ""
    pooling: bool = False
    output: bool = False


class ConfigOfStacks:
    """The bodies of a model's config, and the stacks that may start from bodies of other models.

    Attributes:
      body: Kind of the stacks, a key of `starts` of the models that may start from them; "" if none may.
      starts: Kind of the stacks of another model -> the stacks that may start from them. A stack that the model does not have,
        such as a second tower, is left out.
      head_fields: Fields of a stack's config that do not belong to its body.
      body_params: Parameters of a stack that belong to its body.
      loss_params: Parameters of the loss, which a source may lack; see `training.starts.warm_start`.
      free_fields: Fields that a run that starts from another one may change; see `training.starts.architecture`.
    """

    body: ClassVar[str] = ""
    starts: ClassVar[Mapping[str, tuple[Start, ...]]] = {}
    head_fields: ClassVar[tuple[str, ...]] = ()
    body_params: ClassVar[tuple[str, ...]] = ("embed", "positions", "embed_norm", "layers", "final_norm")
    loss_params: ClassVar[tuple[str, ...]] = ()
    free_fields: ClassVar[tuple[str, ...]] = ()

    def stacks(self) -> dict[str, Any]:
        """Configs of the model's stacks of layers, by the names of their modules.

        Returns:
          The config itself under "", for a model that is one Backbone.
        """
        return {"": self}
