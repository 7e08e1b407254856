"""`hpnlp techniques`: lists ways to make a model faster or smaller, and which of them a run can have."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from hpnlp import cli
from hpnlp.cli import run_names
from hpnlp.errors import InputError, plural

if TYPE_CHECKING:
    from hpnlp.advise import Technique

USAGE = """
hpnlp techniques [RUN] [--goal=latency|throughput|training|memory|disk] [--reasons]

Lists ways to make a model faster or smaller: what they do, what they need (nothing, training batches, or the training of a
new model), which parts of the model they change, and the page of the documentation. With RUN, only those that the run can
have, and by what factor each makes it faster at most, after `hpnlp profile RUN`: the factor if the parts that it changes
take no time at all. What changes the whole program has no such factor. --reasons also lists the others, and why not.

Nothing is measured or changed.
"""

flags.DEFINE_string("workdir", None, "The same as RUN.")
flags.DEFINE_enum(
    "goal", None, ["latency", "throughput", "training", "memory", "disk"], "List only what makes this less."
)
flags.DEFINE_bool("reasons", False, "Also list the techniques that the run cannot have, and why.")


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp techniques`.

    Args:
      argv: "hpnlp techniques" and the arguments of the command.

    Raises:
      InputError: A flag or the run is invalid.
    """
    arguments = cli.parse(argv, USAGE, positional=True)
    f = cli.FLAGS
    workdir = None
    if f.reasons and not (arguments or f.workdir):
        raise InputError("--reasons says why a run cannot have techniques: name the run")
    if arguments or f.workdir:
        workdir = Path(run_names.expand_one(cli.named_run(arguments, "hpnlp techniques RUN", "workdir"), None)[0])
    cli.prepare_jax()

    from hpnlp.advise import Goal, techniques
    from hpnlp.compress.weights_file import has_weights
    from hpnlp.planner.compressed import run_outline
    from hpnlp.training.config_file import load_config

    config = load_config(workdir) if workdir else None
    layers = config.model.layers if config and "layers" in vars(config.model) else 4
    listed = [t for t in techniques(layers) if f.goal is None or Goal(f.goal) in t.goals]
    refusals = {}
    if workdir and config:
        outline = None if has_weights(workdir) else run_outline(workdir)
        refusals = {t.name: t.refusal(outline, config) for t in listed}
    applicable = [t for t in listed if not refusals.get(t.name)]
    print(_listing(applicable, _bounds(applicable, workdir, f.goal)))
    if workdir:
        count = len(listed) - len(applicable)
        print(f"{len(applicable)} {plural(len(applicable), 'technique')}; {count} more do not fit this run")
    if f.reasons:
        print("\n".join(f"- {name}: {reason}" for name, reason in refusals.items() if reason))


def _bounds(listed: Sequence[Technique], workdir: Path | None, goal: str | None) -> Mapping[str, str]:
    """Name of a technique -> largest factors by the profiles of a run; empty without a profile."""
    if workdir is None:
        return {}
    from hpnlp.advise.technique import PROGRAMS
    from hpnlp.jobs.profile.profile_run import read_traced

    programs = {g: program for g, program in PROGRAMS.items() if goal in (None, g)}
    traced = {program: time for program in programs.values() if (time := read_traced(workdir, program))}
    if programs and not traced:
        print(f"for the largest factor of each: hpnlp profile {workdir} --program={next(iter(programs.values()))}\n")
    texts = {}
    for technique in listed:
        bounds = {
            programs[g]: technique.bound(traced[programs[g]]) for g in technique.goals if programs.get(g) in traced
        }
        if shown := [f"{program} {bound:.2f}" for program, bound in bounds.items() if bound is not None]:
            texts[technique.name] = ", ".join(shown)
    return texts


def _listing(listed: Sequence[Technique], bounds: Mapping[str, str]) -> str:
    """A section for each group, in which techniques that share all else are named together."""
    from hpnlp.advise.techniques import described
    from hpnlp.cost.parts import label

    lines, group = [], ""
    alike: dict[tuple[str, ...], list[Technique]] = {}
    for t in listed:
        changed = f"changes {', '.join(map(label, t.shortens)) or 'the whole program'}"
        bound = f"{bounds[t.name]} times faster at most" if t.name in bounds else ""
        facts = (f"for {', '.join(t.goals)}", f"needs {t.needs}", changed, bound, f"docs/guide/{t.page}")
        alike.setdefault((t.group, *filter(None, facts)), []).append(t)
    for (name, *facts), members in alike.items():
        if name != group:
            lines += ["", f"## {name}"]
            group = name
        lines += ["", f"{'; '.join(facts)}:"]
        width = max(len(t.name) for t in members)
        for t in members:
            first, text = f"    {t.name:{width}}  ", described(t)
            lines += textwrap.wrap(text, 110, initial_indent=first, subsequent_indent=" " * len(first)) or [
                first.rstrip()
            ]
    return "\n".join(lines[1:]).replace("\xa0", " ") + "\n"
