"""A run loads the modules that every run passes through, and those of the entries of tables that it names."""

import json
import subprocess
import sys

# Packages, and modules of packages, that a plain language model does not need.
CATALOGUE = (
    "hpnlp.compress.weight_training",
    "hpnlp.compress.distilling.distillation",
    "hpnlp.compress.files",
    "hpnlp.models.huggingface",
    "hpnlp.models.encoder",
    "hpnlp.models.rnn",
    "hpnlp.nn.blocks.evolved",
    "hpnlp.nn.feed_forward.experts",
    "hpnlp.nn.output.sampled",
    "hpnlp.ops.moe",
    "hpnlp.ops.rnn",
    "hpnlp.ops.search",
    "hpnlp.ops.weights",
    "hpnlp.planner",
    "hpnlp.report.comparison",
    "hpnlp.retrieval",
    "hpnlp.training.starts.teacher",
    "hpnlp.training.starts.warm_start",
)
FILES = 176  # that the program below loads at most

PROGRAM = """
import json, sys
import jax
from hpnlp import tasks
from hpnlp.training import config, loop
from hpnlp.tasks.vocabulary import Sizes

resolved = config.resolve({"task": "lm", "model": {"layers": 1, "dim": 32, "heads": 2}})
model = tasks.make_model(resolved, Sizes(264))
batch = model.example_batch(1, 8)
jax.eval_shape(lambda: model.init(jax.random.key(0), batch, method="loss"))
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "hpnlp")))
"""


def test_a_language_model_loads_no_other_entries():
    lines = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    loaded = json.loads(lines.splitlines()[-1])
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{entry}." for entry in CATALOGUE))] == []
    assert len(loaded) <= FILES
