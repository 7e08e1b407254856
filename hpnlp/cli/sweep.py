"""`hpnlp sweep`: trains every member of an experiment's get_sweep(), one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment, folds, members
from hpnlp.cli.members import Member

USAGE = """
hpnlp sweep --config=FILE --workdir=DIR [--folds=K] [--section.field=value ...]

FILE defines get_sweep(), which returns a list of overrides such as {"model.dim": 128}, one for each member. All members are
validated before the first one trains. Each member trains in its own process and directory under DIR. Finished members are
skipped, interrupted ones are resumed, and a failed one does not stop the others. At the end, a table (compare.md) and a plot
(compare.png) are written to DIR, with 95 % intervals of the differences to the best member, as by hpnlp compare. Ctrl-C and the
other signals that stop `hpnlp train` save the current member, skip the remaining ones, and exit with code 130.

With --folds=K, each member is trained K times (cross-validation): fold k holds out the k-th of K equal parts of the documents
or examples, in place of the fraction data.heldout. Parts are chosen by the same hash, so that groups stay together. The table
has one row for a member, with the mean over folds, the standard deviation and a 95 % interval. Without get_sweep(), the config
of FILE is the only member.

With --processes=N, `hpnlp launch` trains each member in N processes of this machine, and restarts them.
"""

flags.DEFINE_string("config", None, "Experiment file, which defines get_config() and get_sweep().")
flags.DEFINE_string("workdir", None, "Directory of the members' directories.")
flags.DEFINE_integer("folds", None, "Number of folds of a cross-validation of each member.", lower_bound=2)
LAUNCH = ("processes", "min_processes", "max_restarts")
flags.DEFINE_integer("processes", None, "Processes of each member, which hpnlp launch supervises.", lower_bound=1)
flags.DEFINE_integer("min_processes", None, "As of hpnlp launch; needs --processes.", lower_bound=1)
flags.DEFINE_integer("max_restarts", None, "As of hpnlp launch; needs --processes.", lower_bound=0)


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp sweep`.

    Args:
      argv: "hpnlp sweep" and the arguments of the command.

    Raises:
      InputError: A flag or a member is invalid, or a member did not finish.
    """
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE)
    own_data = ", or --config=classification/texts --data.path=FILE for data of your own"
    path, workdir = cli.required("config", experiment.EXAMPLE, own_data), Path(cli.required("workdir", "runs/sweep"))
    count: int | None = cli.FLAGS.folds
    in_sweep = _resolve_members(path, _load_sweep(path, has_folds=count is not None), overrides, count)
    if cli.FLAGS.processes is None:
        cli.refuse(LAUNCH, "without --processes: add it, and hpnlp launch supervises each member")
    launch = [f"--{name}={cli.FLAGS[name].value}" for name in LAUNCH if cli.FLAGS[name].present]
    first = next(iter(in_sweep.values()))
    if count is not None and not workdir.exists() and not first.config.train.init_from:
        folds.check_data(first)
    with members.written(workdir):
        in_sweep = members.in_old_directories(in_sweep, workdir)
        members.check_directories(in_sweep, workdir)
        finished, failed = members.train(in_sweep, workdir, launch)
        if finished:
            from hpnlp import report

            print(report.compare(finished, workdir / "compare.png"), flush=True)
    if failed:
        raise cli.InputError(members.failure_message(failed, len(in_sweep)))


def _load_sweep(config: str, has_folds: bool) -> list[Mapping[str, Any]]:
    """The overrides of all members; with folds, one member without any is enough.

    Raises InputError where get_sweep() does not return a list of them.
    """
    path, *argument = config.split(":", 1)
    path = experiment.locate(path)
    module = experiment.load(path)
    if not hasattr(module, "get_sweep"):
        if has_folds:
            return [{}]
        raise cli.InputError(f"{path} has no get_sweep(): define one that returns a list of overrides")
    if not callable(module.get_sweep):
        raise cli.InputError(f"{path}: get_sweep is not a function: define one that returns a list of overrides")
    sweep = experiment.call(path, _call_get_sweep, module.get_sweep, argument)
    if not (
        isinstance(sweep, Sequence)
        and sweep
        and all(isinstance(member, Mapping) and all(isinstance(name, str) for name in member) for member in sweep)
    ):
        raise cli.InputError(
            f'{path}: get_sweep() returned {sweep!r:.80}: return a list such as [{{"model.dim": 64}}, ...]'
        )
    return list(sweep)


def _call_get_sweep(get_sweep: Callable[..., Any], argument: Sequence[str]) -> Any:
    """Calls get_sweep() with the argument of --config=FILE:ARGUMENT, if it takes one."""
    return get_sweep(*(argument if signature(get_sweep).parameters else ()))


def _resolve_members(
    path: str, sweep: Sequence[Mapping[str, Any]], overrides: Sequence[str], count: int | None
) -> Mapping[str, Any]:
    """All members by name, or the runs of all their folds, validated as far as is possible without reading their data.

    Raises InputError where a member is invalid, two are equal or of different tasks, or a member sets a field that an override
    sets to another value.
    """
    resolved: dict[str, Member] = {}
    for name, fields in zip(members.name_members(sweep), sweep, strict=True):
        member = _resolve_member(path, name, fields, overrides, count)
        if equal := [other for other, of_other in resolved.items() if of_other.config == member.config]:
            raise cli.InputError(
                f"members {equal[0]} and {name} of get_sweep() have the same config: remove one of them"
            )
        resolved[name] = member
    configs = {name: member.config for name, member in resolved.items()}
    if len({config.task for config in configs.values()}) > 1:
        tasks = ", ".join(f"{name}: {config.task}" for name, config in configs.items())
        raise cli.InputError(
            f"members of get_sweep() have different tasks ({tasks}), whose scores do not compare: write a sweep for each task"
        )
    return resolved if count is None else folds.divided(resolved, count)


def _resolve_member(
    path: str, name: str, fields: Mapping[str, Any], overrides: Sequence[str], count: int | None
) -> Member:
    """The member with these fields, which holds out the first fold if there are folds. Raises InputError if it is invalid."""
    members.check_overrides(
        fields, overrides, f"member {name} of get_sweep()", lambda field: f"or remove {field} from get_sweep()"
    )
    member_flags = [*overrides, *(f"--{field}={value}" for field, value in fields.items())]
    if count is not None:
        member_flags = folds.first_fold(member_flags, count)
    return members.resolve(path, member_flags, f"member {name} of get_sweep()")
