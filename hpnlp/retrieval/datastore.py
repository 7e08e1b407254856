"""Datastores on disk: vectors of the positions of a text or of texts, in shards that are joined to one searchable index.

A datastore is a directory with record.json, vectors.npy, and for each vector a word in words.npy (a language model's hidden
states, and the tokens that followed) or a line of texts.jsonl. One with all shards has index.npz in place of vectors.npy.
While a datastore is written, its record says so: a command that was killed is given again, and replaces what it has left.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpnlp.atomic_file import replace_bytes, replaced
from hpnlp.errors import TemporaryError, is_temporary
from hpnlp.retrieval.index import Index
from hpnlp.types import InputError

FORMAT = 2
RECORD, VECTORS, WORDS, TEXTS, INDEX = "record.json", "vectors.npy", "words.npy", "texts.jsonl", "index.npz"
FILES = (RECORD, VECTORS, WORDS, TEXTS, INDEX, "mixture.npz", "mixture.json")
PART = re.compile(r"\.(.+)\.[0-9a-f]{32}\.part")  # files that `atomic_file.replaced` had not finished
BLOCK = 1 << 16  # keys that are read at a time
LARGEST = 1 << 15  # bound on the norms in the index, under the largest float16
UNFINISHED = "unfinished"  # the key of the record of a datastore that is being written
EXACT_VECTORS = 20_000  # the largest number of vectors that are searched exactly by default


@dataclasses.dataclass(frozen=True)
class Record:
    """Description of what a datastore holds.

    Attributes:
      content: "words" or "texts".
      run: Directory of the run whose model made the vectors.
      step: Step of its checkpoint.
      weights: Digest of the model's weights.
      tokenizer: Digest of its tokenizer.
      source: Digest of what the shards were divided from: of options and texts.
      shard: Number of the shard, from 0.
      shards: Number of shards; 1 for a complete datastore.
      count: Number of vectors.
      dim: Numbers of a vector.
      documents: Digests of the documents that are stored, for "words".
      centre: Half of a squared norm, see `index_vectors`; 0 for "texts" and shards.
      scale: Factor of the norms in the index, see `index_vectors`; 1 for "texts" and shards.
      index: Spec of the index; "" for a shard.
    """

    content: str
    run: str
    step: int
    weights: str
    tokenizer: str
    source: str
    shard: int
    shards: int
    count: int
    dim: int
    documents: tuple[str, ...] = ()
    centre: float = 0.0
    scale: float = 1.0
    index: str = ""

    def check_run_exists(self, directory: str | Path) -> None:
        """Raises InputError if there is no directory of the run whose model reads the queries of the datastore `directory`."""
        if not os.path.isdir(self.run):
            raise InputError(
                f"{directory} was built with the model of {self.run}, which is not there: "
                "put the run back there, or build the datastore again"
            )


def document_digest(tokens: np.ndarray) -> str:
    """Digest of the tokens of a document, 16 hexadecimal digits."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=8).hexdigest()


def read_record(directory: str | Path) -> Record:
    """Reads the record of a datastore.

    Args:
      directory: The datastore.

    Returns:
      The record.

    Raises:
      InputError: The directory is no datastore of this version.
    """
    path = Path(directory) / RECORD
    try:
        values = json.loads(path.read_text("utf-8"))
        version, is_unfinished = values.pop("format"), values.pop(UNFINISHED, False)
        record = Record(**{**values, "documents": tuple(values["documents"])}) if version == FORMAT and values else None
    except FileNotFoundError as error:
        raise InputError(f"{directory} is no datastore: make one with hpnlp index build") from error
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror or error})") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} is damaged, or not of a datastore: build it again") from error
    if version != FORMAT:
        raise InputError(f"{directory} has format {version}, and this version reads {FORMAT}: build it again")
    if is_unfinished or record is None:
        raise InputError(f"{directory} is not complete, since its command has not ended: give the command again")
    return record


def prepare_directory(directory: str | Path) -> Path:
    """Makes the directory of a new datastore, without the files of an older one, and with the record of an unfinished one.

    Args:
      directory: A directory that does not exist, is empty, or holds a datastore, which may be unfinished.

    Returns:
      The directory.

    Raises:
      InputError: It holds other files, or cannot be made.
    """
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {file.name: _finished_name(file.name) for file in path.iterdir()}
        if others := sorted(name for name, finished in names.items() if finished not in FILES):
            raise InputError(f"{path} holds {others[0]!r}, which is not of a datastore: name another directory")
        if RECORD in names:
            _check_replaceable(path)
        elif files := sorted(name for name, finished in names.items() if name == finished or finished != RECORD):
            raise InputError(f"{path} holds {files[0]!r} and no {RECORD}: remove it, or name another directory")
        replace_bytes(path / RECORD, json.dumps({"format": FORMAT, UNFINISHED: True}).encode())
        for name in names.keys() - {RECORD}:
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise (TemporaryError if is_temporary(error) else InputError)(
            f"cannot write {path} ({error.strerror or error}): name another directory"
        ) from error
    return path


def _finished_name(name: str) -> str:
    """The name that a file gets when it is complete."""
    match = PART.fullmatch(name)
    return match[1] if match else name


def _check_replaceable(path: Path) -> None:
    """Raises InputError unless a record is of a datastore, of any format, which may be unfinished."""
    try:
        values = json.loads((path / RECORD).read_text("utf-8"))
        if isinstance(values, dict) and (values.get(UNFINISHED) or {"format", "content", "weights"} <= values.keys()):
            return
    except ValueError:
        pass
    raise InputError(f"{path / RECORD} is damaged, or not of a datastore: remove it, or name another directory")


def write_record(directory: Path, record: Record) -> None:
    """Writes the record, the last file of a datastore."""
    content = json.dumps({"format": FORMAT, **dataclasses.asdict(record)}, indent=1) + "\n"
    with replaced(directory / RECORD) as file:
        file.write(content.encode())


def default_index(count: int) -> str:
    """The index of a number of vectors.

    Args:
      count: Number of vectors.

    Returns:
      A spec of `hpnlp.retrieval.index.Index`: exact search of few vectors, and of more an inverted file of about sqrt(count)
      cells, of which a search reads a 128th, at least 8.
    """
    if count <= EXACT_VECTORS:
        return "exact"
    cells = 1 << round(math.log2(math.sqrt(count)))
    return f"ivf(cells={cells},probes={max(8, cells // 128)})"


def index_vectors(shards: Sequence[np.ndarray]) -> tuple[np.ndarray, float, float]:
    """Vectors whose products with (q, scale, scale) are in the order of the distances of q and the keys.

    Args:
      shards: Keys, float16 `[n, D]` each; together at least one.

    Returns:
      float16 `[N, D + 2]`, all keys with (centre - |key|^2 / 2) / scale as the sum of two numbers, since one of float16 has an
      error of the size of distances; centre, the mean of |key|^2 / 2; and the scale, a power of 2, so that
      |q - key|^2 = |q|^2 + 2 (centre - product). Where norms differ much, the scale is such that they do not determine the
      cells of an inverted file.

    Cost: memory for the result, and for blocks of keys.
    """
    count, dim = sum(map(len, shards)), shards[0].shape[1]
    vectors, halves = np.empty((count, dim + 2), np.float16), np.empty(count, np.float32)
    start = 0
    for shard in shards:
        for i in range(0, len(shard), BLOCK):
            block = shard[i : i + BLOCK]
            rows = slice(start, start := start + len(block))
            vectors[rows, :dim] = block
            halves[rows] = np.square(block.astype(np.float32)).sum(axis=1) / 2
    centre = float(halves.mean(dtype=np.float64))
    numbers = np.float32(centre) - halves
    spread = float(np.sqrt(np.square(numbers).mean(dtype=np.float64)))
    # The last numbers spread 4 to 8 times as much as the others then. Measured with ivf(cells=32,probes=4) on 3,000 clustered
    # keys of D 96 whose norms have a log-normal spread of 0.5: recall@5 is 0.99 to 1.00, at scale 1 0.34, and at 1 time 0.70.
    scale = max(1.0, spread / max(math.sqrt(2 * centre / dim), 1e-6) / 8, float(np.abs(numbers).max()) / LARGEST)
    scale = 2.0 ** math.ceil(math.log2(scale))
    numbers /= np.float32(scale)
    vectors[:, dim] = numbers
    vectors[:, dim + 1] = numbers - vectors[:, dim].astype(np.float32)
    return vectors, centre, scale


def complete(directory: str | Path, shards: Sequence[str | Path], index: str = "", flags: Sequence[str] = ()) -> Record:
    """Joins all shards to a searchable datastore.

    Args:
      directory: The new datastore, see `prepare_directory`; it may be the only shard.
      shards: Directories of the shards, in any order.
      index: Spec of the index; "" for `default_index`.
      flags: Flags by which the shards were built, for the command that a message names.

    Returns:
      The record of the new datastore.

    Raises:
      InputError: A shard is absent or named twice, is of another model, tokenizer or text, or is complete; its vectors are not
        finite, or its files have other numbers of rows than its record; or the disk is full.
    """
    records = [read_record(shard) for shard in shards]
    _check_shards(shards, records)
    order = sorted(range(len(records)), key=lambda i: records[i].shard)
    paths = [Path(shards[i]) for i in order]
    first, target = records[order[0]], Path(directory)
    stored = [_shard_vectors(path, records[i], first.dim) for path, i in zip(paths, order, strict=True)]
    if not sum(map(len, stored)):
        raise InputError(f"{', '.join(map(str, paths))} hold no vectors: build a datastore of more text")
    for path, i in zip(paths, order, strict=True):
        _check_values(path, records[i])
    if first.content == "words":
        vectors, centre, scale = index_vectors(stored)
    else:
        vectors, centre, scale = np.concatenate(stored), 0.0, 1.0
    spec = index or default_index(len(vectors))
    try:
        built = Index(spec).build(vectors)
    except InputError as error:
        if not index:
            raise
        command = shlex.join(["hpnlp", "index", "merge", *map(str, paths), "--out=DIR", *flags])
        raise InputError(f"--index={index}: {error}; the vectors are kept: {command}, with another --index") from error
    if paths != [target]:
        target = prepare_directory(target)
        _join_values(target, paths, first.content)
    built.save(target / INDEX)
    documents = tuple(digest for i in order for digest in records[i].documents)
    record = dataclasses.replace(
        first, shard=0, shards=1, count=len(vectors), documents=documents, centre=centre, scale=scale, index=spec
    )
    write_record(target, record)
    (target / VECTORS).unlink(missing_ok=True)
    return record


def _check_shards(shards: Sequence[str | Path], records: Sequence[Record]) -> None:
    """Raises InputError unless records are those of all shards of one source."""
    first = records[0]
    for shard, record in zip(shards, records, strict=True):
        if record.index:
            raise InputError(f"{shard} is a complete datastore: only shards are merged; leave it out")
        for name in ("content", "weights", "tokenizer", "source", "shards"):
            ours, other = getattr(first, name), getattr(record, name)
            if ours != other:
                raise InputError(
                    f"{shards[0]} and {shard} are not of one datastore: {name} is {ours} and {other}: build all shards from "
                    "one run with the same texts and flags"
                )
    numbers = [record.shard for record in records]
    if doubled := sorted({n for n in numbers if numbers.count(n) > 1}):
        named = [str(shard) for shard, record in zip(shards, records, strict=True) if record.shard == doubled[0]]
        raise InputError(f"{' and '.join(named)} are both shard {doubled[0]}: name each shard once")
    if missing := sorted(set(range(first.shards)) - set(numbers)):
        raise InputError(
            f"shard {missing[0]} of {first.shards} is missing: name its directory, or build it with "
            f"--shard={missing[0]}/{first.shards}"
        )


def _load(path: Path) -> np.ndarray:
    """An array of a shard, memory-mapped."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): build the shard again") from error


def _shard_vectors(path: Path, record: Record, dim: int) -> np.ndarray:
    """The vectors of a shard, memory-mapped; raises InputError unless they are finite and as many as its record has."""
    vectors = _load(path / VECTORS)
    if vectors.shape != (record.count, dim):
        raise InputError(f"{path / VECTORS} has {vectors.shape} numbers, and its record others: build the shard again")
    for start in range(0, len(vectors), BLOCK):
        invalid = np.flatnonzero(~np.isfinite(vectors[start : start + BLOCK]).all(axis=1))
        if invalid.size:
            raise InputError(
                f"{path / VECTORS} has NaN or infinity, first in row {start + invalid[0]}: build the shard again"
            )
    return vectors


def _check_values(path: Path, record: Record) -> None:
    """Raises InputError unless a shard has a word or a text for each vector."""
    values = path / (WORDS if record.content == "words" else TEXTS)
    if not values.is_file():
        raise InputError(f"{values} is missing: build the shard again")
    if record.content == "words":
        count = len(_load(values))
    else:
        with open(values, "rb") as file:
            count = sum(line.endswith(b"\n") for line in file)
    if count != record.count:
        raise InputError(
            f"{values} has {count} {record.content}, and {RECORD} {record.count} vectors: build the shard again"
        )


def _join_values(target: Path, paths: Sequence[Path], content: str) -> None:
    """Writes the words or texts of all shards to the target."""
    if content == "words":
        with replaced(target / WORDS) as file:
            np.save(file, np.concatenate([_load(path / WORDS) for path in paths]))
        return
    with replaced(target / TEXTS) as file:
        for path in paths:
            with open(path / TEXTS, "rb") as part:
                shutil.copyfileobj(part, file)


@dataclasses.dataclass(frozen=True)
class Datastore:
    """A complete datastore.

    Attributes:
      directory: Its directory.
      record: Its record.
      index: The index of its vectors.
    """

    directory: Path
    record: Record
    index: Index

    @classmethod
    def load(cls, directory: str | Path, content: str) -> Datastore:
        """Reads a datastore.

        Args:
          directory: The datastore.
          content: What it must hold, "words" or "texts".

        Returns:
          The datastore.

        Raises:
          InputError: The directory is no complete datastore with this content.
        """
        record = read_record(directory)
        if not record.index:
            raise InputError(
                f"{directory} is shard {record.shard} of {record.shards}: join all with hpnlp index merge, and name the result"
            )
        if record.content != content:
            kind = (
                "of texts, which no language model predicts from"
                if content == "words"
                else "of a language model's text"
            )
            raise InputError(f"{directory} is a datastore {kind}: name another one")
        index = Index.load(Path(directory) / INDEX)
        if len(index) != record.count:
            raise InputError(
                f"{directory}: {INDEX} has {len(index)} vectors and {RECORD} {record.count}: build the datastore again"
            )
        return cls(Path(directory), record, index)

    def check_run(self, directory: str | os.PathLike[str], weights: str, tokenizer: str) -> None:
        """Raises InputError unless the vectors are of a run.

        Args:
          directory: The run's directory.
          weights: Digest of its weights.
          tokenizer: Digest of its tokenizer.
        """
        for name, ours, its in (
            ("weights", self.record.weights, weights),
            ("tokenizer", self.record.tokenizer, tokenizer),
        ):
            if ours != its:
                raise InputError(
                    f"{self.directory} was built with the {name} of {self.record.run}, and {os.fspath(directory)} has others: "
                    f"build a datastore with hpnlp index build {os.fspath(directory)}"
                )

    def check_scored(self, documents: Iterable[np.ndarray]) -> None:
        """Raises InputError if a document that is scored, or a copy of it, is in the datastore."""
        stored = set(self.record.documents)
        is_stored = [document_digest(document) in stored for document in documents]
        if count := sum(is_stored):
            raise InputError(
                f"{self.directory} holds {count} of the {len(is_stored)} documents that are scored, which would "
                "find themselves: build a datastore of other text"
            )

    def words(self) -> np.ndarray:
        """The token after each position, int32 `[n]`."""
        words = np.asarray(_load(self.directory / WORDS), np.int32)
        if len(words) != self.record.count:
            raise InputError(
                f"{self.directory}: {WORDS} has {len(words)} words and {RECORD} {self.record.count} vectors: build the "
                "datastore again"
            )
        return words

    def texts(self, numbers: Sequence[int]) -> Mapping[int, str]:
        """Texts by their numbers.

        Args:
          numbers: Numbers of texts.

        Returns:
          Number -> text.

        Raises:
          InputError: The file of texts is missing or damaged.
        """
        wanted, path = set(numbers), self.directory / TEXTS
        try:
            with open(path, encoding="utf-8") as file:
                texts = {number: json.loads(line) for number, line in enumerate(file) if number in wanted}
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path} ({error}): build the datastore again") from error
        if len(texts) < len(wanted):
            raise InputError(f"{path} has fewer texts than there are vectors: build the datastore again")
        return texts
