"""Attention within buckets of tokens: hashed by random rotations (Reformer), or clustered by k-means (Routing Transformer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.layers import buffer
from hpnlp.nn.mixers.checks import check_decoding, check_mask, dropout_option
from hpnlp.ops.attention import Causal, Full
from hpnlp.ops.attention.bucketed import (
    BucketCache,
    BucketSettings,
    bucketed_attention,
    extend_bucket_cache,
    lsh_buckets,
    nearest_centroids,
    random_rotations,
    start_bucket_cache,
    unit_vectors,
)
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


class BucketMixer(Mixer):
    """Softmax attention to nearby tokens of the same bucket, with one projection for queries and keys.

    A key is the query of its token, scaled to length 1. A token attends to itself only if it sees no other token. Subclasses
    define the buckets.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits()

    dropout: float = dropout_option()

    @property
    def reach(self) -> int:
        """Number of tokens of its bucket that a token sees in each direction."""
        raise NotImplementedError

    def assign(self, inputs: MixerInputs) -> tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]:
        """Queries, and the buckets of tokens; each a function of the token alone.

        Args:
          inputs: Inputs of the mixer.

        Returns:
          (q [B, T, N, H] with the factor of the scores, buckets int32 [B, T, N, R], statistics).
        """
        raise NotImplementedError

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.v is not None
        causal = self.within(mask) == Causal()
        q, buckets, statistics = self.assign(inputs)
        k, rate = unit_vectors(q), 0.0 if inputs.deterministic else self.dropout
        o = bucketed_attention(
            q,
            k,
            inputs.v,
            buckets,
            self._settings(causal),
            segment_ids=inputs.segment_ids,
            dropout_rate=rate,
            rng=inputs.rng if rate else None,
            streams=inputs.streams if rate else None,
        )
        cache = None
        if inputs.capacity is not None:
            cache = start_bucket_cache(k, inputs.v, buckets, inputs.lengths(), inputs.capacity)
        return MixerOutput(o, statistics=statistics, cache=cache)

    def extend(self, inputs: MixerInputs, mask: AnyMask, cache: BucketCache) -> tuple[jax.Array, BucketCache]:
        """Mixes new tokens with the preceding ones.

        Args:
          inputs: q and v of the new tokens. A sequence is one segment.
          mask: `Causal()`.
          cache: Cache of the preceding tokens.

        Returns:
          `(o [B, T, N, H], the extended cache)`.

        Raises:
          InputError: Dropout is on, or the mask is not `Causal()`.
        """
        assert inputs.v is not None
        check_decoding(inputs, self.dropout)
        check_mask("attention within buckets with a cache", mask, Causal())
        q, buckets, _ = self.assign(inputs)
        k = unit_vectors(q)
        return extend_bucket_cache(q, k, inputs.v, buckets, cache, self._settings(causal=True))

    def _settings(self, causal: bool) -> BucketSettings:
        return BucketSettings(self.reach, causal, hides_self=True, scale=1.0)

    def within(self, mask: AnyMask) -> Any:
        """The mask of the pairs that may influence each other. The buckets select among them.

        Args:
          mask: `Causal()` or `Full()`.

        Returns:
          The mask.

        Raises:
          InputError: Another mask, which does not apply to tokens in the order of their buckets.
        """
        return check_mask("attention within buckets", mask, Causal(), Full())


class ReformerMixer(BucketMixer):
    """Attention to tokens in the same bucket of a random hash, in several rounds (`ops.attention.bucketed`).

    The rotations are drawn for each layer and training step, and are the same for all heads; evaluation and decoding always
    draw the same ones. Unlike in the paper, a token sees the last `window` tokens of its bucket and not a chunk of the sorted
    sequence, so that later tokens have no influence.

    On 2048 tokens around 64 random centres, with a cosine of about 0.8 within a cluster, and no causal mask, the pairs that a
    token sees have this share of the weights of exact attention, and of all pairs (`experiments/bench/bucketed.py`). The last
    column has about the number of pairs of the paper's chunks of 64 tokens, each with the one before it:

    | rounds | 32 buckets, window 64 | 32 buckets, window 128 | 16 buckets, window 128 |
    |---|---|---|---|
    | 1 | 0.36 (3.5 %) | 0.41 (4.1 %) | 0.45 (6.8 %) |
    | 2 | 0.61 (6.6 %) | 0.67 (7.7 %) | 0.69 (12.7 %) |
    | 4 | 0.81 (12.4 %) | 0.87 (14.5 %) | 0.90 (22.7 %) |
    | 8 | 0.96 (21.8 %) | 0.98 (25.0 %) | 0.98 (39.1 %) |
    | 16 | 0.99 (36.8 %) | 1.00 (41.5 %) | 1.00 (60.8 %) |

    Cost: as `bucketed_attention`. Decoding reads all earlier tokens.

    References: Kitaev et al. 2020, "Reformer: the efficient transformer", arXiv 2001.04451, sec. 2.
    """

    traits: ClassVar[MixerTraits] = MixerTraits(draws=True)

    buckets: int = option(
        32,
        "Number of buckets of a round, 1 or even; about T / window.",
        least=1,
        rule=("1 or even", lambda buckets: buckets == 1 or buckets % 2 == 0),
    )
    rounds: int = option(4, "Number of hash rounds.", least=1)
    window: int = option(64, "Number of tokens of its bucket that a token sees in each direction.", least=1)

    @property
    def reach(self) -> int:
        return self.window

    def assign(self, inputs: MixerInputs) -> tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]:
        assert inputs.q is not None and inputs.draws is not None
        rotations = random_rotations(inputs.draws, self.rounds, inputs.q.shape[-1], self.buckets)
        return inputs.q, lsh_buckets(inputs.q, rotations), {}


class RoutingMixer(BucketMixer):
    """Attention to tokens in the same cluster of spherical k-means (`ops.attention.bucketed`).

    Queries are normalised as by a layer norm without parameters. The centroids of each head are buffers: a training step moves
    each towards the mean direction of its tokens in the batch, by an exponential average, and scales it to length 1.

    In the paper, a cluster holds the w tokens with the largest similarity of the whole sequence, later ones included, and
    a token in no cluster gets 0. Here a token belongs to its nearest centroid and sees the last `window` tokens of that
    cluster, so that later tokens have no influence. All heads are routed; in the paper half of them attend locally, for which
    layers can take turns: `model.mixer="window(256,0),routing"`.

    Cost: as `bucketed_attention` with one round, and T products with the centroids. Decoding reads all earlier tokens.

    References: Roy et al. 2020, "Efficient content-based sparse attention with routing transformers", arXiv 2003.05997,
      sec. 4.1 and algorithm 1.
    """

    statistic_axes: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "sums": ("heads", None, None),
        "counts": ("heads", None),
    }

    clusters: int = option(32, "Number of clusters of a head; about T / window.", least=1)
    window: int = option(256, "Number of tokens of its cluster that a token sees in each direction.", least=1)
    decay: float = option(0.999, "Weight of the old centroid in the exponential average.", least=0, most=1)

    @property
    def reach(self) -> int:
        return self.window

    @nn.compact
    def assign(self, inputs: MixerInputs) -> tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]:
        assert inputs.q is not None
        heads, dim = inputs.q.shape[2:]
        shape = heads, self.clusters, dim
        centroids = buffer(self, "centroids", _random_directions, shape, ("heads", None, None))
        q = inputs.q.astype(jnp.float32)
        directions = unit_vectors(q - jnp.mean(q, axis=-1, keepdims=True))
        clusters = nearest_centroids(directions, centroids)
        members, counted = jax.nn.one_hot(clusters, self.clusters, dtype=jnp.float32), directions
        if inputs.segment_ids is not None:
            is_text = (inputs.segment_ids > 0)[:, :, None, None]
            # Directions as well: padding may be NaN, and 0 * NaN is NaN.
            members, counted = (jnp.where(is_text, x, jnp.float32(0)) for x in (members, directions))
        sums = jnp.einsum("btnc,btnh->nch", members, jax.lax.stop_gradient(counted))
        statistics = {"sums": sums, "counts": jnp.sum(members, axis=(0, 1))}
        return (directions * dim**0.5).astype(inputs.q.dtype), clusters[..., None], statistics

    def advance(
        self, buffers: Mapping[str, jax.Array], statistics: Mapping[str, jax.Array], step: jax.Array, rng: jax.Array
    ) -> Any:
        """The centroids of the next step.

        Args:
          buffers: "centroids" [N, C, H].
          statistics: "sums" [N, C, H] of the directions of the tokens of each cluster, and "counts" [N, C] of these tokens.
          step: Ignored.
          rng: Ignored.

        Returns:
          The new buffers. The centroid of a cluster without tokens does not change.
        """
        centroids, counts = buffers["centroids"], statistics["counts"][..., None]
        mean = statistics["sums"] / jnp.maximum(counts, 1.0)
        moved = unit_vectors(self.decay * centroids + (1 - self.decay) * mean, eps=1e-12)
        return {"centroids": jnp.where(counts > 0, moved, centroids)}


def _random_directions(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Vectors of length 1, along the last axis."""
    return unit_vectors(jax.random.normal(key, shape, dtype))
