"""Writes the held-out perplexities of a sweep of `words.py` as a result file, each beside the full layer's.

    python experiments/softmax/quality.py runs/docs [--corpus=docs]

Layers without probabilities have no perplexity, and no row. What a step takes is measured by `steps.py`, on a quiet machine.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from absl import app, flags

from hpnlp import measure, report
from hpnlp.nn.output import is_normalized

FLAGS = flags.FLAGS
flags.DEFINE_string("corpus", "docs", "What the members were trained on: names the file.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Where the result goes.")


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        sys.exit("usage: python experiments/softmax/quality.py SWEEP, the directory of a finished sweep")
    members = [report.read_report(path.parent) for path in sorted(Path(argv[1]).glob("*/report.json"))]
    scored = {one["config"]["model.output"]: one for one in members if is_normalized(one["config"]["model.output"])}
    if "full" not in scored:
        sys.exit(f"{argv[1]} has no finished member with model.output=full: there is nothing to put the others beside")
    if len({one.get("heldout_digest") for one in scored.values()}) != 1:
        sys.exit(f"the members of {argv[1]} were scored on different text: they do not compare")
    rows = []
    for output, one in scored.items():
        ratio = math.exp(one["heldout_loss"] - scored["full"]["heldout_loss"])
        perplexity = math.exp(one["heldout_loss"])
        print(f"{output:24} perplexity {perplexity:8.2f}, {ratio:.4f} of full's", flush=True)
        rows.append(
            {
                "what": f"held-out perplexity of {output}, {FLAGS.corpus}, {one['steps']} steps",
                "output": output,
                "steps": one["steps"],
                "ratios": {"over full": ratio},
                "perplexity": perplexity,
                "by_rows": one["config"]["optimizer.rows"],
                "parameters": one["parameters"],
            }
        )
    print(measure.write_result(f"softmax_quality_{FLAGS.corpus.replace('-', '_')}", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
