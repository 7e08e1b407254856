"""Attention from clusters of queries."""

from hpnlp.ops.attention.clustered.attention import clustered_attention, improved_clustered_attention
from hpnlp.ops.attention.clustered.hamming_kmeans import Clusters, hamming_kmeans, sign_bits

__all__ = ["Clusters", "clustered_attention", "hamming_kmeans", "improved_clustered_attention", "sign_bits"]
