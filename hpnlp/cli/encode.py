"""`hpnlp encode`: a file of vectors of texts, by a trained model."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names, text_inputs
from hpnlp.cli.text_inputs import STDIN, Example, TextInputs
from hpnlp.types import InputError

USAGE = """
hpnlp encode RUN texts.txt --to=vectors.npy
hpnlp encode RUN a.jsonl b.jsonl.gz --fields=body --to=vectors.npy --dtype=float16
cat texts.txt | hpnlp encode RUN --to=vectors.npy

Writes a vector of each text: those of a dual encoder have length 1, so that their products are cosines; those of an encoder are
its last hidden states, pooled as for its labels, or their mean. RUN is the directory of a run, or of a compressed or converted
model, such as hpnlp convert makes of a directory of sentence-transformers.

Texts come from files, or from stdin: text with one in each line, or records (.csv, .tsv, .jsonl, .json, .parquet, .npz) with
the field of the run's data, or that of --fields. In lines of text, a tab stands between the two texts of a pair. Files are read
once before the work begins, to count their texts and to find invalid records.

The file holds a row for each text, in their order: floats [n, D]; or with --dtype=int8, records of int8 "codes" [D] and a
float32 "scale", whose product is the vector. Lines without text have rows of zeros; their number and the first ones are printed
to stderr, and so is the number of texts that were cut to data.seq_len tokens.
"""

flags.DEFINE_string("to", None, "File to write, .npy; an older one is replaced.")
flags.DEFINE_enum("dtype", "float32", ["float32", "float16", "int8"], "Dtype of the numbers in the file.")
flags.DEFINE_boolean(
    "partners",
    False,
    "Encode texts as second texts of pairs, as documents beside queries: by the second tower of a dual encoder with "
    "model.shared=False.",
)
flags.DEFINE_enum(
    "compute_dtype",
    None,
    ["float32", "bfloat16", "float16"],
    "Dtype of the model's products; by default that of the training. Products of bfloat16 take half the time on CPUs with "
    "instructions for them.",
)
flags.DEFINE_list(
    "fields", [], "Fields of records that hold the texts; by default those of the run's data, such as text."
)
flags.DEFINE_integer("batch_size", 64, "Largest number of texts of a batch.", lower_bound=1, upper_bound=2**16)
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp encode`.

    Args:
      argv: "hpnlp encode" and the arguments of the command.

    Raises:
      InputError: A flag, a file, a text or the run is invalid, or the vectors cannot be written.
    """
    arguments = cli.parse(argv, USAGE, positional=True)
    f = cli.FLAGS
    if not arguments:
        raise InputError("expected a run: write hpnlp encode RUN texts.txt --to=vectors.npy")
    (directory, step), names = run_names.expand_one(arguments[0], f.step), arguments[1:] or [STDIN]
    target = Path(cli.required("to", "vectors.npy"))
    _check_files(names, target)
    cli.prepare_jax()

    from hpnlp.atomic_file import replaced
    from hpnlp.data.reading import sources
    from hpnlp.jobs.predictor import Predictor
    from hpnlp.jobs.vector_files import write_vectors
    from hpnlp.training.files.metrics import ProgressLines

    predictor, without_text = Predictor(directory, step, f.compute_dtype), sources.LeftOut()
    kind = text_inputs.with_fields(predictor.text_kind, f.fields)
    inputs = TextInputs(kind, sources.LeftOut(), keeps_blank=True)
    total = sum(1 for _ in _examples(names, inputs)) if all(map(_is_regular, names)) else 0
    progress = ProgressLines(lambda line: print(f"hpnlp: {line}", file=sys.stderr), "texts")
    with replaced(target) as file:
        vectors, cut = write_vectors(
            predictor,
            ((example.place, example.text) for example in _examples(names, inputs)),
            file,
            f.dtype,
            f.batch_size,
            lambda place: without_text.add(text_inputs.WITHOUT_TEXT, place),
            lambda done: progress("encoding", done, total),
            f.partners,
        )
    print(f"{target}: {vectors.count:,} vectors of {vectors.dim} numbers, {f.dtype}")
    for line in sources.described(without_text):
        print(f"hpnlp: rows of zeros: {line}", file=sys.stderr)
    if cut:
        print(f"hpnlp: {predictor.cut_message(cut, vectors.count)}", file=sys.stderr)


def _check_files(names: Sequence[str], target: Path) -> None:
    """Raises InputError for flags without an effect, and for an output that cannot be written, before the model is read."""
    if target.suffix != ".npy":
        raise InputError(f"--to={target}: expected a file .npy")
    if not target.absolute().parent.is_dir() or target.is_dir():
        raise InputError(f"--to={target}: expected a file in a directory that exists")
    if os.path.exists(target) and not _is_regular(str(target)):
        raise InputError(f"--to={target} is not a regular file: name another one")
    if names.count(STDIN) > 1:
        raise InputError(f"{' '.join(names)}: stdin can be read once: name it once")
    for name in names:
        text_inputs.check_exists(name)
        if os.path.realpath(name) == os.path.realpath(target):
            raise InputError(f"--to={target} is a file that is read: name another one")
    if not any(map(text_inputs.has_records, names)):
        cli.refuse(["fields"], "without a file of records, such as .jsonl: leave it out")


def _is_regular(name: str) -> bool:
    """Whether a name is that of a regular file, which can be read twice."""
    return name != STDIN and os.path.exists(name) and stat.S_ISREG(os.stat(name).st_mode)


def _examples(names: Sequence[str], inputs: TextInputs) -> Iterator[Example]:
    """The examples of all files."""
    for name in names:
        yield from inputs.from_file(name)
