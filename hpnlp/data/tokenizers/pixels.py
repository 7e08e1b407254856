"""Greyscale images as text and tokens: one character, and one token, for each pixel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from hpnlp.data.tokenizers.prompt import prompt_bytes
from hpnlp.data.tokenizers.tokenizer_file import check_version
from hpnlp.types import InputError, Tokenizer, WordStats

FORMAT = 1  # version of the JSON that `save` writes
VALUES = 256
_FIRST = 32  # code of the character of a black pixel: the space


def to_text(image: ArrayLike) -> str:
    """Writes an image, uint8 of any shape, as text: one character per pixel, with the code 32 + value."""
    return (np.asarray(image, np.uint8).ravel().astype("<u4") + _FIRST).tobytes().decode("utf-32-le")


class PixelTokenizer(Tokenizer):
    """The 256 values of pixels, pad and seven reserved ids. Texts are those of `to_text`; bos and eos do not exist."""

    vocab_size: int = 264
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int = VALUES
    lossless: bool = True
    stats: WordStats | None = None

    def encode(self, text: bytes) -> np.ndarray:
        codes = np.frombuffer(text.decode().encode("utf-32-le"), "<u4").astype(np.int64) - _FIRST
        if len(codes) and not 0 <= codes.min() <= codes.max() < VALUES:
            index = int(np.argmax((codes < 0) | (codes >= VALUES)))
            raise InputError(
                f"data.tokenizer='pixels': character {index} of a text has the code {codes[index] + _FIRST}, expected "
                f"{_FIRST} to {_FIRST + VALUES - 1}, one for each value of a pixel: pass an image, or another tokenizer"
            )
        return codes.astype(np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        return self.encode(prompt_bytes(text))

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        values = np.asarray(ids, np.int64)
        return to_text(values[values < VALUES]).encode()

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"type": "pixels", "version": FORMAT}, file)


def build(*, texts: Iterable[bytes]) -> PixelTokenizer:
    """The tokenizer of the spec pixels."""
    del texts
    return PixelTokenizer()


def parse(form: Mapping[str, Any], path: str) -> PixelTokenizer:
    """The tokenizer of a JSON object."""
    check_version(form, FORMAT, path)
    return PixelTokenizer()
