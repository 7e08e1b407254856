"""The file of compressed weights in a run directory."""

from __future__ import annotations

import os
from pathlib import Path

# Name of the file in a run directory, which then holds no checkpoints.
WEIGHTS_FILE = "weights.hpnlp"


def has_weights(workdir: str | os.PathLike[str]) -> bool:
    """Whether a run directory holds compressed weights.

    Args:
      workdir: The directory.

    Returns:
      True if it has the file WEIGHTS_FILE.
    """
    return (Path(workdir) / WEIGHTS_FILE).exists()
