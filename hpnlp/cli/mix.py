"""`hpnlp mix`: mixes a language model with neighbours from its training text, and scores held-out text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from hpnlp import cli

USAGE = """
hpnlp mix RUN [--store="suffix(longest=48,words=3,k=32)"] [--gate_tokens=320000] [--epochs=2] [--nodynamic]

Looks up, at each position, what followed the same last tokens and words before, in the training text and in the held-out text
up to there, and mixes it with the probabilities of the run's language model. A small network, the gate, is trained on the last
training documents to weigh them. Prints bits per byte of the held-out text for the model, the index and both.

"static" rows have read the training text only, "adaptive" ones also the held-out text before the position, as a compressor has.
"dynamic" trains the model on each stretch of text after it was predicted. No figure uses later text.

Writes mixture.json, mixture.md, mixture.png and gate.npz, the parameters of the gate, to RUN.
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


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp mix`.

    Args:
      argv: "hpnlp mix" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid.
    """
    workdir = Path(cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp mix RUN", "workdir"))
    f = cli.FLAGS
    cli.prepare_jax()

    from flax.traverse_util import flatten_dict

    from hpnlp import plots
    from hpnlp.atomic_file import replaced
    from hpnlp.jobs.retrieval.mix import Options, Row, mix
    from hpnlp.report import mixture as report
    from hpnlp.report.files import replace_text
    from hpnlp.training.contents import locked
    from hpnlp.training.metrics import ProgressLines
    from hpnlp.training.run_directory import load_config

    def print_line(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def show(row: Row) -> None:
        print(f"{row.name}, {row.text}: {row.bits:.4f} bits per byte", flush=True)

    load_config(workdir)  # before the directory is locked, which would make it
    with locked(workdir):
        options = Options(f.store, f.gate_tokens, f.epochs, f.seed, f.dynamic)
        result = mix(
            workdir,
            options,
            ProgressLines(print_line, "steps"),
            show,
        )
        compressors = report.compressors(workdir, result.heldout_digest)
        text = report.render(result.rows, compressors, result.heldout_bytes, result.documents)
        record = {
            "step": result.step,
            "heldout_digest": result.heldout_digest,
            "options": dataclasses.asdict(options),
            "seconds": dict(result.seconds),
        }
        record["rows"] = [dataclasses.asdict(row) for row in result.rows]
        arrays: Any = flatten_dict(result.params, sep="/")
        with replaced(workdir / "gate.npz") as file:
            np.savez(file, **arrays)
        replace_text(workdir / "mixture.md", text)
        replace_text(workdir / "mixture.json", json.dumps(record, indent=1) + "\n")
        plots.plot_ladder(report.ladder(result.rows, compressors), workdir / "mixture.png")
    print(f"\n{text}\nwritten: {workdir}, with mixture.md, mixture.json, mixture.png and gate.npz", flush=True)
