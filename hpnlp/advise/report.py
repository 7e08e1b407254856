"""The report of a search: a sentence, what was compared, a table, what was not tried and why, commands, and a picture."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpnlp import tasks
from hpnlp.advise import kept_quality
from hpnlp.advise.advice import Advice, Finding
from hpnlp.advise.candidate import UNCHANGED, Candidate
from hpnlp.advise.kept_quality import QualityVerdict
from hpnlp.advise.technique import Goal, Needs
from hpnlp.advise.trial import Measured, trivial_name
from hpnlp.advise.workload import Program
from hpnlp.cost.paired_times import Ratio, Verdict, described
from hpnlp.cost.parts import label
from hpnlp.errors import plural
from hpnlp.report.files import replace_text
from hpnlp.tasks.reports.reporting import three_digits
from hpnlp.training.config import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("advise.md", "advise.json", "advise.png")
ROWS = 5  # candidates in the table that the command prints
DRAWN = 7  # candidates whose quality is drawn
_COUNTED = {Goal.MEMORY: "memory", Goal.DISK: "bytes on disk"}


def render(advice: Advice, rows: int | None = ROWS) -> str:
    """The report as Markdown.

    Args:
      advice: Result of a search.
      rows: Most candidates in the table; None for all.

    Returns:
      Markdown.
    """
    lines = [verdict(advice), "", *_compared(advice), "", *_table(advice, rows), ""]
    lines += [f"- {line}" for line in _remarks(advice, rows)]
    if commands := list(_commands(advice)):
        lines += ["", "Commands:", "", *(f"    {command}" for command in commands)]
    return "\n".join(lines) + "\n"


def verdict(advice: Advice) -> str:
    """The result of a search in a sentence or two.

    Args:
      advice: Result of a search.

    Returns:
      The sentences.
    """
    best = advice.recommended
    if best is not None:
        return f"{best.candidate.name}: {_gain(best, advice.settings.goal)}{_quality(best)}. Confirmed in a second process."
    measured = [f for f in advice.findings if f.ratio is not None]
    if not measured:
        errors = [f for f in advice.findings if f.error]
        if errors:
            return f"All {len(errors)} candidates failed, the first with: {errors[0].error}"
        return "No technique was measured: see below why."
    count = len(measured)
    text = f"Nothing here is worth it: {count} {'technique was' if count == 1 else 'techniques were'} measured"
    misses = [f for f in measured if f.is_faster and not f.is_kept]
    if misses:
        nearest = misses[0]
        reason = _quality(nearest).removeprefix("; ") or status(nearest, False)
        return (
            f"{text}, and none that gains is shown to keep {100 * advice.settings.keep:.3g} % of the quality. The largest "
            f"gain: {nearest.candidate.name}, {_gain(nearest, advice.settings.goal)}; {reason}."
        )
    return f"{text}, and none of them is shown to gain."


def _gain(finding: Finding, goal: Goal) -> str:
    """The change of what the goal counts, in words."""
    ratio = finding.ratio
    if ratio is None:
        return finding.error
    if goal in _COUNTED:
        size = _size(finding.measured, goal) if finding.measured else ""
        return f"{ratio.median:.2g} of the {_COUNTED[goal]}{size and f' ({size})'}"
    return described(ratio, finding.cpu or ratio)


def _size(measured: Measured, goal: Goal) -> str:
    """The bytes that the goal counts, in megabytes; "" where they are not known."""
    count = measured.disk_bytes if goal is Goal.DISK else measured.peak_bytes
    return f"{three_digits(count / 1e6)} MB" if count else ""


def _quality(finding: Finding) -> str:
    """The quality after a semicolon; "" where it is not known."""
    if finding.quality is None:
        return ""
    after = f" after {finding.steps:,} steps, beside the unchanged model after as many" if finding.is_trained else ""
    return f"; {kept_quality.described(finding.quality)}{after}"


def _compared(advice: Advice) -> Iterator[str]:
    """Lines on the workload, the machine, its noise, and what the held-out examples can show."""
    result, settings = advice.baseline, advice.settings
    original = result.models[0]
    environment = result.environment
    machine = (
        f"{environment['cpu']}, {environment['cores']} cores"
        if environment["backend"] == "cpu"
        else environment["device"]
    )
    amount = f"{three_digits(1e3 * result.baseline_seconds)} ms" if result.baseline_seconds else ""
    if settings.goal in _COUNTED:
        amount = _size(original, settings.goal)
    yield f"Measured: {settings.quantity(advice.workload)}{amount and f', {amount}'}; {machine}, jax {environment['jax']}."
    if result.equal is not None and math.isfinite(result.equal.high):
        yield f"Two equal calls differ by {100 * (result.equal.low - 1):.0f} to {100 * (result.equal.high - 1):.0f} % here."
    metric, _ = tasks.find(advice.config.task).primary_metric(flat(advice.config))
    if original.examples is None:
        if advice.workload.program is not Program.TRAINING:
            yield "There are no scores of single held-out examples: quality cannot be compared."
        return
    count = len(original.examples.identity)
    name = trivial_name(metric)
    trivial = f", {name} without a model {result.trivial:.4f}" if result.trivial is not None else ""
    path = flat(advice.config).get("data.heldout_path") or flat(advice.config).get("data.path")
    score = f"held-out {metric} {original.scores[metric]:.4f}{f' on {path}' if path else ''}"
    documents = f" of {original.examples.document_count:,} documents" if original.examples.document_count else ""
    yield f"Quality: {score}{trivial}; {count:,} examples{documents}, half of them to confirm."
    gain = abs(original.scores[metric] - (result.trivial or 0.0))
    if metric == "accuracy" and gain and advice.recommended is None:
        yield _examples_needed(advice, count, gain)


def _examples_needed(advice: Advice, count: int, gain: float) -> str:
    """The number of examples by which the fastest undecided candidate could be judged, and where to get them."""
    settings = advice.settings
    undecided = [f.quality for f in advice.findings if f.is_faster and f.quality is not None]
    undecided = [q for q in undecided if q.verdict is QualityVerdict.NOT_SHOWN]
    if undecided and undecided[0].documents:
        return f"{undecided[0].documents:,} documents decide, which are independent: hold out more of them, or lower --keep."
    share = undecided[0].differing if undecided else kept_quality.DISCORDANT_PRUNED
    models = f"models that differ on {100 * share:.2g} % of them"
    half, limit = count // 2, flat(advice.config).get("data.heldout_examples")
    size = kept_quality.described_size(half, settings.keep, gain, share, models)
    if half >= kept_quality.needed_examples(settings.keep, gain, share):
        return f"{size}."
    more = "score all by --data.heldout_examples=0" if count == limit else "name a file of them as --data.heldout_path"
    if settings.batches:
        more = "leave out --batches"
    return f"{size} in each half: {more}, or lower --keep."


def _table(advice: Advice, rows: int | None) -> list[str]:
    """The findings, the largest gain first, with the recommended one in bold."""
    goal, original = advice.settings.goal, advice.baseline.models[0]
    shown = [f for f in advice.findings if f.ratio is not None]
    # Heading -> text of a finding; columns without a text in any row are left out.
    columns: dict[str, Callable[[Finding], str]] = {
        f"{_COUNTED.get(goal, 'time')} (unchanged: 1)": lambda f: _interval(f.ratio),
        "faster at most": lambda f: f"{f.bound:.2f} times" if f.bound is not None else "",
        "memory of the call": lambda f: _memory(f, original, goal),
        "memory of the weights": lambda f: "" if _memory(f, original, goal) else _weights(f, original, goal),
        "quality that is kept": _share,
        "equal labels": lambda f: f"{100 * f.agreement.share:.3g} %" if f.agreement else "",
    }
    optional = {"memory of the call", "memory of the weights", "equal labels"}
    columns = {name: text for name, text in columns.items() if name not in optional or any(map(text, shown))}
    table = [
        ["technique", *columns, "verdict"],
        ["---", *("---" if name == "quality that is kept" else "---:" for name in columns), "---"],
    ]
    for finding in shown[:rows]:
        is_best = advice.recommended is not None and finding.candidate == advice.recommended.candidate
        name = f"**{finding.candidate.name}**" if is_best else finding.candidate.name
        table.append([name, *(text(finding) for text in columns.values()), status(finding, is_best)])
    lines = [f"| {' | '.join(row)} |" for row in table]
    if rows is not None and len(shown) > rows:
        lines.append(f"\n{len(shown) - rows} more in {FILES[0]}")
    return lines


def _interval(ratio: Ratio | None) -> str:
    """A ratio of times with its interval."""
    if ratio is None:
        return ""
    if ratio.low == ratio.high or not math.isfinite(ratio.high):
        return f"{ratio.median:.2f}"
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _memory(finding: Finding, original: Measured, goal: Goal) -> str:
    """Memory that the compiled program needs, over that of the unchanged model; "" where it is not known, or is the goal."""
    measured = finding.measured
    if goal in _COUNTED or measured is None or not measured.peak_bytes or not original.peak_bytes:
        return ""
    return f"{measured.peak_bytes / original.peak_bytes:.2f}"


def _weights(finding: Finding, original: Measured, goal: Goal) -> str:
    """Bytes of the weights in memory, over those of the unchanged model; "" where they are not known, or bytes are the goal."""
    measured = finding.measured
    if goal in _COUNTED or measured is None or not measured.memory_bytes or not original.memory_bytes:
        return ""
    return f"{measured.memory_bytes / original.memory_bytes:.2f}"


def _share(finding: Finding) -> str:
    """Retention with its lower limit."""
    quality = finding.quality
    if quality is None:
        return ""
    if quality.verdict is QualityVerdict.NOTHING_LEARNED:
        return "cannot be judged"
    return ", at least ".join(kept_quality.percents(quality))


def status(finding: Finding, is_best: bool) -> str:
    """The meaning of a finding, in a few words.

    Args:
      finding: The finding.
      is_best: Whether it is the recommended one.

    Returns:
      The words.
    """
    if finding.error:
        return f"failed: {finding.error}"
    if is_best:
        return "recommended"
    if finding.measured is not None and finding.measured.is_same:
        return "the same program as without it"
    assert finding.ratio is not None
    if finding.ratio.verdict is not Verdict.FASTER:
        return str(finding.ratio.verdict)
    if finding.is_kept:
        return "confirmed" if finding.is_confirmed else "works"
    if finding.quality is not None and finding.quality.verdict is QualityVerdict.LOST:
        return "loses too much" + (" without training" if finding.needs is Needs.TRAINING else "")
    if finding.quality is not None:
        return "loss not excluded"
    return "quality not known: needs training" if finding.needs is Needs.TRAINING else "quality not scored"


def _remarks(advice: Advice, rows: int | None) -> Iterator[str]:
    """Lines on the techniques that were not tried, with the reasons, and on the search."""
    if advice.bounded:
        names = [f"{name} ({bound:.2f} x)" for name, bound in advice.bounded.items()]
        yield f"not tried, since the parts that they change take too little time: {_listed(names, rows)}"
    if advice.untrained:
        yield f"not tried, since they need the training of a new model: {_listed(advice.untrained, rows)}"
    if advice.skipped:
        yield f"no time left for: {_listed(advice.skipped, rows)}; a larger --budget goes on from here"
    if advice.refused:
        if rows is None:
            yield from (f"{name} does not fit: {reason}" for name, reason in advice.refused.items())
        else:
            count = len(advice.refused)
            yield f"{count} {plural(count, 'technique')} that {'does' if count == 1 else 'do'} not fit this run: see {FILES[0]}"
    if failed := [f for f in advice.findings if f.error]:
        yield f"{len(failed)} failed, first {failed[0].candidate.name}: {failed[0].error}"
    if advice.baseline.traced is not None:
        total = advice.baseline.traced.total
        largest = sorted(advice.baseline.traced.seconds.items(), key=lambda item: -item[1])[:3]
        yield "time goes to " + ", ".join(f"{label(name)} {100 * seconds / total:.0f} %" for name, seconds in largest)
    took = f"the search took {advice.seconds / 60:.1f} min"
    limit = advice.settings.seconds + advice.settings.train_seconds
    yield took + (
        f" of {limit / 60:.1f}: a measurement that has begun is finished" if advice.seconds > 1.1 * limit else ""
    )
    yield "verdicts and rules: docs/guide/advise.md"


def _listed(names: Sequence[str], most: int | None) -> str:
    shown = names if most is None else names[:most]
    more = f" and {len(names) - len(shown)} more" if len(shown) < len(names) else ""
    return ", ".join(shown) + more


def _commands(advice: Advice) -> Iterator[str]:
    """Commands that apply the recommended candidate, or measure it again."""
    if advice.recommended is None:
        return
    yield from _apply_commands(advice, advice.recommended)
    if advice.settings.goal in _COUNTED:  # bytes are the same each time
        return
    out = [] if advice.directory == Path(advice.run) / "advise" else [f"--out={advice.directory}"]
    yield shlex.join(["hpnlp", "advise", advice.run, f"--verify={advice.recommended.candidate.name}", *out])


def _apply_commands(advice: Advice, best: Finding) -> Iterator[str]:
    """Commands that apply a candidate, and a line of Python for a change of the use of a model."""
    run, candidate, steps, settings = advice.run, best.candidate, best.steps, advice.settings
    of_user = [f"--{name}={value}" for name, value in settings.changes.items()]
    if advice.workload.program is Program.TRAINING or (steps and not candidate.recipe):
        flags = [f"--{name}={value}" for name, value in candidate.changes.items()]
        yield shlex.join(["hpnlp", "train", *settings.experiment, "--workdir=NEW", *of_user, *flags])
        return
    target = run
    if candidate.recipe:
        target = f"{run}-{''.join(c if c.isalnum() else '-' for c in candidate.recipe).strip('-')}"
        finetune = [f"--finetune={steps}"] if steps else []
        yield shlex.join(
            ["hpnlp", "compress", run, f"--to={target}", f"--recipe={candidate.recipe}", *finetune, *of_user]
        )
    if dtype := candidate.changes.get("model.dtype"):
        yield f"python -c 'import hpnlp; model = hpnlp.load({json.dumps(target)}, dtype={json.dumps(dtype)})'"


def write(advice: Advice, directory: Path) -> list[Path]:
    """Writes the report as Markdown and JSON, and draws the picture.

    Args:
      advice: Result of a search.
      directory: The directory.

    Returns:
      The files.
    """
    markdown, content, picture = (directory / name for name in FILES)
    replace_text(markdown, f"# Which technique for {advice.run}\n\n{render(advice, None)}")
    replace_text(content, json.dumps(to_json(advice), indent=1, default=str) + "\n")
    plot(advice, picture)
    return [markdown, content, picture]


def to_json(advice: Advice) -> dict[str, Any]:
    """All that a search found, with every round.

    Args:
      advice: Result of a search.

    Returns:
      Values that JSON can hold.
    """
    return {
        "run": advice.run,
        "settings": dataclasses.asdict(advice.settings),
        "workload": dataclasses.asdict(advice.workload),
        "has_data": advice.has_data,
        "machine": advice.baseline.environment,
        "baseline_seconds": advice.baseline.baseline_seconds,
        "verdict": verdict(advice),
        "recommended": advice.recommended.candidate.name if advice.recommended else None,
        "findings": [_values(finding) for finding in advice.findings],
        "bounded": dict(advice.bounded),
        "refused": dict(advice.refused),
        "untrained": list(advice.untrained),
        "skipped": list(advice.skipped),
        "traced": dataclasses.asdict(advice.baseline.traced) if advice.baseline.traced else None,
        "seconds": advice.seconds,
    }


def _values(finding: Finding) -> dict[str, Any]:
    """A finding without the scores and labels of single examples."""
    measured = finding.measured and dataclasses.replace(finding.measured, examples=None, labels=())
    plain = dataclasses.replace(finding, measured=measured)
    return {"name": finding.candidate.name, **dataclasses.asdict(plain)}


def plot(advice: Advice, path: Path) -> None:
    """Draws the ratios with their intervals and bounds, and the quality that is kept beside the gain.

    Args:
      advice: Result of a search.
      path: File to write; its extension decides the format.
    """
    from matplotlib.figure import Figure  # without pyplot, which would change a notebook's backend

    shown = [f for f in advice.findings if f.ratio is not None][:25]
    judged = [f for f in shown if f.quality is not None and math.isfinite(f.quality.retention)][:DRAWN]
    figure = Figure(figsize=(13 if judged else 8, 1.4 + 0.32 * max(8, len(shown))), layout="constrained")
    axes = figure.subplots(1, 2 if judged else 1, squeeze=False)[0]
    _draw_ratios(axes[0], advice, shown)
    if judged:
        _draw_quality(axes[1], advice, judged)
    figure.savefig(path, dpi=130)


def _draw_ratios(axes: Axes, advice: Advice, shown: Sequence[Finding]) -> None:
    """A line for each candidate: the interval of its ratio, and its bound."""
    for row, finding in enumerate(shown):
        ratio = finding.ratio
        assert ratio is not None
        colour = _colour(advice, finding)
        low, high = (ratio.low, ratio.high) if math.isfinite(ratio.high) else (ratio.median, ratio.median)
        marker = "o" if finding.is_kept or not finding.is_faster else "x"
        axes.plot([low, high], [row, row], color=colour, linewidth=2)
        axes.plot(ratio.median, row, marker, color=colour)
        if finding.bound is not None:
            axes.plot(1 / finding.bound, row, "|", color="black", markersize=9)
    axes.axvline(1.0, color="0.4", linewidth=0.9)
    axes.set_yticks(range(len(shown)), [finding.candidate.name for finding in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel=f"{_COUNTED.get(advice.settings.goal, 'time')} (1: {UNCHANGED})")
    axes.grid(alpha=0.3, axis="x")
    axes.set_title("x: gains, but is not shown to keep the quality; |: gains at most; green: recommended", fontsize=8)


def _draw_quality(axes: Axes, advice: Advice, judged: Sequence[Finding]) -> None:
    """The gain of each candidate and the quality that it keeps, down to the lower limit; shares below 0 are drawn at 0."""
    shares = [max(f.quality.retention, 0.0) for f in judged if f.quality]
    least = min(advice.settings.keep, *shares) - 0.05
    for number, (finding, share) in enumerate(zip(judged, shares, strict=True), 1):
        ratio, quality = finding.ratio, finding.quality
        assert ratio is not None and quality is not None
        colour, gain = _colour(advice, finding), 1 / ratio.median
        axes.plot([gain, gain], [max(quality.low, least), share], color=colour, linewidth=2)
        if math.isfinite(ratio.high):
            axes.plot([1 / ratio.high, 1 / ratio.low], [share] * 2, color=colour, linewidth=2)
        axes.plot(gain, share, "o", color=colour, label=f"{number} {finding.candidate.name}")
        axes.annotate(str(number), (gain, share), (4, 4), textcoords="offset points", fontsize=8)
    axes.axhline(advice.settings.keep, color="0.4", linewidth=0.9, linestyle="--")
    axes.set(xlabel="gain (times)", ylabel="quality that is kept, down to its lower limit", ylim=(least, None))
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, handlelength=0, markerscale=0)
    axes.set_title(f"dashed: --keep={advice.settings.keep:g}, above which the whole line must be", fontsize=8)


def _colour(advice: Advice, finding: Finding) -> str:
    if advice.recommended is not None and finding.candidate == advice.recommended.candidate:
        return "C2"
    if finding.is_faster:
        return "C0"
    return "C3" if finding.ratio is not None and finding.ratio.verdict is Verdict.SLOWER else "0.55"


def read_candidate(directory: Path, name: str) -> tuple[Candidate, Mapping[str, Any]]:
    """A row of an earlier report.

    Args:
      directory: Directory of the report.
      name: Name of the candidate.

    Returns:
      The candidate, and the values of its finding.

    Raises:
      InputError: There is no report, or no such row.
    """
    from hpnlp.spec import did_you_mean
    from hpnlp.types import InputError

    path = directory / FILES[1]
    try:
        findings = {finding["name"]: finding for finding in json.loads(path.read_text("utf-8"))["findings"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} holds no report: run hpnlp advise without --verify first") from error
    if name not in findings:
        raise InputError(f"--verify={name!r}: {path} has no such row: {did_you_mean(name, findings)}")
    values = findings[name]["candidate"]
    return Candidate(tuple(values["techniques"]), values["recipe"], values["changes"]), findings[name]
