"""Mixers: ways to mix information along the sequence. `model.mixer` names entries of MIXERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.nn.mixers import patterns
from hpnlp.nn.mixers.exact import exact
from hpnlp.ops.attention import Full

MIXERS: dict[str, Callable[..., Any]] = {
    "full": exact(Full),
    "blockwise": exact(patterns.blockwise),
    "window": exact(patterns.window),
    "dilated": exact(patterns.dilated),
    "strided": exact(patterns.strided),
    "fixed": exact(patterns.fixed),
    "random": exact(patterns.random),
    "global": exact(patterns.global_),
    "longformer": exact(patterns.longformer),
    "bigbird": exact(patterns.bigbird),
}
