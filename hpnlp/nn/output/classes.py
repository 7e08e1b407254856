"""Output layers that compare a word with those of its class or cluster: adaptive and class-based softmax."""

from __future__ import annotations

import math
from typing import ClassVar

import flax.linen as nn
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import embed_init, param
from hpnlp.nn.output.base import OutputLayer, known_counts, known_order
from hpnlp.ops.softmax import adaptive
from hpnlp.ops.softmax import class_based as ops
from hpnlp.spec import lookup


class AdaptiveOutput(OutputLayer):
    """Adaptive softmax: see `ops.softmax.adaptive`; torch's `AdaptiveLogSoftmaxWithLoss` has these parameters.

    cutoffs: the ids, by falling frequency, where tails begin; without any, a sixteenth and a quarter of the vocabulary.
    div_value: how many times narrower than the last each tail is.
    Cost: the head for all tokens, a tail for the tokens whose label it has.
    """

    cutoffs: tuple[int, ...] = ()
    div_value: int | float = 4

    rows_are: ClassVar[str] = ""

    def setup(self) -> None:
        self.at = self.cutoffs or (max(self.vocab // 16, 1), max(self.vocab // 4, 2))
        head, tails = adaptive.adaptive_shapes(self.dim, self.vocab, self.at, self.div_value)
        self.head = param(self, "head", embed_init, head, ("classes", "embed"))
        self.tails = [_Tail(*shapes) for shapes in tails]

    def _tails(self) -> list[tuple[Array, Array]]:
        return [tail() for tail in self.tails]

    def nll(self, table: None, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return adaptive.adaptive_nll(h, self.head, self._tails(), labels, self.at)

    def logits(self, table: None, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return adaptive.adaptive_log_probs(h, self.head, self._tails(), self.at)

    def top_k(self, table: None, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return adaptive.adaptive_top_k(h, self.head, self._tails(), self.at, k)


class _Tail(nn.Module):
    """A cluster's projection `kernel [d, D]` and its words' vectors `table [words, d]`."""

    projection: tuple[int, int]
    words: tuple[int, int]

    @nn.compact
    def __call__(self) -> tuple[Array, Array]:
        # Kernels are [in, out] where they are initialised, and here [out, in].
        init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=1, out_axis=0)
        kernel = param(self, "kernel", init, self.projection, ("hidden", "embed"))
        return kernel, param(self, "table", embed_init, self.words, ("classes", "hidden"))


class ClassOutput(OutputLayer):
    """Class-based softmax: see `ops.softmax.classes`. Row i of the table is of word `order[i]`.

    classes: how many, 0 for the square root of the vocabulary. by: an entry of PARTITIONS, "size" for ranges of ids of one
    size, "mass" for ranges of frequencies of one sum of square-rooted counts, "similar" for such ranges of similar words.
    Cost: the classes for all tokens, and for each token the words of its label's class.
    """

    classes: int = 0
    by: str = "size"

    rows_are: ClassVar[str] = "words in the order of their classes"

    def setup(self) -> None:
        count = self.classes or max(round(math.sqrt(self.vocab)), 1)
        self.parts = lookup(PARTITIONS, self.by, "partition")(self, count)
        self.head = param(self, "head", embed_init, (count, self.dim), ("classes", "embed"))

    def nll(self, table: Float[Array, "V D"], h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return ops.class_nll(h, self.head, table, self.parts, labels)

    def logits(self, table: Float[Array, "V D"], h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        return ops.class_log_probs(h, self.head, table, self.parts)

    def top_k(
        self, table: Float[Array, "V D"], h: Float[Array, "N D"], k: int
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        return ops.class_top_k(h, self.head, table, self.parts, k)


PARTITIONS = {
    "size": lambda layer, count: ops.equal_size_classes(layer.vocab, count),
    "mass": lambda layer, count: _equal_mass(layer, count, similar=False),
    "similar": lambda layer, count: _equal_mass(layer, count, similar=True),
}


def _equal_mass(layer: ClassOutput, count: int, similar: bool) -> ops.Classes:
    what = "by='similar'" if similar else "by='mass'"
    order = known_order(layer.stats, what, "by=mass") if similar else None
    return ops.equal_mass_classes(known_counts(layer.stats, layer.vocab, what, "by=size"), count, order=order)
