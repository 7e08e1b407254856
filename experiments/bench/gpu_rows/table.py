"""The rows of the GPU benchmark, in order of importance."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_rows.attention import DENSE, SPARSE
from gpu_rows.decoding import DECODING
from gpu_rows.encoder import ENCODER
from gpu_rows.experts import EXPERTS
from gpu_rows.loss import EXACT, LAYERS
from gpu_rows.mixing import CONTENT, EFFICIENCY, LINEAR
from gpu_rows.parity import PARITY
from gpu_rows.recurrent import LSTM
from gpu_rows.rows import Case, Row
from gpu_rows.step import SETTINGS, STEP

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        PARITY, STEP, DENSE, SPARSE, EXACT, LINEAR, DECODING, LSTM, ENCODER, EXPERTS, CONTENT, EFFICIENCY, LAYERS, SETTINGS,
    )
}  # fmt: skip


def planned_cases(names: Iterable[str], rehearse: bool) -> list[tuple[Row, Case]]:
    """The cases of some rows in the order in which they run: first those of all rows that do not wait."""
    cases = [(row, case) for row in ROWS.values() if row.name in names for case in row.cases]
    cases = [(row, case) for row, case in cases if case.rehearsed or not rehearse]
    return sorted(cases, key=lambda planned: planned[1].later)


def case_of(row: str, name: str) -> Case:
    """The case of a row with a name."""
    return next(case for case in ROWS[row].cases if case.name == name)
