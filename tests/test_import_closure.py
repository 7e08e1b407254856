"""A run loads the modules that every run passes through, and those of the entries of tables that it names."""

import ast
import json
import subprocess
import sys
from pathlib import Path

# Packages, and modules of packages, that a plain language model does not need.
CATALOGUE = (
    "hpnlp.compress.weight_training",
    "hpnlp.compress.distilling.distillation",
    "hpnlp.compress.files",
    "hpnlp.models.huggingface",
    "hpnlp.data.examples.kind",
    "hpnlp.models.decode",
    "hpnlp.models.encoder",
    "hpnlp.models.pairs",
    "hpnlp.models.rnn",
    "hpnlp.nn.blocks.evolved",
    "hpnlp.nn.feed_forward.experts",
    "hpnlp.nn.output.sampled",
    "hpnlp.ops.attention.decoding",
    "hpnlp.ops.attention.positions.bias",
    "hpnlp.ops.moe",
    "hpnlp.ops.rnn",
    "hpnlp.ops.sampling",
    "hpnlp.ops.search",
    "hpnlp.ops.weights",
    "hpnlp.planner",
    "hpnlp.report.comparison",
    "hpnlp.report.comparison_plots",
    "hpnlp.retrieval",
    "hpnlp.training.starts.teacher",
    "hpnlp.training.starts.warm_start",
)
# Numbers of files with code, and of all lines, that the program below loads at most.
FILES, LINES = 168, 31_900

PROGRAM = """
import json, sys
import jax
import hpnlp.cli.train, hpnlp.report.single  # the command, and the end of a run
from hpnlp import tasks
from hpnlp.training import config, loop
from hpnlp.tasks.vocabulary import Sizes

resolved = config.resolve({"task": "lm", "model": {"layers": 1, "dim": 32, "heads": 2}})
model = tasks.make_model(resolved, Sizes(264))
batch = model.example_batch(1, 8)
jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="loss"))
print(json.dumps({n: m.__file__ for n, m in sorted(sys.modules.items()) if n.split(".")[0] == "hpnlp"}))
"""


def has_code(path):
    """Whether a file holds more than a docstring."""
    return len(ast.parse(Path(path).read_text("utf-8")).body) > 1


def test_a_language_model_loads_no_other_entries():
    lines = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    loaded = json.loads(lines.splitlines()[-1])
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{entry}." for entry in CATALOGUE))] == []
    assert sum(map(has_code, loaded.values())) <= FILES
    assert sum(len(Path(path).read_text("utf-8").splitlines()) for path in loaded.values()) <= LINES
