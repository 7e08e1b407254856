"""Experts in a form that ONNX files can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpnlp.models.backbone import BackboneConfig
from hpnlp.nn.feed_forward import described_network
from hpnlp.nn.feed_forward.experts import ExpertLayer
from hpnlp.spec import Spec, parse, parse_one


def with_dense_experts(model: Any) -> Any:
    """A model that computes all experts for all tokens, with neither sorts nor loops.

    Returns:
      The model, for the same weights; itself if it has no experts.
    """
    config = model.config
    if not isinstance(config, BackboneConfig):
        return model
    form = ",".join(str(_with_dense_form(entry)) for entry in parse(config.form, "model.form"))
    return model.clone(config=dataclasses.replace(config, mlp=_dense(config.mlp), form=form))


def _with_dense_form(entry: Spec) -> Spec:
    kwargs = tuple((name, _dense(value) if name == "mlp" else value) for name, value in entry.kwargs)
    return dataclasses.replace(entry, kwargs=kwargs)


def _dense(mlp: str) -> str:
    """The network; with `impl="dense"` if it has experts."""
    if not isinstance(described_network(mlp), ExpertLayer):
        return mlp
    spec = parse_one(mlp, "model.mlp")
    kwargs = {**dict(spec.kwargs), "impl": "dense"}
    return str(dataclasses.replace(spec, kwargs=tuple(kwargs.items())))
