"""Bodies: the parts of models that models of other tasks may start from (`train.init_from`).

The body of a stack is everything of it but its head: embeddings, layers and final norm, with their buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from hpnlp.nn.block import BlockConfig


@dataclasses.dataclass(frozen=True)
class BodyStart:
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


class ConfigOfModel:
    """Base class of the configs of models: their stacks of layers, and those that may start from bodies of other models.

    Attributes:
      body: Kind of the stacks, a key of `starts` of the models that may start from them; "" if none may.
      starts: Kind of the stacks of another model -> the stacks that may start from them. A stack that the model does not have,
        such as a second tower, is left out.
      head_fields: Fields of a stack's config that do not belong to its body.
      body_params: Parameters of a stack that belong to its body.
      loss_params: Parameters of the loss, which a source may lack; see `training.starts.warm_start`.
      free_fields: Fields that a run that starts from another one may change; see `training.starts.architecture`.
      has_convolutions: Whether the model is a network of convolutions of images.
      data_buffers: Buffers that are functions of the data, such as an index of documents; `train.init_from` does not copy them.
    """

    body: ClassVar[str] = ""
    starts: ClassVar[Mapping[str, tuple[BodyStart, ...]]] = {}
    head_fields: ClassVar[tuple[str, ...]] = ()
    body_params: ClassVar[tuple[str, ...]] = ("embed", "positions", "embed_norm", "layers", "final_norm")
    loss_params: ClassVar[tuple[str, ...]] = ()
    free_fields: ClassVar[tuple[str, ...]] = ()
    has_convolutions: ClassVar[bool] = False
    data_buffers: ClassVar[tuple[str, ...]] = ()

    @property
    def is_single_stack(self) -> bool:
        """Whether the model is one Backbone with at least one layer, so that all layers' parameters are under "layers"."""
        return False

    def stacks(self) -> dict[str, Any]:
        """Configs of the model's stacks of layers, each a `BackboneConfig`, by the names of their modules.

        Returns:
          The stacks; none for a model that is not made of Blocks.
        """
        return {}

    def all_forms(self) -> list[BlockConfig]:
        """The Blocks of one period of each stack that has layers."""
        return [form for stack in self.stacks().values() if stack.layers for form in stack.forms()]

    def canonical(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fields that decide what the model computes; values that are written in several ways are resolved to one.

        Args:
          values: Fields of the config that decide what the model computes.

        Returns:
          The fields, without those that other fields make ineffective.
        """
        return values

    def with_networks(self, change: Callable[[str], str]) -> Any:
        """Replaces the feed-forward networks of all layers.

        Args:
          change: Function from a spec string, as `model.mlp`, to another one.

        Returns:
          The changed config.
        """
        return self

    def split_carry(self, carry: Any) -> Any:
        """The carry of the layers by the name of their stack; None where the compiler places all layers on devices."""
        return None

    @property
    def compares_examples(self) -> bool:
        """Whether the loss compares examples of a batch, and `models.pairs.grad_cache` computes it from parts of it."""
        return False

    def check_accumulation(self, accumulate: int) -> None:
        """Checks that a batch may be divided into parts.

        Args:
          accumulate: Number of parts that gradients are accumulated from.

        Raises:
          InputError: There are several parts, and the loss is no sum over them, nor computed by `models.pairs.grad_cache`.
        """
        return None  # most losses are sums over examples
