"""The section of docs/results.md on GPUs: every row of `gpu.py` with its bar and goal, measured or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_rows.rows import Row
from gpu_rows.table import ROWS

NOT_MEASURED = "not measured yet"
Results = Mapping[str, Sequence[Mapping[str, Any]]]  # device -> records


def shown(figure: Mapping[str, float]) -> str:
    """The median of a figure, and its range where it differs from the median."""
    median, least, most = (f"{figure[name]:.3g}" for name in ("median", "least", "most"))
    return median if least == median == most else f"{median} ({least} to {most})"


def origin(record: Mapping[str, Any]) -> str:
    """The commit of a record that was measured with an earlier source than the others, in parentheses."""
    return f" (at {record['commit'][:8]})" if record.get("commit") else ""


def limit(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def row_lines(row: Row, results: Results) -> list[list[str]]:
    """Lines of a row: measurement, figure, bar, goal, and the figure on each device.

    A row that is not measured has a line for each of its figures.
    """
    measured: dict[tuple[str, str], dict[str, str]] = {}  # (measurement, figure) -> device -> text
    for device, records in results.items():
        for record in (record for record in records if record["row"] == row.name):
            for name, figure in record.get("figures", {}).items():
                measured.setdefault((record["what"], name), {})[device] = shown(figure) + origin(record)
            failed = {name: reason for name, reason in record.get("failed", {}).items() if not record.get("figures")}
            for name, reason in failed.items():
                measured.setdefault((record["what"], name), {})[device] = reason.replace("|", r"\|")
    if not measured:
        measured = {(row.title, name): {} for name in row.targets or ("",)}
    lines = []
    for (what, name), by_device in measured.items():
        target = row.target(name)
        texts = [by_device.get(device, NOT_MEASURED) for device in results] or [NOT_MEASURED]
        lines.append(
            [what if what == row.title else f"{row.name}: {what}", name, limit(target.bar), limit(target.goal), *texts]
        )
    return lines


def parity_line(results: Results) -> list[str]:
    """The line of the parity checks: how many agree on each device."""
    texts = []
    for records in results.values():
        checks = [record for record in records if record["row"] == "parity"]
        agreeing = sum(record.get("agrees", False) for record in checks)
        texts.append(f"{agreeing} of {len(checks)} agree" if checks else NOT_MEASURED)
    return [ROWS["parity"].title, "", "", "", *(texts or [NOT_MEASURED])]


def efficiency_table(device: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Steps per second and memory of every mixer by length, on one device; "" where none is measured."""
    rows: dict[str, dict[str, str]] = {}  # mixer -> column -> figure
    for record in (record for record in records if record["row"] == "efficiency" and record["figures"]):
        figures = {name: f"{figure['median']:.3g}" for name, figure in record["figures"].items()}
        cells = {f"{name}, T {record['length']:,}": text for name, text in figures.items()}
        rows.setdefault(record["mixer"], {}).update(cells)
    columns = sorted({column for cells in rows.values() for column in cells}, key=lambda c: (c[0] == "g", len(c), c))
    lines = [[f"`{mixer}`", *(cells.get(column, "") for column in columns)] for mixer, cells in rows.items()]
    if not lines:
        return ""
    return f"\n\n{ROWS['efficiency'].title}, on {device}:\n\n{markdown_table(['mixer', *columns], lines)}"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


def gpu_section(results: Results) -> str:
    """Markdown of the section.

    Args:
      results: Records of each device by its name; empty while nothing is measured.

    Returns:
      The text, with one table.
    """
    header = ["measurement", "figure", "bar", "goal", *(results or ["GPU"])]
    lines = [parity_line(results)]
    for row in ROWS.values():
        if row.name not in ("parity", "efficiency"):
            lines += row_lines(row, results)
    table = markdown_table(header, lines)
    efficiency = "".join(efficiency_table(device, records) for device, records in results.items())
    if not efficiency:
        efficiency = f"\n\n{ROWS['efficiency'].title}: {NOT_MEASURED}."
    return (
        "## On a GPU\n\n`python experiments/bench/gpu.py` measures these rows on one NVIDIA GPU, see [GPUs, TPU pods and "
        "SLURM](guide/running.md#measure-on-a-gpu). A ratio is the median of seven, with the least and the largest. The "
        f"bar is the least that counts.\n\n{table}{efficiency}"
    )
