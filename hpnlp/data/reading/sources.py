"""Paths to files: "stdlib", files, directories and globs, with duplicates and unreadable kinds of files left out.

A file or a glob that a user names is read as it is. A walk through a directory leaves out files that are unlikely to be
text: hidden files and directories, `__pycache__`, links to directories, and compressed files other than `.txt`, `.md`,
`.json` and `.jsonl` followed by `.gz` or `.zst`. `reading.documents.DocumentReader` leaves out more files of a walk by their
content. Every omission is counted in a `LeftOut`, so that the caller can report it.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpnlp.data.reading import files
from hpnlp.data.reading.files import printable
from hpnlp.errors import plural
from hpnlp.types import InputError

_ARCHIVES = (".bz2", ".xz", ".zip", ".7z", ".tgz", ".npz", ".tar.gz", ".tar.zst")
# A walk leaves out compressed files whose extension below .gz or .zst is another.
_WALKED_COMPRESSED = (".txt", ".md", ".json", ".jsonl")
_PACKAGES = frozenset({"site-packages", "dist-packages"})
# Name of a corpus -> directories of the standard library that its walk does not enter.
_STDLIB = {"stdlib": _PACKAGES | {"test", "tests", "idle_test"}, "stdlib+tests": _PACKAGES}
_KINDS = {".jsonl": "jsonl", ".json": "json", ".parquet": "parquet", ".npy": "tokens"}
# Largest number of documents, or of training examples, that others are compared with, at about 200 bytes each.
MAX_COMPARED = 1 << 20
NAMED = 3  # names that are kept for each reason of a `LeftOut`
_EXPANSION = 4  # typical ratio of the size of text to its compressed size


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a source.

    Attributes:
      path: Absolute path.
      name: Path within the source, which stays the same when the source is moved.
      size: Size on disk in bytes.
    """

    path: str
    name: str
    size: int

    @property
    def kind(self) -> str:
        """Format by the extension: "text", "jsonl", "json" (an array of records, or else text), "parquet" or "tokens"."""
        return _KINDS.get(self.suffix, "text")

    @property
    def suffix(self) -> str:
        """Extension of the format in lower case, without that of a compression."""
        return os.path.splitext(files.uncompressed(self.path))[1].lower()

    @property
    def text_bytes(self) -> int:
        """Size of the file's text in bytes; an estimate where the file is compressed."""
        return self.size * _EXPANSION if files.compression(self.path) else self.size


@dataclasses.dataclass(frozen=True)
class Source:
    """The files that one path of `data.path` stands for.

    Attributes:
      path: The path as the user wrote it.
      files: Files sorted by name.
      walked: True if the path is a directory, of which unsuitable files are left out.
      left_out: Files that were left out.
    """

    path: str
    files: tuple[File, ...]
    walked: bool
    left_out: LeftOut

    @functools.cached_property
    def text_bytes(self) -> int:
        """Size of the text of all files in bytes; see `File.text_bytes`."""
        return sum(file.text_bytes for file in self.files)


class LeftOut(dict[str, list[Any]]):
    """Counts of what is not read: reason -> [count, names of the first ones]. JSON-able."""

    def add(self, reason: str, name: str) -> None:
        """Counts one file, document or line; the names of the first NAMED of each reason are kept."""
        entry = self.setdefault(reason, [0])
        entry[0] += 1
        if len(entry) <= NAMED:
            entry.append(name)

    def merge(self, other: LeftOut) -> None:
        """Adds counts."""
        for reason, (count, *names) in other.items():
            entry = self.setdefault(reason, [0])
            entry[0] += count
            entry += names[: NAMED + 1 - len(entry)]

    def since(self, earlier: LeftOut) -> LeftOut:
        """Counts what was added since an earlier state, of which `earlier` is a copy."""
        added = LeftOut()
        for reason, (count, *names) in self.items():
            before, *known = earlier.get(reason, [0])
            if count > before:
                added[reason] = [count - before, *names[len(known) :]]
        return added

    def __str__(self) -> str:
        return ", ".join(
            f"{count} {reason}" + (f" ({printable(names[0])}{', ...' * (count > 1)})" if names else "")
            for reason, (count, *names) in self.items()
        )

    def in_brackets(self) -> str:
        """Text for an error message, " (left out: ...)", or "" if nothing is left out."""
        return f" (left out: {self})" if self else ""


def described(counts: LeftOut, noun: str = "", separator: str = " ") -> list[str]:
    """A line for each reason with its count and first places; `noun`, in the singular, is the word for what is counted."""
    lines = []
    for reason, (count, *places) in counts.items():
        counted = plural(count, noun) + separator if noun else ""
        more = f"; and {count - len(places):,} more" if count > len(places) == NAMED else ""
        lines.append(f"{count:,} {counted}{reason}: {'; '.join(map(printable, places))}{more}")
    return lines


@dataclasses.dataclass
class LineCounts:
    """Numbers of records and lines of the files in which they differ.

    Lines are more than records where a quoted cell of CSV has several lines, and where lines are blank.

    Attributes:
      files: Number of these files.
      records: Records of these files, bad ones included.
      lines: Lines of these files, without the names of columns.
      first: Name of the first of these files.
    """

    files: int = 0
    records: int = 0
    lines: int = 0
    first: str = ""

    def add(self, name: str, records: int, lines: int) -> None:
        """Counts a file, unless each of its lines holds a record."""
        if records != lines:
            self.first = self.first or name
            self.files, self.records, self.lines = self.files + 1, self.records + records, self.lines + lines

    def __str__(self) -> str:
        more = f" and {self.files - 1} more" if self.files > 1 else ""
        return f"{self.records:,} records from {self.lines:,} lines of {printable(self.first)}{more}"


def reading_notes(record: Mapping[str, Any], cached_in: str) -> Iterator[str]:
    """Parts of a summary on how data were read: from which cache entry, "" for none, and what is not read.

    `record` has the "lines" (absent from caches of early versions) and the "left_out" of a prepared entry.
    """
    if cached_in:
        yield f"tokens read from the cache, {printable(cached_in)}"
    if record.get("lines", {}).get("files"):
        yield str(LineCounts(**record["lines"]))
    if record["left_out"]:
        yield f"left out: {LeftOut(record['left_out'])}"


def find(paths: str, argument: str, readable: tuple[str, ...] = ()) -> tuple[Source, ...]:
    """Lists the files of each of several paths. A file that several paths lead to belongs to the first of them.

    Args:
      paths: "stdlib" or "stdlib+tests", a file, a directory or a glob; several are separated by commas.
      argument: Name of the config field that holds `paths`, for error messages.
      readable: Extensions of files that are read in addition: ".npz" as an archive, ".csv" if compressed.

    Returns:
      One source per path.

    Raises:
      InputError: A path does not exist, or no file is left to read in it.
    """
    return distinct(
        [_find_one(path.strip(), argument, readable) for path in paths.split(",")], argument, (), "given twice"
    )


def distinct(sources: Sequence[Source], argument: str, known: Iterable[str], reason: str) -> tuple[Source, ...]:
    """Removes files that are the same as, or links to, files at the paths `known` or of an earlier source.

    A document is held out by its name, so a file with two names could be trained on under one and scored under the other.
    Within a source the name with the fewest directories is kept, so that adding a link changes nothing. The removed files are
    counted under `reason` in `Source.left_out`. Raises InputError if no file of a source remains; `argument` is the name of the
    config field that holds the paths.
    """
    seen, result = {os.path.realpath(path) for path in known}, []
    for source in sources:
        kept, left_out = set(), LeftOut()
        left_out.merge(source.left_out)
        for file in sorted(source.files, key=_depth_and_name):
            real = os.path.realpath(file.path)
            if real in seen:
                left_out.add(reason, file.name)
            else:
                kept.add(file)
                seen.add(real)
        if not kept:
            raise InputError(
                f"{argument}={source.path!r} adds no file{left_out.in_brackets()}: leave it out, or pass another"
            )
        remaining = tuple(file for file in source.files if file in kept)
        result.append(dataclasses.replace(source, files=remaining, left_out=left_out))
    return tuple(result)


def without_scored(train: Sequence[Source], scored: Sequence[Source], argument: str) -> tuple[Source, ...]:
    """Removes files that are scored from training sources; see `distinct`. `argument` names the field of the scored paths.

    Raises InputError if no file of a training source remains.
    """
    if not scored:
        return tuple(train)
    paths = [file.path for source in scored for file in source.files]
    real = set(map(os.path.realpath, paths))
    for source in train:
        if all(os.path.realpath(file.path) in real for file in source.files):
            raise InputError(
                f"{argument}={','.join(of_scored.path for of_scored in scored)!r} holds all files of the training data, "
                f"data.path={source.path!r}: pass other files as {argument}"
            )
    return distinct(train, "data.path", paths, f"held out by {argument}")


def _depth_and_name(file: File) -> tuple[int, str]:
    """Sort key of files: number of directories in the name, then the name."""
    return file.name.count("/"), file.name


def _find_one(path: str, argument: str, readable: tuple[str, ...]) -> Source:
    """Lists the files of one path."""
    left_out = LeftOut()
    base, names, walked = _list_files(path, argument, left_out)
    found_files = []
    for name in sorted(names):
        file = os.path.join(base, name)
        is_readable = files.uncompressed(name).lower().endswith(readable)
        fault = "" if is_readable else compression_fault(name)
        if fault and not walked:
            raise InputError(f"{argument}: {file!r} {fault}: unpack it")
        if fault:
            left_out.add("compressed in a form that is not read", name)
        elif walked and not is_readable and _is_unlikely_text(name):
            left_out.add(f"compressed, of other formats ({extension(name)})", name)
        else:
            size = files.check_regular(file).st_size
            found_files.append(File(os.path.abspath(file), name.replace(os.sep, "/"), size))
    if not found_files:
        raise InputError(f"{argument}={path!r} holds no file to read{left_out.in_brackets()}: pass one that does")
    return Source(path, tuple(found_files), walked, left_out)


def _list_files(path: str, argument: str, left_out: LeftOut) -> tuple[str, list[str], bool]:
    """Returns the base directory, the files' names relative to it, and whether the path is a directory that is walked."""
    full = os.path.expanduser(path)
    if path in _STDLIB:
        base = sysconfig.get_path("stdlib")
        return base, [name for name in _walk(base, LeftOut(), _STDLIB[path]) if name.endswith(".py")], False
    if os.path.isdir(full):
        return full, _walk(full, left_out), True
    if os.path.isfile(full):
        base, name = os.path.split(full)
        return base, [name], False
    if path and glob.has_magic(full) and not os.path.exists(full):
        base = _fixed_directory(full)
        return base, _expand_glob(full, base, left_out), False
    raise InputError(f'{argument}={path!r} {_path_fault(full)}: pass "stdlib", a file, a directory, or a quoted glob')


def _expand_glob(pattern: str, base: str, left_out: LeftOut) -> list[str]:
    """Names of the files that match `pattern`, relative to `base`."""
    names = []
    for match in glob.glob(pattern, recursive=True):
        name = os.path.relpath(match, base)
        if os.path.isfile(match):
            names.append(name)
        else:
            left_out.add("directories", name)
    return names


def _fixed_directory(pattern: str) -> str:
    """The longest leading directory of a glob without wildcards."""
    while glob.has_magic(pattern):
        pattern = os.path.dirname(pattern)
    return pattern or "."


def _path_fault(path: str) -> str:
    """The reason why nothing can be read at `path`."""
    if not path or "\0" in path:
        return "does not exist"
    try:
        os.stat(path)
    except FileNotFoundError:
        return "is a link to nothing" if os.path.islink(path) else "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "is not a regular file"


def compression_fault(name: str) -> str:
    """Reason why a compressed file cannot be read as a stream, by its name; "" if it can, or is not compressed."""
    if name.lower().endswith(_ARCHIVES):
        return "is compressed in a form that is not read"
    if files.compression(name) and files.uncompressed(name).lower().endswith((".parquet", ".npy")):
        return "is compressed, and this format is not read from its start to its end"
    return ""


def extension(name: str) -> str:
    """Extension of a file in lower case with that of its compression, such as ".log.gz"; "no extension" if it has none."""
    inner = files.uncompressed(name)
    suffix = os.path.splitext(inner)[1] + name[len(inner) :]
    return suffix.lower() or "no extension"


def _is_unlikely_text(name: str) -> bool:
    """Whether a walk leaves out the file as compressed data of an unknown kind."""
    return bool(files.compression(name)) and not files.uncompressed(name).lower().endswith(_WALKED_COMPRESSED)


def _walk(base: str, left_out: LeftOut, excluded: frozenset[str] = frozenset()) -> list[str]:
    """Paths of the files under `base`, relative to it; directories named in `excluded` are not entered."""

    def fail(error: OSError) -> None:
        raise InputError(f"cannot read {error.filename!r}: {error.strerror}: mend its permissions") from error

    names = []
    for directory, subdirectories, file_names in os.walk(base, onerror=fail):
        entered = []
        for name in subdirectories + file_names:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, base)
            if name.startswith(".") or name == "__pycache__":
                left_out.add("hidden", relative)
            elif os.path.isfile(path):
                names.append(relative)
            elif os.path.islink(path) or not os.path.isdir(path):
                left_out.add("links and devices", relative)
            elif name not in excluded:
                entered.append(name)
        subdirectories[:] = entered
    return names
