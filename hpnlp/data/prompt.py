"""What every tokenizer does with a prompt before a model continues it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpnlp.types import InputError


def prompt_bytes(text: str) -> bytes:
    """The bytes of a prompt: those of a command line that are not UTF-8 reach Python as lone surrogates."""
    return text.encode("utf-8", "surrogateescape")


def with_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    """`ids` with bos before them, once. Raises InputError where that leaves nothing to start from."""
    if bos_id is not None and (len(ids) == 0 or ids[0] != bos_id):
        return np.concatenate([np.array([bos_id], np.int32), ids])
    if len(ids) == 0:
        raise InputError("the prompt is empty and this tokenizer has no bos to start from: give it some text")
    return ids


def unknown_parts(parts: Iterable[str], vocab_size: int) -> InputError:
    """The error for a prompt of which `parts` have no id of their own."""
    named = ", ".join(map(repr, dict.fromkeys(parts)))
    return InputError(
        f"the prompt has parts that the vocabulary of {vocab_size} ids does not hold: {named}: say it otherwise, or "
        "train with data.tokenizer=bytes, which knows all text"
    )
