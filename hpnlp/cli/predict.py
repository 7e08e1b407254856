"""`hpnlp predict`: labels, tags, targets and similarities of texts, by a trained model."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names, text_inputs
from hpnlp.cli.text_inputs import Example
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.reading.fields import FieldError
    from hpnlp.data.reading.sources import LeftOut
    from hpnlp.jobs.predictor import Predictor
    from hpnlp.tasks.predictions import Prediction

USAGE = """
hpnlp predict RUN "a text" "another text"
hpnlp predict RUN --file=reviews.csv --out=labels.csv
cat texts.txt | hpnlp predict RUN --file=- --format=jsonl

Predicts with a run of a classifier (label and probability), a tagger (a label for each word), a sequence-to-sequence model (the
target) or a dual encoder (the similarity of a pair). RUN is the directory of a run, or of a compressed or converted model.

Texts come from the command line, or from --file: text with one example in each line (.txt, or - for stdin), or records (.csv,
.tsv, .jsonl, .json, .parquet, .npz) with the fields of the run's data, or those of --fields; a label is not needed. On the
command line and in lines of text, a tab stands between the two texts of a pair.

Predictions are written as CSV or JSON lines, in the order of the examples, each with its texts and the fields of --keep. Blank
lines of text are left out; their number and the first ones are printed to stderr, and so is the number of texts that were cut
to data.seq_len tokens. CSV without predictions has its header.
"""

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl"}
CHUNK = 2048  # examples that are read, predicted and written at a time
INTERVAL = 10.0  # seconds between two lines of progress

flags.DEFINE_string("file", None, "File of texts or records; - for lines of text from stdin.")
flags.DEFINE_list(
    "fields", [], "Fields of the file's records that hold the texts; by default those of the run's data, such as text."
)
flags.DEFINE_list("keep", [], "Other fields of the file's records to write beside the predictions, such as an id.")
flags.DEFINE_bool(
    "skip_bad_lines", False, "Leave out, and count, records without a text or without tokens, or that cannot be read."
)
flags.DEFINE_string("out", None, "File to write, .csv or .jsonl; an older one is replaced. By default stdout.")
flags.DEFINE_enum("format", None, ["csv", "jsonl"], "Format of the output: by default that of --out, or csv.")
flags.DEFINE_integer(
    "top", 1, "Number of labels with their probabilities, the most probable first; 0 for all.", lower_bound=0
)
flags.DEFINE_integer("batch_size", 32, "Largest number of examples of a batch.", lower_bound=1, upper_bound=2**16)
flags.DEFINE_integer("step", None, "Step of the checkpoint; by default the best, or the newest if none was evaluated.")
flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "float16"], "Dtype of the model's products; by default that of the training."
)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp predict`.

    Args:
      argv: "hpnlp predict" and the arguments of the command.

    Raises:
      InputError: A flag, a text or the run is invalid.
    """
    arguments = cli.parse(argv, USAGE, positional=True)
    f = cli.FLAGS
    if not arguments:
        raise InputError('expected a run: write hpnlp predict RUN "a text", or hpnlp predict RUN --file=FILE')
    (directory, step), texts = run_names.expand_one(arguments[0], f.step), arguments[1:]
    if bool(texts) == bool(f.file):
        raise InputError("expected texts after the run, or --file=FILE (- for stdin), and not both")
    _check_flags(texts)
    form = _form(f.out, f.format)
    cli.prepare_jax()

    from hpnlp.atomic_file import replaced
    from hpnlp.data.reading import sources
    from hpnlp.jobs.predictor import Predictor

    predictor, left_out = Predictor(directory, step, f.dtype), sources.LeftOut()
    kind, prediction = text_inputs.with_fields(predictor.kind, f.fields), predictor.prediction_type
    inputs = text_inputs.TextInputs(kind, left_out, "--file=", f.keep, f.skip_bad_lines)
    examples = inputs.from_lines(enumerate(texts, 1), "text") if texts else inputs.from_file(f.file)
    header = _with_prediction(dict.fromkeys([*f.keep, *(column.name for column in kind.inputs)]), _names(prediction))
    cut: list[int] = []
    rows = _predicted(predictor, examples, left_out, cut)
    if f.out is None:
        count = _write(rows, form, header, sys.stdout)
    else:
        with replaced(Path(f.out)) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            count = _write(rows, form, header, text)
            text.detach()  # flushes it, and leaves the file open
        print(f"{f.out}: {count:,} predictions")
    for line in sources.described(left_out):
        print(f"hpnlp: {f.file}: left out: {line}", file=sys.stderr)
    if sum(cut):
        print(f"hpnlp: {predictor.cut_message(sum(cut), count)}", file=sys.stderr)
    if not count:
        print(f"hpnlp: {f.file}: no texts to predict from", file=sys.stderr)


def _check_flags(texts: Sequence[str]) -> None:
    """Raises InputError for flags without an effect, a missing input, and an output that would replace the input."""
    f = cli.FLAGS
    if texts or not text_inputs.has_records(f.file):
        cli.refuse(["fields", "keep"], "without a file of records, such as .csv: leave it out")
    if texts:
        cli.refuse(["skip_bad_lines"], "without --file: leave it out")
    if f.file:
        text_inputs.check_exists(f.file, "--file=")
    if f.out and f.file and os.path.realpath(f.out) == os.path.realpath(f.file):
        raise InputError(f"--out={f.out} is the file that is read: name another one")


def _form(out: str | None, form: str | None) -> str:
    """The format of the output."""
    if out is None:
        return form or "csv"
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES and form is None:
        raise InputError(f"--out={out}: expected a file .csv or .jsonl, or --format=csv or jsonl")
    if form is not None and SUFFIXES.get(suffix, form) != form:
        raise InputError(f"--out={out} with --format={form}: the suffix names another format: remove --format")
    if not Path(out).absolute().parent.is_dir() or Path(out).is_dir():
        raise InputError(f"--out={out}: expected a file in a directory that exists")
    return form or SUFFIXES[suffix]


def _predicted(
    predictor: Predictor, examples: Iterator[Example], left_out: LeftOut, cut: list[int]
) -> Iterator[tuple[dict[str, Any], Prediction]]:
    """`(fields, prediction)` of examples, with lines of progress on stderr; counts texts without tokens and cut ones."""
    start = shown = time.monotonic()
    done = 0
    while chunk := list(itertools.islice(examples, CHUNK)):  # memory does not grow with the number of examples
        texts = [example.text for example in chunk]

        def report_bad(number: int, error: FieldError, chunk: Sequence[Example] = chunk) -> None:
            place = chunk[number].place
            if not cli.FLAGS.skip_bad_lines:
                fix = "correct it, or leave it out" + " by --skip_bad_lines" * bool(cli.FLAGS.file)
                raise InputError(f"{place} {error}: {fix}") from error
            left_out.add("invalid", place)

        predictions, cut_here = predictor.predict_valid(texts, cli.FLAGS.batch_size, report_bad)
        cut.append(cut_here)
        yield from ((chunk[number].fields, prediction) for number, prediction in predictions.items())
        done += len(chunk)
        if (now := time.monotonic()) - shown > INTERVAL:
            shown = now
            print(f"hpnlp: {done:,} predictions, {done / (now - start):,.0f} per second", file=sys.stderr)


def _write(rows: Iterator[tuple[dict[str, Any], Prediction]], form: str, header: Iterable[str], file: Any) -> int:
    """Writes predictions, of which CSV has the header also if there are none. Returns their number."""
    count, writer = 0, csv.writer(file, lineterminator="\n")
    for count, (record, prediction) in enumerate(rows, 1):
        fields = _with_prediction(record, _fields(prediction))
        if form == "jsonl":
            file.write(json.dumps(fields, ensure_ascii=False, default=str) + "\n")
            continue
        if count == 1:
            writer.writerow(header)
        writer.writerow(map(_cell, fields.values()))
    if form == "csv" and not count:
        writer.writerow(header)
    return count


def _with_prediction(record: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record and of its prediction, whose names are other ones."""
    return {**record, **{f"predicted_{name}" if name in record else name: prediction[name] for name in prediction}}


def _names(prediction: type[Prediction]) -> dict[str, None]:
    """Names of the fields of predictions that are written."""
    from hpnlp.tasks.predictions import LabelPrediction

    names = [field.name for field in dataclasses.fields(prediction) if field.name != "words"]
    is_single = prediction is LabelPrediction and cli.FLAGS.top == 1
    return dict.fromkeys(names[:-1] if is_single else names)


def _fields(prediction: Prediction) -> dict[str, Any]:
    """The fields of a prediction, with --top labels."""
    values = {name: getattr(prediction, name) for name in _names(type(prediction))}
    if isinstance(probabilities := values.get("probabilities"), dict):
        shown = list(probabilities.items())[: cli.FLAGS.top or None]
        values["probabilities"] = {label: _rounded(value) for label, value in shown}
    return {name: _rounded(value) for name, value in values.items()}


def _rounded(value: object) -> Any:
    """Floats with six digits after the point."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _cell(value: object) -> Any:
    """A value of a cell: lists joined by spaces, and probabilities as JSON."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
