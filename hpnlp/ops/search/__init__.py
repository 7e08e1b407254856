"""Maximum inner product search: the rows of a table w [V, D] with the largest q w^T, for queries q [Q, D]."""

from hpnlp.ops.search.exact import exact_search, recall
from hpnlp.ops.search.ivf import IvfIndex, build_ivf, ivf_search
from hpnlp.ops.search.lsh import LshIndex, build_lsh, lsh_candidates, lsh_search
from hpnlp.ops.search.pq import PqCodes, PqIndex, build_pq, pq_search

__all__ = [
    "IvfIndex", "LshIndex", "PqCodes", "PqIndex", "build_ivf", "build_lsh", "build_pq", "exact_search", "ivf_search",
    "lsh_candidates", "lsh_search", "pq_search", "recall",
]  # fmt: skip
