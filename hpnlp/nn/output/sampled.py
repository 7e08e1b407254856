"""Output layers that train on some words of the vocabulary. What they report, without an rng, is the exact softmax's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpnlp.nn.layers import param
from hpnlp.nn.output.base import known_counts
from hpnlp.nn.output.full import FullOutput
from hpnlp.nn.output.ranking import RankingOutput
from hpnlp.ops.softmax import sampled_losses as ops
from hpnlp.ops.softmax import without_silent
from hpnlp.ops.softmax.proposals import LogUniform, Sampler, Samples, Uniform, sample, unigram
from hpnlp.spec import lookup
from hpnlp.types import InputError, LossOut, WordStats

# name -> (vocab, stats, power) -> sampler
SAMPLERS: dict[str, Callable[[int, WordStats | None, float], Sampler]] = {
    "uniform": lambda vocab, stats, power: Uniform(vocab),
    "log_uniform": lambda vocab, stats, power: LogUniform(vocab),
    "unigram": lambda vocab, stats, power: unigram(
        known_counts(stats, vocab, "sampler='unigram'", "sampler=log_uniform"), power
    ),
}


class _Sampling(FullOutput):
    """Trains on the labels' rows of the table and on samples'.

    samples: how many, S. sampler: an entry of SAMPLERS; "log_uniform" wants ids by falling frequency, "unigram" the counts,
    which it takes to the `power`. per_token: each token draws its own, instead of a batch sharing them, and N S D numbers are
    read. unique: without repetition; with per_token it takes V numbers for each token.
    Cost of a step: 6 N S D operations, and what the optimizer does to the table.
    """

    samples: int = 1024
    sampler: str = "log_uniform"
    power: float = 0.75
    per_token: bool = False
    unique: bool = False

    def loss(
        self,
        table: Any,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of the sampled loss, by the table or `TableRows` of it; without an rng, of the exact one."""
        if rng is None:
            return super().loss(table, h, labels, weights)
        h, labels = without_silent(h, labels, weights)
        samples = self._samples(labels, rng)
        each, aux = self.each(h, table[labels], table[samples.ids], samples, labels, weights)
        return self.weighted(each, labels, weights, aux)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"]:
        return jnp.concatenate([labels, self._samples(labels, rng).ids.reshape(-1)])

    def _samples(self, labels: Int[Array, " N"], rng: jax.Array) -> Samples:
        sampler = lookup(SAMPLERS, self.sampler, "sampler")(self.vocab, self.stats, self.power)
        return sample(sampler, rng, self.samples, labels, per_token=self.per_token, unique=self.unique)

    def merges(self, rng: jax.Array | None) -> bool:
        return rng is None

    def each(
        self, h: Array, target: Float[Array, "N D"], noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Float[Array, " N"], dict[str, Array]]:
        """(loss, reports) of each token, from the vectors of its label and of the samples."""
        raise NotImplementedError

    def _with_repetition(self) -> None:
        if self.unique:
            raise InputError(
                "unique=True: this loss is of samples that may repeat; `sampled` has one of those that may not"
            )


class SampledOutput(_Sampling):
    """Sampled softmax: see `ops.softmax.sampled.sampled_softmax`. `correct_label` is TensorFlow's form of it."""

    unique: bool = True
    correct_label: bool = False

    def each(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        scores = ops.scores(h, target, noise)
        return ops.sampled_softmax(*scores, samples, labels, correct_label=self.correct_label), {}


class ImportanceOutput(_Sampling):
    """Importance sampling: see `ops.softmax.sampled.importance_sampling`. Reports the effective sample size.

    effective: where it is not 0, samples are taken `block` by `block` until this many are in effect, `samples` at most.
    """

    effective: float = 0.0
    block: int = 128

    def each(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._with_repetition()
        if not self.effective:
            each, size = ops.importance_sampling(*ops.scores(h, target, noise), samples)
            return each, {"effective_samples": size}
        if self.per_token:
            raise InputError(
                "per_token=True with effective: a batch shares the samples whose number adapts; leave one out"
            )
        each, size, used = ops.adaptive_importance_sampling(
            h, target, noise, samples, effective=self.effective, block=self.block, weights=weights
        )
        return each, {"effective_samples": size, "samples": jnp.broadcast_to(used.astype(jnp.float32), size.shape)}


class NCEOutput(_Sampling):
    """Noise-contrastive estimation: see `ops.softmax.sampled.noise_contrastive`. Reports an estimate of log Z: the mean
    and the mean square.

    Log-probabilities are scores with a bias for each word that begins at the log of its share of the text, where counts say it,
    and else at -log V: a model that knows nothing begins with Z near 1. partition: "fixed" leaves Z at 1, "learned" learns
    a number to be subtracted from all scores.
    """

    partition: str = "fixed"

    def setup(self) -> None:
        if self.partition not in ("fixed", "learned"):
            raise InputError(f"partition={self.partition!r}: expected 'fixed' or 'learned'")
        self.word_bias = param(self, "bias", self._first_bias, (self.vocab,), ("vocab",))
        self.log_z = self.param("log_z", nn.initializers.zeros, (), jnp.float32) if self.partition == "learned" else 0.0

    def _first_bias(self, rng: jax.Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, " V"]:
        counts = np.ones(shape) if self.stats is None else np.maximum(self.stats.counts, 1)
        return jnp.asarray(np.log(counts / counts.sum()), dtype)

    @property
    def bias(self) -> Float[Array, " V"]:
        return self.word_bias

    def each(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._with_repetition()
        target, noise = ops.scores(h, target, noise)
        target = target + self.bias[labels] - self.log_z
        own = self.bias[samples.ids]
        noise = noise + (own if own.ndim == 2 else own[None]) - self.log_z
        # What importance sampling makes of the same scores.
        estimate = jax.lax.stop_gradient(ops.importance_sampling(jnp.zeros_like(target), noise, samples)[0])
        return ops.noise_contrastive(target, noise, samples), {"log_z": estimate, "log_z_square": estimate**2}


class NegativeSamplingOutput(RankingOutput, _Sampling):
    """Negative sampling: see `ops.softmax.sampled.negative_sampling`. Its scores rank words; they are no probabilities."""

    samples: int = 64

    why: ClassVar[str] = (
        "negative sampling gives no probabilities: its scores tend to log(p / (S q)), and what they sum to is unknown; compare "
        "words by `top_k`, or train with `nce`, which does"
    )

    def loss(
        self,
        table: Any,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        """The weighted sum of its own loss, with the same samples every time where there is no rng."""
        return super().loss(table, h, labels, weights, jax.random.key(0) if rng is None else rng)

    def merges(self, rng: jax.Array | None) -> bool:
        return False

    def each(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._with_repetition()
        return ops.negative_sampling(*ops.scores(h, target, noise)), {}
