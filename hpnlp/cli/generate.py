"""`hpnlp generate`: continues prompts with a trained model, and streams the text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from hpnlp import cli
from hpnlp.types import InputError

USAGE = """
hpnlp generate --workdir=runs/bytes --prompt="def " --tokens=200 --temperature=0.8 --top_p=0.95 --seed=0

Continues a prompt, or several of any lengths as one batch (--prompt given again), with the model of a run. Text goes to
stdout as it is made, that of several prompts at the end; what it took goes to stderr.
"""

flags.DEFINE_string("workdir", None, "The run whose model writes.")
flags.DEFINE_multi_string("prompt", [], "A text to continue; may be given again. Without one, the model begins itself.")
flags.DEFINE_string("prompt_file", None, "A file of prompts, one a line.")
flags.DEFINE_integer("tokens", 200, "New tokens for each prompt.")
flags.DEFINE_float("temperature", 0.8, "0 takes the most probable token each time; 1 draws as the model believes.")
flags.DEFINE_integer("top_k", 0, "Draw among so many most probable tokens; 0 for all.")
flags.DEFINE_float("top_p", 0.95, "Draw among the most probable tokens that together reach this probability.")
flags.DEFINE_integer("seed", 0, "The same seed gives the same text.")
flags.DEFINE_integer("step", None, "The checkpoint to take; by default the best, or the newest where none was scored.")


def run(argv: Sequence[str]) -> None:
    cli.parse(argv, USAGE)
    prompts, workdir = _prompts(), cli.required("workdir", "runs/bytes")
    cli.prepare_jax()

    from hpnlp.data.prompt import prompt_bytes
    from hpnlp.training import decode
    from hpnlp.training import run as runs

    f = cli.FLAGS
    loaded = runs.load(workdir, f.step)
    tokenizer, model = loaded.tokenizer, loaded.model
    encoded = [tokenizer.encode_prompt(prompt) for prompt in prompts]
    longest = max(len(ids) for ids in encoded) + f.tokens
    generation = decode.Generation(
        model,
        loaded.params,
        encoded,
        tokens=f.tokens,
        temperature=f.temperature,
        top_k=f.top_k,
        top_p=f.top_p,
        seed=f.seed,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        allowed=decode.speakable(tokenizer),
    )
    if longest > model.config.max_len:
        _note(f"{longest} tokens are more than the {model.config.max_len} that the model was trained on")
    streams = [decode.TextStream(tokenizer, ids) for ids in encoded]
    texts = [prompt_bytes(prompt).decode("utf-8", "replace") for prompt in prompts]
    alone, made = len(prompts) == 1, 0

    def add(row: int, piece: str) -> None:
        texts[row] += piece
        if alone:
            print(piece, end="", flush=True)

    if alone:
        print(texts[0], end="", flush=True)
    for chunk in generation:
        made += int((chunk != tokenizer.pad_id).sum())
        for row, ids in enumerate(chunk):
            add(row, streams[row].push(ids))
    for row, stream in enumerate(streams):
        add(row, stream.push([], final=True))
    print("" if alone else "\n".join(f"--- prompt {number}\n{text}" for number, text in enumerate(texts, 1)))
    seconds = generation.seconds
    rate = made / max(seconds["decode"], 1e-9)
    _note(f"compile {seconds['compile']:.1f} s, prefill {1e3 * seconds['prefill']:.0f} ms, {rate:,.0f} tokens/s")


def _prompts() -> list[str]:
    prompts = list(cli.FLAGS.prompt)
    if cli.FLAGS.prompt_file:
        try:
            with open(cli.FLAGS.prompt_file, encoding="utf-8") as file:
                prompts += [line for line in file.read().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else f"byte {error.start} is not UTF-8"
            raise InputError(f"--prompt_file={cli.FLAGS.prompt_file}: {what}: name a file of UTF-8 text") from error
    return prompts or [""]


def _note(line: str) -> None:
    print(f"hpnlp: {line}", file=sys.stderr)
