"""Spec strings of feed-forward networks, with one spelling for networks of the same function."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpnlp.nn.feed_forward import described_network
from hpnlp.nn.feed_forward.network import FeedForward
from hpnlp.spec import Spec, parse_one

# Arguments of routers that change how a model is trained or run, and not the function that it computes afterwards.
FREE = ("balance", "z", "impl", "rate", "importance", "load", "jitter", "threshold", "exchange_capacity")


def canonical_mlp(text: str) -> str:
    """Rewrites a feed-forward network so that networks of the same function have equal spec strings.

    Args:
      text: `model.mlp`.

    Returns:
      The spec string, without arguments that are used in training only.
    """
    network, spec = described_network(text), parse_one(text, "model.mlp")
    if not network.expert_count:
        return text
    common = {field.name for field in dataclasses.fields(FeedForward)}
    names = [field.name for field in dataclasses.fields(network) if field.name not in common]
    values = {name: getattr(network, name) for name in names if name not in FREE}
    if values.get("gates") == "softmax" and values.get("normalize"):
        values |= {"gates": "softmax_k", "normalize": False}
    return experts_text(spec.name, values)


def experts_text(name: str, values: dict[str, Any]) -> str:
    """Writes a mixture of experts as a spec string.

    Args:
      name: Entry of FEED_FORWARDS.
      values: Its arguments, with experts and k.

    Returns:
      The spec string, without arguments that have their defaults.
    """
    module = described_network(name)
    further = {field: value for field, value in values.items() if value != getattr(module, field)}
    positional = tuple(values[field] for field in ("experts", "k"))
    return str(Spec(name, positional, tuple((k, v) for k, v in further.items() if k not in ("experts", "k"))))
