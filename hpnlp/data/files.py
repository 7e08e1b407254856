"""Opens files of text: regular files only, decompressed as a stream, with encodings other than UTF-8 detected."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import shlex
import stat
import zlib
from collections.abc import Iterator
from typing import Any

from hpnlp.types import InputError

SNIFF = 8192  # bytes at the start of a file that tell its kind
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}
_BUFFER = 1 << 16
_BOMS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def printable(name: str) -> str:
    """`name` with escapes for what a terminal cannot show: line ends, controls, and surrogates (bytes that are not UTF-8)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def compression(name: str) -> str:
    """The extension of a compression that can be read (".gz" or ".zst"), or "" for none."""
    extension = os.path.splitext(name)[1].lower()
    return extension if extension in _UNPACK else ""


def uncompressed(name: str) -> str:
    """`name` without the extension of its compression."""
    return name[: len(name) - len(compression(name))]


def is_special(path: str | os.PathLike[str]) -> bool:
    """True for a FIFO, a socket or a device: reading or opening one may wait forever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_regular(path: str) -> os.stat_result:
    """The stat of `path`; raises InputError where it is not a regular file: reading a FIFO or a device may never end."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path!r} is not a regular file: copy its content to one")
    return status


def unreadable(path: str, error: OSError) -> InputError:
    """The InputError for an OSError raised while `path` was read."""
    reason = " ".join(str(error.strerror or error).split())  # pyarrow's have several lines
    return InputError(f"cannot read {path!r}: {reason}: mend or remove it")


@contextlib.contextmanager
def open_text(path: str) -> Iterator[io.BufferedReader]:
    """Opens `path` for reading bytes, decompressed as they are read where its extension is .gz or .zst.

    `peek()` on the new stream returns at least SNIFF bytes, or all there are. Raises InputError, also from within the context,
    where the file cannot be read or its compressed data is damaged or cut short.
    """
    check_regular(path)
    packed = compression(path)
    try:
        with _decompressed(path, packed) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        # Errors of a decompressor have no errno: gzip raises EOFError, zlib.error and OSError, pyarrow OSError.
        if not packed or (isinstance(error, OSError) and error.errno):
            assert isinstance(error, OSError)
            raise unreadable(path, error) from error
        raise InputError(
            f"cannot decompress {path!r} ({error}): the file is damaged or cut short: download or compress it again"
        ) from error


def _decompressed(path: str, packed: str) -> io.BufferedReader[Any]:
    if packed == ".gz":
        return io.BufferedReader(gzip.open(path), _BUFFER)  # type: ignore[arg-type]
    if packed == ".zst":
        try:
            import pyarrow as pa
        except ImportError as error:
            raise InputError(
                f"{path!r}: zstd needs the pyarrow package: pip install pyarrow, or unpack the file by zstd -d"
            ) from error
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), _BUFFER)  # type: ignore[arg-type]
    return io.BufferedReader(io.FileIO(path), _BUFFER)


def foreign_encoding(head: bytes) -> str:
    """The encoding that text which starts with `head` is in, where it is UTF-16 or UTF-32; "" for everything else."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name if _is_text(head, name) else ""
    if len(head) < 8 or b"\0" not in head:
        return ""
    # Without a byte-order mark: text that is mostly Latin has a NUL in most pairs, always on the same side.
    pairs = len(head) // 2
    for name, zero in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        nuls = head[zero : 2 * pairs : 2].count(0)
        if nuls >= 0.8 * pairs and 0 not in head[1 - zero : 2 * pairs : 2] and _is_text(head, name):
            return name
    return ""


def _is_text(head: bytes, encoding: str) -> bool:
    """Whether `head`, which may end within a character, is text in `encoding` and not binary data that looks alike."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(c < " " and not c.isspace() for c in text)


def not_utf8(path: str, encoding: str) -> InputError:
    """The InputError for text in UTF-16 or UTF-32, with the command that converts it."""
    quoted = shlex.quote(printable(path))
    unpack = _UNPACK.get(compression(path))
    convert = f"iconv -f {encoding} -t UTF-8"
    command = f"{unpack} {quoted} | {convert}" if unpack else f"{convert} {quoted}"
    return InputError(f"{path!r} is {encoding}, not UTF-8: convert it by: {command} > NEW_FILE")
