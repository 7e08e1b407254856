"""Output layers: hidden states to a loss over a vocabulary, and back. `model.output` names an entry of OUTPUTS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.nn.output.full import FullOutput

OUTPUTS: dict[str, Callable[..., Any]] = {"full": FullOutput}
