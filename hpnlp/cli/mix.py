"""`hpnlp mix`: mixes a language model with neighbours from its training text, and scores held-out text."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import datastore_flags
from hpnlp.types import InputError

USAGE = """
hpnlp mix RUN [--store="suffix(longest=48,words=3,k=32)"] [--gate_tokens=320000] [--epochs=2] [--nodynamic]
hpnlp mix RUN --nodynamic --datastore=DIR [--mixture=tuned] [--k=32]
hpnlp mix RUN --prompt="def " [--tokens=200] [--temperature=0.8] [--top_p=0.95]

Looks up, at each position, what followed the same last tokens and words before, in the training text and in the held-out text
up to there, and mixes it with the probabilities of the run's language model. A small network, the gate, is trained on the last
training documents to weigh them. Prints bits per byte of the held-out text for the model, the index and both.

"static" rows have read the training text only, "adaptive" ones also the held-out text before the position, as a compressor has.
"dynamic" trains the model on each stretch of text after it was predicted. No figure uses later text.

With --datastore, the model's probabilities are those with the neighbours of its hidden states, see hpnlp index build.

Writes mixture.json, mixture.md, mixture.png and gate.npz, the parameters of the gate, to RUN. With --prompt, a text is
continued with the mixture of an earlier call; the index of the training text is made first.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_string("store", "suffix", "Contexts that are looked up: suffix(shortest, longest, words, k).")
flags.DEFINE_integer(
    "gate_tokens",
    320_000,
    "Tokens at the end of the training text that train the gate, at most a fifth.",
    lower_bound=1,
)
flags.DEFINE_integer("epochs", 2, "Passes over these tokens.", lower_bound=1)
flags.DEFINE_boolean("dynamic", True, "Score the model with dynamic evaluation as well.")
flags.DEFINE_integer("seed", 0, "Seed of the order of training documents and of the gate.", lower_bound=0)
flags.DEFINE_string("prompt", None, "Text to continue, in place of scores.")
flags.DEFINE_integer("tokens", 200, "Largest number of new tokens.", lower_bound=1)
flags.DEFINE_float(
    "temperature", 0.8, "Temperature of sampling; 0 takes the most probable token each time.", lower_bound=0.0
)
flags.DEFINE_integer("top_k", 0, "Sample among the K most probable tokens; 0 for all.", lower_bound=0)
flags.DEFINE_float(
    "top_p",
    0.95,
    "Sample among the most probable tokens whose probabilities sum to P.",
    lower_bound=0.0,
    upper_bound=1.0,
)

datastore_flags.define()

OF_SCORES = ("store", "gate_tokens", "epochs", "dynamic", "datastore", "mixture", "k")
OF_TEXT = ("tokens", "temperature", "top_k", "top_p")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp mix`.

    Args:
      argv: "hpnlp mix" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid.
    """
    workdir = Path(cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp mix RUN", "workdir"))
    f = cli.FLAGS
    if f.prompt is not None:
        cli.refuse(OF_SCORES, "with --prompt, which reads the gate of an earlier call: leave it out")
        _continue(workdir)
        return
    cli.refuse(OF_TEXT, "without --prompt: leave it out")
    cli.prepare_jax()

    from hpnlp.jobs.retrieval import mixture_report as report
    from hpnlp.jobs.retrieval.mix import MixOptions, MixRow, mix, save_gate
    from hpnlp.report import comparison_plots
    from hpnlp.report.files import replace_text
    from hpnlp.training.config_file import load_config
    from hpnlp.training.files.contents import locked
    from hpnlp.training.files.metrics import ProgressLines

    def print_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def show(row: MixRow) -> None:
        print(f"{row.name}, {row.text}: {row.bits:.4f} bits per byte", flush=True)

    load_config(workdir)  # before the directory is locked, which would make it
    with locked(workdir):
        options = MixOptions(f.store, f.gate_tokens, f.epochs, f.seed, f.dynamic, datastore_flags.neighbours())
        result = mix(workdir, options, ProgressLines(print_line, "steps"), show)
        compressors = report.compressors(workdir, result.heldout_digest)
        text = report.render(result.rows, compressors, result.heldout_bytes, result.documents)
        record = {
            "step": result.step,
            "heldout_digest": result.heldout_digest,
            "options": dataclasses.asdict(options),
            "seconds": dict(result.seconds),
        }
        record["rows"] = [dataclasses.asdict(row) for row in result.rows]
        save_gate(workdir, result, options)
        replace_text(workdir / "mixture.md", text)
        replace_text(workdir / "mixture.json", json.dumps(record, indent=1) + "\n")
        comparison_plots.plot_ladder(report.ladder(result.rows, compressors), workdir / "mixture.png")
    if result.epochs > 1:
        print_line(
            f"hpnlp: the model has read its training text {result.epochs:.1f} times, so that the gate, which is trained on the "
            "end of it, relies on the model too much: a gain is smaller than it could be"
        )
    print(f"\n{text}\nwritten: {workdir}, with mixture.md, mixture.json, mixture.png and gate.npz", flush=True)


def _continue(workdir: Path) -> None:
    """Prints a continuation of the prompt."""
    f = cli.FLAGS
    if not f.temperature:
        cli.refuse(
            ["top_k", "top_p", "seed"], "with --temperature=0, which takes the most probable token: leave it out"
        )
    cli.prepare_jax()

    from hpnlp.jobs.retrieval.mixed_text import MixedModel
    from hpnlp.models.decode import TextStream
    from hpnlp.training.files.metrics import ProgressLines

    def note(line: str) -> None:
        print(f"hpnlp: {line}", file=sys.stderr, flush=True)

    model = MixedModel.load(workdir, ProgressLines(note, "contexts"))
    tokenizer = model.run.tokenizer
    ids = tokenizer.encode_prompt(f.prompt)
    if not len(ids):
        raise InputError("--prompt is empty, and the tokenizer has no token at the beginning of a text: pass some text")
    stream, begun, count = TextStream(tokenizer, ids), 0.0, 0
    print(f.prompt, end="", flush=True)
    for token in model.continued(ids, f.tokens, f.temperature, f.top_k, f.top_p, f.seed):
        begun, count = begun or time.perf_counter(), count + 1  # the first token includes compilation
        print(stream.push([token]), end="", flush=True)
    print(stream.push([], final=True), flush=True)
    if count > 1:
        note(f"{(count - 1) / (time.perf_counter() - begun):,.0f} tokens/s")
