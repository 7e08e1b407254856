"""Tables of the page on scaling laws: checks of the fits, and the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
CONSTANTS = ("A", "B", "E", "alpha", "beta", "a")


def checks(rows: Rows) -> str:
    """Tables of the benchmark scaling_laws."""
    parts = _by_part(rows)
    refit = [
        [
            row["points"],
            *(f"{row[name]:.6g}" for name in CONSTANTS),
            f"{row['agreeing']} of {row['starts']}",
            f"{row['n_5.76e+23'] / 1e9:.1f} B, {row['ratio_5.76e+23']:.1f}",
        ]
        for row in parts["refit"]
    ]
    grids = [
        [
            f"1/{row['drift']:g} to {row['drift']:g}" if row["drift"] > 1 else "at the optimum",
            f"{row['approach_3_error']:.1g}",
            f"{round(row['approach_2_error'], 4) + 0.0:+.4f}",
            f"{row['approach_2_size_error']:+.1%}",
            f"{row['estimated_bias']:+.4f}, {row['estimated_size_bias']:+.1%}",
            "yes" if row["warned"] else "no",
        ]
        for row in parts["noise-free"]
    ]
    coverage = [
        [
            row["design"],
            "least squares" if row["delta"] is None else f"{row['delta']:g}",
            *(f"{row[name]:.3f}" for name in (*CONSTANTS, "N*", "loss")),
        ]
        for row in parts["coverage"]
    ]
    first = parts["refit"][0]
    notebook, projection = parts["peer"]
    projected = [abs(difference) for difference in projection["differences_in_sd"]]
    studies = parts["coverage"][0]["studies"]
    return "\n\n".join(
        [
            "**The 240 points of Hoffmann et al. 2022** that Besiroglu et al. 2024 read off the figure:",
            _table(("points", *CONSTANTS, "starts that agree", "N* and D*/N* at 5.76e23"), refit),
            f"The fit takes {first['cpu_seconds']:.1f} s of CPU time. The objective, written as in the notebook of the data "
            f"and minimised from 20 points around the fit by another method, is {notebook['peer_objective']:.9g} at its least, "
            f"and {notebook['objective']:.9g} here.",
            "**Losses without noise**, five budgets with nine sizes up to 4 times to each side of centres that drift off the "
            "optimum; N* at 1000 times the largest budget:",
            _table(
                ("centres", "additive: error of a", "isoFLOP: error of a", "of N*", "bias as the warning states it", "warned"),
                grids,
            ),
            f"Variable projection by the package vpnls, which minimises squares of losses, differs on a noisy grid by "
            f"{projected[0]:.2f} and {projected[1]:.2f} standard deviations of alpha and beta.",
            f"**Coverage**: share of {studies} synthetic studies whose 90 % interval holds the true value, with noise of "
            "0.5 %; N* at ten times the largest budget; loss of a single further run:",
            _table(("design", "border of the Huber loss", *CONSTANTS, "N*", "loss"), coverage),
        ]
    )  # fmt: skip


def study(rows: Rows) -> str:
    """Tables of the benchmark scaling_study."""
    parts = _by_part(rows)
    (summary,) = parts["study"]
    fits = [
        [
            row["convention"],
            *(_interval(row["intervals"][name]) for name in CONSTANTS),
            f"{row['agreeing']} of {row['starts']}",
        ]
        for row in parts["fit"]
    ]
    optima = [
        [f"{row['budget']:.2e}", *(_interval(row[name]) for name in ("n", "d", "ratio", "loss"))]
        for row in parts["optimum"]
    ]
    seconds = sum(row["seconds"] for row in parts["point"])
    share = summary["noise"]
    noise = "" if share is None else f" Runs that differ in the seed only differ by {share:.2%} of the loss."
    predictions = [
        f"The largest run, which was not fitted, has the loss {row['loss']:.4f}. Predicted was {row['value']:.4f} "
        f"({row['low']:.4f} to {row['high']:.4f}), {row['error']:+.2%}."
        for row in parts.get("prediction", ())
    ]
    warned = "\n".join(f"- {text}." for text in summary["warnings"])
    return "\n\n".join(
        [
            f"{len(parts['point'])} runs, {seconds / 60:.0f} minutes of training.{noise} " + " ".join(predictions),
            "![Scaling laws of byte-level models](../images/scaling_study-cpu.png)",
            _table(("convention", *CONSTANTS, "starts that agree"), fits),
            f"Optimum in the convention {summary['convention']}; only the budget of the first row is within those of the runs:",
            _table(("C", "N*", "D*", "D*/N*", "loss"), optima),
            *([f"Warnings of `hpnlp scaling fit`:\n\n{warned}"] if warned else []),
        ]
    )


def _by_part(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    parts: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    return parts


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.4g} ({estimate['low']:.4g} to {estimate['high']:.4g})"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
