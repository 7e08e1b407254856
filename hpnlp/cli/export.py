"""`hpnlp export`: writes the model of a run as one file that runs without hpnlp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.types import InputError

USAGE = """
hpnlp export RUN --to=model.stablehlo [--length=N] [--batch=N] [--platforms=cpu,cuda]
hpnlp export RUN --to=model.onnx --format=onnx [--length=N] [--batch=N]

Writes the function of token ids [B, T] to logits, with the weights inside. An encoder also takes segment_ids, 1 for text and 0
for padding, and token_types where pairs of texts have types.

StableHLO, for any number of sequences B, is called in Python with JAX alone:

  import jax
  function = jax.export.deserialize(open("model.stablehlo", "rb").read())
  logits = function.call(tokens)

ONNX (pip install onnx) has a fixed number of sequences, and is run by onnxruntime and others.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_string("to", None, "File to write; an older one is replaced.")
flags.DEFINE_enum("format", "stablehlo", ["stablehlo", "onnx"], "Format of the file.")
flags.DEFINE_integer("length", 0, "Tokens of a sequence; 0 for data.seq_len of the run.", lower_bound=0)
flags.DEFINE_integer(
    "batch", 0, "Sequences of a batch; 0 for any number, or for one in the format onnx.", lower_bound=0
)
flags.DEFINE_list(
    "platforms", [], "Devices that call a StableHLO file: cpu, cuda, rocm, tpu; by default that of this process."
)
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp export`.

    Args:
      argv: "hpnlp export" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid, or the format does not have such a model.
    """
    workdir = cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp export RUN --to=FILE", "workdir")
    f, target = cli.FLAGS, Path(cli.required("to", "model.stablehlo"))
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise InputError(f"--to={target}: expected a file in a directory that exists")
    named = {".onnx": "onnx", ".stablehlo": "stablehlo"}.get(target.suffix, f.format)
    if named != f.format:
        raise InputError(
            f"--to={target} is named as a file of the format {named}, and --format={f.format}: pass --format={named}, or "
            "name the file otherwise"
        )
    if f.format == "onnx" and f.platforms:
        raise InputError("--platforms is for the format stablehlo: leave it out, ONNX files run on any device")
    cli.prepare_jax()

    from hpnlp.models.export import onnx_file, stablehlo
    from hpnlp.models.export.functions import logits_function
    from hpnlp.training import run_directory

    loaded = run_directory.load(*run_names.expand_one(workdir, f.step))
    function = logits_function(loaded.model, loaded.params, f.length or loaded.config.data.seq_len)
    if f.format == "stablehlo":
        stablehlo.write(function, target, batch=f.batch, platforms=f.platforms)
    else:
        onnx_file.write(function, target, batch=f.batch or 1)
    size = target.stat().st_size
    batch = f.batch or ("B" if f.format == "stablehlo" else 1)
    inputs = " and ".join(function.inputs)
    print(f"{target}: {size:,} bytes, a function of {inputs}, int32 [{batch}, {function.length}], to logits")
