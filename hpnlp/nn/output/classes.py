"""Output layers that compare a word with those of its class or cluster: adaptive and class-based softmax."""

from __future__ import annotations

import math
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import embed_init, param
from hpnlp.nn.output.base import OutputLayer, required_counts, required_order
from hpnlp.ops.softmax.structured import adaptive
from hpnlp.ops.softmax.structured import class_based as ops
from hpnlp.spec import lookup
from hpnlp.types import option


class AdaptiveOutput(OutputLayer):
    """Adaptive softmax with the parameters of torch's `AdaptiveLogSoftmaxWithLoss`: see `ops.softmax.structured.adaptive`.

    Cost:
      The head for all tokens, and a tail for the tokens whose label it has.
    """

    cutoffs: tuple[int, ...] = option(
        (), "First ids of the tails, for ids sorted by falling frequency; empty for 1/16 and 1/4 of the vocabulary."
    )
    div_value: int | float = option(4, "Each tail is this many times narrower than the one before it.")

    rows_are: ClassVar[str] = ""

    def setup(self) -> None:
        self.tail_starts = self.cutoffs or (max(self.vocab // 16, 1), max(self.vocab // 4, 2))
        head, tails = adaptive.adaptive_shapes(self.dim, self.vocab, self.tail_starts, self.div_value)
        self.head = param(self, "head", embed_init, head, ("classes", "embed"))
        self.tails = [_Tail(*shapes) for shapes in tails]

    def _tails(self) -> list[tuple[Array, Array]]:
        return [tail() for tail in self.tails]

    def nll(self, table: None, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return adaptive.adaptive_nll(h, self.head, self._tails(), labels, self.tail_starts)

    def logits(self, table: None, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return adaptive.adaptive_log_probs(h, self.head, self._tails(), self.tail_starts)

    def top_k(self, table: None, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return adaptive.adaptive_top_k(h, self.head, self._tails(), self.tail_starts, k)


class _Tail(nn.Module):
    """Parameters of a tail: the projection `kernel` [d, D] and the vectors of the words `table` [words, d]."""

    #: Shape of the projection.
    projection: tuple[int, int]
    #: Shape of the vectors.
    words: tuple[int, int]

    @nn.compact
    def __call__(self) -> tuple[Array, Array]:
        # Initialisers expect kernels of [in, out]; this one is [out, in].
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=0)
        kernel = param(self, "kernel", init, self.projection, ("hidden", "embed"))
        return kernel, param(self, "table", embed_init, self.words, ("classes", "hidden"))


class ClassOutput(OutputLayer):
    """Class-based softmax: see `hpnlp.ops.softmax.structured.class_based`. Row i of the table belongs to word `order[i]`.

    Cost:
      The classes for all tokens, and for each token the words of its label's class.
    """

    classes: int = option(0, "Number of classes; 0 for the square root of the vocabulary.")
    by: str = option(
        "size",
        "size for ranges of ids of equal size, mass for ranges of words sorted by frequency with equal sums of square roots of "
        "counts, similar for such ranges of words sorted by similarity.",
    )

    rows_are: ClassVar[str] = "words in the order of their classes"

    def setup(self) -> None:
        count = self.classes or max(round(math.sqrt(self.vocab)), 1)
        self.partition = lookup(PARTITIONS, self.by, "partition")(self, count)
        self.head = param(self, "head", embed_init, (count, self.dim), ("classes", "embed"))

    def nll(self, table: Float[Array, "V D"], h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return ops.class_nll(h, self.head, table, self.partition, labels)

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return ops.class_log_probs(h, self.head, table, self.partition)

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return ops.class_top_k(h, self.head, table, self.partition, k)


# name -> (layer, number of classes) -> classes
PARTITIONS = {
    "size": lambda layer, count: ops.equal_size_classes(layer.vocab, count),
    "mass": lambda layer, count: _equal_mass(layer, count, similar=False),
    "similar": lambda layer, count: _equal_mass(layer, count, similar=True),
}


def _equal_mass(layer: ClassOutput, count: int, similar: bool) -> ops.Classes:
    setting = "by='similar'" if similar else "by='mass'"
    order = required_order(layer.stats, setting, "by=mass") if similar else None
    return ops.equal_mass_classes(required_counts(layer.stats, layer.vocab, setting, "by=size"), count, order=order)
