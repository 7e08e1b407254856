"""Experts in a form that ONNX files can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpnlp.nn.feed_forward import described_network
from hpnlp.spec import parse_one
from hpnlp.types import Model


def with_dense_experts(model: Model) -> Any:
    """A model that computes all experts for all tokens, with neither sorts nor loops.

    Returns:
      The model, for the same weights.
    """
    return model.clone(config=model.config.with_networks(_dense))


def _dense(mlp: str) -> str:
    """The network; with `impl="dense"` if it has experts."""
    if not described_network(mlp).expert_count:
        return mlp
    spec = parse_one(mlp, "model.mlp")
    kwargs = {**dict(spec.kwargs), "impl": "dense"}
    return str(dataclasses.replace(spec, kwargs=tuple(kwargs.items())))
