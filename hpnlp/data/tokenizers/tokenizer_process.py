"""A process for the package `tokenizers`, whose threads allocate many small blocks.

`hpnlp.training` leaves one memory arena to all threads of its process (`hpnlp.training.processes.allocator`). There, two
threads of the package take longer than one: 72 MiB of text took 45 s with two threads and 36 s with one, and 14 s with two
threads in a process of their own. This file imports nothing of hpnlp, so that the process starts in 0.1 s.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from hpnlp.types import JSONValue

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
        if not sys.executable:
            raise OSError("the interpreter that runs is not known (sys.executable is empty)")
        # With -P, the modules beside this file do not hide others of their names, such as the package. In a group of its own,
        # the process gets no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-P", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        weakref.finalize(self, _end, self._process, self.parent)
        self._send((form, encode_special_tokens, bpe))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, parts of one array, without special tokens around them."""
        self._send(texts)
        lengths = self._receive()
        ids = np.frombuffer(bytearray(self._read(4 * sum(lengths))), np.int32)
        return np.split(ids, np.cumsum(lengths[:-1])) if lengths else []

    def train(self, texts: Iterable[str]) -> str:
        """Makes the vocabulary from texts, which are read once; returns the text of a tokenizer.json."""
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

    def _send(self, message: JSONValue) -> None:
        assert self._process.stdin is not None  # a pipe
        try:
            self._process.stdin.write(json.dumps(message, ensure_ascii=False).encode())
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()

    def _receive(self) -> Any:
        assert self._process.stdout is not None  # a pipe
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._fail()
        reply = json.loads(line)
        if isinstance(reply, dict):
            raise ValueError(reply["error"])
        return reply

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None  # a pipe
        content = self._process.stdout.read(size)
        if len(content) < size:
            self._fail()
        return content

    def _fail(self) -> NoReturn:
        code = self._process.wait()
        fix = ": free some memory" if code < 0 else ""  # such as the code of a kill for want of memory
        raise ChildProcessError(f"the process of the package tokenizers ended with code {code}{fix}")


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Kills the process, which may be at work that nobody needs, or kept open by a fork of this one."""
    if os.getpid() != parent:  # a fork of the process that started it
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
    process.wait()


def _messages() -> Iterator[Any]:
    """The messages of the parent, lines of JSON, until null. The process ends where the parent closes the pipe."""
    for line in sys.stdin.buffer:
        if not line.endswith(b"\n"):  # the parent was interrupted
            break
        message = json.loads(line)
        if message is None:
            return
        yield message
    os._exit(0)


def _exit_after(parent: int) -> None:
    """Exits within 0.5 s after the parent has ended, whose pipe a fork may keep open."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _serve() -> None:
    """Answers the messages of the parent, in the process."""
    threading.Thread(target=_exit_after, args=(os.getppid(),), daemon=True).start()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write into the pipe
    messages = _messages()
    form, encode_special_tokens, bpe = next(messages)

    def reply(message: JSONValue, *arrays: np.ndarray) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        for array in arrays:
            replies.write(array.tobytes())
        replies.flush()

    try:
        tokenizers: Any = importlib.import_module("tokenizers")  # Any, as pyright does not find its classes
        inner = tokenizers.Tokenizer.from_str(form)
        inner.encode_special_tokens = encode_special_tokens
        if bpe is not None:
            texts = (text for batch in messages for text in batch)
            inner.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**bpe))
            reply(inner.to_str())
            return
        for texts in messages:
            encoded = [np.array(e.ids, np.int32) for e in inner.encode_batch_fast(texts, add_special_tokens=False)]
            reply([*map(len, encoded)], *encoded)
    except BrokenPipeError:  # the parent has ended, or was interrupted
        os._exit(0)
    except Exception as error:  # the parent raises errors of the package
        reply({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    _serve()
