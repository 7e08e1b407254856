"""The part of a Backbone's config that plans and the planner read: supported layouts, and FLOPs."""

from __future__ import annotations

import abc
import functools
import math
from typing import Any

from hpnlp import measure
from hpnlp.models.stacks.layer_forms import carries
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.feed_forward import FeedForward, described_network
from hpnlp.parallel.layout import Layout
from hpnlp.types import InputError, MixerTraits


class PlannedLayers(abc.ABC):
    """Layers of Blocks, as plans and the planner see them. Methods without a body here are those of `BackboneConfig`."""

    @abc.abstractmethod
    def attention_width(self) -> int: ...  # noqa: D102

    @abc.abstractmethod
    def non_embedding_parameters(self) -> int: ...  # noqa: D102

    @abc.abstractmethod
    def forms(self) -> tuple[BlockConfig, ...]: ...  # noqa: D102

    def networks(self) -> list[FeedForward]:
        """The feed-forward networks of one period, for their properties.

        Returns:
          The network of each form, with one column.
        """
        return [described_network(form.mlp) for form in self.forms()]

    @functools.cached_property
    def network_traits(self) -> tuple[MixerTraits, ...]:
        """Traits of the feed-forward networks of one period."""
        return tuple(network.traits for network in self.networks())

    def expert_sizes(self) -> dict[str, tuple[int, str]]:
        """The size of the logical axis "experts", as in `BackboneConfig.sizes`; empty for layers without experts."""
        counts = {form.mlp: network.expert_count for form, network in zip(self.forms(), self.networks(), strict=True)}
        counts = {mlp: count for mlp, count in counts.items() if count}
        if not counts:
            return {}
        return {"experts": (math.gcd(*counts.values()), " and ".join(f"model.mlp={mlp!r}" for mlp in counts))}

    @functools.cached_property
    def reads_tokens(self) -> bool:
        """Whether a feed-forward network reads the ids of the words."""
        return any(network.reads_tokens for network in self.networks())

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU (`measure.training_flops`).

        Args:
          batch_size: Sequences of a batch.
          length: Tokens of a sequence.

        Returns:
          The number of FLOPs.
        """
        parameters, width = self.non_embedding_parameters(), self.attention_width()
        # One layer of the width of all layers together, which may have different heads.
        return measure.training_flops(parameters, batch_size * length, layers=1, width=width, length=length)

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

    def check_layout(self, layout: Layout) -> None:
        """Checks that a layout over devices supports the mixers and residuals of the layers.

        Args:
          layout: The plan on its devices.

        Raises:
          InputError: The layers do not work with an axis that the layout divides.
        """
        c: Any = self
        for field, axis in (("pipeline", "layers"), ("sequence", "length")):
            if carries(c.mixer) and layout.size(axis) > 1:
                raise InputError(
                    f"plan.{field}={layout.size(axis)}: model.mixer={c.mixer!r} carries state from batch to batch, which "
                    f"devices that hold parts of the {axis} do not keep: set plan.{field}=1, or choose another mixer"
                )
        heads = [c.sizes()[name][0] for name in ("heads", "kv_heads")]
        if layout.size("length") > 1 or layout.size("heads") > 1:
            from hpnlp.parallel import context_parallel  # several devices only

            context_parallel.check_support(layout, c.all_mixers(), c.masks(), heads, c.dropout)
        for form, traits in zip(c.forms(), c.network_traits, strict=True):
            if layout.size("length") > 1 and not (traits.prefix_consistent and traits.causal):
                raise InputError(
                    f"plan.sequence={layout.size('length')} divides sequences, and model.mlp={form.mlp!r} needs all tokens of "
                    "a sequence, to count them or to choose among them: set plan.sequence=1, or choose a router without a "
                    "capacity, as top_k(8,2)"
                )
        if layout.size("heads") > 1 and any(form.joint_qk_norm for form in c.forms()):
            raise InputError(
                f"plan.tensor={layout.size('heads')} divides the heads, and model.joint_qk_norm=True normalises all of them "
                "together: set plan.tensor=1, and divide with plan.fsdp"
            )
        if c.has_memory and layout.size("length") > 1:
            raise InputError(
                f"plan.sequence={layout.size('length')} divides sequences, and the model's layers attend to a memory: the "
                "memory is not divided: set plan.sequence=1"
            )
        if c.residual == "reversible" and layout.size("layers") > 1 and (layout.zero == 3 or layout.rounds > 1):
            raise InputError(
                "model.residual='reversible': pipeline stages that gather their parameters in the backward pass (ZeRO "
                "3 or plan.rounds over 1) are not reversible: set plan.zero=2 and plan.rounds=1, or model.residual='plain'"
            )
