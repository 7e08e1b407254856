"""Output layers that predict the bits of a word's code: binary, hybrid, and error-correcting."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import Dense
from hpnlp.nn.output.base import OutputLayer
from hpnlp.ops.softmax import zero_ignored_tokens
from hpnlp.ops.softmax.structured import binary_codes as ops
from hpnlp.types import InputError, LossOut, option


class BinaryOutput(OutputLayer):
    """Predicts all bits of a word's id at once: see `hpnlp.ops.softmax.structured.binary_codes`.

    Cost:
      6 D operations a token for each of frequent + 1 outputs and each bit of the code.
    """

    frequent: int = option(
        0,
        "Number of words, those with the first ids, that have a softmax with one more entry for all others; 0 for none.",
        least=0,
    )
    objective: str = option(
        "normalized", "Loss that is trained, see `code_nll`; the reported loss is normalized.", among=ops.LOSSES
    )

    rows_are: ClassVar[str] = ""
    # Whether the code is convolutional.
    error_correcting: ClassVar[bool] = False

    def setup(self) -> None:
        if not 0 <= self.frequent < self.vocab:
            raise InputError(
                f"frequent={self.frequent}: expected 0 to {self.vocab - 1}, so that some words have a code"
            )
        if self.vocab == 1:
            raise InputError("a vocabulary of one word has no bits to predict: choose another output layer")
        self.code = (ops.convolutional_code if self.error_correcting else ops.binary_code)(self.vocab - self.frequent)
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
        h, labels = zero_ignored_tokens(h, labels, weights)
        losses = self._losses(h, labels, "normalized" if rng is None else self.objective)
        return self.weighted(losses, labels, weights)

    def nll(self, table: None, h: Float[Array, "N D"], labels: Int[Array, " N"]) -> Float[Array, " N"]:
        return self._losses(h, labels, "normalized")

    def logits(self, table: None, h: Float[Array, "N D"]) -> Float[Array, "N V"]:
        classes, bits = self._scores(h)
        return (
            ops.code_log_probs(bits, self.code) if classes is None else ops.hybrid_log_probs(classes, bits, self.code)
        )

    def top_k(self, table: None, h: Float[Array, "N D"], k: int) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        classes, bits = self._scores(h)
        return ops.code_top_k(bits, self.code, k) if classes is None else ops.hybrid_top_k(classes, bits, self.code, k)

    def _losses(self, h: Float[Array, "N D"], labels: Int[Array, " N"], objective: str) -> Float[Array, " N"]:
        classes, bits = self._scores(h)
        if classes is None:
            return ops.code_nll(bits, labels, self.code, loss=objective)
        return ops.hybrid_nll(classes, bits, labels, self.code, loss=objective)

    def _scores(self, h: Float[Array, "N D"]) -> tuple[Array | None, Array]:
        """(logits of the frequent words and of "another word", or None; logits of the bits)."""
        outputs = self.project(h.astype(jnp.float32))
        return outputs[:, : self.classes] if self.classes else None, outputs[:, self.classes :]


class BinaryHybridOutput(BinaryOutput):
    """A softmax over the frequent words, and bits for the other words."""

    frequent: int = 1024


class BinaryECCOutput(BinaryOutput):
    """Predicts the bits of a convolutional code, and corrects up to 4 wrong bits by Viterbi's algorithm.

    The default objective is that of the single bits, because the normaliser of this code takes 128 operations a bit.
    """

    objective: str = "logistic"

    error_correcting: ClassVar[bool] = True
