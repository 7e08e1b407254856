"""Files of vectors of texts: a .npy that grows row by row, of floats, or of 8-bit codes with a scale for each row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

import numpy as np

from hpnlp.data.reading.fields import FieldError
from hpnlp.jobs.predictor import Example, Predictor
from hpnlp.types import InputError

CHUNK = 2048  # texts that are sorted by length, encoded and written at a time
DTYPES = ("float32", "float16", "int8")
_LARGEST = 127  # largest absolute value of a code


class VectorFile:
    """Writes vectors to a .npy file as they come, so that memory does not grow with their number.

    Of floats, the file holds `[n, D]`. Of "int8", it holds n records with the fields "codes", int8 `[D]`, and "scale",
    float32: a vector is codes x scale, with an error of at most scale / 2 in each number.

    Attributes:
      count: Number of vectors so far.
      dim: Numbers of a vector, D.
    """

    def __init__(self, file: BinaryIO, dtype: str, dim: int) -> None:
        """Begins the file.

        Args:
          file: An empty file, open for writing, in which positions can be set.
          dtype: An entry of DTYPES.
          dim: Numbers of a vector.
        """
        self.count = 0
        self.dim, self._file = dim, file
        self._records = np.dtype([("codes", np.int8, (dim,)), ("scale", "<f4")]) if dtype == "int8" else None
        self._dtype = np.dtype(dtype).newbyteorder("<") if self._records is None else self._records
        self._write_header()
        self._start = file.tell()

    def append(self, vectors: np.ndarray) -> None:
        """Writes vectors after those before.

        Args:
          vectors: float32 `[m, D]`.
        """
        rows = vectors.astype(self._dtype) if self._records is None else self._quantized(vectors)
        self._file.write(rows.tobytes())
        self.count += len(vectors)

    def finish(self) -> None:
        """Writes the number of vectors into the beginning of the file."""
        self._file.seek(0)
        self._write_header()
        assert self._file.tell() == self._start, "numpy pads the header, so that the number of rows may grow"

    def _write_header(self) -> None:
        shape = (self.count,) if self._records is not None else (self.count, self.dim)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        np.lib.format.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})

    def _quantized(self, vectors: np.ndarray) -> np.ndarray:
        """Records of vectors, whose largest number becomes the largest code."""
        rows = np.empty(len(vectors), self._dtype)
        scale = np.abs(vectors).max(axis=1) / np.float32(_LARGEST)
        rows["scale"] = scale
        rows["codes"] = np.rint(vectors / np.where(scale > 0, scale, 1)[:, None])
        return rows


def write_vectors(
    predictor: Predictor,
    examples: Iterable[tuple[str, Example]],
    file: BinaryIO,
    dtype: str,
    batch_size: int,
    report_bad: Callable[[str], None],
    report_done: Callable[[int], None],
    partners: bool = False,
) -> tuple[VectorFile, int]:
    """Writes a row for each text, in memory that does not grow with their number.

    Args:
      predictor: The model.
      examples: Places, for messages, and texts as `Predictor.encode` reads them.
      file: As for VectorFile.
      dtype: An entry of DTYPES.
      batch_size: Largest number of texts of a batch.
      report_bad: Called with the place of a text that is empty, has no tokens or is invalid, whose row is zeros.
      report_done: Called with the number of texts that are written.
      partners: As for `Predictor.encode`.

    Returns:
      The file, and the number of texts that were cut.

    Raises:
      InputError: There are no texts, the model has no vectors, or a vector has numbers that are not finite in the dtype.
    """
    target, cut, remaining = None, 0, iter(examples)
    report_done(0)
    while chunk := list(itertools.islice(remaining, CHUNK)):

        def report(number: int, error: FieldError, chunk: Sequence[tuple[str, Example]] = chunk) -> None:
            report_bad(chunk[number][0])

        vectors, cut_here = predictor.encode_valid([text for _, text in chunk], batch_size, report, partners)
        cut += cut_here
        rows = np.zeros((len(chunk), predictor.run.model.config.dim), np.float32)
        for number, vector in vectors.items():
            rows[number] = vector
        limit = np.finfo(np.float16 if dtype == "float16" else np.float32).max
        invalid = np.flatnonzero(~(np.abs(rows) <= limit).all(axis=1))
        if invalid.size:
            raise InputError(
                f"{chunk[invalid[0]][0]}: the vector has NaN, infinity or a number too large for {dtype}: name another run or "
                f"--step than those of {predictor.directory}, or a larger dtype"
            )
        target = target or VectorFile(file, dtype, rows.shape[1])
        target.append(rows)
        report_done(target.count)
    if target is None:
        raise InputError("there are no texts to encode: name a file with texts")
    target.finish()
    return target, cut
