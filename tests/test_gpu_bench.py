"""The benchmark of GPUs: its rehearsal, its process that survives failures, its comparisons and its table."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).parents[1] / "experiments" / "bench"
# Packages that a borrowed machine may lack. Flax imports rich.
ABSENT = ("grain", "matplotlib", "orbax", "tensorstore", "tokenizers")


@pytest.fixture(scope="module")
def bench():
    """Modules of the benchmark by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import gpu_rows.rows as rows
        import gpu_rows.table as table
        from gpu_rows import mixing

        yield {"rows": rows, "table": table, "mixing": mixing}


def run(script, *arguments, path=()):
    command = [sys.executable, str(script), *arguments]
    environment = {"PYTHONPATH": ":".join(map(str, path))}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.oracle
def test_rehearsal_measures_every_row_without_the_packages_of_the_trainer(tmp_path):
    for name in ABSENT:
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)")
    done = run(BENCH / "gpu.py", "--rehearse", f"--out={tmp_path / 'out'}", path=[tmp_path, BENCH.parents[1]])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = json.loads((tmp_path / "out" / "gpu-cpu.json").read_text())["rows"]
    assert not any(row.get("failed") for row in rows) and all(row["agrees"] for row in rows if row["row"] == "parity")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        from gpu_rows.table import ROWS
    assert {row["row"] for row in rows} == {*ROWS}
    peers = [row for row in rows if ROWS[row["row"]].peer and "step" not in row["row"]]
    assert peers and all(len(row["ms"]) > 1 and row["figures"] for row in peers)


FAULTY = """
    import os, sys, time, types
    from absl import app
    from gpu_rows import process
    from gpu_rows.rows import Case, Row

    def fine(context): return [{"what": "fine", "figures": {"x": {"median": 1.0, "least": 1.0, "most": 1.0}}}]
    def crash(context): os._exit(9)
    def hang(context): time.sleep(1000)
    def broken(context): raise ValueError("the message")
    def differs(context): return [{"what": "lstm", "group": "lstm", "agrees": False, "difference": 3.0}]

    cases = [Case(f.__name__, 0.1, f) for f in (fine, crash, broken, hang)] + [Case("again", 0.1, fine)]
    rows = [
        Row("parity", "", "", {}, [Case("lstm", 0.1, differs), Case("loss", 0.1, broken)]),
        Row("steps", "", "", {}, cases, checks=("lstm, other",)),
        Row("lstm", "", "", {}, [Case("lstm", 0.1, fine)], checks=("lstm",)),
        Row("loss", "", "", {}, [Case("loss", 0.1, fine)], checks=("loss",)),
    ]
    table = types.ModuleType("gpu_rows.table")  # in place of the table, which takes seconds to import
    table.ROWS = {row.name: row for row in rows}
    table.planned_cases = lambda names, rehearse: [(row, case) for row in rows if row.name in names for case in row.cases]
    table.case_of = lambda row, name: next(case for case in table.ROWS[row].cases if case.name == name)
    sys.modules["gpu_rows.table"] = table
    import gpu
    gpu.LEAST_LIMIT = 1
    if __name__ == "__main__":
        app.run(gpu.main)
"""


@pytest.mark.slow
def test_crashes_and_hangs_end_one_case_only_and_what_is_measured_is_kept(tmp_path):
    script = tmp_path / "faulty.py"
    script.write_text(textwrap.dedent(FAULTY))
    arguments = [script, "--rehearse", f"--out={tmp_path / 'out'}"]
    first = run(*arguments, path=[BENCH, BENCH.parents[1]])
    assert first.returncode == 1, first.stderr
    rows = {
        (row["row"], row["case"]): row for row in json.loads((tmp_path / "out" / "gpu-cpu.json").read_text())["rows"]
    }
    failed = {case: row["failed"]["case"] for case, row in rows.items() if "failed" in row}
    assert failed == {
        ("parity", "loss"): "ValueError: the message",
        ("steps", "crash"): "its process ended with exit code 9",
        ("steps", "broken"): "ValueError: the message",
        ("steps", "hang"): "exceeded its limit of 1 s",
        ("lstm", "lstm"): "not measured, since lstm differs in the parity check",
        ("loss", "loss"): "not measured, since the parity checks of loss have not finished",
    }
    assert rows["steps", "again"]["figures"] and "lstm differs" in first.stdout
    second = run(*arguments, "--only=steps,lstn", path=[BENCH, BENCH.parents[1]])
    assert second.returncode == 1 and "unknown row 'lstn': did you mean 'lstm'?" in second.stderr
    path = tmp_path / "out" / "gpu-cpu.json"
    whole = path.read_text()
    path.write_text(re.sub('"jaxlib": ".*"', '"jaxlib": "0"', whole))
    third = run(*arguments, "--only=lstm", path=[BENCH, BENCH.parents[1]])
    (kept,) = path.parent.glob("gpu-cpu.json.*")  # a result of other versions is not lost
    assert "has another jaxlib: it is kept as" in third.stdout and len(json.loads(kept.read_text())["rows"]) == 9
    kept.unlink()
    path.write_text(re.sub('"source": ".*"', '"source": "other"', re.sub('"commit": .*,', '"commit": "abc",', whole)))
    other = run(
        *arguments, "--only=steps", path=[BENCH, BENCH.parents[1]]
    )  # rows of another source are replaced one by one
    assert other.stdout.index("] steps: hang") < other.stdout.index("] steps: fine")
    commits = {(row["row"], row["case"]): row.get("commit") for row in json.loads(path.read_text())["rows"]}
    assert commits["steps", "fine"] is None and commits["lstm", "lstm"] == "abc" and commits["parity", "lstm"] is None
    path.write_text(whole)
    fourth = run(*arguments, "--only=parity", path=[BENCH, BENCH.parents[1]])  # cases that ended come last
    assert fourth.stdout.index("] parity: loss") < fourth.stdout.index("] parity: lstm")
    fifth = run(*arguments, "--only=lstm", path=[BENCH, BENCH.parents[1]])
    assert "holds 1 case of this card and source" in fifth.stdout and "] parity: lstm" not in fifth.stdout
    path.write_text(path.read_text()[:-100])
    damaged = run(*arguments, path=[BENCH, BENCH.parents[1]])
    assert damaged.returncode == 1 and "is damaged: move it away" in damaged.stderr
    refused = run(script, "--rehearse", f"--out={script}", path=[BENCH, BENCH.parents[1]])
    assert refused.returncode == 1 and "cannot be written (File exists): use another directory" in refused.stderr


def test_cases_have_distinct_names_and_every_mixer_can_be_built(bench):
    for row in bench["table"].ROWS.values():
        names = [case.name for case in row.cases]
        assert len(set(names)) == len(names) and any(case.rehearsed for case in row.cases)
    for spec in bench["mixing"].all_mixers():
        assert bench["mixing"].small_model(spec, 16384, rehearse=False).config.mixer == spec


def test_one_wrong_vector_of_thousands_is_a_difference(bench):
    difference = bench["rows"].difference
    expected = np.random.default_rng(0).standard_normal((64, 64, 16))
    actual = expected.copy()
    assert difference([actual], [expected]) == 0
    actual[3, 5] *= 1.2
    assert difference([actual], [expected]) > 0.1
    assert difference([actual[..., :8]], [expected]) is None
    actual[3, 5, 0] = np.nan
    assert difference([actual], [expected]) is None
    assert difference([np.zeros(3)], [np.zeros(3)]) == 0


def test_missing_peers_are_absent_and_errors_are_failures(bench):
    rows = bench["rows"]
    calls = rows.Calls()
    assert calls.add("ours", lambda: lambda: np.ones(2)).sum() == 2

    def fails(error):
        raise error

    calls.add("torch", lambda: fails(rows.AbsentPeerError("torch is not installed")))
    calls.add("ours, pallas", lambda: lambda: fails(ValueError("no such\nkernel")))
    record = rows.compare(rows.Context(rehearse=True), "case", calls)
    assert record["absent"] == {"torch": "torch is not installed"}
    assert (
        record["failed"] == {"ours, pallas": "ValueError: no such"}
        and record["figures"] == {}
        and record["ms"]["ours"] > 0
    )
