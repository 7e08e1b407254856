"""Feed-forward networks of layers that may differ: mixtures of experts and MLPs, in `model.mlp` and `model.form`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hpnlp.models.huggingface.family import ModelConfig
from hpnlp.nn.feed_forward import FeedForward, described_network
from hpnlp.nn.feed_forward.canonical import canonical_mlp
from hpnlp.spec import Spec, parse_period


@dataclasses.dataclass(frozen=True)
class Network:
    """The feed-forward network of a layer.

    Attributes:
      mlp: Its spec, as `model.mlp`.
      columns: Number of columns, of each expert where there are experts.
    """

    mlp: str
    columns: int

    @property
    def module(self) -> FeedForward:
        """The network with one column, for its properties."""
        return described_network(self.mlp)

    @property
    def has_experts(self) -> bool:
        """Whether the network is a mixture of experts."""
        return self.module.expert_count > 0


def model_networks(config: ModelConfig) -> list[Network]:
    """The networks of a model.

    Args:
      config: The model.

    Returns:
      The network of each layer.
    """
    forms = config.forms()
    period = [Network(form.mlp, form.mlp_size) for form in forms]
    return [period[layer % len(forms)] for layer in range(config.layers)]


def network_fields(networks: Sequence[Network], form: str = "block") -> dict[str, Any]:
    """Writes networks as fields of a model's config, with one spelling for equal networks.

    Args:
      networks: The network of each layer.
      form: `model.form`, whose other fields are kept.

    Returns:
      The fields mlp and mlp_dim, those of the first layer with experts, or of the first layer; and form, with the layers that
      have another network.
    """
    base = next((network for network in networks if network.has_experts), networks[0])
    entries = parse_period(form, "model.form")
    layers = [_entry(entries[i % len(entries)], network, base) for i, network in enumerate(networks)]
    period = next(n for n in range(1, len(layers) + 1) if all(layers[i] == layers[i % n] for i in range(len(layers))))
    names = []
    for entry in layers[:period]:
        if names and names[-1][0] == entry:
            names[-1][1] += 1
        else:
            names.append([entry, 1])
    text = ",".join(str(dataclasses.replace(entry, repeat=count)) for entry, count in names)
    return {"mlp": base.mlp, "mlp_dim": base.columns, "form": text}


def _entry(entry: Spec, network: Network, base: Network) -> Spec:
    """The form of a layer with this network, in a model whose own network is `base`."""
    kwargs = {name: value for name, value in entry.kwargs if name not in ("mlp", "mlp_dim")}
    if canonical_mlp(network.mlp) != canonical_mlp(base.mlp):
        kwargs["mlp"] = network.mlp
    if network.columns != base.columns:
        kwargs["mlp_dim"] = network.columns
    return dataclasses.replace(entry, kwargs=tuple(kwargs.items()))
