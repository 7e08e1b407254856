"""Pruning of experts: some are removed, or merged into the ones that stay.

References:
  Muzio et al. 2024, "SEER-MoE", arXiv 2404.05089: experts are removed by what calibration data show of them.
  Li et al. 2024, "Merge, then compress: demystify efficient SMoE with hints from its routing policy", arXiv 2310.01334: experts
  are merged with weights by their use, after their columns are aligned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

from hpnlp.compress.layers import Layer
from hpnlp.nn.block import BlockConfig
from hpnlp.nn.feed_forward import described_network
from hpnlp.spec import parse_one
from hpnlp.types import InputError

ROUTER = "router"  # name of the router's matrix [D, E]
STACKS = ("up", "gate", "down")  # names of the experts' matrices


def with_fewer_experts(form: BlockConfig, count: int) -> BlockConfig:
    """A layer's form with another number of experts.

    Args:
      form: The form of a layer with experts.
      count: The number.

    Returns:
      The form; all other arguments of its feed-forward network are kept.

    Raises:
      InputError: The router cannot do with fewer experts.
    """
    spec, network = parse_one(form.mlp, "model.mlp"), described_network(form.mlp)
    if reason := network.needs_all_experts:
        raise InputError(f"experts: model.mlp={form.mlp!r}: {reason}: leave the stage out")
    if spec.args:  # the first of which is `experts`
        smaller = dataclasses.replace(spec, args=(count, *spec.args[1:]))
    else:
        smaller = dataclasses.replace(spec, kwargs=tuple((dict(spec.kwargs) | {"experts": count}).items()))
    return dataclasses.replace(form, mlp=str(smaller))


def merged(layer: Layer, kept: Sequence[int] | np.ndarray, scores: np.ndarray) -> Layer:
    """Adds the other experts to the ones that stay.

    Each other expert joins the one whose column of the router has the largest cosine with its own. The columns of its MLP are
    permuted, which does not change its result, so that they resemble those of that expert most; then the matrices are averaged.

    Args:
      layer: A layer with experts.
      kept: Indices of the experts that stay.
      scores: Importance of each expert, the weight of its matrices in the average.

    Returns:
      A layer with all experts, of which those in `kept` are averages.

    Cost: of each other expert, O(F^2 D) for the similarities of its F columns and O(F^3) for the permutation.
    """
    mlp = layer.variables["params"]["mlp"]
    stacks = {name: np.array(mlp[name], np.float32) for name in STACKS if name in mlp}
    router = np.asarray(mlp[ROUTER], np.float32)
    router = router / np.maximum(np.linalg.norm(router, axis=0), 1e-30)
    similarity = router.T @ router[:, list(kept)]
    sums = {name: stack * _broadcast(scores) for name, stack in stacks.items()}
    weights = np.array(scores, np.float64)
    for expert in sorted(set(range(len(scores))) - {int(index) for index in kept}):
        target = int(kept[int(np.argmax(similarity[expert]))])
        order = _aligned_columns(stacks, expert, target)
        for name, stack in stacks.items():
            permuted = stack[expert][order] if name == "down" else stack[expert][:, order]
            sums[name][target] += permuted * scores[expert]
        weights[target] += scores[expert]
    # An expert without importance, to which none is added, stays as it is.
    averages = {
        name: np.where(_broadcast(weights) > 0, sums[name] / np.maximum(_broadcast(weights), 1e-300), stack)
        for name, stack in stacks.items()
    }
    arrays = {name: jnp.asarray(value, mlp[name].dtype) for name, value in averages.items()}
    params = {**layer.variables["params"], "mlp": {**mlp, **arrays}}
    return dataclasses.replace(layer, variables={**layer.variables, "params": params})


def _aligned_columns(stacks: Mapping[str, np.ndarray], expert: int, target: int) -> np.ndarray:
    """The column of an expert's MLP to put in the place of each column of another expert's."""
    columns = {
        index: np.concatenate(
            [stack[index].T if name != "down" else stack[index] for name, stack in stacks.items()], axis=1
        )
        for index in (expert, target)
    }
    return linear_sum_assignment(columns[target] @ columns[expert].T, maximize=True)[1]


def _broadcast(scores: np.ndarray) -> np.ndarray:
    return np.asarray(scores, np.float64)[:, None, None]
