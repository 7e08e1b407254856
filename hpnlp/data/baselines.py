"""Bits per byte that general-purpose compressors need for held-out text, measured while a model trains.

A compressor that has not read the training text cannot compete with a model that has. xz is therefore measured twice: on the
held-out text alone, and on the held-out text after the training text, as the difference of two compressed sizes. The latter
takes seconds to minutes of one core. A process of low priority therefore compresses ever longer ends of a large training text
beside the training, and a run that ends earlier takes the longest one that is finished. After all of it, PPMd and zpaq follow,
as far as they are installed. Complete figures are kept in the data cache.

That process runs this file as a program, so the imports at the top are of the standard library alone.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import importlib.util
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpnlp.data.corpus import Corpus

# Size in bytes of the dictionary of xz at preset 9: how far back it finds repetitions. Compression takes memory of about 11
# times the text or the dictionary, whichever is smaller.
WINDOW = 1 << 26

# Field of report.json -> name of the compressor. The last ones compress the training text first; PPMd and zpaq only if they
# are installed.
NAMES = {
    "gzip_bits_per_byte": "gzip -9 alone",
    "xz_bits_per_byte": "xz -9e alone",
    "xz_trained_bits_per_byte": "xz -9e after the training text",
    "ppmd_trained_bits_per_byte": "PPMd (order 32) after the training text",
    "zpaq_trained_bits_per_byte": "zpaq -m5 after the training text",
}

_VERSION = 3  # version of the record in the cache; part of its name
_SMALL_BYTES = 1 << 18  # text that is compressed in the time that it takes to start a process
_CHUNK = 1 << 20
_FIRST_BYTES = 1 << 20  # the shortest end of the training text that xz compresses; each next one is 4 times as long
_PATIENCE = 5.0  # seconds that `Baselines.result` waits for the figures without training text


def measure(training: bytes, heldout: bytes) -> Iterator[dict[str, Any]]:
    """Measures compressors on the held-out text: gzip and xz alone, xz after ends of the training text, others after all of it.

    Args:
      training: Text that is compressed first; b"" for none.
      heldout: Text to compress, at least one byte.

    Yields:
      Bits per byte of `heldout` for each name in NAMES, None where there is no figure (yet); `xz_trained_bytes`, the size of
      the end of `training` that xz compressed first; and `is_complete`, true for the last item.
    """
    sizes = {"gzip": len(gzip.compress(heldout, 9)), "xz": _xz_bytes([heldout])}
    figures: dict[str, Any] = dict.fromkeys(NAMES)
    figures |= {f"{name}_bits_per_byte": 8 * size / len(heldout) for name, size in sizes.items()}
    others = [name for name, is_installed in _OTHERS.items() if training and is_installed()]
    yield {**figures, "xz_trained_bytes": 0, "is_complete": not training}
    length = min(_FIRST_BYTES, len(training))
    while length:
        end = training[-length:]
        size, is_last = _xz_bytes([end, heldout]) - _xz_bytes([end]), length == len(training)
        figures |= {"xz_trained_bits_per_byte": 8 * size / len(heldout), "xz_trained_bytes": length}
        yield {**figures, "is_complete": is_last and not others}
        length = 0 if is_last else min(4 * length, len(training))
    for name in others:
        size = {"ppmd": _ppmd_bytes, "zpaq": _zpaq_bytes}[name](training, heldout)
        figures[f"{name}_trained_bits_per_byte"] = 8 * size / len(heldout)
        yield {**figures, "is_complete": name == others[-1]}


_OTHERS = {
    "ppmd": lambda: importlib.util.find_spec("pyppmd") is not None,
    "zpaq": lambda: shutil.which("zpaq") is not None,
}


def _ppmd_bytes(training: bytes, heldout: bytes) -> int:
    """Compressed size of the held-out text by PPMd variant H, whose model has read the training text."""
    ppmd: Any = importlib.import_module("pyppmd")  # Any, as an optional package
    memory = min(1 << 30, max(1 << 24, 96 * (len(training) + len(heldout))))  # with less, the model restarts
    encoder = ppmd.Ppmd7Encoder(32, memory)
    encoder.encode(training)
    return len(encoder.encode(heldout)) + len(encoder.flush())


def _zpaq_bytes(training: bytes, heldout: bytes) -> int:
    """Size of the held-out text by zpaq -m5: the difference of two archives."""
    sizes = []
    with tempfile.TemporaryDirectory() as directory:
        for text in (training, training + heldout):
            path, archive = os.path.join(directory, "text"), os.path.join(directory, f"{len(text)}.zpaq")
            with open(path, "wb") as file:
                file.write(text)
            command = ["zpaq", "add", archive, path, "-m5", "-t1"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            sizes.append(os.path.getsize(archive))
    return sizes[1] - sizes[0]


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
    """The measurement for one corpus, which runs in a process beside the training and never holds up its result.

    If the tokenizer is not lossless, xz is not measured after the training text, which cannot be decoded exactly.
    """

    def __init__(self, corpus: Corpus) -> None:
        """Starts the measurement, unless the cache holds its result or the text is small."""
        from hpnlp.data.reading import token_store

        self._corpus = corpus
        self._process: subprocess.Popen[bytes] | None = None
        self._training_bytes, self._share = 0, 0.0
        self._root, entry = os.path.split(corpus.directory)
        self._name = f"baselines-{_VERSION}-{entry}"
        self._cached = token_store.find(self._root, self._name)
        self._is_small = corpus.train_tokens + corpus.heldout_bytes <= _SMALL_BYTES
        self._printed = b""
        self._is_over = False  # the report is written, and a measurement that has not begun does not begin
        # Decoding the training text takes seconds, for which the training need not wait.
        self._starting = threading.Thread(target=self._start, daemon=True)
        if self._cached is None and not self._is_small:
            self._starting.start()

    def _training_text(self) -> bytes:
        """The end of the training text; b"" if it cannot be decoded exactly."""
        training, share = b"", 0.0
        if self._corpus.tokenizer.lossless:
            training, share = self._corpus.read_training_text(WINDOW)
        self._training_bytes, self._share = len(training), share
        return training

    def _start(self) -> None:
        """Starts the process that compresses the training text. Without room for it, `result` lacks all figures."""
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:
            training = self._training_text()
            file.write(training)
            file.write(self._corpus.read_heldout())
            file.seek(0)
            if self._is_over:
                return
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
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)

    def result(self, log: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Takes the figures that are measured so far, and ends the measurement.

        Args:
          log: Called with a message if figures are missing.

        Returns:
          The last figures of `measure`, None for a figure that was not measured, and `xz_trained_share`, the share of the
          training text that xz compressed first.
        """
        if self._cached is not None:
            return self._cached
        if self._is_small:
            *_, figures = measure(self._training_text(), self._corpus.read_heldout())
            del figures["is_complete"]
            return {**figures, "xz_trained_share": self._share}
        figures, end = self._figures(), time.monotonic() + _PATIENCE
        while figures is None and self._is_running() and time.monotonic() < end:
            time.sleep(0.05)
            figures = self._figures()
        self._is_over = True
        if self._process is not None:
            _kill(self._process)
        if figures is None:
            if log is not None:
                log("the compressors were not measured in time: the report has no figures of them")
            return {**dict.fromkeys(NAMES), "xz_trained_bytes": 0, "xz_trained_share": 0.0}
        seen, total, is_complete = figures["xz_trained_bytes"], self._training_bytes, figures.pop("is_complete")
        record = {**figures, "xz_trained_share": self._share * seen / total if total else 0.0}
        if is_complete:
            self._keep(record)
        elif seen < total and log is not None:
            log(
                f"the report compares with xz after {seen / 2**20:,.0f} of {total / 2**20:,.0f} MiB of training text: more was "
                "not compressed in time"
            )
        return record

    def _keep(self, record: dict[str, Any]) -> None:
        """Puts a complete result into the cache; if the cache cannot be written, the next run measures again."""
        from hpnlp.data.reading import token_store
        from hpnlp.types import InputError

        with contextlib.suppress(InputError):
            token_store.cached(self._root, self._name, lambda directory: record)
        self._cached = record

    def _is_running(self) -> bool:
        """Whether the process is being started, or has not ended."""
        return self._starting.is_alive() or (self._process is not None and self._process.poll() is None)

    def _figures(self) -> dict[str, Any] | None:
        """The last line that the process has written in full; None without any."""
        if not self._starting.is_alive() and self._process is not None and self._process.stdout is not None:
            self._printed += self._process.stdout.read() or b""
        lines = self._printed[: self._printed.rfind(b"\n") + 1].splitlines()
        return json.loads(lines[-1]) if lines else None


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
    """Reads the training text and then the held-out text from stdin, and prints the items of `measure` as lines of JSON.

    Args:
      length: Size of the training text in bytes.
    """
    os.nice(19)
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    text = sys.stdin.buffer.read()
    for figures in measure(text[:length], text[length:]):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
