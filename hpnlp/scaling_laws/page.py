"""The page of a study, scaling.md."""

from __future__ import annotations

from collections.abc import Sequence

from hpnlp.scaling_laws.analysis import Analysis, Prediction
from hpnlp.scaling_laws.fit import Estimate, Fit
from hpnlp.scaling_laws.flops import CONVENTIONS


def render(analysis: Analysis, unfinished: Sequence[str], picture: str, level: float | int = 0.9) -> str:
    """The page.

    Args:
      analysis: The results of the study.
      unfinished: Names of runs that were left out.
      picture: Name of the figure beside the page.
      level: Probability of intervals.

    Returns:
      Markdown.
    """
    points, noise = analysis.law.points, analysis.law.points.noise()
    repeats = (
        f"Runs that differ in the seed only differ by {noise:.2%} of the loss." if noise else "No run was repeated."
    )
    sections = [
        "# Scaling laws",
        verdict(analysis),
        f"{len(points)} runs were fitted, of {points.n.min():,.0f} to {points.n.max():,.0f} parameters and "
        f"{points.d.min():,.0f} to {points.d.max():,.0f} tokens. Intervals hold the true value with {level:.0%} probability, "
        f"by {len(analysis.law.samples)} bootstrap samples. {repeats}",
        *([f"Not finished, and left out: {', '.join(unfinished)}."] if unfinished else []),
        f"![scaling laws]({picture})",
        "## Constants of `E + A N^-alpha + B D^-beta`",
        _table(
            ("convention", "A", "B", "E", "alpha", "beta", "a: N* ~ C^a for C = 6 N D", "starts that agree"),
            [
                (name, *(_cell(law.interval(key, level)) for key in (*law.constants, "a")), f"{law.agreeing} of {law.starts}")
                for name, law in analysis.conventions.items()
            ],
        ),
        "\n".join(f"- {name}: {law.description}." for name, law in CONVENTIONS.items()),
        "## Other forms",
        f"Convention {analysis.convention}.",
        _table(("form", "constants", "a"), [_other(name, each, level) for name, each in analysis.others.items()]),
        "## Optimum for a budget",
        f"Convention {analysis.convention}, with the FLOPs of a token interpolated between the sizes. Only the budget "
        "of the first row is within those of the runs; each later one is ten times as large.",
        _table(
            ("C", "N*", "D*", "D*/N*", "loss"),
            [
                (f"{o.budget:.3g}", *(_cell(x) for x in (o.n, o.d, o.ratio)), _cell(o.loss) if o.loss else "-")
                for o in analysis.optima
            ],
        ),
    ]  # fmt: skip
    if analysis.predictions:
        rows = [
            (p.member.name, f"{p.member.loss:.4f}", _cell(p.predicted, 5), f"{p.relative_error:+.2%}",
             "yes" if p.member.loss in p.predicted else "no")
            for p in analysis.predictions
        ]  # fmt: skip
        header = ("run", "held-out loss", "predicted", "error", "inside the interval")
        sections += ["## Runs that were not fitted", _table(header, rows)]
    if analysis.warnings:
        sections += ["## Warnings", "\n".join(f"- {text}." for text in analysis.warnings)]
    return "\n\n".join(sections) + "\n"


def verdict(analysis: Analysis) -> str:
    """The result of a study in a sentence or two.

    Args:
      analysis: The results.

    Returns:
      The sentences.
    """
    a = analysis.law.interval("a")
    text = f"N* grows as C^{a.value:.3f} ({a.low:.3f} to {a.high:.3f})."
    for p in analysis.predictions:
        inside = "inside" if p.member.loss in p.predicted else "outside"
        text += (
            f" The run of {_n(analysis, p):,} parameters and {p.member.tokens:,} tokens, which was not fitted, has the loss "
            f"{p.member.loss:.4f}; predicted was {p.predicted.value:.4f} ({p.relative_error:+.2%}), and the loss is {inside} "
            f"the interval {p.predicted.low:.4f} to {p.predicted.high:.4f}."
        )
    return text


def _n(analysis: Analysis, prediction: Prediction) -> int:
    """Parameters of a held-out run in the convention of the analysis."""
    return CONVENTIONS[analysis.convention].parameters(prediction.member.size)


def _other(name: str, each: Fit | str, level: float | int) -> tuple[str, str, str]:
    if isinstance(each, str):
        return name, each, "-"
    constants = ", ".join(f"{key} {value:.4g}" for key, value in each.constants.items())
    return name, constants, _cell(each.interval("a", level))


def _cell(estimate: Estimate, digits: int = 4) -> str:
    return f"{estimate.value:.{digits}g} ({estimate.low:.{digits}g} to {estimate.high:.{digits}g})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in lines)
