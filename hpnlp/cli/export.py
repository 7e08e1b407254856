"""`hpnlp export`: writes the model of a run as one file that runs without hpnlp."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.models.export.formats import FORMATS
from hpnlp.types import InputError

USAGE = """
hpnlp export RUN --to=DIR [--format=onnx]
hpnlp export RUN --to=model.onnx [--length=N] [--batch=N]
hpnlp export RUN --to=model.stablehlo [--length=N] [--batch=N] [--platforms=cpu,cuda]

A directory, of a classifier or a tagger, is served without hpnlp: it has the model, the tokenizer with the special tokens of
training, the labels, predict.py, which runs on onnxruntime (or jax) and tokenizers alone, and a README.md. Its predictions are
compared with those of the run for held-out texts.

A file holds the function of token ids [B, T] to logits, with the weights inside. An encoder also takes segment_ids, 1 for text
and 0 for padding, and token_types where pairs of texts have types. ONNX (pip install onnx) is run by onnxruntime and others;
StableHLO is called in Python with JAX alone:

  import jax
  function = jax.export.deserialize(open("model.stablehlo", "rb").read())
  logits = function.call(tokens)

Both take any batch and any length up to that of learned positions, where the model can be exported so.
"""

BY_SUFFIX = {entry.suffix: name for name, entry in FORMATS.items()}

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_string("to", None, "Directory or file (.onnx, .stablehlo) to write; an older export is replaced.")
flags.DEFINE_enum("format", None, list(FORMATS), "Format; by default that of the file's suffix, or onnx.")
flags.DEFINE_integer(
    "length", 0, "Tokens of a sequence; 0 for any number, up to the longest of the model.", lower_bound=0
)
flags.DEFINE_integer("batch", 0, "Sequences of a batch; 0 for any number.", lower_bound=0)
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
    workdir = cli.named_run(cli.parse(argv, USAGE, positional=True), "hpnlp export RUN --to=DIR", "workdir")
    f, target = cli.FLAGS, Path(cli.required("to", "DIR"))
    form = _form(target, f.format)
    is_file = target.suffix in BY_SUFFIX
    if is_file and (target.is_dir() or not target.absolute().parent.is_dir()):
        raise InputError(f"--to={target}: expected a file in a directory that exists")
    if f.platforms and (form == "onnx" or not is_file):
        raise InputError("--platforms is for files of the format stablehlo: leave it out, or pass --to=model.stablehlo")
    directory, step = run_names.expand_one(workdir, f.step)
    cli.prepare_jax()

    from hpnlp.jobs.export import export_run
    from hpnlp.training import run_directory

    if not is_file:
        export_run.check_target(target)
    run = run_directory.load(directory, step)
    if not is_file:
        export_run.write_directory(run, Path(directory), target, form, length=f.length, batch=f.batch)
        print(f"{target}: next: python {target / export_run.SCRIPT} TEXT")
        return
    written = export_run.write_model(run, target, form, length=f.length, batch=f.batch, platforms=f.platforms)
    for remark in written.remarks:
        print(f"{target}: {remark}")
    inputs = " and ".join(written.function.inputs)
    print(f"{target}: {target.stat().st_size:,} bytes, a function of {inputs}, int32 {written.shape}, to logits")


def _form(target: Path, form: str | None) -> str:
    """The format to write, by --format and the suffix of --to."""
    named = BY_SUFFIX.get(target.suffix)
    if form and named and form != named:
        raise InputError(
            f"--to={target} is named as a file of the format {named}, and --format={form}: pass --format={named}, or name the "
            "file otherwise"
        )
    return form or named or "onnx"
