"""Tree classifier: a label of each tree, by layers of child-sum Tree-LSTMs from the leaves to the root."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpnlp.model_interfaces.ranges import LIMITS, classes_option, rate_option
from hpnlp.models.backbone import DTYPES
from hpnlp.models.classifiers.pooled_classifier import PooledClassifier
from hpnlp.models.prediction import Batch
from hpnlp.models.stacks.unstacked import Unstacked
from hpnlp.nn.layers import Embed, dropout
from hpnlp.nn.pooling import POOLINGS
from hpnlp.nn.tree_lstm import ChildSumTreeLSTM, batch_schedule
from hpnlp.parallel.memory import remat
from hpnlp.spec import lookup
from hpnlp.types import check_options, option


@dataclasses.dataclass(frozen=True)
class TreeClassifierConfig(Unstacked):
    """Tree-LSTMs with one label for each tree."""

    description: ClassVar[str] = "a tree classifier"
    undivided: ClassVar[str] = "whose trees are not divided"

    layers: int = option(
        1,
        "Layers; each reads the hidden states of the layer before, and their sum is kept.",
        least=1,
        most=LIMITS["layers"],
    )
    dim: int = option(128, "Features of the embeddings and of the states, D.", least=1, most=LIMITS["dim"])
    pooling: str = option(
        "max",
        'An entry of POOLINGS: how the states of the nodes become one vector; "first" is the root.',
        among=POOLINGS,
    )
    vocab: int = option(0, "Number of ids of labels of nodes; 0 for the tokenizer's.", least=0, most=LIMITS["vocab"])
    classes: int = classes_option()
    max_children: int = option(0, "Largest number of children of a node; 0 for data.max_children.", least=0, most=2**10)
    dropout: float = rate_option(
        "Share of features of embeddings and of the pooled state that are dropped in training.", 0.3
    )
    dtype: str = option("float32", "Dtype of the activations; parameters stay float32.")

    def __post_init__(self) -> None:
        check_options(self, "model")
        lookup(DTYPES, self.dtype, "model.dtype")

    def training_flops(self, batch_size: int, length: int) -> float:
        """FLOPs of a training step that count for its MFU: three times those of the products.

        Args:
          batch_size: Trees of a batch.
          length: Nodes of a tree.

        Returns:
          The number of FLOPs.
        """
        # For each node: 4 D^2 of its input, D^2 of its forget gate, and for each second node 3 D^2 of its children.
        per_node = self.layers * 6.5 * self.dim**2
        return 6.0 * batch_size * (length * per_node + self.dim * self.classes)


class TreeClassifier(PooledClassifier):
    """Embeddings of labels, layers of child-sum Tree-LSTMs, pooling over the nodes, and a softmax over classes.

    A batch is that of `data.examples.kinds.trees.Trees`. Nodes of all trees are computed together, by height and number
    of children (`hpnlp.ops.trees`). Of the policies of `remat`, only "none" and "full" differ.

    References:
      Tai et al. 2015, "Improved semantic representations from tree-structured long short-term memory networks".
    """

    def setup(self) -> None:
        c, module = self.config, ChildSumTreeLSTM
        policy = remat.policy(self.remat)
        if policy is not None:
            module = nn.remat(ChildSumTreeLSTM, policy=policy, prevent_cse=True)
        self.embed = Embed(c.vocab, c.dim)
        self.trees = [module(c.dim, name=f"layer_{i}") for i in range(c.layers)]
        self.setup_head(c.dim)

    def states(self, batch: Batch, ids: Array, rng: Array | None, deterministic: bool) -> Float[Array, "B T D"]:
        """States of the nodes of trees.

        Args:
          batch: Trees.
          ids: A number for each node.
          rng: Key of dropout; None for none.
          deterministic: Not read.

        Returns:
          The sum of the states of all layers.
        """
        c = self.config
        schedule = batch_schedule(batch, c.max_children)
        h = dropout(self.embed(batch["tokens"], DTYPES[c.dtype]), c.dropout, rng, ids)
        for index, layer in enumerate(self.trees):
            y = layer(h.reshape(-1, c.dim), schedule).reshape(h.shape)
            h = h + y if index else y
        return h

    @nn.nowrap
    def example_batch(self, batch_size: int, length: int) -> dict[str, jax.Array]:
        """A batch with the shapes and dtypes of a batch of data.

        Args:
          batch_size: Number of trees, B.
          length: Nodes of a tree, T.

        Returns:
          Trees whose nodes are chains, each the parent of the next one.
        """
        ones = jnp.ones((batch_size, length), jnp.int32)
        positions = jnp.arange(length, dtype=jnp.int32)[None] * ones
        return {
            "tokens": jnp.zeros_like(ones),
            "segment_ids": ones,
            "positions": positions,
            "parents": positions - 1,
            "slots": jnp.zeros_like(ones),
            "heights": length - 1 - positions,
            "arities": jnp.where(positions < length - 1, ones, 0),
            "labels": jnp.zeros((batch_size,), jnp.int32),
            "weights": jnp.ones((batch_size,), jnp.float32),
        }

    @nn.nowrap
    def batch_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of the arrays of a batch: ("batch",) for labels and weights, otherwise ("batch", "length")."""
        names = ("tokens", "segment_ids", "positions", "parents", "slots", "heights", "arities")
        axes: Mapping[str, tuple[str, ...]] = dict.fromkeys(names, ("batch", "length"))
        return {**axes, "labels": ("batch",), "weights": ("batch",)}
