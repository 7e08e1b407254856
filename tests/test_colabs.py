"""Every notebook runs from first to last cell with tiny sizes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpnlp.ops.attention.masks.table import MASKS

NOTEBOOKS = sorted((Path(__file__).parents[1] / "colabs").glob("*.ipynb"))


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """The client of a kernel that executes all notebooks one after another, so that libraries are imported once."""
    import nbclient
    import nbformat

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPNLP_NOTEBOOK_STEPS", "6")
        patch.setenv("HPNLP_NOTEBOOK_LENGTH", "128")
        # A package of the standard library in place of all of it, which takes seconds to read.
        patch.setenv("HPNLP_NOTEBOOK_TEXT", str(Path(asyncio.__file__).parent))
        # LLVM's optimizations take longer than these small programs run.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("MPLBACKEND", "Agg")
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(), kernel_name="python3")
        with client.setup_kernel():
            yield client


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, kernel: Any, tmp_path: Path) -> None:
    """In an empty namespace and an empty directory."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.cells[:0] = [nbformat.v4.new_code_cell(text) for text in ("%reset -f", f"%cd -q {tmp_path}")]
    client = nbclient.NotebookClient(notebook, timeout=600, km=kernel.km)
    client.kc = kernel.kc
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook draws no figure"


def outputs_of(path: Path) -> list[dict[str, Any]]:
    """Outputs of a committed notebook, after a check that each code cell was executed without an error."""
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells), f"{path.name} has cells without outputs: run make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output["output_type"] == "error" for output in outputs), f"{path.name} ended with an error"
    return outputs


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(
        "".join(text)
        for output in outputs
        for kind, text in {"text": output.get("text", []), **output.get("data", {})}.items()
        if kind.startswith("text")
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook_has_outputs_without_local_paths(path: Path) -> None:
    outputs = outputs_of(path)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not re.search(r"/(home|root|tmp|Users)/", text_of(outputs))


@pytest.fixture(scope="module")
def beginnings() -> Any:
    """The module that writes the beginnings of the notebooks."""
    spec = importlib.util.spec_from_file_location("beginnings", NOTEBOOKS[0].parents[1] / ".ci" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebooks_and_readme_begin_with_the_address_of_setup(beginnings: Any) -> None:
    changed = [path.name for path, content in beginnings.files().items() if path.read_text("utf-8") != content]
    assert not changed, "run python .ci/notebooks.py"


def test_notebooks_install_from_the_repository_and_open_in_colab(beginnings: Any) -> None:
    notebook = json.loads(NOTEBOOKS[0].read_text("utf-8"))
    address = "https://github.com/owner/name"
    changed = beginnings.with_beginning(notebook, NOTEBOOKS[0].name, address)
    title, _, install = ("".join(cell["source"]) for cell in changed["cells"][:3])
    assert f"/github/owner/name/blob/main/colabs/{NOTEBOOKS[0].name})" in title.splitlines()[2]
    assert f'REPOSITORY = "{address}"' in install and changed["cells"][3:] == notebook["cells"][3:]
    assert beginnings.with_beginning(changed, NOTEBOOKS[0].name, "")["cells"][0] == notebook["cells"][0]


def test_install_cell_never_asks_the_package_index(
    beginnings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    with pytest.raises(SystemExit, match="set REPOSITORY"):
        exec(beginnings.INSTALL.format(repository=""), {})
    exec(beginnings.INSTALL.format(repository="https://github.com/owner/name"), {})
    (tmp_path / "setup.py").touch()
    exec(beginnings.INSTALL.format(repository=""), {})
    assert [command[-1] for command in commands] == ["git+https://github.com/owner/name", str(tmp_path)]


def test_attention_notebook_shows_every_mask() -> None:
    text = text_of(outputs_of(NOTEBOOKS[0].parent / "attention_patterns.ipynb"))
    assert not [name for name in MASKS if f"`{name}`" not in text]
