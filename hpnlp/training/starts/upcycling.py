"""Upcycling: experts that start as copies of the MLP of a dense model (Komatsuzaki et al. 2023, arXiv 2212.05055)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from hpnlp.models.backbone import BackboneConfig
from hpnlp.models.variables import BUFFERS
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.feed_forward import described_network
from hpnlp.nn.feed_forward.experts import ExpertLayer
from hpnlp.spec import parse_one
from hpnlp.types import InputError

# Fields of a model's config in which it may differ from a dense source.
FIELDS = ("mlp", "mlp_dim", "form")


def upcycled_layers(model: Any, source: Any) -> list[int]:
    """Layers whose experts can start from the MLP of the same layer of another model.

    Args:
      model: Config of the model; None if it is not known.
      source: Config of the model to start from.

    Returns:
      Indices of the layers with experts in the model and an MLP in the source; none if the models differ in the number or the
      other fields of their layers, or if layers without experts differ.
    """
    if model is None or not (model.is_single_stack and source.is_single_stack and model.layers == source.layers):
        return []
    upcycled = []
    for layer in range(model.layers):
        form, old = _form(model, layer), _form(source, layer)
        if _without_network(form) != _without_network(old):
            return []
        network, mlp = described_network(form.mlp), described_network(old.mlp)
        if network.expert_count and mlp.starts_experts:
            upcycled.append(layer)
        elif parse_one(form.mlp, "model.mlp") != parse_one(old.mlp, "model.mlp") or form.mlp_size != old.mlp_size:
            return []
    return upcycled


def check(model: BackboneConfig, source: BackboneConfig, layers: list[int], accept_changes: bool) -> str:
    """Checks that the experts of a model can start from MLPs.

    Args:
      model: Config of the model.
      source: Config of the model to start from.
      layers: Result of `upcycled_layers`.
      accept_changes: Allow experts whose first results differ from those of the MLPs.

    Returns:
      The differences that were accepted, as text; "" for none.

    Raises:
      InputError: The experts are of another kind or size than the MLPs, or compute something else at first.
    """
    differences = ""
    for layer in layers:
        form, old = _form(model, layer), _form(source, layer)
        network: Any = described_network(form.mlp)
        if network.kind != old.mlp:
            raise InputError(
                f"model.mlp={form.mlp!r} has experts of kind={network.kind!r}, and layer {layer} of the source an MLP of kind "
                f"{old.mlp!r}: set kind={old.mlp!r}"
            )
        if form.mlp_size != old.mlp_size:
            raise InputError(
                f"model.mlp={form.mlp!r} has experts of {form.mlp_size} columns, and layer {layer} of the source an MLP of "
                f"{old.mlp_size}: set model.mlp_dim={old.mlp_size}"
            )
        if reason := _changed_output(network):
            differences = f"model.mlp={form.mlp!r}: {reason}"
    if differences and not accept_changes:
        raise InputError(
            f"{differences}: use gates that sum to 1, as top_k(8,2), or start in spite of that with --accept_changes"
        )
    return differences


def upcycled(weights: PyTree, initial: PyTree, model: BackboneConfig, source: BackboneConfig, layers: list[int]) -> Any:
    """Weights of a model whose experts are copies of the MLPs of a dense model.

    Args:
      weights: Weights of the dense model, arrays.
      initial: Weights of the model that are initialised, for the routers, shared experts and buffers.
      model: Config of the model.
      source: Config of the dense model.
      layers: Result of `upcycled_layers`.

    Returns:
      The weights of the model.
    """
    order, old_order = model.stack_order(), source.stack_order()
    stacks, first = old_order.split(weights["layers"]), order.split(initial["layers"])
    trees = []
    for layer in range(model.layers):
        tree = old_order.layer(stacks, layer)
        if layer in layers:
            tree = {**tree, "mlp": _experts(tree["mlp"], order.layer(first, layer)["mlp"])}
        trees.append(tree)
    joined = {
        name: jax.tree.map(lambda *leaves: jnp.stack(leaves), *(trees[i] for i in order.members(name, model.layers)))
        for name in order.stack_names
    }
    result = {**weights, "layers": order.join(joined)}
    return result | ({BUFFERS: initial[BUFFERS]} if BUFFERS in initial else {})


def _experts(mlp: PyTree, initial: PyTree) -> Any:
    """The parameters of a layer with experts: copies of an MLP, and the initial values of all others."""
    copies = {name: jnp.broadcast_to(mlp[name]["kernel"], initial[name].shape) for name in mlp}
    return {**initial, **copies}


def _changed_output(network: ExpertLayer) -> str:
    """The reason why equal experts compute something else than one of them; "" if they do not."""
    if network.shared:
        return "shared experts are added to the output of the MLP"
    if not network.keeps_scale:
        return "the gates of a token do not sum to 1, so that the output of the MLP is scaled"
    return ""


def _form(config: BackboneConfig, layer: int) -> BlockConfig:
    forms = config.forms()
    return forms[layer % len(forms)]


def _without_network(form: BlockConfig) -> BlockConfig:
    return dataclasses.replace(form, mlp="swiglu", mlp_dim=1)
