"""Measures everything that has a row for an NVIDIA GPU, in order of importance, and writes the result after every case.

    python experiments/bench/gpu.py [--minutes=8] [--only=step,dense] [--out=DIR]
    python experiments/bench/gpu.py --rehearse

First, kernels are compared with independent forms on the CPU; what differs is reported and not timed. Then each case is timed
side by side with its peer in torch, if torch has CUDA: seven rounds, interleaved, medians with the least and the largest ratio,
and shares of the rates that the card reached in the first seconds. Cases that do not fit into the minutes are named at the end.

Cases run in a process of their own under a time limit: one that crashes or exceeds its limit is recorded, and the next goes on
in a new process. A result in --out from the same card, versions and source is kept, so that a second command measures what is
left; --only measures its rows again. Compiled programs are cached in --out/.cache. --rehearse runs every row at tiny size on a
CPU, to test the command.

Needs jax, flax, optax, ml_collections and numpy; torch for its peers.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from gpu_rows.process import DeviceError, Worker
from gpu_rows.rows import Case, Record, Row

from hpnlp import measure

ROOT = Path(__file__).parents[2]
LIMIT = 3  # a case may take this many times the expected seconds, within the minutes
LEAST_LIMIT = 10  # seconds
SAME = ("device", "driver", "jax", "jaxlib", "flax", "torch", "source")  # of results that are kept
# Errors after which a device is unusable until its process ends.
FATAL = re.compile("cuda|internal|illegal|aborted", re.IGNORECASE)

FLAGS = flags.FLAGS
flags.DEFINE_float("minutes", 8, "Minutes for everything, compilation included.", lower_bound=0.1)
flags.DEFINE_list(
    "only", [], "Rows to measure, by their names in the plan; empty for all that --out does not hold yet."
)
flags.DEFINE_bool("rehearse", False, "Run every row at tiny size on a CPU; without --out, the result is not kept.")
flags.DEFINE_string(
    "out", None, "Directory of the result and of the cache of compiled programs; experiments/results if unset."
)


def source_digest() -> str:
    """Digest of all Python files of the library and of this benchmark."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("hpnlp/**/*.py"), *Path(__file__).parent.glob("**/*.py")]):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Result:
    """The result file, with the records of an earlier command on the same card, by the same versions and source.

    Attributes:
      records: The records, in the order of the rows.
    """

    def __init__(self, directory: Path, worker: Worker, order: Sequence[str]) -> None:
        card = dataclasses.asdict(worker.card) if worker.card else {}
        self._environment = {**worker.environment, "source": source_digest(), "card": card}
        self._directory, self._order = directory, order
        path = measure.result_path("gpu", directory, self._environment["device"])
        earlier = json.loads(path.read_text("utf-8")) if path.exists() else {"environment": {}, "rows": []}
        is_same = all(earlier["environment"].get(name) == self._environment.get(name) for name in SAME)
        self.records: list[Record] = earlier["rows"] if is_same else []
        self._seconds = {(r["row"], r["case"]): r["seconds"] for r in earlier["rows"] if not r.get("unfinished")}

    def expected_seconds(self, row: Row, case: Case) -> float:
        """Seconds that a case took in the earlier result; without one, those that its row assumes."""
        return self._seconds.get((row.name, case.name), case.seconds)

    def holds(self, row: Row, case: Case) -> bool:
        """Whether a case has been run to its end."""
        return any((r["row"], r["case"]) == (row.name, case.name) and not r.get("unfinished") for r in self.records)

    def differing(self) -> frozenset[str]:
        """The parity groups that differ."""
        return frozenset(r["group"] for r in self.records if r["row"] == "parity" and not r.get("agrees", True))

    def store(self, row: Row, case: Case, records: Sequence[Record], seconds: float) -> Path:
        """Replaces the records of a case, and writes the file."""
        new = [{"row": row.name, "case": case.name, "seconds": round(seconds, 1), **record} for record in records]
        kept = [r for r in self.records if (r["row"], r["case"]) != (row.name, case.name)]
        self.records = sorted([*kept, *new], key=lambda record: self._order.index(record["row"]))
        return measure.write_result("gpu", self.records, self._directory, self._environment)


def describe(row: Row, records: Sequence[Record]) -> str:
    """Lines of a case: figures with their range and bar, milliseconds, failures; of the parity checks, how many agree."""
    if all("agrees" in record for record in records):
        return f"  {sum(record['agrees'] for record in records)} of {len(records)} checks agree"
    lines = []
    for record in records:
        parts = []
        for name, figure in record.get("figures", {}).items():
            bar = row.target(name).bar
            shown = f"{name} {figure['median']:.3g} ({figure['least']:.3g} to {figure['most']:.3g})"
            parts.append(shown + (f", bar {bar:.3g}" if bar is not None else ""))
        parts += [f"{name} {ms:.3g} ms" for name, ms in record.get("ms", {}).items()]
        parts += [f"{name}: {reason}" for kind in ("absent", "failed") for name, reason in record.get(kind, {}).items()]
        lines.append(f"  {record['what']}: {'; '.join(parts)}")
    return "\n".join(lines)


def selected_rows(known: Sequence[str]) -> Sequence[str]:
    """The rows of --only, with the parity checks; all rows without it."""
    for name in FLAGS.only:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(known)}"
            sys.exit(f"--only: unknown row {name!r}: {hint}")
    return ["parity", *FLAGS.only] if FLAGS.only else known


def print_plan(cases: Sequence[tuple[Row, Case]], result: Result, held: int, worker: Worker) -> None:
    """Prints the device, and the cases with their expected seconds."""
    if card := worker.card:
        rates = ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in card.products.items())
        print(f"{worker.environment['device']}: copy {card.bandwidth / 1e12:.3g} TB/s, products of {rates}")
    seconds = [result.expected_seconds(*case) for case in cases]
    print(
        f"{len(cases)} cases, expected {sum(seconds):.0f} s, within {60 * FLAGS.minutes:.0f} s; held by --out: {held}"
    )
    for row in dict.fromkeys(row.name for row, _ in cases):
        names = [f"{c.name} ({s:.0f} s)" for (of, c), s in zip(cases, seconds, strict=True) if of.name == row]
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        print(f"  {row}: {', '.join(names[:8])}{more}", flush=True)


def run_case(worker: Worker, result: Result, row: Row, case: Case, left: float) -> tuple[Path, list[str]]:
    """Runs a case, and stores and prints its records.

    Args:
      worker: The process.
      result: The result file.
      row: The row.
      case: The case.
      left: Seconds that are left of the minutes.

    Returns:
      The result file, and descriptions of failures.
    """
    start, differing = time.monotonic(), result.differing()
    if missing := sorted(differing.intersection(row.checks)):
        kind, content = "failed", f"not measured, since {', '.join(missing)} differs in the parity check"
    else:
        limit = max(LEAST_LIMIT, min(LIMIT * result.expected_seconds(row, case), left))
        kind, content = worker.run(row, case, differing, limit)
    if kind == "measured":
        records = content
        print(describe(row, records), flush=True)
    else:
        records = [{"what": case.name, "unfinished": True, "failed": {"ours": content.strip().splitlines()[-1]}}]
        print(f"  failed: {content}", flush=True)
    path = result.store(row, case, records, time.monotonic() - start)
    failures = [(f"{row.name}, {r['what']}: {n}", why) for r in records for n, why in r.get("failed", {}).items()]
    if any(FATAL.search(why) for _, why in failures):
        worker.stop()
    return path, [f"{what}: {why}" for what, why in failures]


def measure_all(worker: Worker, directory: Path) -> list[str]:
    """Runs cases until the minutes are over, and returns descriptions of failures."""
    start = time.monotonic()
    end = start + 60 * FLAGS.minutes
    worker.launch(alone=not FLAGS.rehearse)
    from gpu_rows.table import ROWS, planned_cases  # imports the library while the process does so as well

    names = selected_rows(list(ROWS))
    worker.wait()
    result = Result(directory, worker, list(ROWS))
    planned = planned_cases(names, FLAGS.rehearse)
    wanted = [(row, case) for row, case in planned if row.name in FLAGS.only or not result.holds(row, case)]
    print_plan(wanted, result, len(planned) - len(wanted), worker)
    problems, left_out, path = [], [], None
    for index, (row, case) in enumerate(wanted):
        now = time.monotonic()
        if now + (0 if FLAGS.rehearse else result.expected_seconds(row, case)) > end:
            left_out.append(f"{row.name} {case.name}")
            continue
        progress = f"[{index + 1}/{len(wanted)}, {now - start:.0f} s of {60 * FLAGS.minutes:.0f}]"
        print(f"{progress} {row.name}: {case.name}", flush=True)
        path, failures = run_case(worker, result, row, case, end - now)
        problems += failures
    problems += [f"{group} differs" for group in sorted(result.differing())]
    if left_out:
        print(f"\nleft out, since the minutes are over: {'; '.join(left_out)}. The same command measures them.")
    print(f"\n{len(problems)} failures" + "".join(f"\n  {problem}" for problem in problems))
    if path and (FLAGS.out or not FLAGS.rehearse):
        print(f"written: {path}")
    return problems


def main(_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as temporary:
        default = temporary if FLAGS.rehearse else str(ROOT / "experiments" / "results")
        directory = Path(FLAGS.out or default)
        worker = Worker(FLAGS.rehearse, str(directory / ".cache" / "xla"))
        try:
            problems = measure_all(worker, directory)
        except DeviceError as error:
            sys.exit(f"no NVIDIA GPU: {error}. Install jax[cuda13] or jax[cuda12]; --rehearse runs on a CPU")
        except KeyboardInterrupt:
            sys.exit("interrupted: the result file holds the cases that were measured")
        finally:
            worker.stop()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    app.run(main)
