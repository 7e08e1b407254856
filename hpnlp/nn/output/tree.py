"""Hierarchical softmax as an output layer."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from hpnlp.nn.output.base import OutputLayer, required_counts, required_order
from hpnlp.ops.softmax.structured import hierarchical as ops
from hpnlp.ops.table_rows import TableRows
from hpnlp.spec import lookup
from hpnlp.types import WordStats, option


class HierarchicalOutput(OutputLayer):
    """Hierarchical softmax over a binary tree of the words: see `hpnlp.ops.softmax.structured.hierarchical`.

    Row n of the table belongs to inner node n; the last row is not used.

    Cost:
      6 D operations a token for each of the first 63 nodes and each deeper node on its label's path, and the optimizer's work
      on the table.
    """

    tree: str = option(
        "huffman",
        "huffman from the counts; similar with Huffman's depths, but similar words share nodes; balanced in the order of the "
        "ids.",
    )

    rows_are: ClassVar[str] = "nodes"

    def setup(self) -> None:
        self.paths = lookup(TREES, self.tree, "tree")(self)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"]:
        return ops.tree_rows(self.paths, labels)

    def nll(
        self, table: Float[Array, "V D"] | TableRows, h: Float[Array, "N D"], labels: Int[Array, " N"]
    ) -> Float[Array, " N"]:
        return ops.tree_nll(h, table, self.paths, labels)

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return ops.tree_log_probs(h, table, self.paths)

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return ops.tree_top_k(h, table, self.paths, k)

    def sample(
        self,
        table: Float[Array, "V D"],
        h: Float[Array, "N D"],
        rng: jax.Array,
        temperature: float | jax.Array = 1.0,
        top_k: int = 0,
        top_p: float | jax.Array = 1.0,
    ) -> Int[Array, " N"]:
        if isinstance(top_p, float | int) and top_p == 1 and not top_k:
            return ops.tree_sample(h, table, self.paths, rng, temperature=temperature)
        return super().sample(table, h, rng, temperature, top_k, top_p)


# Cached, because building takes seconds for hundreds of thousands of words, and a model is traced several times.
@functools.lru_cache(maxsize=2)
def _huffman(stats: WordStats | None, vocab: int, similar: bool) -> ops.Tree:
    setting = "tree='similar'" if similar else "tree='huffman'"
    order = required_order(stats, setting, "tree=huffman") if similar else None
    return ops.huffman_tree(required_counts(stats, vocab, setting, "tree=balanced"), order)


# name -> layer -> tree
TREES = {
    "balanced": lambda layer: ops.balanced_tree(layer.vocab),
    "huffman": lambda layer: _huffman(layer.stats, layer.vocab, similar=False),
    "similar": lambda layer: _huffman(layer.stats, layer.vocab, similar=True),
}
