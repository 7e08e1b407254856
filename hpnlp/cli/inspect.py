"""`hpnlp inspect`: measures the attention matrices of a trained model, and its loss by the length of the context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.types import InputError

USAGE = """
hpnlp inspect RUN [--windows=8] [--length=N] [--layers=0,5] [--batches=N]

Looks inside of the model of a run on its held-out data: a language model, masked language model, classifier or tagger. Prints a
table of the layers, and writes it with all heads to inspect.json in RUN, and pictures, inspect_*.png.

Of each attention matrix, a softmax of products of queries and keys, it measures the spectrum (the number of singular values
that hold 90 % of their sum, and the share of the sum in the leading quarter: where a few hold most of it, low-rank attention
such as linformer or nystrom can replace the layer), the mean distance of query and key (where it is small, a window can) and
the entropy of the rows. Beside each number stands that of attention which is spread evenly over the same keys. Mixers that
multiply no values by such a matrix, such as recurrences or Fourier mixing, are skipped.

The loss of all held-out tokens by the number of tokens before them in their document and sequence shows how much of the context
the model uses.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_integer("windows", 8, "Number of windows of held-out text whose attention is measured.", lower_bound=1)
flags.DEFINE_integer("length", 0, "Tokens of a window; 0 for data.seq_len of the run.", lower_bound=0)
flags.DEFINE_list("layers", [], "Layers whose attention is measured, from 0; all by default.")
flags.DEFINE_integer(
    "batches", 0, "Largest number of batches whose losses are measured, spread over the held-out data; 0 for all.",
    lower_bound=0, upper_bound=2**31 - 1,
)  # fmt: skip
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp inspect`.

    Args:
      argv: "hpnlp inspect" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid.
    """
    workdir = cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp inspect RUN", "workdir")
    f = cli.FLAGS
    layers = None if not f["layers"].present else _numbers(f.layers)
    directory, step = run_names.expand_one(workdir, f.step)
    cli.prepare_jax()

    from hpnlp.jobs.inspect import inspect_run

    settings = inspect_run.Settings(f.windows, f.length, layers, f.batches or None)
    inspection = inspect_run.inspect_run(directory, step, settings, _progress)
    print(f"{directory}, step {inspection.step}")
    print(inspect_run.render(inspection))
    print(f"written: {', '.join(map(str, inspect_run.write(inspection, Path(directory))))}")


def _numbers(texts: Sequence[str]) -> tuple[int, ...]:
    """The layers of --layers."""
    if not texts or not all(text.strip().isdecimal() for text in texts):
        raise InputError(f"--layers={','.join(texts)}: expected numbers of layers, as --layers=0,5")
    return tuple(int(text) for text in texts)


def _progress(work: str, done: int, total: int) -> None:
    """Prints every 64th batch to stderr."""
    if done and done % 64 == 0:
        print(f"{work}: {done} of {total or '?'} batches", file=sys.stderr)
