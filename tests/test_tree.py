"""Checks of the source tree: files are short, imports are light, and no file that is read can run code."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "hpnlp").rglob("*.py"))

MAX_LINES = 500  # of a source file; the aim is about 300


def test_source_files_are_at_most_500_lines():
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in NAMES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_public_class_names_occur_once():
    trees = [ast.parse((ROOT / name).read_text("utf-8")) for name in NAMES]
    classes = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name in sorted(set(classes)) if classes.count(name) > 1 and not name.startswith("_")] == []


def test_files_of_oracles_hold_no_other_tests():
    """conftest.py skips the import of these files if no oracles run."""
    names = [
        path
        for path in (ROOT / "tests").rglob("*_oracle.py")
        if "pytestmark = pytest.mark.oracle" not in path.read_text("utf-8")
    ]
    assert names == []


def test_generated_parts_of_the_documentation_follow_the_source():
    spec = importlib.util.spec_from_file_location("code_map", ROOT / "docs/code_map.py")
    code_map = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code_map)
    for file, (name, make) in code_map.SECTIONS.items():
        text = (ROOT / file).read_text("utf-8")
        assert code_map.replaced(text, name, make()) == text, f"{file}: run python docs/code_map.py"


def test_the_walk_through_a_step_names_functions_that_exist():
    text = (ROOT / "docs/how_a_step_runs.md").read_text("utf-8")
    links = re.findall(r"\[`([^`]+)`\]\(\.\./(hpnlp/[^)]+)\)", text)
    assert len(links) > 30
    for name, path in links:
        source = (ROOT / path).read_text("utf-8")
        for part in name.split("."):
            assert re.search(rf"^\s*(?:def|class) {part}\b|^{part}\b.* = ", source, re.MULTILINE), (
                f"{path} has no {name}"
            )


HEAVY = "flax optax orbax grain ml_collections rich matplotlib"


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("hpnlp, hpnlp.__main__", f"jax numpy {HEAVY}"),
        ("hpnlp.spec, hpnlp.types, hpnlp.measure, hpnlp.ops.attention", HEAVY),
        ("hpnlp.compress.container", f"jax {HEAVY}"),
        ("hpnlp.cli.launch, hpnlp.cli.output", f"jax numpy {HEAVY}"),
        ("hpnlp.cli.train", "tensorflow torch transformers"),
    ],
)
def test_imports_avoid_heavy_packages(modules, unwanted):
    program = f"import sys, {modules}; print(*sorted(set(sys.modules) & set({unwanted!r}.split())))"
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout.split() == []


def unsafe_calls(tree: ast.AST):
    """Yields imports, calls and arguments by which reading a file could run code."""
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


def test_no_file_runs_code_that_it_reads():
    assert len(list(unsafe_calls(ast.parse("import pickle; eval(x); f(allow_pickle=True)")))) == 3
    unsafe = {name: list(unsafe_calls(ast.parse((ROOT / name).read_text("utf-8")))) for name in NAMES}
    assert {name: calls for name, calls in unsafe.items() if calls} == {}
