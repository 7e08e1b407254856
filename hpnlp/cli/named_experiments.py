"""Experiments of the package, which `--config` names without a path: `lm/bytes` is the file `experiments/lm/bytes.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import hpnlp

# Task -> the experiment that its runs start from where --config is left out.
STARTS = {
    "lm": "lm/bytes",
    "rnn_lm": "lm/rnn",
    "classification": "classification/texts",
    "rnn_classification": "classification/encoders:lstm",
    "hashed_classification": "classification/prado",
    "image_classification": "classification/digits_convnet",
    "tree_classification": "classification/stdlib_trees",
    "tagging": "tagging/words",
    "masked_lm": "masked_lm/bytes",
    "realm": "realm/keys",
    "seq2seq": "seq2seq/numbers",
    "dual_encoder": "dual_encoder/stdlib",
    "word_embeddings": "embeddings/words",
    "labelled_bags": "embeddings/titles",
}
_OTHERS = ("bench", "compression", "results")  # directories of a checkout that are not installed


def find() -> dict[str, Path]:
    """Finds the experiments of the package.

    Returns:
      Name, such as "lm/bytes" -> its file, which defines get_config(). An installed package holds them in its directory
      `experiments`; a checkout and an editable installation have that directory beside the package.
    """
    package = Path(hpnlp.__file__).parent
    is_checkout = (package.parent / "setup.py").is_file()  # otherwise the directory may be of another package
    root = package.parent / "experiments" if is_checkout else package / "experiments"
    files = sorted(root.glob("*/*.py"))
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in files
        if path.parent.name not in _OTHERS and "get_config" in path.read_text("utf-8")
    }


def listed() -> str:
    """The names of the experiments with the first sentence of each, for --help.

    Returns:
      The text.
    """
    lines = ["", "Experiments of the package:"]
    for name, path in find().items():
        summary = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n\n")[0]
        lines.append(f"  {name}\n      {' '.join(summary.split())}")
    return "\n".join(lines) + "\n"
