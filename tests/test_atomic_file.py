"""Files that are replaced atomically."""

import errno
import os

import pytest

from hpnlp.atomic_file import replace_bytes, replaced
from hpnlp.errors import TemporaryError
from hpnlp.report.files import replace_text
from hpnlp.training.files.metrics import JsonlWriter
from hpnlp.types import InputError


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    line = b'{"step": 1}\n'
    replace_bytes(path, line)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: replace_bytes(path, b"new"),
        lambda: replace_text(path, "new"),
        lambda: JsonlWriter(tmp_path),
    ):
        with pytest.raises(OSError, match="No space left.*metrics.jsonl'"):
            write()
    with pytest.raises(TemporaryError, match="cannot write .*metrics.jsonl.* has space"), replaced(path) as file:
        file.write(b"new")
    with pytest.raises(TemporaryError, match="the disk is full"), replaced(path):
        raise OSError("1000 requested and 96 written")  # of np.save, without a number
    assert path.read_bytes() == line and os.listdir(tmp_path) == [path.name]


def test_links_stay_and_special_files_are_refused(tmp_path):
    target = tmp_path / "directory" / "target"
    target.parent.mkdir()
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name, written in (("link", target), ("dangling", tmp_path / "new")):
        replace_bytes(tmp_path / name, b"content")
        assert (tmp_path / name).is_symlink() and written.read_bytes() == b"content" and not written.is_symlink()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to_fifo").symlink_to(tmp_path / "fifo")
    for name, reason in (
        ("fifo", "not a regular file"),
        ("to_fifo", "not a regular file"),
        ("directory", "Is a directory"),
    ):
        with pytest.raises(InputError, match=reason), replaced(tmp_path / name) as file:
            file.write(b"content")
    assert (tmp_path / "fifo").is_fifo() and sorted(os.listdir(tmp_path)) == sorted(
        ["directory", "link", "dangling", "new", "fifo", "to_fifo"]
    )
