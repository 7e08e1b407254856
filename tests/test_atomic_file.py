"""Files that are replaced atomically."""

import errno
import os

import pytest

from hpnlp.atomic_file import replace_bytes, replaced
from hpnlp.report.files import replace_text
from hpnlp.training.metrics import JsonlWriter
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
        with pytest.raises(OSError, match="No space left"):
            write()
    with pytest.raises(InputError, match="cannot write .*metrics.jsonl.* has space"), replaced(path) as file:
        file.write(b"new")
    assert path.read_bytes() == line and os.listdir(tmp_path) == [path.name]
