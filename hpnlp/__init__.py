"""hpnlp: techniques of high-performance NLP in JAX, side by side, correct, composable and measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpnlp.version import __version__ as __version__

if TYPE_CHECKING:
    import hpnlp.jobs.predictor


def load(
    run: str | os.PathLike[str], step: int | None = None, dtype: str | None = None
) -> hpnlp.jobs.predictor.Predictor:
    """Loads a trained model, to predict, encode or generate texts.

    Args:
      run: Directory of a run, or of a compressed or converted model.
      step: Step of the checkpoint; None for the best, or the newest if none was evaluated.
      dtype: Dtype of activations and products, "float32", "bfloat16" or "float16"; None for that of the training. Products of
        bfloat16 take half the time on CPUs with instructions for them (avx512_bf16, amx), and less on accelerators. float16 is
        for GPUs without bfloat16: CPUs convert it, and its largest number is 65,504.

    Returns:
      The model, whose methods `predict`, `encode` and `generate` take texts.

    Raises:
      InputError: The directory holds no run, or one that cannot be read; or its model has no such dtype.
    """
    from hpnlp.jobs.predictor import Predictor  # imports the trainer, which `import hpnlp` alone does not need

    return Predictor(run, step, dtype)
