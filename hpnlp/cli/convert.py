"""`hpnlp convert`: converts a Hugging Face checkpoint to a run, or a run to a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags
from jaxtyping import PyTree

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.spec import parse_one
from hpnlp.training.files.contents import LOCK, Contents, check_run, checked_directory, contents_of, locked
from hpnlp.types import InputError

if TYPE_CHECKING:
    from hpnlp.data.examples.kind import Kind
    from hpnlp.training.run_directory import Run

USAGE = """
hpnlp convert DIR --to=RUN [--dtype=bfloat16]
hpnlp convert RUN --to=DIR [--dtype=bfloat16] [--step=N]

Converts a directory with config.json, model.safetensors (or several files with an index) and tokenizer.json to a run at step 0,
for `hpnlp generate` and `hpnlp train`. Converts a run to such a directory, for transformers; matrices of a compressed run are
written as the numbers that they represent. RUN@STEP is the checkpoint of a step. Families:

  language models                                        llama, mistral, qwen2, qwen3, gemma, gemma2, gpt2
  language models with experts                           mixtral, qwen2_moe, qwen3_moe, olmoe, dots1
  masked words, labels of texts and labels of tokens     bert, roberta, distilbert, mobilebert
  vectors of texts, also of sentence-transformers        bert, roberta, distilbert
"""

flags.DEFINE_string("from", None, "The same as DIR or RUN, the directory that is read.")
flags.DEFINE_string("to", None, "Directory to write: a run, or a Hugging Face checkpoint.")
flags.DEFINE_string(
    "dtype", "float32", "Dtype of the run's computation, or of the checkpoint's tensors: float32, bfloat16 or float16."
)
flags.DEFINE_integer(
    "step", None, "Step of the run's checkpoint; by default the best, or the newest if none was evaluated."
)

DTYPES = ("float32", "bfloat16", "float16")

# Files of the tokenizer and of transformers' generate(), which are copied unchanged.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
COMPANIONS = ("special_tokens_map.json", "chat_template.jinja", "generation_config.json")

# Families for which AutoTokenizer of transformers 5 ignores the normalizer and pre-tokenizer of tokenizer.json.
FIXED_TOKENIZER = ("qwen2",)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp convert`.

    Args:
      argv: "hpnlp convert" and the arguments of the command.

    Raises:
      InputError: A flag or the source is invalid, or the target cannot be written.
    """
    arguments = cli.parse(argv, USAGE, positional=True)
    name = cli.named_run(arguments, "hpnlp convert RUN --to=DIR or hpnlp convert DIR --to=RUN", "from")
    directory, step = run_names.expand_one(name, cli.FLAGS.step)
    source = Path(directory)
    target = Path(cli.required("to", "runs/x"))
    if cli.FLAGS.dtype not in DTYPES:
        raise InputError(f"--dtype={cli.FLAGS.dtype}: expected {', '.join(DTYPES)}")
    is_checkpoint = contents_of(source) is Contents.CHECKPOINT
    _check_source(source, is_checkpoint, step)
    _check_target(target)
    cli.prepare_jax()
    if is_checkpoint:
        checked_directory(target, "--to")
    try:
        with locked(target):
            _check_target(target)  # again, since another process may have written to it
            if is_checkpoint:
                _to_run(source, target)
            else:
                _to_checkpoint(source, target, step)
                (target / LOCK).unlink()  # a checkpoint is handed on with all of its files
    except OSError as error:
        if str(error.filename or "").startswith(str(source)):
            raise InputError(
                f"cannot read {error.filename} ({error.strerror}): repair it, or use another directory"
            ) from error
        raise InputError(
            f"cannot write --to={target} ({error.strerror}): free some space, or use another directory"
        ) from error


def _check_source(source: Path, is_checkpoint: bool, step: int | None) -> None:
    """Raises InputError where `source` holds neither a run nor a checkpoint, or a step is named of a checkpoint."""
    if not is_checkpoint:
        check_run(source, " and no Hugging Face checkpoint")
    if step is not None and is_checkpoint:
        raise InputError(f"--step={step}: {source} is a Hugging Face checkpoint, which has no steps: remove --step")
    for name in (*TOKENIZER, *COMPANIONS):
        path = source / name
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"{path} is not a file: restore it, or remove it")


def _check_target(target: Path) -> None:
    """Raises InputError where `target` cannot be made or holds a run or checkpoint, before any weights are read."""
    if target.is_dir() and (held := contents_of(target)) not in (Contents.NOTHING, Contents.OTHER):
        raise InputError(f"--to={target} already holds {held.value}: use an empty directory")
    parent = next(path for path in (target, *target.absolute().parents) if os.path.lexists(path))
    if not parent.is_dir():
        raise InputError(f"cannot write --to={target}: {parent} is not a directory: use another directory")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write --to={target}: {parent} is read-only: use another directory")


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copies those of the files that exist."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def _to_run(source: Path, target: Path) -> None:
    """Writes a run at step 0 with the model and the tokenizer of a Hugging Face checkpoint."""
    from hpnlp.data import tokenizers
    from hpnlp.data.examples import save_labels
    from hpnlp.models.huggingface import convert, generation, sentence_files
    from hpnlp.tasks import TASKS
    from hpnlp.tasks.vocabulary import Vocabulary
    from hpnlp.training import config
    from hpnlp.training import run_directory as runs
    from hpnlp.training.config_file import write_config
    from hpnlp.training.files.checkpoint import Checkpointer
    from hpnlp.training.files.metrics import reading_progress

    model, labels = convert.load_config(source, cli.FLAGS.dtype), convert.labels(source)
    task = TASKS[convert.family_in(source).task]
    generation.eos_ids(source)  # raises where they cannot be read
    # Sequences are at most as long as the model's learned positions.
    seq_len = min(task.data_config.seq_len, model.max_len)
    if task.name == "dual_encoder":
        seq_len = sentence_files.max_length(source, model.max_len)
    data = task.data_config(seq_len=seq_len, tokenizer=str(target / "tokenizer.json"))
    values = config.Config(task.model_config(**dataclasses.asdict(model)), data, task=task.name)
    tokenizer = tokenizers.load(str(source))
    if tokenizer.vocab_size > model.vocab:
        raise InputError(
            f"{source / 'config.json'}: vocab_size is {model.vocab}, and the tokenizer beside it has {tokenizer.vocab_size} "
            "ids: put the tokenizer there that the checkpoint was trained with"
        )
    runs.make_model(values, Vocabulary(tokenizer, labels))  # raises where the tokenizer does not fit the model
    _, params = convert.read(source, cli.FLAGS.dtype, reading_progress())
    checkpoints = Checkpointer(target)
    checkpoints.save_params(params)
    checkpoints.check_saved(0, params)
    checkpoints.close()
    _copy(source, target, (*TOKENIZER, *COMPANIONS))
    if labels is not None:
        save_labels(labels, str(target))
    if not (target / generation.GENERATION).exists() and (settings := generation.generation_settings(source)):
        # The config.json of a run does not hold the ids that end a text.
        (target / generation.GENERATION).write_text(json.dumps(settings) + "\n")
    write_config(target, values)
    for remark in [*convert.remarks(source), *generation.generation_remarks(source)]:
        print(f"{target}: {remark}")
    following = f"hpnlp train --task={task.name} --train.init_from={target} ..."
    if task.name == "lm":
        following = f"hpnlp generate {target} --prompt=..."
    elif task.name == "dual_encoder":
        following = f"hpnlp encode {target} texts.txt --to=vectors.npy"
    print(f"{target}: a run at step 0. Next: {following}")


def _to_checkpoint(source: Path, target: Path, step: int | None) -> None:
    """Writes a Hugging Face checkpoint with the model and the tokenizer of a run."""
    from hpnlp import tasks
    from hpnlp.data import tokenizers
    from hpnlp.jobs.export import exported_tokenizer
    from hpnlp.models.huggingface import convert
    from hpnlp.ops.weight import dense_tree
    from hpnlp.training import run_directory as runs
    from hpnlp.training.config_file import load_config
    from hpnlp.training.files.metrics import reading_progress

    values = load_config(source)
    runs.check_task(source, values, convert.TASKS, "convert")
    run, labels = runs.load(source, step), runs.load_vocabulary(source, values).labels
    tokenizer, model = run.tokenizer, run.model.config
    _check_convertible(source, run)
    kind = tasks.find(run.config.task).input_kind(run.config.data)
    with tempfile.TemporaryDirectory() as scratch:
        # Raises before anything is written to the target.
        is_copied = exported_tokenizer.write(run, kind, source, scratch)
        ids = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id
        texts = convert.TextSettings(*ids, labels, run.config.data.seq_len)
        params, progress = dense_tree(run.params), reading_progress()
        convert.save(model, params, target, dtype=cli.FLAGS.dtype, texts=texts, progress=progress)
        _copy(Path(scratch), target, TOKENIZER)
    convert.check_readable(target)
    if labels is not None and model.output:  # a dual encoder's classifier is left out
        assert kind is not None
        _check_predictions(run, kind, target)
    tokenizers.load(str(target))
    _copy(source, target, COMPANIONS)
    _print_remarks(run, target, is_copied)


def _check_convertible(source: Path, run: Run) -> None:
    """Raises InputError for a run that reads texts or computes products as transformers does not."""
    from hpnlp.compress import files
    from hpnlp.training.config import flat

    if flat(run.config).get("data.distinct"):
        raise InputError(
            f"{source}: data.distinct=True keeps each token of a text once, as no tokenizer of transformers does"
        )
    if files.takes_signs(run.params):
        raise InputError(
            f"{source}: products of binary(inputs=True) take the signs of their inputs, as no layer of transformers does: "
            "convert a run without it, or write a file with hpnlp export"
        )


def _print_remarks(run: Run, target: Path, is_copied: bool) -> None:
    """Prints differences between a run and its checkpoint, and how the checkpoint is loaded."""
    from hpnlp.models.huggingface import convert

    model = run.model.config
    if model.output and parse_one(model.output, "model.output").name != "full":
        print(f"{target}: model.output={model.output!r} estimates a full softmax, which the checkpoint has")
    if kinds := _kinds_of_weights(run.params):
        print(
            f"{target}: matrices that were {' and '.join(kinds)} are written as the {cli.FLAGS.dtype} numbers that they "
            "represent; transformers does not round the inputs of their products"
        )
    family = convert.family_in(target)
    if not is_copied and family.model_type in FIXED_TOKENIZER:
        print(
            f"{target}: AutoTokenizer of transformers builds Qwen's tokenizer for model_type={family.model_type}: "
            f"load this one with PreTrainedTokenizerFast.from_pretrained({str(target)!r}) instead"
        )
    print(f"{target}: a checkpoint. Next, in Python: {family.loader}.from_pretrained({str(target)!r})")


def _check_predictions(run: Run, kind: Kind, target: Path) -> None:
    """Checks that a checkpoint gives the ids and the labels of the run for held-out texts, and prints how many."""
    from hpnlp.jobs import held_out
    from hpnlp.jobs.export import exported_tokenizer
    from hpnlp.models.huggingface import convert
    from hpnlp.tasks.predictions import TrainedModel

    try:
        texts = held_out.heldout_texts(run)
    except InputError as error:
        print(f"{target}: not compared with the run, whose held-out texts cannot be read ({error})")
        return
    exported_tokenizer.check(run, kind, target, texts)
    model_config, params = convert.load(target)
    of_run = TrainedModel(run.config, run.model, run.params, run.tokenizer, run.vocabulary.labels or ())
    of_checkpoint = dataclasses.replace(of_run, model=convert.family_in(target).model(model_config), params=params)
    expected, actual = (held_out.predicted_labels(trained, kind, texts) for trained in (of_run, of_checkpoint))
    agreement = held_out.Agreement.of(expected, actual)
    cause = ", by the rounding to --dtype" if agreement.differing else ""
    print(f"{target}: {agreement.describe(len(texts))}{cause}")


def _kinds_of_weights(params: PyTree) -> list[str]:
    """Names of the stages of recipes that made the matrices of a model, without plain arrays."""
    import jax

    from hpnlp.compress.files import stages_of
    from hpnlp.ops.weight import is_weight

    return sorted(set().union(*map(stages_of, jax.tree.leaves(params, is_leaf=is_weight))))
