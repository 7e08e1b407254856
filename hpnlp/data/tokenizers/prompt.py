"""Steps that all tokenizers share when they encode a prompt."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hpnlp.types import InputError


def prompt_bytes(text: str) -> bytes:
    """Encodes a prompt; bytes of a command line that are not UTF-8 reach Python as lone surrogates, and become bytes again."""
    return text.encode("utf-8", "surrogateescape")


def with_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    """Puts bos before the ids of a prompt that does not start with it; raises InputError if it is empty and there is no bos."""
    if bos_id is not None and (len(ids) == 0 or ids[0] != bos_id):
        return np.concatenate([np.array([bos_id], np.int32), ids])
    if len(ids) == 0:
        raise InputError("the prompt is empty and this tokenizer has no bos to start from: write a prompt")
    return ids


def unknown_parts(missing: Iterable[str], vocab_size: int) -> InputError:
    """Makes the error for a prompt with parts that have no id in a vocabulary."""
    names = ", ".join(map(repr, dict.fromkeys(missing)))
    return InputError(
        f"the prompt has parts that the vocabulary of {vocab_size} ids does not hold: {names}: use other words, or "
        "train with data.tokenizer=bytes, which encodes all text"
    )
