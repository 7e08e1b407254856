"""`hpnlp generate`: continues prompts with a trained model, and streams the text."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from hpnlp import cli
from hpnlp.types import InputError

USAGE = """
hpnlp generate --workdir=runs/bytes --prompt="def " --tokens=200 --temperature=0.8 --top_p=0.95 --seed=0

Continues a prompt, or several of any lengths as one batch (--prompt given again), with the model of a run. Text goes to
stdout as it is made, that of several prompts at the end; what it took goes to stderr. --prompt_file=- reads prompts from
stdin, as in: printf "def \nclass " | hpnlp generate --workdir=runs/bytes --prompt_file=-
"""

PROMPT_BYTES = 1 << 26  # of all prompts in a file, at most
NOTED = 4096  # tokens of a prompt, from which reading it is announced

flags.DEFINE_string("workdir", None, "The run whose model writes.")
flags.DEFINE_multi_string("prompt", [], "A text to continue; may be given again. Without one, the model begins itself.")
flags.DEFINE_string("prompt_file", None, "A file of prompts, one a line; - for stdin. Empty lines are left out.")
flags.DEFINE_integer("tokens", 200, "New tokens for each prompt.")
flags.DEFINE_float("temperature", 0.8, "0 takes the most probable token each time; 1 draws as the model believes.")
flags.DEFINE_integer("top_k", 0, "Draw among so many most probable tokens; 0 for all.")
flags.DEFINE_float("top_p", 0.95, "Draw among the most probable tokens that together reach this probability.")
flags.DEFINE_integer("seed", 0, "The same seed gives the same text; 0 to 2**32 - 1.")
flags.DEFINE_integer("step", None, "The checkpoint to take; by default the best, or the newest where none was scored.")


def run(argv: Sequence[str]) -> None:
    cli.parse(argv, USAGE)
    prompts, workdir = _prompts(), cli.required("workdir", "runs/bytes")
    cli.prepare_jax()

    from hpnlp.data.prompt import prompt_bytes
    from hpnlp.models import decode
    from hpnlp.training import run_directory as runs

    f = cli.FLAGS
    loaded = runs.load(workdir, f.step)
    tokenizer, model = loaded.tokenizer, loaded.model
    encoded = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    read = max(len(ids) for ids in encoded)
    if read >= NOTED:
        _note(f"reading a prompt of {read:,} tokens")
    with _heartbeat("compiling"):
        generation = decode.Generation(
            model,
            loaded.params,
            encoded,
            tokens=f.tokens,
            temperature=f.temperature,
            top_k=f.top_k,
            top_p=f.top_p,
            seed=f.seed,
            eos_id=loaded.eos_ids,
            pad_id=tokenizer.pad_id,
            allowed=decode.speakable(tokenizer),
        )
    if read + f.tokens > model.config.max_len:
        _note(f"{read + f.tokens} tokens are more than the {model.config.max_len} that the model was trained on")
    streams = [decode.TextStream(tokenizer, ids) for ids in encoded]
    texts = [prompt_bytes(prompt).decode("utf-8", "replace") for prompt in prompts]
    alone, made = len(prompts) == 1, 0

    def add(row: int, piece: str) -> None:
        texts[row] += piece
        if alone:
            print(piece, end="", flush=True)

    if alone:
        print(texts[0], end="", flush=True)
    chunks = iter(generation)
    with _heartbeat(f"reading a prompt of {read:,} tokens"):
        first = next(chunks)
    ended = np.zeros(len(prompts), bool)
    for chunk in itertools.chain([first], chunks):
        stops = np.isin(chunk, loaded.eos_ids)
        for row in np.flatnonzero(~ended).tolist():
            # Pads follow the end of a row, and some tokenizers have none that stands for nothing.
            ids = chunk[row, : stops[row].argmax() + 1] if stops[row].any() else chunk[row]
            made += len(ids)
            add(row, streams[row].push(ids))
        ended |= stops.any(axis=1)
    for row, stream in enumerate(streams):
        add(row, stream.push([], final=True))
    print("" if alone else "\n".join(f"--- prompt {number}\n{text}" for number, text in enumerate(texts, 1)))
    seconds = generation.seconds
    rate = made / max(seconds["decode"], 1e-9)
    _note(f"compile {seconds['compile']:.1f} s, prefill {1e3 * seconds['prefill']:.0f} ms, {rate:,.0f} tokens/s")


def _prompts() -> list[str]:
    prompts = list(cli.FLAGS.prompt)
    if cli.FLAGS.prompt_file is not None:
        prompts += _read_prompts(cli.FLAGS.prompt_file)
    return prompts or [""]


def _read_prompts(name: str) -> list[str]:
    """The lines of a file, or of stdin where it is named "-". Raises InputError unless it is UTF-8 text."""

    def refused(reason: str, fix: str = "name a file of UTF-8 text, or - for stdin") -> InputError:
        return InputError(f"--prompt_file={name}: {reason}: {fix}")

    try:
        if name == "-":
            data = sys.stdin.buffer.read(PROMPT_BYTES + 1) if sys.stdin else b""
        else:
            with open(name, "rb") as file:
                data = file.read(PROMPT_BYTES + 1)
    except OSError as error:
        raise refused(error.strerror or str(error)) from error
    if len(data) > PROMPT_BYTES:
        raise refused(f"it holds more than {PROMPT_BYTES >> 20} MiB", "give fewer or shorter prompts")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise refused("it is UTF-16", "convert it, as with iconv -f UTF-16 -t UTF-8")
    if 0 in data:
        raise refused(f"byte {data.index(0)} is zero, as in binary files and UTF-16")
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise refused(f"byte {error.start} is not UTF-8") from error
    prompts = [line for line in (line.removesuffix("\r") for line in lines) if line]
    if not prompts:
        raise refused("it holds no prompt", "write one a line")
    return prompts


@contextlib.contextmanager
def _heartbeat(doing: str, every: float = 10.0) -> Iterator[None]:
    """Prints a line every so many seconds while the block runs."""
    done, begun = threading.Event(), time.monotonic()

    def report() -> None:
        while not done.wait(every):
            _note(f"{doing}: {time.monotonic() - begun:.0f} s so far")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _note(line: str) -> None:
    print(f"hpnlp: {line}", file=sys.stderr)
