"""Formats of exported models."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExportFormat:
    """A format of a file with a model.

    Attributes:
      suffix: Suffix of the file's name.
      runtime: Python package that runs the file.
    """

    suffix: str
    runtime: str

    @property
    def model_file(self) -> str:
        """Name of the file in a directory that is served."""
        return f"model{self.suffix}"


FORMATS = {"onnx": ExportFormat(".onnx", "onnxruntime"), "stablehlo": ExportFormat(".stablehlo", "jax")}
