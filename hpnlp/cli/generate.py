"""`hpnlp generate`: continues prompts with a trained model, and streams the text."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from hpnlp import cli
from hpnlp.cli import datastore_flags, run_names
from hpnlp.types import InputError, Tokenizer

if TYPE_CHECKING:
    from hpnlp.models.decode import Generation
    from hpnlp.training.run_directory import Run

USAGE = """
hpnlp generate RUN [RUN ...] --prompt="def " --tokens=200 --temperature=0.8 --top_p=0.95 --seed=0

Continues prompts with the model of a run, such as runs/bytes. Several prompts of any lengths (--prompt given more than once)
are one batch. The text of a single prompt is streamed to stdout, the texts of several are printed at the end; timings are
printed to stderr.
--prompt_file=- reads prompts from stdin: printf "def \\nclass " | hpnlp generate runs/bytes --prompt_file=-

The probabilities of several runs with one vocabulary are averaged; RUN@STEP is the checkpoint of a step, RUN@last3 the newest
three checkpoints of a run, and SWEEP@best3 the three best finished runs of a directory.
"""

MAX_PROMPT_BYTES = 1 << 26  # limit of the total size of the prompts in a file
LONG_PROMPT = 4096  # tokens from which on the prefill is announced

flags.DEFINE_string("workdir", None, "The same as RUN; several runs are separated by commas.")
flags.DEFINE_multi_string(
    "prompt", [], "Text to continue; may be given more than once. Without a prompt, the model starts from nothing."
)
flags.DEFINE_string("prompt_file", None, "File of prompts, one per line, or - for stdin. Empty lines are skipped.")
flags.DEFINE_integer("tokens", 200, "Number of new tokens for each prompt.")
flags.DEFINE_float("temperature", 0.8, "Temperature of sampling; 0 takes the most probable token each time.")
flags.DEFINE_integer("top_k", 0, "Sample among the K most probable tokens; 0 for all.")
flags.DEFINE_float("top_p", 0.95, "Sample among the most probable tokens whose probabilities sum to P.")
flags.DEFINE_integer("seed", 0, "Seed of sampling, 0 to 2**32 - 1. Equal seeds give equal text.")
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")
flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Dtype of the model's products; by default that of the training."
)

datastore_flags.define()


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp generate`.

    Args:
      argv: "hpnlp generate" and the arguments of the command.

    Raises:
      InputError: A flag, a prompt or the run is invalid.
    """
    names = cli.named_runs(cli.parse(argv, USAGE, positional=True), "hpnlp generate RUN --prompt=TEXT", "workdir")
    for name in names[1:]:  # several runs form an ensemble
        if not any(map(os.path.exists, (name, name.rpartition("@")[0]))):
            raise InputError(f"{name!r} holds no run: name one, or write a prompt as --prompt={name!r}")
    if not cli.FLAGS.temperature:
        cli.refuse(
            ["top_k", "top_p", "seed"], "with --temperature=0, which takes the most probable token: leave it out"
        )
    prompts = _prompts()
    cli.prepare_jax()

    from hpnlp.data.tokenizers.prompt import prompt_bytes
    from hpnlp.jobs import ensembles
    from hpnlp.jobs.dtypes import overflow_checked_chunks, with_dtype
    from hpnlp.training import run_directory
    from hpnlp.training.config_file import load_config

    names = [part for name in names for part in ([name] if os.path.exists(name) else name.split(","))]
    members = run_names.expand(names, cli.FLAGS.step)
    for directory, _ in members:
        run_directory.check_task(directory, load_config(directory), ensembles.TASKS, "generate")
    loaded = ensembles.load_ensemble(members)
    if cli.FLAGS.dtype:
        loaded = with_dtype(loaded, cli.FLAGS.dtype)
    loaded = datastore_flags.mixed(loaded, members)
    prompt_ids = [loaded.tokenizer.encode_prompt(prompt) for prompt in prompts]
    length = max(len(ids) for ids in prompt_ids)
    if length >= LONG_PROMPT:
        _note(f"reading a prompt of {length:,} tokens")
    with _heartbeat("compiling"):
        generation = _make_generation(loaded, prompt_ids)
    if length + cli.FLAGS.tokens > loaded.model.config.max_len:
        _note(
            f"{length + cli.FLAGS.tokens} tokens are more than the {loaded.model.config.max_len} that the model was trained on"
        )
    texts = _Texts(
        loaded.tokenizer, prompt_ids, [prompt_bytes(prompt).decode("utf-8", "replace") for prompt in prompts]
    )
    chunks = overflow_checked_chunks(generation)
    count = texts.extend(chunks, loaded.eos_ids, f"reading a prompt of {length:,} tokens")
    texts.finish()
    seconds = generation.seconds
    rate = count / max(seconds["decode"], 1e-9)
    _note(f"compile {seconds['compile']:.1f} s, prefill {1e3 * seconds['prefill']:.0f} ms, {rate:,.0f} tokens/s")


def _make_generation(loaded: Run, prompt_ids: Sequence[Any]) -> Generation:
    """The continuation of the prompts, with the sampling of the flags."""
    from hpnlp.models import decode

    f = cli.FLAGS
    return decode.Generation(
        loaded.model,
        loaded.params,
        prompt_ids,
        tokens=f.tokens,
        sampling=decode.Sampling(f.temperature, f.top_k, f.top_p, f.seed, loaded.tokenizer.drawable_ids()),
        eos_id=loaded.eos_ids,
        pad_id=loaded.tokenizer.pad_id,
    )


class _Texts:
    """Texts of a batch, which grow token by token; a single one is printed as it grows."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[Any], prompts: Sequence[str]) -> None:
        from hpnlp.models.decode import TextStream

        self.texts = list(prompts)
        self.streams = [TextStream(tokenizer, ids) for ids in prompt_ids]
        self.is_single = len(self.texts) == 1
        if self.is_single:
            print(self.texts[0], end="", flush=True)

    def extend(self, chunks: Iterator[np.ndarray], eos_ids: Sequence[int], waiting: str) -> int:
        """Adds the tokens of chunks. Returns their number. `waiting` describes the time before the first of them."""
        count, ended = 0, np.zeros(len(self.texts), bool)
        with _heartbeat(waiting):
            first = next(chunks)
        for chunk in itertools.chain([first], chunks):
            stops = np.isin(chunk, eos_ids)
            for index in np.flatnonzero(~ended).tolist():
                # Padding follows the end of a text, and in some tokenizers every id stands for text, padding too.
                ids = chunk[index, : stops[index].argmax() + 1] if stops[index].any() else chunk[index]
                count += len(ids)
                self.add(index, ids)
            ended |= stops.any(axis=1)
        return count

    def add(self, index: int, ids: np.ndarray | list[int], *, final: bool = False) -> None:
        """Adds tokens to one of the texts; `final` adds incomplete characters too."""
        piece = self.streams[index].push(ids, final=final)
        self.texts[index] += piece
        if self.is_single:
            print(piece, end="", flush=True)

    def finish(self) -> None:
        """Ends all texts, and prints those that were not printed while they grew."""
        for index in range(len(self.texts)):
            self.add(index, [], final=True)
        numbered = (f"--- prompt {number}\n{text}" for number, text in enumerate(self.texts, 1))
        print("" if self.is_single else "\n".join(numbered), flush=True)  # before the timings on stderr


def _prompts() -> list[str]:
    """The prompts of all flags; one empty prompt without any."""
    prompts = list(cli.FLAGS.prompt)
    if cli.FLAGS.prompt_file is not None:
        prompts += _read_prompts(cli.FLAGS.prompt_file)
    return prompts or [""]


def _read_prompts(name: str) -> list[str]:
    """The lines of a file, or of stdin for "-". Raises InputError unless it is UTF-8 text."""
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1) if sys.stdin else b""
        else:
            with open(name, "rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise _prompt_file_error(name, error.strerror or str(error)) from error
    if len(data) > MAX_PROMPT_BYTES:
        raise _prompt_file_error(
            name, f"it holds more than {MAX_PROMPT_BYTES >> 20} MiB", "use fewer or shorter prompts"
        )
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _prompt_file_error(name, "it is UTF-16", "convert it, for example with iconv -f UTF-16 -t UTF-8")
    if 0 in data:
        raise _prompt_file_error(name, f"byte {data.index(0)} is zero, as in binary files and UTF-16")
    from hpnlp.data.reading.files import not_utf8_byte

    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise _prompt_file_error(name, not_utf8_byte(error)) from error
    prompts = [line for line in (line.removesuffix("\r") for line in lines) if line]
    if not prompts:
        raise _prompt_file_error(name, "it holds no prompt", "write one per line")
    return prompts


def _prompt_file_error(name: str, reason: str, fix: str = "use a file of UTF-8 text, or - for stdin") -> InputError:
    return InputError(f"--prompt_file={name}: {reason}: {fix}")


@contextlib.contextmanager
def _heartbeat(activity: str, interval: float = 10.0) -> Iterator[None]:
    """Prints a line every `interval` seconds while the block runs."""
    done, start = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(interval):
            _note(f"{activity}: {time.monotonic() - start:.0f} s so far")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _note(line: str) -> None:
    """Prints a line to stderr."""
    print(f"hpnlp: {line}", file=sys.stderr)
