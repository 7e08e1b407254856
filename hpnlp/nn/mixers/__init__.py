"""Mixers: ways to mix information along the sequence. `model.mixer` names entries of MIXERS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpnlp.nn.mixers.full import FullMixer

MIXERS: dict[str, Callable[..., Any]] = {"full": FullMixer}
