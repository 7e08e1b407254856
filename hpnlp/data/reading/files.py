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
from collections.abc import Callable, Iterator
from typing import Any

from hpnlp.types import InputError

# Called during work, as (name of the work, amount done, amount in total or 0 if it is unknown). Of files, amounts are bytes.
Progress = Callable[[str, int, int], None]

SNIFF = 8192  # bytes at the start of a file by which its kind is detected
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}
_BUFFER = 1 << 16
_BOMS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# The fix of bytes that are not UTF-8. Most of them are of Western European text, in Latin-1 or Windows' superset of it.
CONVERT = "to be converted by iconv -f CP1252 -t UTF-8 FILE > NEW_FILE, if it is Latin-1 or of Windows"
# Share of two-byte pairs with a NUL on the same side from which a file counts as UTF-16: most characters are then Latin.
_UTF16_NUL_SHARE = 0.8


def ignore_progress(step: str, done: int, total: int) -> None:
    """Does nothing; a `Progress`."""


def printable(name: str) -> str:
    """A file name or path with escapes for line ends, control characters, and surrogates (bytes that are not UTF-8)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def compression(name: str) -> str:
    """The extension of a compression that can be read, ".gz" or ".zst"; "" for other names."""
    extension = os.path.splitext(name)[1].lower()
    return extension if extension in _UNPACK else ""


def uncompressed(name: str) -> str:
    """A file name or path without a final ".gz" or ".zst"."""
    return name[: len(name) - len(compression(name))]


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a FIFO, a socket or a device: reading or opening one may wait forever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_regular(path: str) -> os.stat_result:
    """The status of a regular file. Raises InputError for other paths: reading a FIFO or a device may never end."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path!r} is not a regular file: copy its content to one")
    return status


def unreadable(path: str, error: OSError) -> InputError:
    """The InputError to raise, of one line, for an OSError from reading a file."""
    reason = " ".join(str(error.strerror or error).split())  # messages of pyarrow have several lines
    return InputError(f"cannot read {path!r}: {reason}: mend or remove it")


def read_bytes(path: str) -> bytes:
    """The content of a file; raises InputError if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def open_text(path: str) -> Iterator[io.BufferedReader]:
    """Opens a file for reading bytes, which are decompressed as they are read if the extension is .gz or .zst.

    Args:
      path: Path of a regular file.

    Yields:
      A stream. `peek()` on the new stream returns at least SNIFF bytes, or the complete content.

    Raises:
      InputError: The file cannot be read, or its compressed data is damaged or truncated; also raised inside the context.
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
            f"cannot decompress {path!r} ({error}): the file is damaged or truncated: download or compress it again"
        ) from error


def _decompressed(path: str, packed: str) -> io.BufferedReader[Any]:
    """Opens a file whose compression has the extension `packed`, "" for none."""
    if packed == ".gz":
        # typeshed expects a RawIOBase; GzipFile derives from another class, and has `readinto`, which is all that is used.
        return io.BufferedReader(gzip.open(path), _BUFFER)  # type: ignore[arg-type]
    if packed == ".zst":
        try:
            import pyarrow as pa
        except ImportError as error:
            raise InputError(
                f"{path!r}: zstd needs the pyarrow package: pip install pyarrow, or unpack the file by zstd -d"
            ) from error
        # pyarrow's stream is no RawIOBase either, and has `readinto` too.
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), _BUFFER)  # type: ignore[arg-type]
    return io.BufferedReader(io.FileIO(path), _BUFFER)


def foreign_encoding(head: bytes) -> str:
    """Name, as iconv takes it, of UTF-16 or UTF-32 if the first bytes of a file are in one of them, or else ""."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name if _is_text(head, name) else ""
    if len(head) < 8 or b"\0" not in head:
        return ""
    # Without a byte-order mark: text that is mostly Latin has a NUL in most pairs, always on the same side.
    pairs = len(head) // 2
    for name, zero in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        nuls = head[zero : 2 * pairs : 2].count(0)
        if nuls >= _UTF16_NUL_SHARE * pairs and 0 not in head[1 - zero : 2 * pairs : 2] and _is_text(head, name):
            return name
    return ""


def _is_text(head: bytes, encoding: str) -> bool:
    """Whether `head`, which may end within a character, is text in `encoding` and not similar binary data."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    return not any(c < " " and not c.isspace() for c in text)


def not_utf8_byte(error: UnicodeDecodeError) -> str:
    """Part of a message on text that is not UTF-8: its first bad byte, the place, and the command that converts the file."""
    return f"not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}), {CONVERT}"


def not_utf8(path: str, encoding: str) -> InputError:
    """The InputError to raise for a file in `encoding`, as of `foreign_encoding`, with the command that converts it."""
    quoted = shlex.quote(printable(path))
    unpack = _UNPACK.get(compression(path))
    convert = f"iconv -f {encoding} -t UTF-8"
    command = f"{unpack} {quoted} | {convert}" if unpack else f"{convert} {quoted}"
    return InputError(f"{path!r} is {encoding}, not UTF-8: convert it by: {command} > NEW_FILE")


class NotTextError(InputError):
    """Bytes that are not UTF-8, given to a tokenizer that needs text: the index and the value of the first invalid byte."""

    def __init__(self, offset: int, byte: int, where: str = ""):
        skip = ", pass data.skip_bad_lines=True to leave such lines out," if where else ","
        super().__init__(
            f"{where or 'the text'}: byte {offset} (0x{byte:02x}) is not UTF-8, which this tokenizer needs, {CONVERT}: "
            f"convert it{skip} or pass data.tokenizer=bytes"
        )
        self.offset = offset
        self.byte = byte


def to_text(data: bytes) -> str:
    """Decodes UTF-8, or raises NotTextError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotTextError(error.start, data[error.start]) from error
