"""Tokenizers from spec strings and files: bytes, pixels, words, byte-pair encoding (extra `hf`), and hashes.

`build` makes a tokenizer from a spec string, and `load` reads one from a file; both return a `hpnlp.types.Tokenizer`. Byte,
word and hashing tokenizers are saved as a small JSON object, all others in the format of Hugging Face's `tokenizer.json`: see
`huggingface`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hpnlp import spec as specs
from hpnlp.data.tokenizers.prompt import prompt_bytes, with_bos
from hpnlp.data.tokenizers.tokenizer_file import check_version
from hpnlp.table import Table
from hpnlp.types import InputError, Tokenizer, WordStats

_BYTES_FORMAT = 1  # version of the JSON of ByteTokenizer
TRAINING_VERSION = 4  # version of how vocabularies are made; part of the cache key of a trained tokenizer
# Bytes of training text for each id of a vocabulary, and their bounds: more text changes rare entries only, and takes longer.
_BYTES_PER_ID, _LEAST_TEXT, _MOST_TEXT = 1 << 12, 1 << 25, 1 << 28


class ByteTokenizer(Tokenizer):
    """The 256 byte values, bos, eos, pad and five reserved ids: 264 in all, so that a table divides by 8 devices."""

    vocab_size: int = 264
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id: int = 258
    lossless: bool = True
    spec: str = "bytes"
    stats: WordStats | None = None

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        return with_bos(self.encode(prompt_bytes(text)), self.bos_id)

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        values = np.asarray(ids, np.int64)
        return values[values < 256].astype(np.uint8).tobytes()

    def save(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"type": "bytes", "version": _BYTES_FORMAT}, file)


def _build_bytes(*, texts: Iterable[bytes]) -> Tokenizer:
    del texts
    return ByteTokenizer()


def _parse_bytes(form: Mapping[str, Any], path: str) -> Tokenizer:
    check_version(form, _BYTES_FORMAT, path)
    return ByteTokenizer()


# Name -> function of the arguments of the spec and of `texts` that makes a tokenizer.
TOKENIZERS: Table[Callable[..., Tokenizer]] = Table(
    {
        "bytes": _build_bytes,
        "pixels": "hpnlp.data.tokenizers.pixels:build",
        "words": "hpnlp.data.tokenizers.word_tokenizer:build",
        "bpe": "hpnlp.data.tokenizers.huggingface:build",
        "hashed_words": "hpnlp.data.tokenizers.hashing_tokenizers:build_words",
        "hashed_ngrams": "hpnlp.data.tokenizers.hashing_tokenizers:build_ngrams",
    }
)
# Tokenizer that is trained on text -> function of the arguments of its spec that returns bounds of the number of ids.
_TRAINED_SIZES: Table[Callable[..., tuple[int, int]]] = Table(
    {"words": "hpnlp.data.tokenizers.word_tokenizer:sizes", "bpe": "hpnlp.data.tokenizers.huggingface:sizes"}
)
# Types in files of `Tokenizer.save` -> function of the JSON object and the path that makes the tokenizer.
_PARSERS: Table[Callable[[Mapping[str, Any], str], Tokenizer]] = Table(
    {
        "bytes": _parse_bytes,
        "pixels": "hpnlp.data.tokenizers.pixels:parse",
        "words": "hpnlp.data.tokenizers.word_tokenizer:parse",
        "hashed_words": "hpnlp.data.tokenizers.hashing_tokenizers:parse",
        "hashed_ngrams": "hpnlp.data.tokenizers.hashing_tokenizers:parse",
    }
)


def is_trained(spec: str) -> bool:
    """Whether `build` of a spec reads texts."""
    return specs.is_name(spec) and specs.parse_one(spec, "data.tokenizer").name in _TRAINED_SIZES


def sizes(spec: str) -> tuple[int, int]:
    """The smallest and the largest possible number of ids of a tokenizer, for every training text."""
    if is_trained(spec):
        return specs.build(specs.parse_one(spec, "data.tokenizer"), _TRAINED_SIZES, "tokenizer")
    size = build(spec).vocab_size
    return size, size


def training_bytes(spec: str) -> int:
    """Amount of text that a vocabulary is made from: 4 KiB for each id, at least 32 MiB and at most 256 MiB."""
    return min(max(_LEAST_TEXT, _BYTES_PER_ID * sizes(spec)[1]), _MOST_TEXT)


def build(spec: str, texts: Iterable[bytes] = ()) -> Tokenizer:
    """Makes the tokenizer of a spec string. The result depends on `spec` and `texts` alone.

    Args:
      spec: "bytes", "pixels" (of images, see `pixels`), "words(30000)", "words(30000, by=whitespace)", "bpe(8192)",
        "bpe(2000, by=identifiers)", "hashed_words" or "hashed_ngrams(65536)" (see `hashing_tokenizers`), or the path of a
        tokenizer.json.
      texts: Documents from which a vocabulary is made; read once, and only if `is_trained(spec)`.

    Returns:
      The tokenizer.

    Raises:
      InputError: An unknown name, an invalid argument, an unreadable file, or text that is not UTF-8.
    """
    if not specs.is_name(spec):
        return load(spec)
    return specs.build(specs.parse_one(spec, "data.tokenizer"), TOKENIZERS, "tokenizer", texts=texts)


def load(path: str) -> Tokenizer:
    """Reads a tokenizer that `Tokenizer.save` or Hugging Face has written.

    Args:
      path: Path of a `tokenizer.json`, or of the directory that holds it.

    Returns:
      The tokenizer.

    Raises:
      InputError: The file is missing, damaged, or of another kind.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    text = _read_file(path)
    try:
        form = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path!r} is no tokenizer.json: it is not JSON ({error}): save or download it again"
        ) from error
    if isinstance(form, dict) and "model" in form:
        from hpnlp.data.tokenizers.huggingface import HFTokenizer

        return HFTokenizer.parse(text, path)
    name = form.get("type") if isinstance(form, dict) else None
    if not isinstance(name, str) or name not in _PARSERS:
        raise InputError(f"{path!r} is no tokenizer.json: it has neither a model nor a known type: pass another path")
    return _PARSERS[name](form, path)


def _read_file(path: str) -> str:
    """The text of the regular file at `path`, or an InputError."""
    if "\0" in path or (os.path.exists(path) and not os.path.isfile(path)):  # reading a FIFO or a device may never end
        raise InputError(f"the tokenizer {path!r} is not a regular file: pass the path of a tokenizer.json")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise InputError(
            f"cannot read the tokenizer {path!r}: {error.strerror}: pass the path of a tokenizer.json"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path!r} is no tokenizer.json: it is binary, not JSON: pass another path") from error


def save_whole(tokenizer: Tokenizer, directory: str) -> None:
    """Saves a tokenizer so that neither a kill nor a full disk leaves an incomplete file.

    Args:
      tokenizer: The tokenizer.
      directory: An existing directory, which receives tokenizer.json and its config files.
    """
    fresh = os.path.join(directory, "tokenizer.tmp")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a run that was killed here
    os.mkdir(fresh)
    try:
        tokenizer.save(os.path.join(fresh, "tokenizer.json"))
        # tokenizer.json is moved last: where it exists, readers expect the other files to exist as well.
        for name in sorted(os.listdir(fresh), key=lambda name: name == "tokenizer.json"):
            os.replace(os.path.join(fresh, name), os.path.join(directory, name))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest, in hexadecimal, of the files that a tokenizer saves."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save(os.path.join(directory, "tokenizer.json"))
            for name in sorted(os.listdir(directory)):
                with open(os.path.join(directory, name), "rb") as file:
                    digest.update(file.read())
    except OSError as error:
        raise InputError(f"cannot write temporary files: {error}: free some space, or set TMPDIR elsewhere") from error
    return digest.hexdigest()
