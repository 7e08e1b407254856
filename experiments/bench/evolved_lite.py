"""Measures the blocks of the Evolved Transformer and the Lite Transformer against the standard block.

    python experiments/bench/evolved_lite.py [--groups=language_model,numbers] [--limit=S]

"language_model": byte-level language models of the standard library's source, in nats per byte of held-out text. "numbers": the
task of experiments/seq2seq/numbers.py, with both cells of the Evolved Transformer, in nats per token of held-out targets. After
equal numbers of steps and after equal training time; `forms.py` has the rules and the flags.

An Evolved cell has about the branches of two standard layers, so that its models have half as many layers. The columns of the
feed-forward networks make the weights of the layers' matrices those of the standard model, or the share in the form's name. The
Lite model of equal size is wider, since its feed-forward networks are flat. Rows have the FLOPs of a training step
("flops_over_plain") and all parameters, tables included.

A run is planned for one to two minutes of one core.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from forms import Form, Groups, run

from hpnlp.cli import experiment
from hpnlp.training.config import default, resolve

FLAGS = flags.FLAGS
LENGTH, BATCH, DIM = 128, 16, 96
NUMBERS = str(Path(__file__).parents[1] / "seq2seq" / "numbers.py")

EVOLVED, EVOLVED_CLAIM = "So et al. 2019", "quality of the big Transformer with 37.6 % fewer parameters (translation)"
LITE, LITE_CLAIM = "Wu et al. 2020", "0.3 BLEU less with 1/2.5 of the computation (translation)"
# Form -> (fields of its blocks, share of the standard model's parameters, paper, published claim).
FORMS: dict[str, tuple[dict[str, Any], float, str, str]] = {
    "standard": ({}, 1.0, "", ""),
    "evolved": (
        {"block": "evolved_decoder", "depth": 0.5},
        1.0,
        EVOLVED,
        "0.7 BLEU more at 7M parameters (translation)",
    ),
    "evolved, 62 % of the parameters": (
        {"block": "evolved_decoder", "depth": 0.5, "dim": 80},
        0.624,
        EVOLVED,
        EVOLVED_CLAIM,
    ),  # fmt: skip
    "lite": ({"block": "lite(31)", "dim": 176}, 1.0, LITE, "1.2 BLEU more under 500M multiplications (translation)"),
    "lite, 40 % of the parameters": ({"block": "lite(31)"}, 0.4, LITE, LITE_CLAIM),
}


def language_model() -> Any:
    """The standard language model."""
    values: Any = default("lm")
    values.data.update(path="stdlib", seq_len=LENGTH, batch_size=BATCH, heldout_bytes=60_000)
    values.model.update(layers=4, dim=DIM, heads=4)
    values.optimizer.learning_rate = 2e-3
    values.train.eval_stride = LENGTH // 2
    if FLAGS.tiny:
        values.data.update(seq_len=16, heldout_bytes=2000)
        values.train.eval_stride = 8
    return values


def numbers() -> Any:
    """The standard sequence-to-sequence model, which is trained on fewer targets at a time than the experiment's."""
    values = experiment.load(NUMBERS).get_config()
    values.data.batch_size = 8 if FLAGS.tiny else 32
    values.model.update(layers=4, dim=DIM, heads=4)
    return values


def standard(make: Callable[[], Any]) -> Any:
    """The config of the standard model, small with --tiny."""
    values = make()
    if FLAGS.tiny:
        values.model.update(layers=2, dim=DIM // 2, heads=2)
    values.model.update(mlp="relu", mlp_dim=4 * values.model.dim)
    return values


def sized(values: Any, fields: dict[str, Any], parameters: float) -> Any:
    """The model of a form, with columns of the feed-forward networks that make the nearest number of parameters.

    Args:
      values: The config of the standard model, which is changed.
      fields: `block`; `depth`, a factor of the layers; `dim`, the model size.
      parameters: Number of weights in the matrices of the layers; 0 to leave the columns as they are.

    Returns:
      The config.
    """
    model = values.model
    model.layers = max(1, round(model.layers * fields.get("depth", 1)))
    model.dim = fields.get("dim", DIM) // (2 if FLAGS.tiny else 1)
    model.block = fields.get("block", "transformer")
    if model.block == "evolved_decoder" and values.task == "seq2seq":
        model.encoder_form = "block(block=evolved_encoder)"
    if not parameters:
        return values
    counts = []
    for columns in (8, 16):
        model.mlp_dim = columns
        counts.append(resolve(values).model.non_embedding_parameters())
    per_column = (counts[1] - counts[0]) / 8
    model.mlp_dim = max(8, 8 + 4 * round((parameters - counts[0]) / per_column / 4))
    return values


def forms(make: Callable[[], Any]) -> list[Form]:
    """All forms of a model. make: returns the config of the standard one."""
    parameters = resolve(sized(standard(make), {}, 0)).model.non_embedding_parameters()
    found = []
    for name, (fields, share, paper, claim) in FORMS.items():
        values = sized(standard(make), fields, share * parameters)
        values.optimizer.update(schedule="constant", warmup=50, clip_norm=1.0)
        values.train.update(sample=0, baselines=False)
        values.plan.name = "single"
        found.append(Form(name, resolve(values), paper, claim))
    return found


def all_groups() -> Groups:
    return {"language_model": forms(language_model), "numbers": forms(numbers)}


def main(_: list[str]) -> None:
    run("evolved_lite", all_groups())


if __name__ == "__main__":
    app.run(main)
