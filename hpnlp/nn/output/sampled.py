"""Output layers that train on negative samples. The loss that they report, without an rng, is that of the exact softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from hpnlp.nn.layers import param
from hpnlp.nn.output.base import required_counts
from hpnlp.nn.output.full import SoftmaxOutput
from hpnlp.nn.output.ranking import RankingOutput
from hpnlp.ops.softmax import sampled_losses as ops
from hpnlp.ops.softmax import zero_ignored_tokens
from hpnlp.ops.softmax.proposals import LogUniform, Sampler, Samples, Uniform, sample, unigram
from hpnlp.spec import lookup
from hpnlp.types import InputError, LossOut, WordStats, option

# name -> (vocab, stats, power) -> proposal distribution
SAMPLERS: dict[str, Callable[[int, WordStats | None, float], Sampler]] = {
    "uniform": lambda vocab, stats, power: Uniform(vocab),
    "log_uniform": lambda vocab, stats, power: LogUniform(vocab),
    "unigram": lambda vocab, stats, power: unigram(
        required_counts(stats, vocab, "sampler='unigram'", "sampler=log_uniform"), power
    ),
}


class _Sampling(SoftmaxOutput):
    """Trains on the rows of the labels and of samples from a proposal distribution.

    Cost:
      A step takes 6 N S D operations, and the optimizer's work on the table. With per_token, N S D numbers are read; with
      per_token and unique, drawing takes V numbers for each token.
    """

    samples: int = option(1024, "Number of samples S.")
    sampler: str = option(
        "log_uniform",
        "uniform; log_uniform for ids sorted by falling frequency; or unigram for the counts of the words.",
    )
    power: float = option(0.75, "Power of the counts, for unigram.")
    per_token: bool = option(False, "Draws samples for each token, in place of samples that the batch shares.")
    unique: bool = option(False, "Draws without repetition.")

    def loss(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        if rng is None:
            return super().loss(table, h, labels, weights)
        h, labels = zero_ignored_tokens(h, labels, weights)
        samples = self._samples(labels, rng)
        losses, aux = self._losses(h, table[labels], table[samples.ids], samples, labels, weights)
        return self.weighted(losses, labels, weights, aux)

    def rows(self, labels: Int[Array, " N"], rng: jax.Array) -> Int[Array, " R"]:
        return jnp.concatenate([labels, self._samples(labels, rng).ids.reshape(-1)])

    def _samples(self, labels: Int[Array, " N"], rng: jax.Array) -> Samples:
        sampler = lookup(SAMPLERS, self.sampler, "sampler")(self.vocab, self.stats, self.power)
        return sample(sampler, rng, self.samples, labels, per_token=self.per_token, unique=self.unique)

    def merges(self, rng: jax.Array | None) -> bool:
        return rng is None

    def _losses(
        self, h: Array, target: Float[Array, "N D"], noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Float[Array, " N"], dict[str, Array]]:
        """(losses [N], reports of the tokens by name), from the vectors of the labels and of the samples."""
        raise NotImplementedError

    def _check_repetition(self) -> None:
        if self.unique:
            raise InputError(
                "unique=True: this loss needs samples that may repeat; set unique=False, or choose `sampled`"
            )


class SampledOutput(_Sampling):
    """Sampled softmax: see `hpnlp.ops.softmax.sampled_losses.sampled_softmax`."""

    unique: bool = True
    correct_label: bool = option(False, "Corrects the score of the label too, as TensorFlow does.")

    def _losses(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        scores = ops.scores(h, target, noise)
        return ops.sampled_softmax(*scores, samples, labels, correct_label=self.correct_label), {}


class ImportanceOutput(_Sampling):
    """Importance sampling: see `hpnlp.ops.softmax.sampled_losses.importance_sampling`. Reports the effective sample size."""

    effective: float = option(0.0, "Effective sample size at which no more samples are used; 0 to use all.")
    block: int = option(128, "Samples that are added at a time until `effective` is reached.")

    def _losses(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._check_repetition()
        if not self.effective:
            losses, size = ops.importance_sampling(*ops.scores(h, target, noise), samples)
            return losses, {"effective_samples": size}
        if self.per_token:
            raise InputError(
                f"per_token=True, effective={self.effective}: an adaptive number of samples is shared by the batch; set "
                "per_token=False, or effective=0"
            )
        losses, size, used = ops.adaptive_importance_sampling(
            h, target, noise, samples, effective=self.effective, block=self.block, weights=weights
        )
        return losses, {"effective_samples": size, "samples": jnp.broadcast_to(used.astype(jnp.float32), size.shape)}


class NCEOutput(_Sampling):
    """Noise-contrastive estimation: see `hpnlp.ops.softmax.sampled_losses.noise_contrastive`.

    Log-probabilities are scores with a bias for each word. The bias is initialised to the log of the word's frequency if counts
    are known, otherwise to -log V, so that an untrained model has a partition function Z near 1. Reports the mean and the mean
    square of an estimate of log Z.
    """

    partition: str = option(
        "fixed",
        "fixed for Z = 1, learned for a parameter that is subtracted from all scores.",
        among=("fixed", "learned"),
    )

    def setup(self) -> None:
        self.word_bias = param(self, "bias", self._init_bias, (self.vocab,), (self.axis,))
        self.log_z = self.param("log_z", nn.initializers.zeros, (), jnp.float32) if self.partition == "learned" else 0.0

    def _init_bias(self, rng: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, " V"]:
        counts = np.ones(shape) if self.stats is None else np.maximum(self.stats.counts, 1)
        return jnp.asarray(np.log(counts / counts.sum()), dtype)

    @property
    def bias(self) -> Float[Array, " V"]:
        return self.word_bias

    def _losses(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._check_repetition()
        target, noise = ops.scores(h, target, noise)
        target = target + self.bias[labels] - self.log_z
        sample_bias = self.bias[samples.ids]
        noise = noise + (sample_bias if sample_bias.ndim == 2 else sample_bias[None]) - self.log_z
        # log Z from the same scores by importance sampling.
        estimate = jax.lax.stop_gradient(ops.importance_sampling(jnp.zeros_like(target), noise, samples)[0])
        return ops.noise_contrastive(target, noise, samples), {"log_z": estimate, "log_z_square": estimate**2}


class NegativeSamplingOutput(RankingOutput, _Sampling):
    """Negative sampling, whose scores are no probabilities: see `hpnlp.ops.softmax.sampled_losses.negative_sampling`."""

    samples: int = 64
    negatives: float = option(
        0.0, "Number of noise words that the samples of a token count as; 0 for as many as there are.", least=0
    )

    no_probabilities: ClassVar[str] = (
        "negative sampling gives no probabilities: its scores tend to log(p / (S q)), whose sum is unknown; compare words by "
        "`top_k`, or train with `nce`"
    )

    def loss(
        self,
        table: PyTree,
        h: Float[Array, "N D"],
        labels: Int[Array, " N"],
        weights: Float[Array, " N"],
        rng: jax.Array | None = None,
    ) -> LossOut:
        # Without an rng: the training loss, with the same samples every time.
        return super().loss(table, h, labels, weights, jax.random.key(0) if rng is None else rng)

    def merges(self, rng: jax.Array | None) -> bool:
        return False

    def _losses(
        self, h: Array, target: Array, noise: Array, samples: Samples, labels: Array, weights: Array
    ) -> tuple[Array, dict[str, Array]]:
        self._check_repetition()
        return ops.negative_sampling(*ops.scores(h, target, noise), negatives=float(self.negatives) or None), {}
