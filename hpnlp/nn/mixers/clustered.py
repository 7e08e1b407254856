"""Attention from clusters of queries as mixers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from hpnlp.model_interfaces.branch import Mixer
from hpnlp.nn.mixers.checks import check_mask
from hpnlp.ops.attention import Full, attend
from hpnlp.ops.attention.clustered import (
    Clusters,
    clustered_attention,
    hamming_kmeans,
    improved_clustered_attention,
    sign_bits,
)
from hpnlp.ops.attention.masks.per_head import AnyMask
from hpnlp.types import InputError, MixerInputs, MixerOutput, MixerTraits, Projection


class ClusteredMixer(Mixer):
    """Bidirectional attention of clusters of queries: all queries of a cluster get the attention of their mean.

    Queries become random sign bits, which K-means clusters by Hamming distance, for each head. The directions are drawn at each
    training step and are the same for all heads.

    Segments share the clusters of a sequence in proportion to their tokens, padding included, and each has at least one. A
    sequence of at most `clusters` tokens, and one with more segments than clusters, gets exact softmax attention.

    Attributes:
      clusters: Number of clusters of a sequence, C.
      bits: Number of sign bits.
      iterations: Number of iterations of K-means.

    Cost: O(B N T C (H + bits iterations)) time, of which the iterations are in the forward pass only; B N T C numbers.

    References: Vyas, Katharopoulos and Fleuret 2020, "Fast transformers with clustered attention", arXiv 2007.04825, sec. 3.
    """

    needs: ClassVar[Mapping[str, Projection]] = {
        "q": Projection("heads", norm=True, rope=True),
        "k": Projection("kv_heads", norm=True, rope=True),
        "v": Projection("kv_heads"),
    }
    traits: ClassVar[MixerTraits] = MixerTraits(
        causal=False, prefix_consistent=False, any_padding=False, decodes=False, draws=True
    )

    clusters: int = 100
    bits: int = 63
    iterations: int = 10

    def __call__(self, inputs: MixerInputs, mask: AnyMask) -> MixerOutput:
        assert inputs.q is not None and inputs.k is not None and inputs.v is not None and inputs.draws is not None
        self.within(mask)
        q, k, v, segment_ids = inputs.q, inputs.k, inputs.v, inputs.segment_ids

        def exact() -> jax.Array:
            o: Any = attend(q, k, v, Full(), segment_ids=segment_ids, kv_segment_ids=segment_ids)
            return o

        if q.shape[1] <= self.clusters:
            return MixerOutput(exact())
        directions = jax.random.normal(inputs.draws, (q.shape[3], self.bits), jnp.float32)
        clusters = hamming_kmeans(sign_bits(q, directions), self.clusters, self.iterations, segment_ids)
        o = self._attend(q, k, v, clusters, segment_ids)
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

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, clusters: Clusters, segment_ids: jax.Array | None
    ) -> jax.Array:
        return clustered_attention(q, k, v, clusters, segment_ids)


class ImprovedClusteredMixer(ClusteredMixer):
    """Clustered attention whose queries divide the weight of the `top` best keys of their centroid by their own scores.

    Attributes:
      clusters: As for ClusteredMixer.
      bits: As for ClusteredMixer.
      iterations: As for ClusteredMixer.
      top: Number of keys of a cluster with exact scores.

    Cost: that of ClusteredMixer, and O(B T N H top) time, B N C (T + top H) numbers.

    References: Vyas et al. 2020, sec. 3.3.
    """

    top: int = 32

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, clusters: Clusters, segment_ids: jax.Array | None
    ) -> jax.Array:
        return improved_clustered_attention(q, k, v, clusters, self.top, segment_ids)


def _check(text: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"model.mixer={text}: expected {name} of at least 1")


def clustered(
    clusters: int = 100, bits: int = 63, iterations: int = 10, *, dropout: float = 0.0, name: str | None = None
) -> ClusteredMixer:
    """Entry of MIXERS: attention of the mean query of each cluster.

    Args:
      clusters: Number of clusters of a sequence.
      bits: Number of sign bits by which queries are clustered.
      iterations: Number of iterations of K-means.
      dropout: Ignored: queries of a cluster share their attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: A number of less than 1.
    """
    _check(f"clustered({clusters},{bits},{iterations})", clusters=clusters, bits=bits, iterations=iterations)
    return ClusteredMixer(clusters, bits, iterations, name=name)


def clustered_improved(
    clusters: int = 100,
    top: int = 32,
    bits: int = 63,
    iterations: int = 10,
    *,
    dropout: float = 0.0,
    name: str | None = None,
) -> ImprovedClusteredMixer:
    """Entry of MIXERS: clustered attention with exact weights of the best keys of each cluster.

    Args:
      clusters: Number of clusters of a sequence.
      top: Number of keys of a cluster with exact scores.
      bits: Number of sign bits by which queries are clustered.
      iterations: Number of iterations of K-means.
      dropout: Ignored: queries of a cluster share their attention probabilities.
      name: Name of the module.

    Returns:
      The mixer.

    Raises:
      InputError: A number of less than 1.
    """
    text = f"clustered_improved({clusters},{top},{bits},{iterations})"
    _check(text, clusters=clusters, top=top, bits=bits, iterations=iterations)
    return ImprovedClusteredMixer(clusters, bits, iterations, top, name=name)
