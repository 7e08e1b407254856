"""The tokenizer that is written beside an exported model, with the special tokens of training around its texts."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpnlp.data.examples.kind import Kind
from hpnlp.data.tokenizers import export, word_hashes
from hpnlp.data.tokenizers.export import Framing
from hpnlp.data.tokenizers.huggingface import import_tokenizers
from hpnlp.jobs import held_out
from hpnlp.models.encoder import Encoder
from hpnlp.models.pairs.dual_encoder import DualEncoder
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

HASHES = "word_hashes.py"  # file of the hash of words, which the script in the directory reads
FILES = ("tokenizer.json", "tokenizer_config.json", HASHES)


def _special_tokens(run: Run, kind: Kind | None) -> Framing | None:
    """The special tokens around the texts of encoders; None for other models, before whose prompts bos stands."""
    model: Any = run.model
    if not isinstance(model, Encoder | DualEncoder):
        return None
    return Framing(
        max_len=run.config.data.seq_len,
        pairs=kind is not None and kind.parts_per_sequence == 2,
        token_types=model.config.token_types,
        mask_id=run.tokenizer.find_mask_id() if run.config.task == "masked_lm" else None,
    )


def write(run: Run, kind: Kind | None, source: Path, directory: str) -> bool:
    """Writes the tokenizer of a run in the Hugging Face layout; or that of hashes of words, with the code of the hash.

    Args:
      run: The run.
      kind: Kind of its examples; None for a task without one.
      source: Directory of the run, whose files are copied if a published tokenizer frames texts as the run does.
      directory: An existing directory.

    Returns:
      Whether the files are those of the run, unchanged.

    Raises:
      InputError: The tokenizer has no Hugging Face form.
    """
    tokenizer = run.tokenizer
    if tokenizer.hashes_words:
        tokenizer.save(os.path.join(directory, "tokenizer.json"))
        shutil.copyfile(word_hashes.__file__, os.path.join(directory, HASHES))
        return True
    is_copied = not tokenizer.is_trained_here
    if is_copied:
        for name in FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, os.path.join(directory, name))
    else:
        export.export(tokenizer, directory)
    framing = _special_tokens(run, kind)
    is_changed = framing is not None and export.frame(tokenizer, directory, framing)
    return is_copied and not is_changed


def _encode(directory: str | Path, texts: Sequence[tuple[str, ...]], max_len: int) -> list[tuple[list[int], list[int]]]:
    """`(ids, types)` of texts by the tokenizer of a directory, as programs without hpnlp encode them."""
    inner = import_tokenizers().Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
    inner.encode_special_tokens = True
    inner.no_padding()
    inner.enable_truncation(max_len)
    return [(encoded.ids, encoded.type_ids) for encoded in (inner.encode(*pair) for pair in texts)]


def _check_hashes(run: Run, directory: str | Path, texts: Sequence[tuple[str, ...]]) -> None:
    """Raises InputError if the exported code gives other hashes than those of training."""
    split = json.loads(Path(directory, "tokenizer.json").read_text("utf-8"))["by"]
    encode = runpy.run_path(os.path.join(directory, HASHES))[
        "encode"
    ]  # an import would leave bytecode in the directory
    for (text,) in texts:
        if encode(text, split).reshape(-1).view(np.int32).tolist() != run.tokenizer.encode(text.encode()).tolist():
            raise InputError(
                f"{HASHES} gives other hashes than training for {text!r:.60}: install numpy 2, and export again"
            )


def check(run: Run, kind: Kind, directory: str | Path, texts: Sequence[tuple[str, ...]]) -> None:
    """Checks that an exported tokenizer gives the ids of training.

    Args:
      run: The run.
      kind: Kind of its examples.
      directory: Directory of the exported tokenizer.
      texts: Held-out texts.

    Raises:
      InputError: The ids or types of a text differ.
    """
    if run.tokenizer.hashes_words:
        _check_hashes(run, directory, texts)
        return
    expected = held_out.framed_ids(run, kind, texts)
    has_types = (framing := _special_tokens(run, kind)) is not None and framing.token_types > 1
    exported = _encode(directory, texts, run.config.data.seq_len)
    for pair, (ids, types), (exported_ids, exported_types) in zip(texts, expected, exported, strict=True):
        if ids != exported_ids or (has_types and types != exported_types):
            raise InputError(
                f"the exported tokenizer gives the ids {exported_ids[:8]}... for {pair[0]!r:.60}, and training has "
                f"{ids[:8]}...: use hpnlp.load, or train with a tokenizer that encodes a word alone as in a text, such as "
                "--data.tokenizer='bpe(4000)' or --data.tokenizer='words(8000, by=whitespace)'"
            )
