"""The page of published claims: each with its conditions, what hpnlp measured, on which machine, and a verdict.

Published numbers stand in `claims_*.py`, by area. Measured ones are read from experiments/results/*.json, and the verdict
is computed from them, so that neither can be older than the results. `results.py` writes docs/claims.md.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]  # name of a result file without its device -> its content
Path = tuple[str | int, ...]

REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_HERE = "reproduced", "partly", "not reproduced", "not here"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number of a result file: a field of one row, or its ratio to another field or row."""

    bench: str  # name of the result file without its device
    row: Mapping[str, Any]  # fields and values that exactly one row has
    field: Path  # keys that lead to the number
    text: str  # sentence with the number as {}
    over: Path = ()  # keys that lead to the divisor
    over_row: Mapping[str, Any] | None = None  # row of the divisor, if it is another one
    inverse: bool = False  # 1 / number: gains from relative times
    reproduced: float | None = None  # the least number that reproduces the claim
    partly: float | None = None  # the least number that reproduces it in part
    lower_is_better: bool = False  # the two bounds are largest numbers


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published claim and what became of it here."""

    claim: str
    source: str
    link: str  # empty where the guide names no source
    conditions: str  # model, data and device of the publication
    figures: tuple[Figure, ...] = ()
    note: str = ""  # what differs here, or why nothing is measured
    is_comparable: bool = True  # False: figures of other quantities or data, which decide nothing


def find_row(results: Results, bench: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The only row with these values. Raises ValueError if there is none, or more than one."""
    rows = [row for row in results[bench]["rows"] if all(row.get(key) == value for key, value in fields.items())]
    if len(rows) != 1:
        raise ValueError(
            f"{len(rows)} rows of {bench} have {dict(fields)}, and a claim needs exactly 1: change its fields"
        )
    return rows[0]


def read(row: Mapping[str, Any], path: Path) -> float:
    value: Any = row
    for key in path:
        value = value[key]
    return float(value)


def number(results: Results, figure: Figure) -> float:
    """The measured number of a figure."""
    row = find_row(results, figure.bench, figure.row)
    value = read(row, figure.field)
    if figure.over:
        other = row if figure.over_row is None else find_row(results, figure.bench, figure.over_row)
        value /= read(other, figure.over)
    return 1 / value if figure.inverse else value


def sentence(results: Results, figure: Figure) -> str:
    """The text of a figure with its number, and with a space before each percent sign."""
    return re.sub(r"(?<=\d)%", " %", figure.text.format(number(results, figure)))


def missing(results: Results, claim: Claim) -> list[str]:
    """Benchmarks of a claim without a committed result."""
    return list(dict.fromkeys(figure.bench for figure in claim.figures if figure.bench not in results))


def reaches(results: Results, figure: Figure, bound: float | None) -> bool:
    if bound is None:
        return False
    value = number(results, figure)
    return value <= bound if figure.lower_is_better else value >= bound


def verdict(results: Results, claim: Claim) -> str:
    """Reproduced or partly if all figures with bounds reach them; figures without bounds inform only."""
    if not claim.figures or not claim.is_comparable or missing(results, claim):
        return NOT_HERE
    bounded = [figure for figure in claim.figures if figure.reproduced is not None or figure.partly is not None]
    full = [reaches(results, figure, figure.reproduced) for figure in bounded]
    if bounded and all(full):
        return REPRODUCED
    part = [done or reaches(results, figure, figure.partly) for done, figure in zip(full, bounded, strict=True)]
    return PARTLY if bounded and all(part) else NOT_REPRODUCED


def cells(results: Results, machines: Mapping[str, str], claim: Claim) -> list[str]:
    """Cells of a claim's line. machines: name of a result file without its device -> description of the machine."""
    source = f"[{claim.source}]({claim.link})" if claim.link else claim.source
    benches = list(dict.fromkeys(figure.bench for figure in claim.figures))
    measured, machine = "", ""
    if absent := missing(results, claim):
        measured = "no result yet of " + ", ".join(f"`experiments/bench/{name}.py`" for name in absent)
    elif benches:
        measured = "; ".join(sentence(results, figure) for figure in claim.figures)
        files: dict[str, list[str]] = {}
        for name in benches:
            files.setdefault(machines[name], []).append(f"`{name}`")
        machine = "; ".join(f"{description} ({', '.join(names)})" for description, names in files.items())
    decision = verdict(results, claim)
    return [
        claim.claim,
        source,
        claim.conditions,
        measured,
        machine,
        f"{decision}: {claim.note}" if claim.note else decision,
    ]


def table(results: Results, machines: Mapping[str, str], claims: Sequence[Claim]) -> str:
    heading = ["claim", "source", "conditions there", "measured here", "machine and file", "verdict"]
    lines = [heading, ["---"] * len(heading), *(cells(results, machines, claim) for claim in claims)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(results: Results, machines: Mapping[str, str], areas: Mapping[str, Sequence[Claim]]) -> str:
    """Markdown of all claims: the number of each verdict, and a table for each area.

    Args:
      results: Result files.
      machines: Description of the machine of each result file.
      areas: Heading -> claims.

    Returns:
      Markdown.
    """
    verdicts = [verdict(results, claim) for claims in areas.values() for claim in claims]
    kinds = (REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_HERE)
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in kinds)
    sections = [f"## {heading}\n\n{table(results, machines, claims)}" for heading, claims in areas.items()]
    return "\n\n".join([f"{len(verdicts)} claims: {counts}.", *sections])
