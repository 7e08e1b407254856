"""Largest sizes of models: several times those of any published model, and so small that no computation of a plan overflows."""

from __future__ import annotations

from typing import Any

from hpnlp.types import option

LIMITS = {"layers": 4096, "dim": 2**18, "vocab": 2**27}


def classes_option(zero: str = "for the number of labels in the data") -> Any:
    """The number of classes of a model."""
    return option(
        0,
        f"Number of classes; 0 {zero}.",
        most=LIMITS["vocab"],
        rule=("0 or at least 2", lambda count: count == 0 or count >= 2),
    )


def rate_option(help: str, default: float = 0.0) -> Any:
    """A rate of dropout."""
    return option(default, help, least=0, below=1)
