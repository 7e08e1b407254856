"""Table and chart of a language model with neighbours from its training text, beside compressors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpnlp.data.baselines import NAMES
from hpnlp.report.files import read_report


def compressors(workdir: Path, heldout_digest: str) -> dict[str, float]:
    """Bits per byte of the compressors in the report of a run.

    Args:
      workdir: The run directory.
      heldout_digest: Digest of the held-out text.

    Returns:
      Name -> bits per byte; empty without a report of this text.
    """
    if not (workdir / "report.json").exists():
        return {}
    report = read_report(workdir)
    if report.get("heldout_digest") != heldout_digest:
        return {}
    return {name: report[field] for field, name in NAMES.items() if report.get(field) is not None}


def ladder(rows: Sequence[Any], compressors: Mapping[str, float]) -> dict[str, float]:
    """Bits per byte of mixtures and compressors, the most first.

    Args:
      rows: Rows of `jobs.retrieval.mix.Mixture`.
      compressors: See `compressors`.

    Returns:
      Name -> bits per byte.
    """
    bits = dict(compressors) | {f"{row.name}, {row.text}": row.bits for row in rows}
    return dict(sorted(bits.items(), key=lambda item: -item[1]))


def render(rows: Sequence[Any], compressors: Mapping[str, float], heldout_bytes: int, documents: int) -> str:
    """Table of bits per byte of mixtures and compressors, the most first, and a note on the rows.

    Args:
      rows: Rows of `jobs.retrieval.mix.Mixture`.
      compressors: Result of `compressors`.
      heldout_bytes: Bytes of the held-out text.
      documents: Number of held-out documents.

    Returns:
      Markdown.
    """
    of_documents = {f"{row.name}, {row.text}": row.median for row in rows}
    lines = ["| what predicts | bits per byte | median over documents |", "| --- | --- | --- |"]
    for name, bits in ladder(rows, compressors).items():
        median = f"{of_documents[name]:.3f}" if name in of_documents else ""
        lines.append(f"| {name} | {bits:.3f} | {median} |")
    note = (
        f"Of {heldout_bytes:,} held-out bytes in {documents} documents. *static* has read the training text; *adaptive* also "
        "the held-out text before each position, as a compressor has."
    )
    return "\n".join(lines) + f"\n\n{note}\n"
