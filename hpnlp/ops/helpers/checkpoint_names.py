"""Names of results for `jax.checkpoint` policies that several operations give."""

from __future__ import annotations

ROUTING = "routing"  # the choice of experts, which every policy keeps
HIDDEN = "hidden"  # products with the first matrices of an MLP
