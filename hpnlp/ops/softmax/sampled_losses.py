"""Losses over a large vocabulary from a few of its words: the label's, and samples.

All take scores of the label `target [N]` and of the samples `noise [N, S]` (see `scores`), float32, and the logs of how often
each was to be expected among the samples (`samplers.sample`); all return one loss a token, in nats, and cost O(N S) beside the
scores, which cost 2 N S D operations for samples that the batch shares and read N S D numbers where each token has its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from hpnlp.ops.array_op import array_op
from hpnlp.ops.linear import product, widened
from hpnlp.ops.softmax.proposals import Samples
from hpnlp.types import InputError


@array_op("N", h="N")
def scores(
    h: Float[Array, "N D"], labels: Float[Array, "N D"], noise: Float[Array, "S D"] | Float[Array, "N S D"]
) -> tuple[Float[Array, " N"], Float[Array, "N S"]]:
    """(target, noise): products of the states with their labels' vectors, and with the samples', shared or each token's own.

    Those of a float16 h are made in float32: see `widened`.
    """
    h, labels, noise = widened(h, labels, noise)
    target = (h.astype(jnp.float32) * labels.astype(h.dtype).astype(jnp.float32)).sum(axis=1)
    if noise.ndim == 2:
        return target, product(h, noise.T)
    own = lax.dot_general(noise.astype(h.dtype), h, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    return target, own


@array_op("N", labels="N")
def hits(samples: Samples, labels: Int[Array, " N"]) -> Array:
    """Which samples are their token's label, [N, S]."""
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

    Samples that are the label do not count. With the label's own score left as it is, and samples that may repeat, the
    sum is an unbiased estimate of the partition function, and the loss is comparable with the exact one, which it
    approaches from below. Samples without repetition have a smaller error, but their expected counts rest on tries that
    are the draw's own, and with most of the vocabulary drawn the sum is some per mille to per cent too large.
    `correct_label` takes the log of the label's expected count from its score as well, as TensorFlow's
    `sampled_softmax_loss` does, whose loss is not. The bias of the gradient falls as 1 / S. Source: Jean et al. 2015,
    "On using very large target vocabulary", eq. 11 to 13; Bengio and Senecal 2008, "Adaptive importance sampling", eq.
    9.
    """
    hit = hits(samples, labels)
    noise = jnp.where(hit, -jnp.inf, noise - _wide(samples.log_expected))
    if correct_label:
        target = target - samples.labels_expected
    some = ~hit.all(axis=1)  # samples that are all the label leave nothing to sum
    others = jax.nn.logsumexp(jnp.where(some[:, None], noise, 0.0), axis=1)
    return jnp.where(some, jax.nn.softplus(others - target), 0.0)


@array_op("N", target="N")
def importance_sampling(
    target: Float[Array, " N"], noise: Float[Array, "N S"], samples: Samples
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """(loss, effective sample size), both a number a token: the partition function is estimated from the samples alone.

    The loss's gradient is that of the exact one with its second term by self-normalised importance sampling, weights
    exp(score) / q; biased by O(1 / S). The effective sample size is (sum of weights)^2 / (sum of squared weights), 1 to S.
    Samples are drawn with repetition. Source: Bengio and Senecal 2003, "Quick training of probabilistic neural nets", sec. 3.
    """
    logs = noise - _wide(samples.log_expected)
    total = jax.nn.logsumexp(logs, axis=1)
    size = jnp.exp(2.0 * total - jax.nn.logsumexp(2.0 * logs, axis=1))
    return total - target, lax.stop_gradient(size)


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
    """(loss, effective sample size, samples used): as many of the shared samples as the batch needs, a block at a time.

    No further block is taken once the effective sample size is at least `effective` in the mean over the tokens; those
    of weight 0 are none. `samples` are those of `sample` for all S; their log expected counts are made those of the
    samples used. S is a multiple of `block`.
    Cost: 2 N D operations a sample used. Source: Bengio and Senecal 2003, sec. 3.3, for a batch instead of an example.
    """
    count = noise.shape[0]
    if count % block:
        raise InputError(f"{count} samples are no multiple of block={block}: draw {-(-count // block) * block}")
    h, labels, noise = widened(h, labels, noise)
    target = (h.astype(jnp.float32) * labels.astype(h.dtype).astype(jnp.float32)).sum(axis=1)
    counts = jnp.ones(h.shape[0], jnp.float32) if weights is None else (weights != 0).astype(jnp.float32)
    # log(1 / q): the samples' number comes in when it is known.
    log_q = samples.log_expected - np.float32(np.log(count))

    def take(sums: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[Array, ...]:
        total, square, used = sums
        logs = product(h, given[0].T) - given[1][None]
        total = jnp.logaddexp(total, jax.nn.logsumexp(logs, axis=1))
        square = jnp.logaddexp(square, jax.nn.logsumexp(2.0 * logs, axis=1))
        return total, square, used + block

    def step(sums: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        size = jnp.exp(2.0 * sums[0] - sums[1])
        enough = (counts * size).sum() >= effective * counts.sum()
        return lax.cond(enough, lambda sums, _: sums, take, sums, given), None

    parts = noise.reshape(-1, block, noise.shape[1]), log_q.reshape(-1, block)
    first = jax.tree.map(lambda x: x[0], parts)
    start = jnp.full(h.shape[0], -jnp.inf, jnp.float32)
    sums = take((start, start, jnp.int32(0)), first)
    (total, square, used), _ = lax.scan(step, sums, jax.tree.map(lambda x: x[1:], parts))
    size = jnp.exp(2.0 * total - square)
    return total - jnp.log(used.astype(jnp.float32)) - target, lax.stop_gradient(size), used


@array_op("N", target="N")
def noise_contrastive(target: Float[Array, " N"], noise: Float[Array, "N S"], samples: Samples) -> Float[Array, " N"]:
    """Noise-contrastive estimation: the label is told from the samples by a logistic regression on score - log(S q).

    Scores are to become log-probabilities that sum to one by themselves: begin with them near -log V. Samples are drawn with
    repetition, and one that is the label counts as any other: without it, the optimum is another.
    Source: Mnih and Teh 2012, "A fast and simple algorithm for training neural probabilistic language models", eq. 8 to 10.
    """
    return _logistic(target - samples.labels_expected, noise - _wide(samples.log_expected))


@array_op("N", target="N")
def negative_sampling(target: Float[Array, " N"], noise: Float[Array, "N S"]) -> Float[Array, " N"]:
    """-log sigmoid(target) - sum of log sigmoid(-noise): the optimum of a score is log(p / (S q)), no log-probability.

    Source: Mikolov et al. 2013, "Distributed representations of words and phrases", eq. 4.
    """
    return _logistic(target, noise)


def _logistic(target: Array, noise: Array) -> Array:
    return jax.nn.softplus(-target) + jax.nn.softplus(noise).sum(axis=1)


def _wide(log_expected: Array) -> Array:
    return log_expected if log_expected.ndim == 2 else log_expected[None]
