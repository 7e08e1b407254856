"""`hpnlp convert`: a checkpoint of Hugging Face to a run, and back."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.types import InputError

USAGE = """
hpnlp convert --from=DIR --to=runs/x [--dtype=bfloat16]
hpnlp convert --from=runs/x --to=DIR [--dtype=bfloat16] [--step=N]

A directory with config.json, model.safetensors and tokenizer.json, of the family llama, mistral, qwen2, qwen3 or gpt2,
becomes a run at step 0, which generate reads and train goes on with. A run becomes such a directory, which transformers
reads.
"""

flags.DEFINE_string("from", None, "A checkpoint of Hugging Face, or a run.")
flags.DEFINE_string("to", None, "What to write: the other of the two.")
flags.DEFINE_string(
    "dtype", "float32", "float32, bfloat16 or float16: what the run computes in, or tensors are stored in."
)
flags.DEFINE_integer(
    "step", None, "The run's checkpoint to take; by default the best, or the newest where none was scored."
)

DTYPES = ("float32", "bfloat16", "float16")

# Files of the tokenizer and of transformers' generate, which are copied as they are.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
COMPANIONS = ("special_tokens_map.json", "chat_template.jinja", "generation_config.json")

# Families for which AutoTokenizer of transformers 5 builds its own normalizer and pre-tokenizer, whatever tokenizer.json says.
OWN_TOKENIZER = ("qwen2",)


def run(argv: Sequence[str]) -> None:
    cli.parse(argv, USAGE)
    source, target = Path(cli.required("from", "DIR")), Path(cli.required("to", "runs/x"))
    if cli.FLAGS.dtype not in DTYPES:
        raise InputError(f"--dtype={cli.FLAGS.dtype}: expected {', '.join(DTYPES)}")
    _check_source(source)
    _check_target(target)
    cli.prepare_jax()
    try:
        (_to_checkpoint if _is_run(source) else _to_run)(source, target)
    except OSError as error:
        if str(error.filename or "").startswith(str(source)):
            raise InputError(
                f"cannot read {error.filename} ({error.strerror}): mend it, or name another --from"
            ) from error
        raise InputError(f"cannot write --to={target} ({error.strerror}): free some space, or name another") from error


def _is_run(source: Path) -> bool:
    return any((source / name).exists() for name in ("checkpoints", "metrics.jsonl"))  # the latter, if none was saved


def _check_source(source: Path) -> None:
    if not source.is_dir():
        found = "is a file" if source.is_file() else "is not a directory"
        raise InputError(
            f"--from={source} {found}: name the directory of a run, or of a checkpoint with its config.json"
        )
    if cli.FLAGS.step is not None and not _is_run(source):
        raise InputError(
            f"--step={cli.FLAGS.step}: {source} is a Hugging Face checkpoint, which has no steps: leave --step out"
        )
    for name in (*TOKENIZER, *COMPANIONS):
        path = source / name
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"{path} is not a file: restore it, or remove it")


def _check_target(target: Path) -> None:
    """Raises InputError where `target` cannot be made or already holds something, before time is spent on weights."""
    for name in ("config.json", "checkpoints"):
        if os.path.lexists(target / name):
            raise InputError(f"--to={target} holds {name} already: name an empty directory")
    parent = next(path for path in (target, *target.absolute().parents) if os.path.lexists(path))
    if not parent.is_dir():
        raise InputError(f"cannot write --to={target}: {parent} is not a directory: name another")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write --to={target}: {parent} is read-only: name another")


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    for name in filter(lambda name: (source / name).exists(), names):
        shutil.copyfile(source / name, target / name)


def _to_run(source: Path, target: Path) -> None:
    from hpnlp.data import DataConfig, tokenizers
    from hpnlp.models.huggingface import convert
    from hpnlp.training import config
    from hpnlp.training import run_directory as runs
    from hpnlp.training.checkpoint import Checkpointer, checked_directory

    checked_directory(target, "--to")
    model = convert.load_config(source, cli.FLAGS.dtype)
    convert.eos_ids(source)  # raises where it cannot be read
    # Rows no longer than the model's positions reach, where these are learned.
    data = DataConfig(seq_len=min(DataConfig.seq_len, model.max_len), tokenizer=str(target / "tokenizer.json"))
    values = config.Config(model=model, data=data)
    runs.make_model(values, tokenizers.load(str(source)))  # raises where the tokenizer is not the model's
    _, params = convert.load(source, cli.FLAGS.dtype)
    target.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpointer(target)
    checkpoints.save_params(params)
    checkpoints.check_saved(0, params)
    checkpoints.close()
    _copy(source, target, (*TOKENIZER, *COMPANIONS))
    if not (target / convert.GENERATION).exists() and (settings := convert.generation_settings(source)):
        # The config.json of a run does not say which ids end a text.
        (target / convert.GENERATION).write_text(json.dumps(settings) + "\n")
    (target / "config.json").write_text(config.to_json(values))
    for remark in [*convert.remarks(source), *convert.generation_remarks(source)]:
        print(f"{target}: {remark}")
    print(f"{target}: a run at step 0. Next: hpnlp generate --workdir={target} --prompt=...")


def _to_checkpoint(source: Path, target: Path) -> None:
    from hpnlp.data import tokenizers
    from hpnlp.data.export import export
    from hpnlp.data.huggingface import HFTokenizer
    from hpnlp.models.huggingface import convert
    from hpnlp.training import run_directory as runs

    run = runs.load(source, cli.FLAGS.step)
    tokenizer, model = run.tokenizer, run.model.config
    bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
    with tempfile.TemporaryDirectory() as scratch:
        is_copied = isinstance(tokenizer, HFTokenizer) and not tokenizer.is_trained_here
        if not is_copied:
            export(tokenizer, scratch)  # raises before anything is written to the target
        convert.save(model, run.params, target, dtype=cli.FLAGS.dtype, bos_id=bos_id, eos_id=eos_id)
        _copy(source if is_copied else Path(scratch), target, TOKENIZER)
    convert.check_readable(target)
    tokenizers.load(str(target))
    _copy(source, target, COMPANIONS)
    if model.output != "full":
        print(f"{target}: model.output={model.output!r} samples from a full softmax, which the checkpoint has")
    if not is_copied and convert.model_type(target) in OWN_TOKENIZER:
        print(
            f"{target}: transformers takes every tokenizer of model_type={convert.model_type(target)} for Qwen's own: load "
            f"this one by PreTrainedTokenizerFast.from_pretrained({str(target)!r}), not by AutoTokenizer"
        )
    print(f"{target}: a checkpoint. Next, in Python: AutoModelForCausalLM.from_pretrained({str(target)!r})")
