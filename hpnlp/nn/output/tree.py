"""Hierarchical softmax as an output layer."""

from __future__ import annotations

import functools
from typing import ClassVar

import jax
from jaxtyping import Array, Float, Int

from hpnlp.nn.output.base import OutputLayer, known_counts, known_order
from hpnlp.ops.softmax import hierarchical as ops
from hpnlp.spec import lookup
from hpnlp.types import TableRows, WordStats


class HierarchicalOutput(OutputLayer):
    """A binary tree over the words: see `ops.softmax.tree`. Row n of the table is of inner node n; the last is not used.

    tree: an entry of TREES, "huffman" for the counts, "similar" for Huffman's depths where similar words share their nodes,
    "balanced" for ids as they come.
    Cost: 6 D operations a token for each of the first 63 nodes and the further ones on its label's path, and what the
    optimizer does to the table.
    """

    tree: str = "huffman"

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


# Kept, because it takes seconds for hundreds of thousands of words, and a model is traced several times.
@functools.lru_cache(maxsize=2)
def _huffman(stats: WordStats | None, vocab: int, similar: bool) -> ops.Tree:
    what = "tree='similar'" if similar else "tree='huffman'"
    order = known_order(stats, what, "tree=huffman") if similar else None
    return ops.huffman_tree(known_counts(stats, vocab, what, "tree=balanced"), order)


TREES = {
    "balanced": lambda layer: ops.balanced_tree(layer.vocab),
    "huffman": lambda layer: _huffman(layer.stats, layer.vocab, similar=False),
    "similar": lambda layer: _huffman(layer.stats, layer.vocab, similar=True),
}
