"""Writes the held-out perplexities of a sweep of `words.py` as a result file, relative to the full softmax.

    python experiments/softmax/quality.py runs/docs [--corpus=docs]

Layers without probabilities have no perplexity, and no row. `steps.py` measures time and memory of their steps.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

from absl import app, flags

from hpnlp import measure, report
from hpnlp.nn.output import is_normalized

FLAGS = flags.FLAGS
flags.DEFINE_string("corpus", "docs", "Corpus of the sweep, which names the result file.")
flags.DEFINE_string("out", str(Path(__file__).parents[1] / "results"), "Where the result goes.")


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        sys.exit("usage: python experiments/softmax/quality.py SWEEP, the directory of a finished sweep")
    members = [report.read_report(path.parent) for path in sorted(Path(argv[1]).glob("*/report.json"))]
    scored = {
        member["config"]["model.output"]: member
        for member in members
        if is_normalized(member["config"]["model.output"])
    }
    if "full" not in scored:
        sys.exit(f"{argv[1]} has no finished member with model.output=full: the perplexities are relative to it")
    if len({member.get("heldout_digest") for member in scored.values()}) != 1:
        sys.exit(
            f"the members of {argv[1]} were scored on different text, so that their perplexities are not comparable"
        )
    rows = []
    for output, member in scored.items():
        ratio = math.exp(member["heldout_loss"] - scored["full"]["heldout_loss"])
        perplexity = math.exp(member["heldout_loss"])
        print(f"{output:24} perplexity {perplexity:8.2f}, {ratio:.4f} of full's", flush=True)
        rows.append(
            {
                "what": f"held-out perplexity of {output}, {FLAGS.corpus}, {member['steps']} steps",
                "output": output,
                "steps": member["steps"],
                "ratios": {"over full": ratio},
                "perplexity": perplexity,
                "by_rows": member["config"]["optimizer.rows"],
                "parameters": member["parameters"],
            }
        )
    print(measure.write_result(f"softmax_quality_{FLAGS.corpus.replace('-', '_')}", rows, FLAGS.out))


if __name__ == "__main__":
    app.run(main)
