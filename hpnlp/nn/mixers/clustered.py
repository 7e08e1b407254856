"""Attention from clusters of queries as mixers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_mask, dropout_option
from hpnlp.ops.attention import Full, attend
from hpnlp.ops.attention.clustered import (
    Clusters,
    clustered_attention,
    hamming_kmeans,
    improved_clustered_attention,
    sign_bits,
)
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import MixerInputs, MixerOutput, MixerTraits, Projection, option


def _bits_option() -> Any:
    return option(63, "Number of sign bits by which queries are clustered.", least=1)


def _iterations_option() -> Any:
    return option(10, "Number of iterations of K-means.", least=1)


class QueryClusters(Mixer):
    """Bidirectional attention of clusters of queries.

    Queries become random sign bits, which K-means clusters by Hamming distance, for each head. The directions are drawn at each
    training step and are the same for all heads.

    Segments share the clusters of a sequence in proportion to their tokens, padding included, and each has at least one. A
    sequence of at most `clusters` tokens, and one with more segments than clusters, gets exact softmax attention.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(
        causal=False, prefix_consistent=False, any_padding=False, decodes=False, draws=True
    )

    clusters: int = option(100, "Number of clusters of a sequence, C.", least=1)
    dropout: float = dropout_option(
        "Ignored: queries of a cluster share their attention probabilities.", has_effect=False
    )

    def bits_and_iterations(self) -> tuple[int, int]:
        """Number of sign bits, and of iterations of K-means."""
        raise NotImplementedError

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, clusters: Clusters, segment_ids: jax.Array | None
    ) -> jax.Array:
        """Attention of clustered queries, `[B, T, N, H]`."""
        raise NotImplementedError

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None and inputs.draws is not None
        self.within(mask)
        q, k, v, segment_ids = inputs.q, inputs.k, inputs.v, inputs.segment_ids

        def exact() -> jax.Array:
            o: Any = attend(q, k, v, Full(), segment_ids=segment_ids, kv_segment_ids=segment_ids)
            return o

        if q.shape[1] <= self.clusters:
            return MixerOutput(exact())
        bits, iterations = self.bits_and_iterations()
        directions = jax.random.normal(inputs.draws, (q.shape[3], bits), jnp.float32)
        clusters = hamming_kmeans(sign_bits(q, directions), self.clusters, iterations, segment_ids)
        o = self.attend(q, k, v, clusters, segment_ids)
        if clusters.fits is not None:
            fits = clusters.fits[:, None, None, None]
            o = lax.cond(jnp.all(fits), lambda: o, lambda: jnp.where(fits, o, exact()))
        return MixerOutput(o)

    def within(self, mask: AnyMask) -> Any:
        """The pairs that influence each other.

        Args:
          mask: `Full()`.

        Returns:
          `Full()`.

        Raises:
          InputError: Another mask: the queries of a cluster attend to the same keys.
        """
        reason = "the queries of a cluster attend to the same keys"
        return check_mask("clustered attention", mask, Full(), reason=reason)


class ClusteredMixer(QueryClusters):
    """Attention of clusters of queries (`QueryClusters`): all queries of a cluster get the attention of their mean.

    Cost: O(B N T C (H + bits iterations)) time, of which the iterations are in the forward pass only; B N T C numbers.

    References: Vyas, Katharopoulos and Fleuret 2020, "Fast transformers with clustered attention", arXiv 2007.04825, sec. 3.
    """

    bits: int = _bits_option()
    iterations: int = _iterations_option()

    def bits_and_iterations(self) -> tuple[int, int]:
        return self.bits, self.iterations

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, clusters: Clusters, segment_ids: jax.Array | None
    ) -> jax.Array:
        return clustered_attention(q, k, v, clusters, segment_ids)


class ImprovedClusteredMixer(QueryClusters):
    """Clustered attention whose queries divide the weight of the `top` best keys of their centroid by their own scores.

    Cost: that of ClusteredMixer, and O(B T N H top) time, B N C (T + top H) numbers.

    References: Vyas et al. 2020, sec. 3.3.
    """

    top: int = option(32, "Number of keys of a cluster with exact scores.", least=1)
    bits: int = _bits_option()
    iterations: int = _iterations_option()

    def bits_and_iterations(self) -> tuple[int, int]:
        return self.bits, self.iterations

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, clusters: Clusters, segment_ids: jax.Array | None
    ) -> jax.Array:
        return improved_clustered_attention(q, k, v, clusters, self.top, segment_ids)
