"""A process for the package `tokenizers`, whose threads allocate many small blocks.

`hpnlp.training` leaves one memory arena to all threads of its process (see `hpnlp.training.allocator`). In that process, two
threads of the package take longer than one: 72 MiB of text took 45 s with two threads and 36 s with one, and 14 s with two
threads in a process of their own. This file imports nothing of hpnlp, so that the process starts in 0.1 s.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

_BATCH = 1 << 20  # characters of a message


class TokenizerProcess:
    """The process of one tokenizer, for one thread at a time. It ends with this object, or with the process that made it."""

    def __init__(self, form: str, encode_special_tokens: bool = False, bpe: Mapping[str, Any] | None = None):
        """Starts the process.

        Args:
          form: The tokenizer, as the text of a tokenizer.json.
          encode_special_tokens: The property of `tokenizers.Tokenizer`, which tokenizer.json lacks.
          bpe: Arguments of `tokenizers.trainers.BpeTrainer`, to make the vocabulary by `train`.

        Raises:
          OSError: The process cannot be started.
        """
        self.parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, _end, self._process, self.parent)
        self._send((form, encode_special_tokens, bpe))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes texts without special tokens around them.

        Args:
          texts: The texts.

        Returns:
          int32 ids of each text.

        Raises:
          ChildProcessError: The process has ended.
        """
        self._send(list(texts))
        lengths = self._receive()
        ids = self._read(4 * sum(lengths))
        return np.split(np.frombuffer(bytearray(ids), np.int32), np.cumsum(lengths[:-1])) if lengths else []

    def train(self, texts: Iterable[str]) -> str:
        """Makes the vocabulary.

        Args:
          texts: Texts, which are read once.

        Returns:
          The tokenizer, as the text of a tokenizer.json.

        Raises:
          ChildProcessError: The process has ended.
        """
        batch, size = [], 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= _BATCH:
                self._send(batch)
                batch, size = [], 0
        self._send(batch)
        self._send(None)
        return self._receive()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None  # a pipe
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self) -> Any:
        assert self._process.stdout is not None  # a pipe
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._fail()
        return json.loads(line)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None  # a pipe
        content = self._process.stdout.read(size)
        if len(content) < size:
            self._fail()
        return content

    def _fail(self) -> NoReturn:
        code = self._process.wait()
        raise ChildProcessError(f"the process of the package tokenizers ended with code {code}")


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Closes the pipes, which ends the process."""
    if os.getpid() != parent:  # a fork of the process that started it
        return
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def _messages() -> Iterator[Any]:
    """The messages of the parent, lines of JSON, until null or until it closes the pipe."""
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):  # the parent was interrupted
            return
        message = json.loads(line)
        if message is None:
            return
        yield message


def _serve() -> None:
    """Answers the messages of the parent, in the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent decides
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write into the pipe
    tokenizers: Any = importlib.import_module("tokenizers")  # Any, as pyright does not find its classes
    messages = _messages()
    first = next(messages, None)
    if first is None:
        return
    form, encode_special_tokens, bpe = first
    inner = tokenizers.Tokenizer.from_str(form)
    inner.encode_special_tokens = encode_special_tokens
    if bpe is not None:
        texts = (text for batch in messages for text in batch)
        inner.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**bpe))
        replies.write(json.dumps(inner.to_str()).encode() + b"\n")
        replies.flush()
        return
    for texts in messages:
        encoded = [e.ids for e in inner.encode_batch_fast(texts, add_special_tokens=False)]
        replies.write(json.dumps([*map(len, encoded)]).encode() + b"\n")
        for ids in encoded:
            replies.write(np.array(ids, np.int32).tobytes())
        replies.flush()


if __name__ == "__main__":
    try:
        _serve()
    except BrokenPipeError:  # the parent has ended, or was interrupted
        os._exit(0)
