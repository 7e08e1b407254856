"""Measures everything that has a row for an NVIDIA GPU, in order of importance, and writes the result after every case.

    python experiments/bench/gpu.py [--minutes=8] [--only=step,dense] [--out=DIR]
    python experiments/bench/gpu.py --rehearse

First, kernels are compared with independent forms on the CPU; what differs is reported and not timed. Then each case is timed
side by side with its peer in torch, if torch has CUDA: seven rounds, interleaved, medians with the least and the largest ratio,
and shares of the rates that the card reached in the first seconds. Cases that do not fit into the minutes are named at the end.

Cases run in a process of their own under a time limit: one that crashes or exceeds its limit is recorded, and the next goes on
in a new process. A result in --out from the same card and versions is continued: a second command measures what is left, then
what was measured with another source, whose records name their commit. The parity checks are always those of this source.
--only measures its rows, and the parity checks that are missing. Compiled programs are cached in --out/.cache.
--rehearse runs a case or two of every row at tiny size on a CPU, to test the command.

Needs jax[cuda13] or jax[cuda12], flax, optax, ml_collections, jaxtyping and numpy; torch with CUDA for its peers.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the library beside this file is measured, installed or not

from gpu_rows.process import DeviceError, Worker  # noqa: E402
from gpu_rows.rows import Case, Record, Row, plural  # noqa: E402

from hpnlp import measure  # noqa: E402

LIMIT = 3  # a case may take this many times the expected seconds, within the minutes
LEAST_LIMIT = 10  # seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME = ("device", "driver", "jax", "jaxlib", "flax", "torch")  # of results that are kept
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
    """The result file, with the records of an earlier command on the same card, by the same versions.

    Attributes:
      records: The records, in the order of the rows. Those of another source have its commit as "commit".
    """

    def __init__(self, directory: Path, worker: Worker, order: Sequence[str]) -> None:
        card = dataclasses.asdict(worker.card) if worker.card else {}
        self._environment = {**worker.environment, "source": source_digest(), "card": card}
        self._directory, self._order = directory, order
        self.path = measure.result_path("gpu", directory, self._environment["device"])
        earlier = self._read() if self.path.exists() else {"environment": {}, "rows": []}
        changed = [name for name in SAME if earlier["environment"].get(name) != self._environment.get(name)]
        self.records: list[Record] = [] if changed else self._continued(earlier)
        self._seconds = {(r["row"], r["case"]): r["seconds"] for r in earlier["rows"] if not r.get("unfinished")}
        if earlier["rows"] and changed:
            kept = self.path.with_name(f"{self.path.name}.{earlier['environment'].get('source', 'old')}")
            self.path.replace(kept)
            print(f"the earlier result has another {', '.join(changed)}: it is kept as {kept}")

    def _continued(self, earlier: dict[str, Any]) -> list[Record]:
        """The records of the earlier file; of another source, all but the parity checks, with its commit."""
        origin = earlier["environment"]
        if origin.get("source") == self._environment["source"]:
            return earlier["rows"]
        commit = {"commit": origin.get("commit")}
        return [commit | record for record in earlier["rows"] if record["row"] != "parity"]

    def _read(self) -> dict[str, Any]:
        """The earlier file. Exits where it is damaged."""
        try:
            earlier = json.loads(self.path.read_text("utf-8"))
            if all({"row", "case", "seconds"} <= record.keys() for record in earlier["rows"]):
                return {"environment": dict(earlier["environment"]), "rows": earlier["rows"]}
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        sys.exit(f"{self.path} is damaged: move it away, or use another --out")

    def expected_seconds(self, row: Row, case: Case) -> float:
        """Seconds that a case took in the earlier result; without one, those that its row assumes."""
        return self._seconds.get((row.name, case.name), case.seconds)

    def holds(self, row: Row, case: Case, any_source: bool = False) -> bool:
        """Whether a case has been run to its end, with this source or with any."""
        return any(
            (r["row"], r["case"]) == (row.name, case.name)
            and not r.get("unfinished")
            and (any_source or "commit" not in r)
            for r in self.records
        )

    def obstacle(self, row: Row) -> str:
        """The parity checks that keep a row from being measured, "" if there are none."""
        held = {r["case"] for r in self.records if r["row"] == "parity" and not r.get("unfinished")}
        unfinished = sorted({name.partition(",")[0] for name in row.checks} - held)
        if unfinished:
            return f"the parity checks of {', '.join(unfinished)} have not finished"
        differing = sorted(self.differing().intersection(row.checks))
        return f"{', '.join(differing)} differs in the parity check" if differing else ""

    def differing(self) -> frozenset[str]:
        """The parity groups that differ."""
        return frozenset(r["group"] for r in self.records if "group" in r and not r["agrees"])

    def store(self, row: Row, case: Case, records: Sequence[Record], seconds: float) -> None:
        """Replaces the records of a case, and writes the file."""
        new = [{"row": row.name, "case": case.name, "seconds": round(seconds, 1), **record} for record in records]
        kept = [r for r in self.records if (r["row"], r["case"]) != (row.name, case.name)]
        self.records = sorted([*kept, *new], key=lambda record: self._order.index(record["row"]))
        measure.write_result("gpu", self.records, self._directory, self._environment)


def describe(row: Row, records: Sequence[Record]) -> str:
    """Lines of a case: figures with their range and bar, milliseconds, failures; of the parity checks, how many agree."""
    if all("agrees" in record for record in records):
        return f"  {sum(record['agrees'] for record in records)} of {len(records)} checks agree"
    lines = []
    for record in records:
        parts = []
        for name, figure in record.get("figures", {}).items():
            bar = row.target(name).bar
            least, most = (f"{figure[end]:.3g}" for end in ("least", "most"))
            shown = f"{name} {figure['median']:.3g}" + (f" ({least} to {most})" if least != most else "")
            order = "at least" if row.target(name).more_is_better else "at most"
            parts.append(shown + (f", bar: {order} {bar:.3g}" if bar is not None and not FLAGS.rehearse else ""))
        parts += [f"{name} {ms:.3g} ms" for name, ms in record.get("ms", {}).items()]
        parts += [f"{name} {size:.3g} MB" for name, size in record.get("megabytes", {}).items()]
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


def print_plan(cases: Sequence[tuple[Row, Case]], held: int, result: Result, worker: Worker) -> None:
    """Prints the device, what is missing, and the cases with their expected seconds."""
    if card := worker.card:
        rates = ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in card.products.items())
        print(f"{worker.environment['device']}: copy {card.bandwidth / 1e12:.3g} TB/s, products of {rates}")
    if "torch" not in worker.environment:
        rows = dict.fromkeys(row.name for row, _ in cases if "torch" in row.peer or "Flex" in row.peer)
        if rows:
            print(f"torch is not installed: {', '.join(rows)} will have times and no ratios")
    if worker.environment["commit"] is None:
        print("this copy has no repository: set HPNLP_COMMIT to the commit that it was made from")
    if held:
        print(f"{result.path} holds {plural(held, 'case')} of this card and source: --only=ROW measures a row again")
    seconds = [result.expected_seconds(*case) for case in cases]
    print(plural(len(cases), "case") + (f", expected {sum(seconds):.0f} s" if not FLAGS.rehearse else ""))
    for row in dict.fromkeys(row.name for row, _ in cases):
        names = [
            c.name + (f" ({s:.0f} s)" if not FLAGS.rehearse else "")
            for (of, c), s in zip(cases, seconds, strict=True)
            if of.name == row
        ]
        more = f", and {len(names) - 8} more" if len(names) > 8 else ""
        print(f"  {row}: {', '.join(names[:8])}{more}", flush=True)


def run_case(worker: Worker, result: Result, row: Row, case: Case, left: float) -> list[str]:
    """Runs a case, and stores and prints its records.

    Args:
      worker: The process.
      result: The result file.
      row: The row.
      case: The case.
      left: Seconds that are left of the minutes.

    Returns:
      Descriptions of failures.
    """
    start = time.monotonic()
    if obstacle := result.obstacle(row):
        kind, content = "failed", f"not measured, since {obstacle}"
    else:
        limit = max(LEAST_LIMIT, min(LIMIT * result.expected_seconds(row, case), left))
        kind, content = worker.run(row, case, result.differing(), limit)
    if kind == "measured":
        records = content
        print(describe(row, records), flush=True)
    else:
        records = [{"what": case.name, "unfinished": True, "failed": {"case": content.strip().splitlines()[-1]}}]
        print(f"  failed: {content}", flush=True)
    result.store(row, case, records, time.monotonic() - start)
    failures = [(f"{row.name}, {r['what']}: {n}", why) for r in records for n, why in r.get("failed", {}).items()]
    if any(FATAL.search(why) for _, why in failures):
        worker.stop()
    return [f"{what}: {why}" for what, why in failures]


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
    wanted.sort(
        key=lambda planned: result.holds(*planned, any_source=True)
    )  # those that are measured already come last
    print_plan(wanted, len(planned) - len(wanted), result, worker)
    problems, left_out = [], []
    for index, (row, case) in enumerate(wanted):
        now = time.monotonic()
        if now + (0 if FLAGS.rehearse else result.expected_seconds(row, case)) > end:
            left_out.append(f"{row.name} {case.name}")
            continue
        progress = f"[{index + 1}/{len(wanted)}, {now - start:.0f} s of {60 * FLAGS.minutes:.0f}]"
        print(f"{progress} {row.name}: {case.name}", flush=True)
        failures = run_case(worker, result, row, case, end - now)
        problems += failures
    problems += [f"{group} differs" for group in sorted(result.differing())]
    absent = {reason for record in result.records for reason in record.get("absent", {}).values()}
    if absent:
        print(f"\nwithout ratios to a peer: {'; '.join(sorted(absent))}")
    if left_out:
        print(f"\nleft out, since the minutes are over: {'; '.join(left_out)}. The same command goes on with them.")
    print(f"\n{plural(len(problems), 'failure')}" + "".join(f"\n  {problem}" for problem in problems))
    if FLAGS.out or not FLAGS.rehearse:
        print(f"result: {result.path}")
    return problems


def interrupt(*_: Any) -> None:
    """Raises KeyboardInterrupt at the first signal, and ignores further ones while the process of the cases is stopped."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def check_directory(directory: Path) -> None:
    """Exits unless files can be written to a directory, which is created if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        sys.exit(f"--out={directory} cannot be written ({error.strerror}): use another directory")


def main(argv: Sequence[str]) -> None:
    if argv[1:] or not math.isfinite(FLAGS.minutes):
        sys.exit(
            f"unexpected {argv[1]!r}: flags are written --name=value" if argv[1:] else "--minutes: expected a number"
        )
    for number in SIGNALS:
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory() as temporary:
        default = temporary if FLAGS.rehearse else str(ROOT / "experiments" / "results")
        directory = Path(FLAGS.out or default)
        check_directory(directory)
        worker = Worker(FLAGS.rehearse, str(directory / ".cache" / "xla"))
        try:
            problems = measure_all(worker, directory)
        except DeviceError as error:
            sys.exit(f"no NVIDIA GPU: {error}. Install jax[cuda13] or jax[cuda12]; --rehearse runs on a CPU")
        except KeyboardInterrupt:
            is_kept = FLAGS.out or not FLAGS.rehearse
            sys.exit(
                f"interrupted: {f'{directory} holds the cases that were measured' if is_kept else 'nothing is kept'}"
            )
        finally:
            worker.stop()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    app.run(main)
