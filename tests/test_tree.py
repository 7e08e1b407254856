"""What no linter checks: files stay small, importing stays cheap, and nothing that is read can run code."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "hpnlp").rglob("*.py"))

LONGEST = 500  # lines of a source file; about 300 is the aim, and this the bound


def test_source_files_are_at_most_500_lines():
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in NAMES}
    assert {name: count for name, count in lines.items() if count > LONGEST} == {}


HEAVY = "flax optax orbax grain ml_collections rich matplotlib"


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("hpnlp, hpnlp.__main__", f"jax numpy {HEAVY}"),
        ("hpnlp.spec, hpnlp.types, hpnlp.measure, hpnlp.ops.attention", HEAVY),
        ("hpnlp.cli.train", "tensorflow torch transformers"),
    ],
)
def test_importing_brings_no_more_than_it_needs(modules, unwanted):
    program = f"import sys, {modules}; print(*sorted(set(sys.modules) & set({unwanted!r}.split())))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def dangers(tree: ast.AST):
    """Ways by which a file that is only read could run code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (n for n in names if n.split(".")[0] in {"pickle", "cloudpickle", "dill", "marshal", "shelve"})
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec", "__import__"}:
                yield node.func.id
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False:
                    yield "allow_pickle"


def test_nothing_that_is_read_runs_code():
    found = {name: list(dangers(ast.parse((ROOT / name).read_text("utf-8")))) for name in NAMES}
    assert {name: ways for name, ways in found.items() if ways} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import load", "import a, dill as d", "eval(x)", "exec(x)", "f(allow_pickle=True)"],
)
def test_dangers_are_seen(source):
    assert list(dangers(ast.parse(source)))


def test_harmless_code_is_no_danger():
    assert not list(
        dangers(ast.parse("import ast; ast.literal_eval(x); np.load(f, allow_pickle=False); eval_every = 1"))
    )
