"""Rows of result files about devices and memory as lines of the documentation's tables."""

from __future__ import annotations

from collections.abc import Sequence

from result_plots import Rows

Lines = Sequence[tuple[str, str]]  # (label, figure)
EXCHANGES = {"ring": "exchanged in a ring", "heads": "exchanged by heads (all-to-all)"}


def bubble(rows: Rows) -> Lines:
    counted = [row for row in rows if "idle_counted" in row]
    difference = max(abs(row["idle_counted"] - row["idle_formula"]) for row in counted)
    idle = [row["idle_formula"] for row in counted]
    label = f"{len(counted)} pipeline schedules, {rows[0]['stages']} stages, 1 to 4 rounds: idle fraction of the time"
    return [(label, f"{max(idle):.3f} to {min(idle):.3f}, differs from the formula by at most {difference:.1e}")]


def remat(rows: Rows) -> Lines:
    first = rows[0]
    size = f"{first['parameters'] / 1e6:.0f}M parameters, T {first['length']}"
    lines = [
        (
            f"`plan.remat={row['remat']}`, step of {size}, B {row['rows']}: temporary memory; error of the plan",
            f"{row['temp_bytes'] / 2**20:,.0f} MiB; {row['temp_bytes_planned'] / row['temp_bytes'] - 1:+.1%}",
        )
        for row in rows
    ]
    return lines + [
        (
            f"`plan.remat={row['remat']}`, step of {size}, B {row['timed_rows']}: time relative to `{first['remat']}`",
            f"{row['time_over_first']:.2f} ({row['ms']:,.0f} ms)",
        )
        for row in rows
        if "timed_rows" in row
    ]


def ring(rows: Rows) -> Lines:
    lines = []
    for row in rows:
        exchange = EXCHANGES.get(row["layout"], row["layout"])
        setting = f"`{row['mixer']}`, a sequence of {row['length']:,} tokens over {row['devices']} devices, {exchange}"
        if "over_one" in row:
            label = f"{setting}: activation memory relative to one device"
            lines.append((label, f"1 / {1 / row['over_one']:.1f}"))
        if "pairs_done" in row:
            label = f"{setting}: fraction of chunk pairs computed; of ring rounds taken; of token pairs that the mask allows"
            pairs, rounds = (row[f"{kind}_done"] / row[f"{kind}_possible"] for kind in ("pairs", "rounds"))
            lines.append((label, f"{pairs:.3f}; {rounds:.3f}; {row['density']:.3f}"))
    return lines


def operations(rows: Rows) -> Lines:
    return [
        (
            f"{row['name']}: forward and backward, time of two devices with a core each relative to one with both",
            f"{row['ratio']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f}), {row['divided_ms']:,.0f} ms; "
            f"{row['sent_bytes'] / 2**20:,.1f} MiB received",
        )
        for row in rows
    ]
