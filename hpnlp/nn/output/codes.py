"""Output layers that predict the bits of a word's code."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import Dense
from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.softmax import binary_codes as ops
from hpnlp.ops.softmax import without_silent
from hpnlp.types import InputError, LossOut


class BinaryOutput(OutputLayer):
    """The bits of a word's id, all at once: see `ops.softmax.codes`.

    frequent: how many words, those of the first ids, have a softmax of their own beside "another"; 0 for none. objective: what
    is trained, as `code_nll` has it; what is reported is normalised over the words.
    Cost: 6 D operations a token for each of frequent + 1 outputs and the code's.
    """

    frequent: int = 0
    objective: str = "normalized"

    rows_are: ClassVar[str] = ""
    corrects: ClassVar[bool] = False

    def setup(self) -> None:
        if not 0 <= self.frequent < self.vocab:
            raise InputError(
                f"frequent={self.frequent}: expected 0 to {self.vocab - 1}, which leaves words to the code"
            )
        if self.vocab == 1:
            raise InputError("a vocabulary of one word has no bits to predict: choose another output layer")
        self.code = (ops.convolutional_code if self.corrects else ops.binary_code)(self.vocab - self.frequent)
        self.classes = self.frequent + 1 if self.frequent else 0
        self.project = Dense(self.classes + self.code.length, ("embed", "classes"), use_bias=True)

    def loss(
        self,
        table: None,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of the objective; without an rng, of -log p(label)."""
        h, labels = without_silent(h, labels, weights)
        return self.weighted(self._each(h, labels, "normalized" if rng is None else self.objective), labels, weights)

    def nll(self, table: None, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return self._each(h, labels, "normalized")

    def logits(self, table: None, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        classes, bits = self._scores(h)
        return (
            ops.code_log_probs(bits, self.code) if classes is None else ops.hybrid_log_probs(classes, bits, self.code)
        )

    def top_k(self, table: None, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        classes, bits = self._scores(h)
        return ops.code_top_k(bits, self.code, k) if classes is None else ops.hybrid_top_k(classes, bits, self.code, k)

    def _each(self, h: Float[Array, "N D"], labels: Int[Array, " N"], objective: str) -> Float[Array, " N"]:
        classes, bits = self._scores(h)
        if classes is None:
            return ops.code_nll(bits, labels, self.code, loss=objective)
        return ops.hybrid_nll(classes, bits, labels, self.code, loss=objective)

    def _scores(self, h: Float[Array, "N D"]) -> tuple[Array | None, Array]:
        """Logits of the frequent words and "another", where there are any, and of the bits."""
        found = self.project(h.astype(jnp.float32))
        return found[:, : self.classes] if self.classes else None, found[:, self.classes :]


class BinaryHybridOutput(BinaryOutput):
    """A softmax over the frequent words, and bits for the others."""

    frequent: int = 1024


class BinaryECCOutput(BinaryOutput):
    """The bits of a convolutional code, of which up to four may be wrong: decoded by Viterbi's algorithm.

    Trained by the bits, because the normaliser of this code costs 128 operations for each of its bits.
    """

    objective: str = "logistic"

    corrects: ClassVar[bool] = True
