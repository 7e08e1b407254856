"""`hpnlp lra`: trains mixers on tasks of the Long Range Arena, or measures their speed and memory by length."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from hpnlp import cli
from hpnlp.cli import experiment, members
from hpnlp.cli.members import Member
from hpnlp.training.processes import signals

USAGE = """
hpnlp lra --mixers=all --tasks=listops_short --budget=1000 --workdir=runs/lra [--section.field=value ...]

Trains each mixer on each task, with one model size, one optimizer setting and one budget, each run in its own process and
directory WORKDIR/TASK/mixer=MIXER. Finished runs are skipped, interrupted ones are resumed, and a failed one does not stop the
others. Writes a table of accuracy, steps/s and peak memory (lra.md), a chart of them (lra.png), and a comparison for each task.
Differences of accuracies have 95 % intervals, paired over the held-out examples: "no difference" if it contains 0.
Overrides of the config hold for all runs. Tasks with published data read a directory: --tasks=text --data=imdb:aclImdb.

--efficiency measures training steps of one task at --lengths instead, each in its own process, and writes
efficiency.json, efficiency.md and efficiency.png. The task language_model measures causal mixers.
"""

flags.DEFINE_string(
    "mixers",
    "all",
    'Mixers, separated by commas, or "all" for all that the first task can have; a name alone has a comparable size.',
)
flags.DEFINE_string("tasks", "listops_short", "Tasks, separated by commas, see the list.")
flags.DEFINE_string(
    "budget", "", 'Steps of each run, or minutes of training, as in "10min"; the default is train.steps.'
)
flags.DEFINE_multi_string(
    "data", [], "Published data as NAME:DIRECTORY, of imdb, aan and cifar10; may be given repeatedly."
)
flags.DEFINE_string("workdir", None, "Directory of the runs.")
flags.DEFINE_bool("efficiency", False, "Measure speed and memory of training steps by length, without data.")
flags.DEFINE_string("lengths", "1024,2048,3072,4096", "Tokens of a sequence, separated by commas.")
flags.DEFINE_integer("rounds", 3, "Measurements of each step, of which the median is taken.", lower_bound=1)
flags.DEFINE_string(
    "measure",
    "",
    "File for the speed of the first task's config, measured in this process; --efficiency starts such processes.",
)

MIN_STEPS = 10  # a run with a budget in minutes takes at least this many steps


def run(argv: Sequence[str]) -> None:
    """Runs `hpnlp lra`.

    Args:
      argv: "hpnlp lra" and the arguments of the command.

    Raises:
      InputError: A flag or a run is invalid, or a run did not finish.
    """
    if (parent := os.environ.pop(signals.PARENT, "")).isdecimal():
        signals.follow(int(parent))
    argv, overrides = experiment.split(argv)
    cli.parse(argv, USAGE + (_listed() if "--help" in argv else ""))
    from hpnlp import lra

    f = cli.FLAGS
    names = list(dict.fromkeys(name.strip() for name in f.tasks.split(",")))
    tasks = [lra.find_task(name) for name in names]
    if f.measure:
        _measure_here(names[0], overrides)
        return
    workdir = Path(cli.required("workdir", "runs/lra"))
    is_all = f.mixers == "all"
    causal = tasks[0].is_causal
    specs, left_out = lra.all_specs(causal=causal) if is_all else (lra.select_specs(f.mixers), {})
    for name, reason in left_out.items():
        print(f"{name}: left out: {reason}", flush=True)
    if not f.efficiency and any(task.is_causal for task in tasks):
        raise cli.InputError(
            "task language_model is measured only: add --efficiency; hpnlp sweep --config=lm/mixers trains "
            "language models"
        )
    if f.efficiency and len(names) > 1:
        raise cli.InputError(
            f"--efficiency measures one task: use --tasks={names[0]}, and another command for each other task"
        )
    if f.efficiency:
        cli.refuse(["budget"], "with --efficiency, which measures single steps: leave it out")
        _measure(names[0], specs, is_all, _parse_lengths(f.lengths), overrides, workdir)
    else:
        cli.refuse(["lengths"], "without --efficiency: add it, or set --data.seq_len=N")
        if not f.budget.endswith("min"):
            cli.refuse(["rounds"], "without --efficiency or a --budget in minutes: leave it out")
        _train(names, specs, is_all, overrides, workdir)


def _listed() -> str:
    """The list of tasks, for --help."""
    from hpnlp import lra

    lines = [
        f"  {name}\n      {task.help}{f' (needs --data={task.path}:DIRECTORY)' * bool(task.stand_in)}"
        for name, task in lra.TASKS.items()
    ]
    return "\nTasks:\n" + "\n".join(lines) + "\n"


def _experiment(task: str) -> str:
    """Value of --config of a task's runs."""
    from hpnlp.lra import tasks

    return f"{Path(tasks.__file__).with_name('experiment.py')}:{task}"


def _directories() -> dict[str, str]:
    """Directories of published data by name. Raises InputError for a malformed flag or an unknown name."""
    from hpnlp import lra
    from hpnlp.spec import lookup

    known = {task.path: task for task in lra.TASKS.values() if task.stand_in}
    result = {}
    for value in cli.FLAGS.data:
        name, colon, directory = value.partition(":")
        if not colon or not directory:
            raise cli.InputError(f"--data={value}: expected NAME:DIRECTORY, as --data=imdb:aclImdb")
        lookup(known, name, "published data set --data")
        result[name] = directory
    return result


def _parse_lengths(text: str) -> list[int]:
    """Values of --lengths."""
    if not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", text):
        raise cli.InputError(f"--lengths={text}: expected numbers of tokens, as --lengths=1024,2048")
    return list(dict.fromkeys(map(int, text.split(","))))


def _parse_budget(text: str, overrides: Sequence[str]) -> tuple[int, float]:
    """Steps and minutes of --budget, one of which is 0; both for none."""
    if text and experiment.last_override("train.steps", overrides):
        raise cli.InputError(f"--budget={text} and --train.steps both set the steps: remove one of them")
    match = re.fullmatch(r"(\d{1,9})|(\d{1,6}(?:\.\d{1,6})?) ?min", text)
    if not text:
        return 0, 0.0
    if match is None or not float(match[1] or match[2]) > 0:
        raise cli.InputError(f"--budget={text}: expected a number of steps, as 1000, or minutes, as 10min")
    return (int(match[1]), 0.0) if match[1] else (0, float(match[2]))


def _member_flags(task: str, spec: str, overrides: Sequence[str]) -> list[str] | None:
    """Overrides of a mixer's runs: its spec, its departure from the common setting, and its data; None to leave it out."""
    from hpnlp.lra.tasks import data_flags, find_departure

    departure = find_departure(spec, task)
    fields: Mapping[str, Any] | None = {} if departure is None else departure.fields
    if departure is not None:
        print(f"{task}, {spec}: {'left out' if fields is None else fields}: {departure.reason}", flush=True)
    if fields is None:
        return None
    fields = {"model.mixer": spec, **fields}
    members.check_overrides(
        fields, overrides, f"task {task}, mixer {spec}", lambda _: "or leave out the mixer in --mixers"
    )
    return [*data_flags(task, _directories()), *(f"--{name}={value}" for name, value in fields.items())]


def _resolved(
    task: str, specs: Sequence[str], is_all: bool, overrides: Sequence[str], length: int = 0
) -> Mapping[str, Any]:
    """Members of a task by the names of their directories. Of all mixers, those that are not valid here are left out."""
    result: dict[str, Member] = {}
    at_length = {"data.seq_len": length} if length else {}
    overrides = [*overrides, *(f"--{field}={value}" for field, value in at_length.items())]
    directories = members.name_members([{"model.mixer": spec, **at_length} for spec in specs])
    for spec, name in zip(specs, directories, strict=True):
        member_flags = _member_flags(task, spec, overrides)
        if member_flags is None:
            continue
        try:
            member = members.resolve(_experiment(task), [*member_flags, *overrides], f"task {task}, mixer {spec}")
        except cli.InputError as error:
            if not is_all or "unknown config field" in str(error) or "model.mixer" not in str(error):
                raise
            print(f"{task}, {spec}: left out: {error}", flush=True)
            continue
        result[name] = member
    if not result:
        raise cli.InputError(f"task {task}: no mixer is left: name others, as in --mixers=full,linear")
    return result


def _train(names: Sequence[str], specs: Sequence[str], is_all: bool, overrides: Sequence[str], workdir: Path) -> None:
    """Trains all runs, and writes the table and the chart of those that are finished."""
    steps, minutes = _parse_budget(cli.FLAGS.budget, overrides)
    overrides = [*overrides, *([f"--train.steps={steps}"] if steps else [])]
    by_task = {name: _resolved(name, specs, is_all, overrides) for name in names}
    finished: dict[str, list[Path]] = {}
    failed: dict[str, int] = {}
    with members.written(workdir):
        if not minutes:
            by_task = {name: members.in_old_directories(of_task, workdir / name) for name, of_task in by_task.items()}
            for name, of_task in by_task.items():
                members.check_directories(of_task, workdir / name)
        for name, of_task in by_task.items():
            directory = workdir / name
            with members.written(directory):
                if minutes:
                    of_task = members.in_old_directories(_with_steps(name, of_task, minutes, directory), directory)
                    members.check_directories(of_task, directory)
                finished[name], codes = members.train(of_task, directory)
            failed |= {f"{name}/{member}": code for member, code in codes.items()}
        if any(finished.values()):
            _write_scores(finished, workdir)
    if failed:
        raise cli.InputError(members.failure_message(failed, sum(map(len, by_task.values()))))


def _write_scores(finished: Mapping[str, Sequence[Path]], workdir: Path) -> None:
    """Writes comparisons, the table and the chart, and prints the table."""
    from hpnlp import report
    from hpnlp.lra import efficiency, table
    from hpnlp.report import comparison_plots
    from hpnlp.report.files import read_report, replace_text
    from hpnlp.training.files.example_scores import ExampleScores

    scores: dict[str, dict[str, table.Score]] = {}
    notes = []
    for name, directories in finished.items():
        if directories:
            report.compare(directories, workdir / name / "compare.png")
            reports = [read_report(directory) for directory in directories]
            # With a budget in minutes, speeds were measured before the runs, which other programs may have slowed down.
            measured = efficiency.read_rows(workdir / name / "speed.json")
            speeds = {row["mixer"]: row["steps_per_second"] for row in measured}
            scores[name] = {
                (mixer := content["config"]["model.mixer"]): table.score(
                    content, speeds.get(mixer), ExampleScores.read(directory)
                )
                for directory, content in zip(directories, reports, strict=True)
            }
            notes.append(f"{name}: {table.describe_heldout(reports[0])}")
    text = "\n".join([table.render_scores(scores), *notes, table.note(scores), ""])
    replace_text(workdir / "lra.md", text)
    points = {name: {mixer: score[:3] for mixer, score in of_task.items()} for name, of_task in scores.items()}
    halves = {name: {mixer: score.half for mixer, score in of_task.items()} for name, of_task in scores.items()}
    comparison_plots.plot_bubbles(points, workdir / "lra.png", halves)
    print(f"{text}\nwritten: {workdir / 'lra.md'}, {workdir / 'lra.png'}", flush=True)


def _with_steps(task: str, of_task: Mapping[str, Any], minutes: float, directory: Path) -> Mapping[str, Any]:
    """The members with as many steps as they do in some minutes, by a measurement that is kept for later commands."""
    rows = _measured(task, of_task, directory / "speed.json")
    speeds = {row["mixer"]: row["steps_per_second"] for row in rows}
    result = {}
    for name, member in of_task.items():
        speed = speeds.get(member.config.model.mixer)
        if speed is None:  # the error of the measurement is that of the run
            result[name] = member
            continue
        steps = max(MIN_STEPS, round(60 * minutes * speed))
        train = dataclasses.replace(member.config.train, steps=steps)
        config = dataclasses.replace(member.config, train=train)
        result[name] = Member([*member.flags, f"--train.steps={steps}"], config)
        print(f"{task}/{name}: {steps} steps in {minutes:g} minutes", flush=True)
    return result


def _measure(
    task: str, specs: Sequence[str], is_all: bool, lengths: Sequence[int], overrides: Sequence[str], workdir: Path
) -> None:
    """Measures steps of each mixer at each length, and writes and prints the table."""
    from hpnlp.lra import table
    from hpnlp.report import comparison_plots
    from hpnlp.report.files import replace_text

    of_task: dict[str, Member] = {}
    for length in lengths:
        of_task |= _resolved(task, specs, is_all, overrides, length)
    with members.written(workdir):
        if rows := _measured(task, of_task, workdir / "efficiency.json"):
            text = table.render_efficiency(rows)
            replace_text(workdir / "efficiency.md", text)
            comparison_plots.plot_efficiency(rows, workdir / "efficiency.png")
            print(f"{text}\nwritten: {workdir}/efficiency.json, .md and .png", flush=True)
    if len(rows) < len(of_task):
        raise cli.InputError(f"{len(of_task) - len(rows)} of {len(of_task)} measurements failed, see the errors above")


def _measured(task: str, of_task: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Rows of the members, in order, of which those in a file are not measured again; failed ones are left out."""
    from hpnlp.lra import efficiency

    known, result = efficiency.read_rows(path), []
    for index, (name, member) in enumerate(of_task.items()):
        key = efficiency.step_key(member.config, task)
        row = next((row for row in known if all(row[field] == key[field] for field in efficiency.KEYS)), None)
        label = f"[{index + 1}/{len(of_task)}] {name}"
        print(f"{label}: measured before" if row else f"{label}: measuring", flush=True)
        if row is None:
            row = _measure_in_process(task, name, member, path)
            if row is None:
                continue
            known.append(row)
            efficiency.write_rows(path, known)
        result.append(row)
    return result


def _measure_in_process(task: str, name: str, member: Member, path: Path) -> dict[str, Any] | None:
    """Measures the step of a member in a process of its own; None if that fails."""
    from hpnlp.lra import efficiency

    part = path.with_suffix(".part.json")
    part.unlink(missing_ok=True)
    overrides = [flag for flag in member.flags if not flag.startswith("--config=")]
    command = ["lra", f"--tasks={task}", f"--measure={part}", f"--rounds={cli.FLAGS.rounds}", *overrides]
    code = members.run(command, name)
    if code or not part.exists():
        print(f"{name}: not measured (exit code {code})", flush=True)
        return None
    (row,) = efficiency.read_rows(part)
    part.unlink()
    return row


def _measure_here(task: str, overrides: Sequence[str]) -> None:
    """Measures one step in this process."""
    from hpnlp.lra import efficiency
    from hpnlp.training import config

    cli.prepare_jax()
    resolved = config.resolve(experiment.read(_experiment(task), overrides))
    efficiency.write_rows(Path(cli.FLAGS.measure), [efficiency.measure_step(resolved, task, cli.FLAGS.rounds)])
