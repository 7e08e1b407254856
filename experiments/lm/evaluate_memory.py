"""Evaluates the runs of a directory with other lengths of their memory: context length against loss.

    python experiments/lm/evaluate_memory.py --workdir=runs/lengths --memories=48,96,192

The mixer of a run must be `segment_memory`, `transformer_xl` or `compressive`; other runs are left out. The compressed part of
a compressive memory grows in proportion. A table of losses is printed; --out writes it as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli, measure
from hpnlp.cli.errors import run_script
from hpnlp.jobs.evaluate_run import evaluate_run
from hpnlp.nn.attention import mixer_period
from hpnlp.spec import Spec
from hpnlp.training.config_file import load_config
from hpnlp.training.files.contents import has_checkpoints
from hpnlp.types import InputError

FLAGS = flags.FLAGS
flags.DEFINE_string("workdir", None, "Directory of a run, or of the runs of a sweep.", required=True)
flags.DEFINE_list("memories", ["48", "96", "192"], "Numbers of tokens in the memory.")
flags.DEFINE_integer("batches", 0, "Largest number of held-out batches, 0 for all.")
flags.DEFINE_string("out", "", "Directory of the JSON file; none is written without it.")

MEMORIES = ("segment_memory", "transformer_xl", "compressive")


def with_memory(mixer: str, memory: int) -> str | None:
    """The mixer with another memory, which is the first argument; None for one without a memory."""
    entries = mixer_period(mixer)
    if not any(entry.name in MEMORIES and entry.args for entry in entries):
        return None
    return ",".join(str(_resized(entry, memory)) for entry in entries)


def _resized(entry: Spec, memory: int) -> Spec:
    if entry.name not in MEMORIES or not entry.args:
        return entry
    args = [memory, *entry.args[1:]]
    if entry.name == "compressive" and len(args) > 1:
        args[1] = max(1, args[1] * memory // entry.args[0])
    return dataclasses.replace(entry, args=tuple(args))


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Held-out loss of one run with each memory."""
    config, rows = load_config(directory), []
    for memory in map(int, FLAGS.memories):
        mixer = with_memory(config.model.mixer, memory)
        if mixer is None:
            return []
        scores = evaluate_run(directory, {"model.mixer": mixer}, FLAGS.batches or None).scores
        rows.append(
            {"run": directory.name, "trained": config.model.mixer, "evaluated": mixer, "memory": memory, **scores}
        )
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: the held-out loss in nats per token, a line for each run and a column for each memory."""
    memories = list(dict.fromkeys(row["memory"] for row in rows))
    lines = [["trained", *map(str, memories)], ["---"] * (1 + len(memories))]
    for run in dict.fromkeys(row["run"] for row in rows):
        of_run = {row["memory"]: row for row in rows if row["run"] == run}
        lines.append([of_run[memories[0]]["trained"], *(f"{of_run[memory]['loss']:.4f}" for memory in memories)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main(_: Any) -> None:
    if not all(memory.isdecimal() and int(memory) for memory in FLAGS.memories):
        raise InputError(f"--memories={','.join(FLAGS.memories)}: expected numbers of tokens, as --memories=48,96")
    cli.prepare_jax()
    workdir = Path(FLAGS.workdir)
    found = (workdir, *sorted(workdir.iterdir())) if workdir.is_dir() else ()
    directories = [path for path in found if path.is_dir() and has_checkpoints(path)]
    rows = []
    for directory in directories:
        for row in rows_of(directory):
            rows.append(row)
            print(f"{row['trained']}: loss {row['loss']:.4f} with a memory of {row['memory']}", flush=True)
    if not rows:
        raise InputError(
            f"--workdir={workdir} holds {len(directories)} runs, none of which has one of the mixers {', '.join(MEMORIES)}: "
            "train one, as experiments/lm/memory_lengths.py describes"
        )
    print("\n" + table_of(rows))
    if FLAGS.out:
        print(measure.write_result("memory_lengths", rows, FLAGS.out))


if __name__ == "__main__":
    run_script(main)
