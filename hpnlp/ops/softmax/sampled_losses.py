"""Losses over a large vocabulary from the label and a few negative samples: sampled softmax, importance sampling, NCE.

All take the score of each token's label, `target` [N], and the scores of the samples, `noise` [N, S], from `scores`, and the
samples with their expected counts from `hpnlp.ops.softmax.proposals.sample`. All return one float32 loss for each token, in
nats, and cost O(N S) beside the scores. Scores cost 2 N S D operations for samples that the batch shares, and read N S D
numbers where each token has its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hpnlp.ops.helpers.array_op import array_op
from hpnlp.ops.linear import product, widened
from hpnlp.ops.softmax.proposals import Samples
from hpnlp.types import InputError


@array_op("N", h="N")
def scores(
    h: Float[Array, "N D"], labels: Float[Array, "N D"], noise: Float[Array, "S D"] | Float[Array, "N S D"]
) -> tuple[Float[Array, " N"], Float[Array, "N S"]]:
    """Products of the states with the vectors of their labels and of the samples.

    Those of a float16 h are computed in float32: see `widened`.

    Args:
      h: [N, D] hidden states.
      labels: [N, D] vectors of the labels.
      noise: [S, D] vectors of samples that the batch shares, or [N, S, D] vectors of each token's samples.

    Returns:
      (target [N], noise [N, S]), float32.
    """
    h, labels, noise = widened(h, labels, noise)
    target = _label_scores(h, labels)
    if noise.ndim == 2:
        return target, product(h, noise.T)
    per_token = lax.dot_general(
        noise.astype(h.dtype), h, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return target, per_token


@array_op("N", labels="N")
def hits(samples: Samples, labels: Int[Array, " N"]) -> Bool[Array, "N S"]:
    """Accidental hits: samples that are their token's label.

    Args:
      samples: Samples that the batch shares or that each token has.
      labels: [N] words of the tokens.

    Returns:
      [N, S] mask.
    """
    ids = samples.ids if samples.ids.ndim == 2 else samples.ids[None]
    return ids == labels[:, None]


@array_op("N", target="N")
def sampled_softmax(
    target: Float[Array, " N"],
    noise: Float[Array, "N S"],
    samples: Samples,
    labels: Int[Array, " N"],
    *,
    correct_label: bool = False,
) -> Float[Array, " N"]:
    """Softmax cross-entropy among the label and the samples, each sample's score less the log of its expected count.

    Accidental hits do not count. With the label's score uncorrected, and samples drawn with repetition, the sum of the
    exponentials is an unbiased estimate of the partition function, and the loss approaches the exact loss from below. Samples
    without repetition have a smaller error, but their expected counts depend on the number of draws, which depends on the
    words drawn; with most of the vocabulary drawn the sum is 0.1 % to some per cent too large. The bias of the gradient falls
    as 1 / S.

    Args:
      target: [N] scores of the labels.
      noise: [N, S] scores of the samples.
      samples: The samples, with their expected counts.
      labels: [N] words of the tokens.
      correct_label: Corrects the label's score too, as TensorFlow's `sampled_softmax_loss`; that loss is not comparable with
        the exact one.

    Returns:
      [N] losses.

    References:
      Jean et al. 2015, "On using very large target vocabulary for neural machine translation", eq. 11 to 13; Bengio and
      Senecal 2008, "Adaptive importance sampling to accelerate training of a neural probabilistic language model", eq. 9.
    """
    hit = hits(samples, labels)
    noise = jnp.where(hit, -jnp.inf, noise - _as_rows(samples.log_expected))
    if correct_label:
        target = target - samples.labels_expected
    has_others = ~hit.all(axis=1)
    other_lse = jax.nn.logsumexp(jnp.where(has_others[:, None], noise, 0.0), axis=1)
    return jnp.where(has_others, jax.nn.softplus(other_lse - target), 0.0)


@array_op("N", target="N")
def importance_sampling(
    target: Float[Array, " N"], noise: Float[Array, "N S"], samples: Samples
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Cross-entropy whose partition function is estimated from the samples alone.

    The gradient is that of the exact loss with its second term estimated by self-normalised importance sampling, with weights
    exp(score) / q; its bias is O(1 / S).

    Args:
      target: [N] scores of the labels.
      noise: [N, S] scores of the samples.
      samples: The samples, drawn with repetition.

    Returns:
      (losses [N], effective sample sizes [N]); the latter are (sum of weights)^2 / (sum of squared weights), 1 to S.

    References:
      Bengio and Senecal 2003, "Quick training of probabilistic neural nets by importance sampling", sec. 3.
    """
    log_weights = noise - _as_rows(samples.log_expected)
    log_z = jax.nn.logsumexp(log_weights, axis=1)
    size = jnp.exp(2.0 * log_z - jax.nn.logsumexp(2.0 * log_weights, axis=1))
    return log_z - target, lax.stop_gradient(size)


@array_op("N", h="N")
def adaptive_importance_sampling(
    h: Float[Array, "N D"],
    labels: Float[Array, "N D"],
    noise: Float[Array, "S D"],
    samples: Samples,
    *,
    effective: float,
    block: int,
    weights: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, " N"], Float[Array, " N"], Int[Array, ""]]:
    """`importance_sampling` with as many of the shared samples as the batch needs, a block at a time.

    No more blocks are used once the mean of the tokens' effective sample sizes is at least `effective`.

    Args:
      h: [N, D] hidden states.
      labels: [N, D] vectors of the labels.
      noise: [S, D] vectors of the samples.
      samples: S samples of the batch, drawn with repetition; their expected counts are scaled to the number of samples used.
      effective: Effective sample size to reach.
      block: Samples of a block; S is a multiple of it.
      weights: [N]; tokens of weight 0 do not count in the mean. None for no such tokens.

    Returns:
      (losses [N], effective sample sizes [N], number of samples used).

    Raises:
      InputError: S is no multiple of block.

    Cost:
      2 N D operations for each sample used.

    References:
      Bengio and Senecal 2003, sec. 3.3, there for an example instead of a batch.
    """
    count = noise.shape[0]
    if count % block:
        raise InputError(f"{count} samples: expected a multiple of block={block}, such as {-(-count // block) * block}")
    h, labels, noise = widened(h, labels, noise)
    target = _label_scores(h, labels)
    counts = jnp.ones(h.shape[0], jnp.float32) if weights is None else (weights != 0).astype(jnp.float32)
    # Expected counts for one sample; the log of the number used is subtracted at the end.
    log_q = samples.log_expected - np.float32(np.log(count))

    def add_block(sums: tuple[Array, ...], x: tuple[Array, Array]) -> tuple[Array, ...]:
        log_sum, log_square_sum, used = sums
        vectors, log_q = x
        log_weights = product(h, vectors.T) - log_q[None]
        log_sum = jnp.logaddexp(log_sum, jax.nn.logsumexp(log_weights, axis=1))
        log_square_sum = jnp.logaddexp(log_square_sum, jax.nn.logsumexp(2.0 * log_weights, axis=1))
        return log_sum, log_square_sum, used + block

    def step(sums: tuple[Array, ...], x: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        size = jnp.exp(2.0 * sums[0] - sums[1])
        enough = (counts * size).sum() >= effective * counts.sum()
        return lax.cond(enough, lambda sums, _: sums, add_block, sums, x), None

    blocks = noise.reshape(-1, block, noise.shape[1]), log_q.reshape(-1, block)
    first = jax.tree.map(lambda x: x[0], blocks)
    empty = jnp.full(h.shape[0], -jnp.inf, jnp.float32)
    sums = add_block((empty, empty, jnp.int32(0)), first)
    (log_sum, log_square_sum, used), _ = lax.scan(step, sums, jax.tree.map(lambda x: x[1:], blocks))
    size = jnp.exp(2.0 * log_sum - log_square_sum)
    return log_sum - jnp.log(used.astype(jnp.float32)) - target, lax.stop_gradient(size), used


@array_op("N", target="N")
def noise_contrastive(target: Float[Array, " N"], noise: Float[Array, "N S"], samples: Samples) -> Float[Array, " N"]:
    """Noise-contrastive estimation: a logistic regression on score - log(S q) separates the label from the samples.

    At the optimum, scores are log-probabilities that sum to 1 without a normaliser: initialise them near -log V. A sample that
    is the label counts like any other; without it, the optimum would be another.

    Args:
      target: [N] scores of the labels.
      noise: [N, S] scores of the samples.
      samples: The samples, drawn with repetition.

    Returns:
      [N] losses.

    References:
      Mnih and Teh 2012, "A fast and simple algorithm for training neural probabilistic language models", eq. 8 to 10.
    """
    return _logistic(target - samples.labels_expected, noise - _as_rows(samples.log_expected))


@array_op("N", target="N")
def negative_sampling(
    target: Float[Array, " N"], noise: Float[Array, "N S"], negatives: float | None = None
) -> Float[Array, " N"]:
    """-log sigmoid(target) - (negatives / S) times the sum of log sigmoid(-noise).

    The optimum of a score is log(p / (negatives q)), which is no log-probability. It is negative for most pairs: with many
    negatives, all vectors have a large component in common.

    Args:
      target: [N] scores of the labels.
      noise: [N, S] scores of the samples.
      negatives: Number of noise words that the samples count as (Ji et al. 2016, where a batch shares them); S by default.

    Returns:
      [N] losses.

    References:
      Mikolov et al. 2013, "Distributed representations of words and phrases and their compositionality", eq. 4.
    """
    return _logistic(target, noise, 1.0 if negatives is None else negatives / noise.shape[1])


def _label_scores(h: Array, labels: Array) -> Float[Array, " N"]:
    """Score of each token's label, float32, from a vector rounded to the dtype of h."""
    return (h.astype(jnp.float32) * labels.astype(h.dtype).astype(jnp.float32)).sum(axis=1)


def _logistic(target: Array, noise: Array, weight: float = 1.0) -> Array:
    return jax.nn.softplus(-target) + weight * jax.nn.softplus(noise).sum(axis=1)


def _as_rows(log_expected: Array) -> Array:
    """[S] as [1, S], and [N, S] as it is."""
    return log_expected if log_expected.ndim == 2 else log_expected[None]
