"""Maximum inner product search: for queries q [Q, D] and a table w [V, D], the rows of w with the largest q w^T."""

from hpnlp.ops.search.exact import exact_search, recall
from hpnlp.ops.search.ivf import IvfIndex, build_ivf, ivf_search
from hpnlp.ops.search.lsh import LshIndex, build_lsh, lsh_candidates, lsh_search

__all__ = [
    "IvfIndex", "LshIndex", "build_ivf", "build_lsh", "exact_search", "ivf_search", "lsh_candidates", "lsh_search",
    "recall",
]  # fmt: skip
