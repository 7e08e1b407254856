"""Bits per byte that general-purpose compressors need for held-out text, measured while a model trains.

A compressor that has not read the training text cannot compete with a model that has. xz is therefore measured twice: on the
held-out text alone, and on the held-out text after the training text, as the difference of two compressed sizes. The latter
takes seconds to minutes of one core, so a large corpus is compressed once, by a process of low priority that runs beside the
training, and the result is kept in the data cache.

That process runs this file as a program, so the imports at the top are of the standard library alone.
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

if TYPE_CHECKING:
    from hpnlp.data.corpus import Corpus

# Size in bytes of the dictionary of xz at preset 9: how far back it finds repetitions. Compression takes memory of about 11
# times the text or the dictionary, whichever is smaller.
WINDOW = 1 << 26

# Field of report.json -> name of the compressor. The last one compresses the training text first.
NAMES = {
    "gzip_bits_per_byte": "gzip -9 alone",
    "xz_bits_per_byte": "xz -9e alone",
    "xz_trained_bits_per_byte": "xz -9e after the training text",
}

_VERSION = 1  # version of the record in the cache; part of its name
_SMALL_BYTES = 1 << 18  # text that is compressed in the time that it takes to start a process
_CHUNK = 1 << 20


def measure(training: bytes | None, heldout: bytes) -> dict[str, float | None]:
    """Measures gzip and xz on the held-out text, and xz on the held-out text after the training text.

    Args:
      training: Text that xz compresses first; None to leave out that figure.
      heldout: Text to compress, at least one byte.

    Returns:
      Bits per byte of `heldout` for each name in NAMES; None for a figure that is left out.
    """
    alone = _xz_bytes([heldout])
    after = None if training is None else _xz_bytes([training, heldout]) - _xz_bytes([training])
    sizes = {"gzip": len(gzip.compress(heldout, 9)), "xz": alone, "xz_trained": after}
    return {f"{name}_bits_per_byte": size and 8 * size / len(heldout) for name, size in sizes.items()}


def _xz_bytes(texts: Sequence[bytes]) -> int:
    """Compressed size of the concatenated texts, with a dictionary no larger than the texts, which saves memory."""
    size = max(1 << 12, min(WINDOW, sum(map(len, texts))))
    chain = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    compressor, total = lzma.LZMACompressor(filters=chain), 0
    for text in texts:
        for start in range(0, len(text), _CHUNK):
            total += len(compressor.compress(text[start : start + _CHUNK]))
    return total + len(compressor.flush())


class Baselines:
    """The measurement for one corpus. A process, where one is needed, starts with the object and is killed with it.

    If the tokenizer is not lossless, xz is not measured after the training text, which cannot be decoded exactly.
    """

    def __init__(self, corpus: Corpus) -> None:
        """Starts the measurement, unless the cache holds its result or the text is small.

        Args:
          corpus: The corpus.
        """
        from hpnlp.data import token_store

        self._corpus = corpus
        self._share = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._root, entry = os.path.split(corpus.directory)
        self._name = f"baselines-{_VERSION}-{entry}"
        self._cached = token_store.find(self._root, self._name)
        large = corpus.train_tokens + corpus.heldout_bytes > _SMALL_BYTES
        if self._cached is None and large and corpus.tokenizer.lossless:
            with contextlib.suppress(OSError):  # a full disk or lack of memory: `result` then lacks this figure
                self._start()

    def _start(self) -> None:
        """Starts the process that compresses the training text."""
        training, self._share = self._corpus.read_training_text(WINDOW)
        with tempfile.TemporaryFile() as file:
            file.write(training)
            file.write(self._corpus.read_heldout())
            file.seek(0)
            # A new process group, so that Ctrl-C does not reach the process; the same session, because Linux shares the
            # cores among sessions without regard to the priorities of their processes.
            self._process = subprocess.Popen(
                [sys.executable, "-I", os.path.abspath(__file__), str(len(training))],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        weakref.finalize(self, _kill, self._process)

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Waits for the measurement.

        Args:
          log: Called with a message if the process is still running.

        Returns:
          The figures of `measure`, None for a figure that could not be measured, and `xz_trained_share`, the share of the
          training text that xz compressed first: the last 64 MiB.
        """
        from hpnlp.data import token_store
        from hpnlp.types import InputError

        if self._cached is not None:
            return self._cached
        heldout = self._corpus.read_heldout()
        if self._process is None:
            training = None
            if self._corpus.tokenizer.lossless and self._corpus.train_tokens + len(heldout) <= _SMALL_BYTES:
                training, self._share = self._corpus.read_training_text(WINDOW)
            return {**measure(training, heldout), "xz_trained_share": self._share}
        if log is not None and self._process.poll() is None:
            log("waiting for xz, which is still compressing the training text (once per corpus)")
        # The training is over: on a machine with other work, the process would wait for it. Only root may raise a priority.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        try:
            figures = json.loads(self._process.communicate()[0])
        except ValueError:  # the process was killed, for example for lack of memory
            return {**measure(None, heldout), "xz_trained_share": 0.0}
        record = {**figures, "xz_trained_share": self._share}
        self._cached = record
        with contextlib.suppress(InputError):  # if the cache cannot be written, the next run measures again
            token_store.cached(self._root, self._name, lambda directory: record)
        return record


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and waits until it has ended."""
    with process:
        process.kill()


def _exit_after(parent: int) -> None:
    """Exits within 0.5 s after the parent process has ended, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(length: int) -> None:
    """Reads the training text and then the held-out text from stdin, and prints the figures of `measure` as JSON.

    Args:
      length: Size of the training text in bytes.
    """
    os.nice(19)
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    text = sys.stdin.buffer.read()
    print(json.dumps(measure(text[:length], text[length:])))


if __name__ == "__main__":
    main(int(sys.argv[1]))
