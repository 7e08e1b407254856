"""Exports of runs: one file, or a directory that is served without hpnlp."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import runpy
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hpnlp import measure, tasks
from hpnlp.data.examples.kind import Kind
from hpnlp.jobs import held_out
from hpnlp.jobs.export import exported_tokenizer
from hpnlp.models.export import onnx_file, stablehlo
from hpnlp.models.export.formats import FORMATS
from hpnlp.models.export.functions import ExportedFunction, logits_function
from hpnlp.models.export.onnx_experts import with_dense_experts
from hpnlp.models.export.onnx_weights import for_runtimes
from hpnlp.ops.weight import dense_tree
from hpnlp.tasks.predictions import TrainedModel
from hpnlp.training.files.contents import EXPORT_FILE, EXPORT_SCRATCH, LOCK, Contents, contents_of, locked
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

SCRIPT = "predict.py"
FILES = (*(entry.model_file for entry in FORMATS.values()), EXPORT_FILE, SCRIPT, "README.md", *exported_tokenizer.FILES)
BATCH_SIZE = 32  # default of the script
TIMED = 8  # held-out texts whose time is measured
TOLERANCE = 1e-3  # largest difference of a probability where products are not rounded
INTEGER_TOLERANCE = 0.1  # the same for int8 models: the runtime rounds their inputs by another range


@dataclasses.dataclass(frozen=True)
class Written:
    """A written model file.

    Attributes:
      function: The function that the file holds.
      batch: Sequences of a batch, 0 for any number.
      remarks: Sizes that are fixed because the model cannot be exported for any, one line each.
      is_rounded: Whether inputs of products are rounded to 8 bits, over the range of the whole batch.
    """

    function: ExportedFunction
    batch: int
    remarks: tuple[str, ...]
    is_rounded: bool

    @property
    def shape(self) -> str:
        """Shape of the inputs, such as "[B, T]"."""
        return f"[{self.batch or 'B'}, {self.function.length or 'T'}]"


def write_model(
    run: Run, path: Path, form: str, *, length: int = 0, batch: int = 0, platforms: Sequence[str] = ()
) -> Written:
    """Writes the logits of a run's model as one file, for any batch and any length where the model can be exported so.

    Args:
      run: A run of a language model or an encoder.
      path: The file.
      form: An entry of FORMATS.
      length: Tokens of a sequence; 0 for any number, or else `data.seq_len`.
      batch: Sequences of a batch; 0 for any number, or else one.
      platforms: Platforms of a StableHLO file; () for that of this process.

    Returns:
      The file and its sizes.

    Raises:
      InputError: The model has no such file.
    """
    fixed = run.model.config.needed_length(run.config.data.seq_len)
    lengths = [length] if length else [fixed] if fixed else [0, run.config.data.seq_len]
    attempts = [(size, batch) for size in lengths] + ([] if batch else [(lengths[-1], 1)])
    model, weights = run.model, run.params
    if form == "onnx":
        model, weights = with_dense_experts(model), for_runtimes(weights)
    remarks = []
    for tokens, sequences in attempts:
        try:
            function = logits_function(model, weights, tokens)
            is_rounded = False
            if form == "onnx":
                is_rounded = onnx_file.write(function, path, batch=sequences)
            else:
                stablehlo.write(function, path, batch=sequences, platforms=platforms)
            return Written(function, sequences, tuple(remarks), is_rounded)
        except InputError as error:
            if (tokens, sequences) == attempts[-1]:
                raise
            remarks.append(str(error))
    raise AssertionError("the last attempt returns or raises")


def check_target(target: Path) -> None:
    """Checks that a directory can hold an export: it is absent, empty, or holds an earlier export.

    Args:
      target: The directory.

    Raises:
      InputError: It holds something else, or cannot be made.
    """
    if target.exists() and not target.is_dir():
        raise InputError(f"--to={target} is a file: name a directory, or a file .onnx or .stablehlo")
    if contents_of(target) not in (Contents.NOTHING, Contents.EXPORTED):
        raise InputError(f"--to={target} holds {contents_of(target).value}: name another directory")
    if not target.absolute().parent.is_dir():
        raise InputError(f"--to={target}: the directory {target.absolute().parent} does not exist: make it first")


def write_directory(
    run: Run,
    source: Path,
    target: Path,
    form: str,
    *,
    length: int = 0,
    batch: int = 0,
) -> None:
    """Writes a classifier or a tagger as a directory that is served with onnxruntime or jax, and tokenizers, alone.

    Prints lines on the files, and on the comparison with the run.

    Args:
      run: The run.
      source: Directory of the run.
      target: The directory; an earlier export in it is replaced.
      form: An entry of FORMATS.
      length: As for `write_model`.
      batch: As for `write_model`.

    Raises:
      InputError: The run is of another task, cannot be exported, or the exported model predicts other labels than the run for
        held-out texts.
    """
    task = tasks.find(run.config.task)
    kind = task.input_kind(run.config.data)
    if not task.is_served or kind is None:
        raise InputError(
            "a directory with tokenizer and labels is for classifiers and taggers, and the run is of "
            f"task={run.config.task!r}: pass --to=model.onnx or --to=model.stablehlo for a file with the logits"
        )
    seq_len = run.config.data.seq_len
    if length and length != seq_len:
        raise InputError(
            f"--length={length}: the run reads texts of up to data.seq_len={seq_len} tokens: leave it out for any length up to "
            "that, or pass a file .onnx or .stablehlo"
        )
    check_target(target)
    with locked(target), _scratch(target) as scratch:
        check_target(target)  # again, since another process may have written to it
        directory = Path(scratch)
        written = write_model(run, directory / FORMATS[form].model_file, form, length=length, batch=batch)
        exported_tokenizer.write(run, kind, source, scratch)
        record = _record(run, kind, written, form)
        (directory / EXPORT_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        script = resources.files("hpnlp.jobs.export").joinpath("served_predict.py").read_text("utf-8")
        (directory / SCRIPT).write_text(script, "utf-8")
        (directory / "README.md").write_text(_readme(record), "utf-8")
        for remark in written.remarks:
            print(f"{target}: {remark}")
        for line in _compared(run, kind, directory, record, written.is_rounded):
            print(line)
        # The record is removed first and comes last: a directory with it is complete.
        for name in (EXPORT_FILE, *FILES):
            (target / name).unlink(missing_ok=True)
        for path in sorted(directory.iterdir(), key=lambda path: path.name == EXPORT_FILE):
            path.replace(target / path.name)
        (target / LOCK).unlink(missing_ok=True)  # the directory is handed on with all of its files
    size = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    print(f"{target}: {size:,} bytes, a function of {' and '.join(written.function.inputs)}, int32 {written.shape}")


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[str]:
    """A temporary directory in the target, whose name marks an unfinished export; those of killed ones are removed."""
    for left in target.glob(f"{EXPORT_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=EXPORT_SCRATCH) as scratch:
        yield scratch


def _record(run: Run, kind: Kind, written: Written, form: str) -> dict[str, Any]:
    """The content of export.json, which the script reads."""
    return {
        "format": form,
        "model": FORMATS[form].model_file,
        "task": run.config.task,
        "labels": list(run.vocabulary.labels or ()),
        "inputs": list(written.function.inputs),
        "texts": [column.name for column in kind.inputs],
        "tokenizer": "hashes" if run.tokenizer.hashes_words else "tokenizers",
        "pad_id": run.tokenizer.pad_id,
        "max_len": written.function.length or run.config.data.seq_len,
        "length": written.function.length,
        "batch": written.batch,
        "step": run.step,
    }


def _readme(record: Mapping[str, Any]) -> str:
    """README.md of the directory."""
    runtime = FORMATS[record["format"]].runtime
    is_hashed = record["tokenizer"] == "hashes"
    unit = "words" if is_hashed else "tokens"
    packages = f"{runtime} numpy" if is_hashed else f"{runtime} tokenizers numpy"
    ids = (
        f"`tokens` has four numbers for each word, the bits of its hash by `{exported_tokenizer.HASHES}`, int32 [B, T, 4]"
        if is_hashed
        else "`tokenizer.json` adds the special tokens of training"
    )
    example = ' "a text"' + (' "the second text"' if len(record["texts"]) == 2 else "")
    return f"""# A {record["task"]} model

`{record["model"]}` maps {", ".join(record["inputs"])} (int32 [B, T]) to logits of the labels in `{EXPORT_FILE}`;
{ids}. It is served without the program that trained it:

    pip install {packages}
    python {SCRIPT}{example}

In Python, from this directory: `from predict import ServedModel`, and `ServedModel().predict(["a text"])` returns one
`{{"label": ..., "probability": ...}}` for each text. Texts are cut after {record["max_len"]} {unit}.
"""


def _compared(run: Run, kind: Kind, directory: Path, record: Mapping[str, Any], is_rounded: bool) -> Iterator[str]:
    """Compares an exported directory with the run on held-out texts, and measures it. Yields a line on each result."""
    try:
        texts = held_out.heldout_texts(run)
    except InputError as error:
        yield f"not compared with the run, whose held-out texts cannot be read: {error}"
        return
    exported_tokenizer.check(run, kind, directory, texts)
    runtime = FORMATS[record["format"]].runtime
    packages = (runtime,) if record["tokenizer"] == "hashes" else (runtime, "tokenizers")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        yield (
            f"ids of {len(texts)} held-out texts are those of the run; predictions were not compared: pip install "
            f"{' '.join(missing)}, and export again"
        )
        return
    yield from _check_predictions(run, kind, directory, record, texts, is_rounded)
    yield _measured(run, directory, record, texts, is_rounded)


def _measured(
    run: Run, directory: Path, record: Mapping[str, Any], texts: Sequence[tuple[str, ...]], is_rounded: bool
) -> str:
    """A line on the time of some texts; for a rounded model, beside that of the same model in float32."""
    texts = (list(texts) * TIMED)[:TIMED]
    functions = {"exported": _prediction(directory, texts)}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".float32-") as scratch:
        if is_rounded:
            dense = dataclasses.replace(run, params=dense_tree(run.params))
            for name in (EXPORT_FILE, SCRIPT, *exported_tokenizer.FILES):
                if (directory / name).exists():
                    shutil.copyfile(directory / name, Path(scratch, name))
            length, batch = record["length"], record["batch"]
            write_model(dense, Path(scratch, record["model"]), record["format"], length=length, batch=batch)
            functions["float32"] = _prediction(Path(scratch), texts)
        timings = measure.timeit(functions)
    runtime, milliseconds = FORMATS[record["format"]].runtime, 1e3 * timings["exported"].median
    shown = f"{TIMED} held-out texts take {milliseconds:.2f} ms in {runtime}"
    if not is_rounded:
        return shown
    shown += f", and {1e3 * timings['float32'].median:.2f} ms with matrices in float32"
    is_slower = timings["exported"].over(timings["float32"]) > 1.05
    return f"{shown}: the rounded model is smaller and not faster here" if is_slower else shown


def _check_predictions(
    run: Run,
    kind: Kind,
    directory: Path,
    record: Mapping[str, Any],
    texts: Sequence[tuple[str, ...]],
    is_rounded: bool,
) -> Iterator[str]:
    """Compares predictions with those of the run, and yields lines on the result.

    A model whose inputs are rounded over the range of the batch is also compared with each text alone.

    Raises InputError if labels differ, or probabilities by more than the rounding of the model.
    """
    trained = TrainedModel(run.config, run.model, run.params, run.tokenizer, run.vocabulary.labels or ())
    expected = held_out.predicted_labels(trained, kind, texts)
    depends_on_batch = is_rounded and not record["batch"]
    names = (
        {BATCH_SIZE: f"in batches of {BATCH_SIZE}: ", 1: "each text alone: "} if depends_on_batch else {BATCH_SIZE: ""}
    )
    labels = {size: _labels(_prediction(directory, texts, size)()) for size in names}
    for size, name in names.items():
        agreement = held_out.Agreement.of(expected, labels[size])
        limit = INTEGER_TOLERANCE if is_rounded else TOLERANCE
        if agreement.largest > limit or (agreement.differing and not is_rounded):
            other = "stablehlo" if record["format"] == "onnx" else "onnx"
            raise InputError(
                f"{name}the exported model predicts {agreement.differing} of {agreement.count} labels of held-out texts "
                f"otherwise than the run, and probabilities differ by {agreement.largest:.3g}: export with --format={other}"
            )
        yield name + agreement.describe(len(texts))
    if depends_on_batch:
        differing = held_out.Agreement.of(labels[BATCH_SIZE], labels[1]).differing
        yield f"{differing} of {len(expected)} labels of a text depend on the other texts of its batch"


def _labels(predictions: Sequence[Any]) -> held_out.Labels:
    """Labels of the predictions of the script, one for each text or a list for its words."""
    items = [item for entry in predictions for item in (entry if isinstance(entry, list) else [entry])]
    return [(item["label"], item["probability"]) for item in items]


def _prediction(
    directory: Path, texts: Sequence[tuple[str, ...]], batch_size: int = BATCH_SIZE
) -> Callable[[], list[Any]]:
    """A function without arguments that predicts texts by the script in a directory."""
    script = runpy.run_path(str(directory / SCRIPT))  # an import would leave bytecode in the directory
    model, examples = script["ServedModel"](directory), [pair if len(pair) > 1 else "".join(pair) for pair in texts]
    return lambda: model.predict(examples, batch_size)
