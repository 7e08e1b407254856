"""Ranges of the sizes of models."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpnlp.nn.block import BlockConfig
from hpnlp.spec import shortened
from hpnlp.types import InputError

# The smallest and largest sizes. The limits are several times those of any published model, and small enough that no
# computation of a plan overflows.
MINIMA = dict.fromkeys(
    ("kv_heads", "head_dim", "mlp_dim", "vocab", "max_len", "position_offset", "unroll", "memory_dim"), 0
)
LIMITS = {
    "layers": 4096,
    "dim": 2**18,
    "heads": 2**14,
    "kv_heads": 2**14,
    "head_dim": 2**16,
    "mlp_dim": 2**20,
    "vocab": 2**27,
    "max_len": 2**28,
    "position_offset": 2**27,
    "unroll": 4096,
    "memory_dim": 2**18,
}


def check_ranges(block: BlockConfig, prefix: str, minima: Mapping[str, int] | None = None) -> None:
    """Checks that the numbers of a config are in range.

    Args:
      block: The config of a Block or a Backbone.
      prefix: Text before a field's name in messages, such as "model.".
      minima: Smallest sizes of other fields.

    Raises:
      InputError: A number is out of range.
    """
    for name, minimum in {**(minima or {}), **MINIMA}.items():
        if getattr(block, name, minimum) < minimum:
            raise InputError(f"{prefix}{name}={getattr(block, name)}: expected at least {minimum}")
    for name, limit in LIMITS.items():
        if getattr(block, name, limit) > limit:
            raise InputError(f"{prefix}{name}={shortened(getattr(block, name), 40)}: expected at most {limit}")
    for name in ("norm_eps", "rope_theta"):
        if not 0 < getattr(block, name) < math.inf:
            raise InputError(f"{prefix}{name}={getattr(block, name)}: expected a finite number over 0")
