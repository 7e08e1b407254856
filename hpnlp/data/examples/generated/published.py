"""Published data sets in the form of their archives: IMDB reviews, pairs of AAN papers, images of CIFAR-10."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading import files as reading
from hpnlp.data.reading.files import not_utf8_byte, printable, read_bytes, unreadable
from hpnlp.data.reading.sources import File
from hpnlp.data.tokenizers.pixels import to_text
from hpnlp.types import InputError

FORMATS = (".txt", ".tsv", ".bin")

_COLUMNS = "label, id1, id2, text1, text2"
_SIDE = 32  # height and width of an image of CIFAR-10
_IMAGE_BYTES = 1 + 3 * _SIDE * _SIDE  # label, and the planes of red, green and blue
_GREY = np.array([0.2989, 0.5870, 0.1140])  # weights of red, green and blue
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def imdb_train(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Reviews to train on of the directory aclImdb (Maas et al. 2011): train/pos/*.txt and train/neg/*.txt.

    Records have "text", "label", "pos" or "neg", and "group", the name of the file. Raises InputError if there is no such file.
    """
    return _imdb(files, "train")


def imdb_test(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Reviews to hold out: test/pos/*.txt and test/neg/*.txt."""
    return _imdb(files, "test")


def _imdb(files: Sequence[File], split: str) -> Iterator[dict[str, Any]]:
    pattern = re.compile(rf"(?:^|/){split}/(pos|neg)/[^/]+\.txt$")
    for file in _matching(files, pattern, f"{split}/pos/*.txt and {split}/neg/*.txt", "imdb"):
        match = pattern.search(file.name)
        assert match is not None
        text = _decoded(read_bytes(file.path), printable(file.path))
        yield {"text": text, "label": match[1], "group": file.name}


def aan_train(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Pairs of papers to train on of the ACL Anthology Network (Radev et al. 2013), in the form of Tay et al. 2021.

    Lines of *.train.tsv have five columns without a header and without quotes: label, id1, id2, text1, text2. Records have
    "text", "pair", "label", "1" if one paper cites the other or else "0", and "group", the line. Raises InputError with the
    place of a malformed line.
    """
    return _aan(files, "train")


def aan_test(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Pairs of papers to hold out: *.test.tsv."""
    return _aan(files, "test")


def _aan(files: Sequence[File], split: str) -> Iterator[dict[str, Any]]:
    for file in _matching(files, re.compile(rf"\.{split}\.tsv$"), f"*.{split}.tsv", "aan"):
        try:
            with reading.open_text(file.path) as stream:
                for number, line in enumerate(stream, 1):
                    where = f"{printable(file.path)}, line {number}"
                    yield {**_pair(_decoded(line.rstrip(b"\r\n"), where), where), "group": f"{file.name}#{number}"}
        except OSError as error:
            raise unreadable(file.path, error) from error


def _pair(line: str, where: str) -> dict[str, str]:
    """The fields of a line of AAN."""
    cells = line.split("\t")
    if len(cells) != 5:
        raise InputError(f"{where}: {len(cells)} columns, expected 5 ({_COLUMNS}), separated by tabs: mend the file")
    label, _, _, text, pair = cells
    if label not in ("0", "1", "0.0", "1.0"):
        raise InputError(f"{where}: label {label[:40]!r}, expected 0 or 1: mend the file")
    if not text or not pair:
        raise InputError(f"{where}: text{1 if not text else 2} is empty: mend or remove the line")
    return {"text": text, "pair": pair, "label": label[0]}


def cifar10_train(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Images to train on of the binary version of CIFAR-10 (Krizhevsky 2009): data_batch_1.bin to data_batch_5.bin.

    Records have "text", the image in grey, see `pixels.to_text`, "label", the name of the class, and "group", the record.
    Raises InputError if a file is missing or damaged.
    """
    return _cifar10(files, re.compile(r"(?:^|/)data_batch_\d+\.bin$"), "data_batch_*.bin")


def cifar10_test(files: Sequence[File]) -> Iterator[dict[str, Any]]:
    """Images to hold out: test_batch.bin."""
    return _cifar10(files, re.compile(r"(?:^|/)test_batch\.bin$"), "test_batch.bin")


def _cifar10(files: Sequence[File], pattern: re.Pattern[str], expected: str) -> Iterator[dict[str, Any]]:
    # The Python version of the archive consists of pickles, which can run code when they are read.
    for file in _matching(files, pattern, f"{expected} of the binary version", "cifar10"):
        content, where = read_bytes(file.path), printable(file.path)
        if not content or len(content) % _IMAGE_BYTES:
            raise InputError(
                f"{where}: {len(content)} bytes, expected images of {_IMAGE_BYTES} bytes, as the binary version of CIFAR-10 "
                "has: download it again"
            )
        records = np.frombuffer(content, np.uint8).reshape(-1, _IMAGE_BYTES)
        for number, record in enumerate(records):
            if record[0] >= len(CIFAR10_CLASSES):
                raise InputError(
                    f"{where}, image {number}: class {record[0]}, expected 0 to 9: download the file again"
                )
            grey = np.rint(_GREY @ record[1:].reshape(3, -1))
            yield {"text": to_text(grey), "label": CIFAR10_CLASSES[record[0]], "group": f"{file.name}#{number}"}


def _matching(files: Sequence[File], pattern: re.Pattern[str], expected: str, name: str) -> list[File]:
    """The files whose names match; InputError if there is none."""
    matching = [file for file in files if pattern.search(file.name)]
    if not matching:
        directory = printable(files[0].path.removesuffix(files[0].name)) if files else "DIRECTORY"
        raise InputError(
            f"data.path={name}:{directory} holds no {expected}: pass the directory of the unpacked archive of {name}"
        )
    return matching


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: {not_utf8_byte(error)}: convert it") from error


IMDB = Generated(imdb_train, None, heldout=imdb_test, formats=FORMATS)
AAN = Generated(aan_train, None, heldout=aan_test, formats=FORMATS)
CIFAR10 = Generated(cifar10_train, None, heldout=cifar10_test, formats=FORMATS)
