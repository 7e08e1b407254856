"""`hpnlp convert`: a checkpoint of Hugging Face to a run, and back."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from hpnlp import cli
from hpnlp.types import InputError

USAGE = """
hpnlp convert --from=DIR --to=runs/x [--dtype=bfloat16]
hpnlp convert --from=runs/x --to=DIR [--dtype=bfloat16] [--step=N]

A directory with config.json, model.safetensors and tokenizer.json, of the Llama or GPT-2 family, becomes a run at step
0, which generate reads and train goes on with. A run becomes such a directory, which transformers reads.
"""

flags.DEFINE_string("from", None, "A checkpoint of Hugging Face, or a run.")
flags.DEFINE_string("to", None, "What to write: the other of the two.")
flags.DEFINE_string(
    "dtype", "float32", "float32, bfloat16 or float16: what the run computes in, or tensors are stored in."
)
flags.DEFINE_integer(
    "step", None, "The run's checkpoint to take; by default the best, or the newest where none was scored."
)

# What belongs to the tokenizer and to transformers' generate is carried over as it is.
COMPANIONS = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
COMPANIONS += ["chat_template.jinja", "generation_config.json"]


def run(argv: Sequence[str]) -> None:
    cli.parse(argv, USAGE)
    source, target = Path(cli.required("from", "DIR")), Path(cli.required("to", "runs/x"))
    for name in ("config.json", "checkpoints"):
        if (target / name).exists():
            raise InputError(f"--to={target} holds {name} already: name an empty directory")
    cli.prepare_jax()
    try:
        (_to_checkpoint if (source / "checkpoints").is_dir() else _to_run)(source, target)
        for name in filter(lambda name: (source / name).exists(), COMPANIONS):
            shutil.copyfile(source / name, target / name)
    except OSError as error:
        raise InputError(f"cannot write --to={target} ({error.strerror}): free some space, or name another") from error


def _to_run(source: Path, target: Path) -> None:
    from hpnlp.data import DataConfig, tokenizers
    from hpnlp.models import convert
    from hpnlp.training import config
    from hpnlp.training import run as runs
    from hpnlp.training.checkpoint import Checkpointer, checked_directory

    checked_directory(target)
    model, params = convert.load(source)
    # Rows no longer than the model's positions reach, where these are learned.
    data = DataConfig(seq_len=min(DataConfig.seq_len, model.max_len), tokenizer=str(target / "tokenizer.json"))
    values = config.Config(model=dataclasses.replace(model, dtype=cli.FLAGS.dtype), data=data)
    runs.make_model(values, tokenizers.load(str(source)))  # raises where the tokenizer is not the model's
    target.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpointer(target)
    checkpoints.save_params(params)
    checkpoints.close()
    (target / "config.json").write_text(config.to_json(values))
    print(f"{target}: a run at step 0. Next: hpnlp generate --workdir={target} --prompt=...")


def _to_checkpoint(source: Path, target: Path) -> None:
    from hpnlp.models import convert
    from hpnlp.training import run as runs

    run = runs.load(source, cli.FLAGS.step)
    bos_id, eos_id = run.tokenizer.bos_id, run.tokenizer.eos_id
    convert.save(run.model.config, run.params, target, dtype=cli.FLAGS.dtype, bos_id=bos_id, eos_id=eos_id)
    print(f"{target}: a checkpoint. Next, in Python: AutoModelForCausalLM.from_pretrained({str(target)!r})")
