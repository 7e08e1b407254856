"""The part of a Backbone's config that plans and the planner read: supported layouts, and FLOPs."""

from __future__ import annotations

import abc
import functools
import math
from typing import Any

from hpnlp import compatibility, measure
from hpnlp.compatibility import Facts
from hpnlp.models.stacks.layer_forms import carries
from hpnlp.nn.attention import mixer_period
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.feed_forward import FeedForward, described_network
from hpnlp.parallel.layout import Layout
from hpnlp.types import MixerTraits


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

    def check_layout(self, layout: Layout) -> None:
        """Checks that a layout over devices supports the mixers and residuals of the layers.

        Args:
          layout: The plan on its devices.

        Raises:
          InputError: The layers do not work with an axis that the layout divides.
        """
        if layout.size("length", "heads", "layers") > 1:
            compatibility.check(layout.added_to(self.facts()))

    def trait_facts(self) -> Facts:
        """Facts on the traits of mixers and feed-forward networks, for `compatibility`."""
        c: Any = self
        names = [spec.name for spec in mixer_period(c.mixer)]
        return Facts(
            mixer=c.mixer,
            traits=[*zip(names, c.traits, strict=True)],
            networks=[(form.mlp, traits) for form, traits in zip(c.forms(), c.network_traits, strict=True)],
        )

    def facts(self) -> Facts:
        """Facts on the layers, for `compatibility`.

        Returns:
          Facts without those of a layout.
        """
        c: Any = self
        sizes = c.sizes()
        return Facts(
            mixer=c.mixer,
            mixers=c.all_mixers(),
            has_carry=carries(c.mixer),
            masks=c.masks(),
            heads=(sizes["heads"][0], sizes["kv_heads"][0]),
            dropout=c.dropout,
            joint_qk_norm=any(form.joint_qk_norm for form in c.forms()),
            networks=[(form.mlp, traits) for form, traits in zip(c.forms(), c.network_traits, strict=True)],
            has_memory=c.has_memory,
            residual=c.residual,
            is_single_stack=c.is_single_stack,
            periodic=c.periodic_fields(),
        )
