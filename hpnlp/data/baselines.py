"""Bits per byte that general-purpose compressors need for held-out text, measured while a model trains.

A compressor that has not seen the training text is no match for a model that has. xz is therefore measured twice: on the
held-out text alone, and on the held-out text once it has compressed the training text, as the difference of two sizes.
That takes seconds to minutes of one core, so a large corpus is compressed in a process of low priority beside the training,
once: the result is kept in the data cache.

The process runs this file as a program, which is why it imports only the standard library at the top.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.stream import Corpus

# Bytes that xz looks back over: the dictionary of its preset 9. Its memory is about 11 times the text, up to this size.
WINDOW = 1 << 26

# Fields of report.json -> the compressors in words. The last has the training text as its dictionary.
NAMES = {
    "gzip_bits_per_byte": "gzip -9 alone",
    "xz_bits_per_byte": "xz -9e alone",
    "xz_trained_bits_per_byte": "xz -9e after the training text",
}

_VERSION = 1  # of the record in the cache: part of its name
_SMALL = 1 << 18  # bytes that compress in the time that starting a process takes
_BLOCK = 1 << 20


def measure(training: bytes | None, heldout: bytes) -> dict[str, float | None]:
    """Measures gzip and xz on the held-out text, and xz on the held-out text after the training text.

    Args:
        training: the text that xz compresses first; None to leave that figure out.
        heldout: the text to compress, at least one byte.

    Returns:
        Bits per byte of `heldout`, by the names in NAMES.
    """
    alone = _xz_bytes([heldout])
    after = None if training is None else _xz_bytes([training, heldout]) - _xz_bytes([training])
    sizes = {"gzip": len(gzip.compress(heldout, 9)), "xz": alone, "xz_trained": after}
    return {f"{name}_bits_per_byte": size and 8 * size / len(heldout) for name, size in sizes.items()}


def _xz_bytes(parts: Sequence[bytes]) -> int:
    """Compressed size of the concatenated parts. The dictionary is no larger than the text, which saves memory."""
    size = max(1 << 12, min(WINDOW, sum(map(len, parts))))
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    compressor, total = lzma.LZMACompressor(filters=chain), 0
    for part in parts:
        for at in range(0, len(part), _BLOCK):
            total += len(compressor.compress(part[at : at + _BLOCK]))
    return total + len(compressor.flush())


class Baselines:
    """The measurement for one corpus: begins when the object is made, and ends with it.

    Without a lossless tokenizer there is no figure for xz after the training text, because the text is not known.
    """

    def __init__(self, corpus: Corpus) -> None:
        from hpnlp.data import token_store

        self._corpus = corpus
        self._share = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._root, entry = os.path.split(corpus.directory)
        self._name = f"baselines-{_VERSION}-{entry}"
        self._known = token_store.find(self._root, self._name)
        large = corpus.train_tokens + corpus.heldout_bytes > _SMALL
        if self._known is None and large and corpus.tokenizer.lossless:
            with contextlib.suppress(OSError):  # a full disk, or no memory: `result` lacks the figure
                self._start()

    def _start(self) -> None:
        training, self._share = self._corpus.read_training_text(WINDOW)
        with tempfile.TemporaryFile() as file:
            file.write(training)
            file.write(self._corpus.read_heldout())
            file.seek(0)
            # A process group of its own, so that Ctrl-C does not reach it; the same session, because Linux weighs processes
            # of different sessions without regard to their priority.
            self._process = subprocess.Popen(
                [sys.executable, "-I", os.path.abspath(__file__), str(len(training))],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        weakref.finalize(self, _end, self._process)

    def result(self, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Waits for the measurement.

        Args:
            say: called with one line where there is something to wait for.

        Returns:
            The fields of `measure`, None where a figure could not be measured, and `xz_trained_share`, the share of the
            training text that xz was given: its last 64 MiB.
        """
        from hpnlp.data import token_store

        if self._known is not None:
            return self._known
        heldout = self._corpus.read_heldout()
        if self._process is None:
            training = None
            if self._corpus.tokenizer.lossless and self._corpus.train_tokens + len(heldout) <= _SMALL:
                training, self._share = self._corpus.read_training_text(WINDOW)
            return {**measure(training, heldout), "xz_trained_share": self._share}
        if self._process.poll() is None:
            say("xz is still compressing the training text, which is done once for a corpus: waiting for it")
        try:
            numbers = json.loads(self._process.communicate()[0])
        except ValueError:  # the process was killed, as for lack of memory
            return {**measure(None, heldout), "xz_trained_share": 0.0}
        record = {**numbers, "xz_trained_share": self._share}
        self._known = record
        with contextlib.suppress(InputError):  # where the cache cannot be written, the next run measures again
            token_store.cached(self._root, self._name, lambda directory: record)
        return record


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:
        process.kill()


def _exit_after(parent: int) -> None:
    """Ends this process soon after its parent, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(length: int) -> None:
    """Reads the training text, of `length` bytes, and the held-out text from stdin, and prints the figures as JSON."""
    os.nice(19)
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    text = sys.stdin.buffer.read()
    print(json.dumps(measure(text[:length], text[length:])))


if __name__ == "__main__":
    main(int(sys.argv[1]))
