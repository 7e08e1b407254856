"""Parameters N and training FLOPs C of language models in three named conventions, counted from a config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from hpnlp import measure
from hpnlp.models.stacks.planned_layers import PlannedLayers
from hpnlp.models.variables import axes_and_shapes
from hpnlp.planner.estimate import planned_model
from hpnlp.training.config import Config
from hpnlp.types import InputError


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """Size of a language model.

    Attributes:
      layers: Parameters of the layers and the final norm; of experts, those that a token uses.
      head: Numbers V x D of the matrix of the logits, also where it is the embedding table (model.tied).
      tables: Parameters of the embedding and position tables, and of the head where it has a matrix of its own.
      attention_width: Heads x head size, summed over the layers with attention.
      length: Tokens of a sequence.
      idle: Parameters of experts that a token does not use, which count neither for N nor for C.
    """

    layers: int
    head: int
    tables: int
    attention_width: int
    length: int
    idle: int = 0

    def _flops(self, parameters: int, causal: bool) -> float:
        return measure.training_flops(
            parameters, 1, layers=1, width=self.attention_width, length=self.length, causal=causal
        )


@dataclasses.dataclass(frozen=True)
class Convention:
    """A way to count N and C.

    Attributes:
      description: What is counted.
      parameters: N of a model.
      flops_per_token: Training FLOPs of a token, C / D.
    """

    description: str
    parameters: Callable[[ModelSize], int]
    flops_per_token: Callable[[ModelSize], float]


# Kaplan et al. 2020; Porian et al. 2024, whose largest correction is the head, in the accounting with attention (their main
# results leave it out); Hoffmann et al. 2022, appendix F, which does not halve attention for the causal mask, and counts the
# softmax too, which is left out here.
CONVENTIONS: Mapping[str, Convention] = {
    "kaplan": Convention(
        "N without embeddings and head; C = 6 N D",
        lambda size: size.layers,
        lambda size: 6.0 * size.layers,
    ),
    "porian": Convention(
        "N with the head once, without other tables; C = 6 N D and 6 x width x T of causal attention per token and layer",
        lambda size: size.layers + size.head,
        lambda size: size._flops(size.layers + size.head, causal=True),
    ),
    "chinchilla": Convention(
        "N of all parameters; C = 6 N D and 12 x width x T of attention per token and layer",
        lambda size: size.layers + size.tables,
        lambda size: size._flops(size.layers + size.tables, causal=False),
    ),
}
DEFAULT = "porian"


def model_size(config: Config) -> ModelSize:
    """Counts the size of a config's model. Allocates nothing.

    Args:
      config: A resolved config of the task "lm", whose vocabulary is known without its data or taken to be the largest.

    Returns:
      The size.

    Raises:
      InputError: The task or the output layer has no logits of all words, whose FLOPs these conventions count.
    """
    if config.task != "lm" or not config.model.output.startswith("full"):
        raise InputError(
            f"task={config.task!r} with model.output={getattr(config.model, 'output', '')!r}: scaling laws count the FLOPs of "
            "language models with logits of all words: use task='lm' and model.output='full'"
        )
    model = planned_model(config)
    axes, shapes = axes_and_shapes(model)
    is_names = {"is_leaf": lambda node: node is None or isinstance(node, tuple)}
    shares = _used_shares(model.config)
    tables = total = idle = 0
    for names, leaf in zip(jax.tree.leaves(axes, **is_names), jax.tree.leaves(shapes), strict=True):
        size = math.prod(leaf.shape)
        total += size
        tables += size if names and {"vocab", "positions"} & set(names) else 0
        if names and "experts" in names:
            idle += round(size * (1 - shares[leaf.shape[names.index("experts")]]))
    c: Any = model.config
    return ModelSize(total - tables - idle, c.vocab * c.dim, tables, c.attention_width(), config.data.seq_len, idle)


def _used_shares(config: PlannedLayers) -> dict[int, float]:
    """Number of experts of a layer -> share of them that a token uses, as a mean over such layers."""
    shares: dict[int, list[float]] = {}
    for network in config.networks():
        if network.expert_count:
            shares.setdefault(network.expert_count, []).append(network.experts_per_token / network.expert_count)
    return {count: sum(values) / len(values) for count, values in shares.items()}
