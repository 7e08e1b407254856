"""Exports of runs: one file, or a directory that is served without hpnlp."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hpnlp import measure, tasks
from hpnlp.data.examples.kind import Kind
from hpnlp.data.examples.kinds import Classification, Tagging
from hpnlp.data.examples.unlabelled import Unlabelled
from hpnlp.jobs import exported_tokenizer, held_out
from hpnlp.models.export import onnx_file, stablehlo
from hpnlp.models.export.functions import ExportedFunction, logits_function
from hpnlp.models.export.onnx_weights import for_runtimes
from hpnlp.ops.weight import dense_tree
from hpnlp.tasks.predictions import LabelPrediction, TagPrediction, TrainedModel
from hpnlp.training.contents import EXPORT_FILE, EXPORT_SCRATCH, LOCK, Contents, contents_of, locked
from hpnlp.training.run_directory import Run
from hpnlp.types import InputError

SCRIPT = "predict.py"
MODEL_FILES = {"onnx": "model.onnx", "stablehlo": "model.stablehlo"}
FILES = (*MODEL_FILES.values(), EXPORT_FILE, SCRIPT, "README.md", *exported_tokenizer.FILES)
RUNTIMES = {"onnx": "onnxruntime", "stablehlo": "jax"}
TIMED = 8  # held-out texts whose time is measured
TOLERANCE = 1e-3  # of probabilities of models whose products are not rounded
# Probabilities of int8 models, whose inputs the runtime rounds by another range.
INTEGER_TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Written:
    """A written model file.

    Attributes:
      path: The file.
      function: The function that it holds.
      batch: Sequences of a batch, 0 for any number.
      remarks: Sizes that are fixed because the model cannot be exported for any, one line each.
    """

    path: Path
    function: ExportedFunction
    batch: int
    remarks: tuple[str, ...]

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
      form: An entry of MODEL_FILES.
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
    weights = for_runtimes(run.params) if form == "onnx" else run.params
    remarks = []
    for tokens, sequences in attempts:
        try:
            function = logits_function(run.model, weights, tokens)
            if form == "onnx":
                onnx_file.write(function, path, batch=sequences)
            else:
                stablehlo.write(function, path, batch=sequences, platforms=platforms)
            return Written(path, function, sequences, tuple(remarks))
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
    log: Callable[[str], None] = print,
) -> None:
    """Writes a classifier or a tagger as a directory that is served with onnxruntime or jax, and tokenizers, alone.

    Args:
      run: The run.
      source: Directory of the run.
      target: The directory; an earlier export in it is replaced.
      form: An entry of MODEL_FILES.
      length: As for `write_model`.
      batch: As for `write_model`.
      log: Called with lines on the files and on the check.

    Raises:
      InputError: The run is of another task, cannot be exported, or the exported model predicts other labels than the run for
        held-out texts.
    """
    kind = tasks.find(run.config.task).input_kind(run.config.data)
    if not isinstance(kind, Classification | Tagging) or run.vocabulary.labels is None:
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
        written = write_model(run, directory / MODEL_FILES[form], form, length=length, batch=batch)
        exported_tokenizer.write(run, kind, source, scratch)
        record = _record(run, kind, written, form)
        (directory / EXPORT_FILE).write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
        script = resources.files("hpnlp.jobs").joinpath("served_predict.py").read_text("utf-8")
        (directory / SCRIPT).write_text(script, "utf-8")
        (directory / "README.md").write_text(_readme(record), "utf-8")
        for remark in written.remarks:
            log(f"{target}: {remark}")
        for line in _compared(run, kind, directory, record):
            log(line)
        # The record is removed first and comes last: a directory with it is complete.
        for name in (EXPORT_FILE, *FILES):
            (target / name).unlink(missing_ok=True)
        for path in sorted(directory.iterdir(), key=lambda path: path.name == EXPORT_FILE):
            path.replace(target / path.name)
        (target / LOCK).unlink(missing_ok=True)  # the directory is handed on with all of its files
    size = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    log(f"{target}: {size:,} bytes, a function of {' and '.join(written.function.inputs)}, int32 {written.shape}")


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
        "model": MODEL_FILES[form],
        "task": run.config.task,
        "labels": list(run.vocabulary.labels or ()),
        "inputs": list(written.function.inputs),
        "texts": [column.name for column in kind.inputs],
        "pad_id": run.tokenizer.pad_id,
        "max_len": written.function.length or run.config.data.seq_len,
        "length": written.function.length,
        "batch": written.batch,
        "step": run.step,
    }


def _readme(record: Mapping[str, Any]) -> str:
    """README.md of the directory."""
    runtime = RUNTIMES[record["format"]]
    example = ' "a text"' + (' "the second text"' if len(record["texts"]) == 2 else "")
    return f"""# A {record["task"]} model

`{record["model"]}` maps {", ".join(record["inputs"])} (int32 [B, T]) to logits of the labels in `{EXPORT_FILE}`;
`tokenizer.json` adds the special tokens of training. It is served without the program that trained it:

    pip install {runtime} tokenizers numpy
    python {SCRIPT}{example}

In Python, from this directory: `from predict import Model`, and `Model().predict(["a text"])` returns one
`{{"label": ..., "probability": ...}}` for each text. Texts are cut after {record["max_len"]} tokens.
"""


def _compared(run: Run, kind: Kind, directory: Path, record: Mapping[str, Any]) -> Iterator[str]:
    """Compares an exported directory with the run on held-out texts, and measures it. Yields a line on each result."""
    try:
        texts = held_out.heldout_texts(run)
    except InputError as error:
        yield f"not compared with the run, whose held-out texts cannot be read: {error}"
        return
    exported_tokenizer.check(run, kind, directory, texts)
    missing = [name for name in (RUNTIMES[record["format"]], "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        yield (
            f"ids of {len(texts)} held-out texts are those of the run; predictions were not compared: pip install "
            f"{' '.join(missing)}, and export again"
        )
        return
    yield check_predictions(run, kind, directory, record, texts)
    yield _measured(run, directory, record, texts)


def _measured(run: Run, directory: Path, record: Mapping[str, Any], texts: Sequence[tuple[str, ...]]) -> str:
    """A line on the time of some texts; for a rounded model, beside that of the same model in float32."""
    texts = (list(texts) * TIMED)[:TIMED]
    functions = {"exported": _prediction(directory, texts)}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".float32-") as scratch:
        if _is_rounded(directory, record):
            dense = dataclasses.replace(run, params=dense_tree(run.params))
            for name in (EXPORT_FILE, SCRIPT, *exported_tokenizer.FILES):
                shutil.copyfile(directory / name, Path(scratch, name))
            length, batch = record["length"], record["batch"]
            write_model(dense, Path(scratch, record["model"]), record["format"], length=length, batch=batch)
            functions["float32"] = _prediction(Path(scratch), texts)
        timings = measure.timeit(functions)
    shown = f"{TIMED} held-out texts take {1e3 * timings['exported'].median:.2f} ms in {RUNTIMES[record['format']]}"
    if "float32" not in functions:
        return shown
    shown += f", and {1e3 * timings['float32'].median:.2f} ms with matrices in float32"
    is_slower = timings["exported"].over(timings["float32"]) > 1.05
    return f"{shown}: the rounded model is smaller and not faster here" if is_slower else shown


def check_predictions(
    run: Run, kind: Kind, directory: Path, record: Mapping[str, Any], texts: Sequence[tuple[str, ...]]
) -> str:
    """Compares the predictions of an exported directory with those of the run.

    Args:
      run: The run.
      kind: Kind of its examples.
      directory: The exported directory.
      record: Its record.
      texts: Held-out texts.

    Returns:
      A line on the result.

    Raises:
      InputError: Labels differ, or probabilities by more than the rounding of the model.
    """
    expected = _of_run(run, kind, texts)
    actual = _prediction(directory, texts)()
    differing, largest = 0, 0.0
    for here, there in zip(expected, actual, strict=True):
        labels, probabilities = (here[0], here[1]) if isinstance(kind, Tagging) else ([here[0]], [here[1]])
        own = there if isinstance(kind, Tagging) else [there]
        for label, probability, item in zip(labels, probabilities, own, strict=True):
            differing += label != item["label"]
            if label == item["label"]:
                largest = max(largest, abs(probability - item["probability"]))
    total = sum(len(there) if isinstance(kind, Tagging) else 1 for there in actual)
    is_rounded = _is_rounded(directory, record)
    limit = INTEGER_TOLERANCE if is_rounded else TOLERANCE
    if largest > limit or (differing and not is_rounded):
        other = "stablehlo" if record["format"] == "onnx" else "onnx"
        raise InputError(
            f"the exported model predicts {differing} of {total} labels of held-out texts otherwise than the run, and "
            f"probabilities differ by {largest:.3g}: export with --format={other}"
        )
    shown = (
        f"{differing} of {total} labels of {len(texts)} held-out texts differ from the run's"
        if differing
        else (f"ids and labels of {len(texts)} held-out texts are those of the run")
    )
    return f"{shown}; probabilities differ by at most {largest:.2g}"


def _is_rounded(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether a file has products of 8-bit integers, whose inputs the runtime rounds."""
    if record["format"] != "onnx":
        return False
    model = importlib.import_module("onnx").load(directory / record["model"])
    return any(node.op_type == "DynamicQuantizeLinear" for node in model.graph.node)


def _of_run(run: Run, kind: Kind, texts: Sequence[tuple[str, ...]]) -> list[tuple[Any, Any]]:
    """`(label, probability)`, or those of each word, that the run predicts for each text."""
    trained = TrainedModel(run.config, run.model, run.params, run.tokenizer, run.vocabulary.labels or ())
    examples = Unlabelled(kind, run.tokenizer, held_out.as_examples(kind, texts))
    count = len(texts)
    batch = kind.batch(examples, range(count), count, run.tokenizer, run.config.data.seq_len)
    predictions = tasks.find(run.config.task).predict(trained, batch, examples.values)
    return [
        (prediction.labels, prediction.probabilities)
        if isinstance(prediction, TagPrediction)
        else (prediction.label, prediction.probability)
        for prediction in predictions
        if isinstance(prediction, TagPrediction | LabelPrediction)
    ]


def _prediction(directory: Path, texts: Sequence[tuple[str, ...]]) -> Callable[[], list[Any]]:
    """A function without arguments that predicts texts by the script in a directory."""
    spec = importlib.util.spec_from_file_location("hpnlp_exported_predict", directory / SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, examples = module.Model(directory), [parts if len(parts) > 1 else "".join(parts) for parts in texts]
    return lambda: model.predict(examples)
