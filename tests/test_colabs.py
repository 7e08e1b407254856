"""Every notebook runs from first to last cell with tiny sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpnlp.ops.attention.masks.table import MASKS

NOTEBOOKS = sorted((Path(__file__).parents[1] / "colabs").glob("*.ipynb"))


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import nbclient
    import nbformat

    monkeypatch.setenv("HPNLP_NOTEBOOK_STEPS", "6")
    monkeypatch.setenv("HPNLP_NOTEBOOK_LENGTH", "128")
    # LLVM's optimizations take longer than these small programs run.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "the notebook draws no figure"


def test_attention_notebook_shows_every_mask() -> None:
    notebook = json.loads((NOTEBOOKS[0].parent / "attention_patterns.ipynb").read_text("utf-8"))
    text = {kind: "".join(line for cell in notebook["cells"] if cell["cell_type"] == kind for line in cell["source"])
            for kind in ("code", "markdown")}  # fmt: skip
    for name in MASKS:
        assert f"`{name}`" in text["markdown"], f"no description of {name}"
        assert re.search(rf"\b{name}\(", text["code"]), f"{name} is not drawn"
