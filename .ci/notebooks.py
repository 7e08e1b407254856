"""Writes the beginning of each notebook (link to Colab, cell that installs hpnlp) and their list in the README.

    python .ci/notebooks.py

The address of the repository stands in `setup.py`. Without one there is no link, and outside of a checkout the cell
asks for it. It never takes hpnlp from the package index, where the name may belong to somebody else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
ABOUT = (
    "## Install\n"
    "Installs hpnlp from the checkout that contains this notebook, or else, as in Colab, from the repository. Does nothing if "
    "hpnlp can be imported. If Colab then asks to restart the session, because it had loaded older versions of some packages, "
    "do so and continue below."
)
INSTALL = """import importlib.util
import subprocess
import sys
from pathlib import Path

REPOSITORY = "{repository}"  # the address of the git repository of hpnlp
if importlib.util.find_spec("hpnlp") is None:
    checkouts = [str(directory) for directory in (Path.cwd(), Path.cwd().parent) if (directory / "setup.py").exists()]
    if not checkouts and not REPOSITORY:
        raise SystemExit("hpnlp is neither installed nor in this directory: set REPOSITORY to its address")
    source = checkouts[0] if checkouts else f"git+{{REPOSITORY}}"
    print(f"Installing hpnlp from {{source}}")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)"""


def repository() -> str:
    """The address of the repository, which `setup.py` states."""
    return re.search(r'^REPOSITORY = "([^"]*)"', (ROOT / "setup.py").read_text("utf-8"), re.MULTILINE)[1]


def badge(name: str, address: str) -> str:
    """A link that opens a notebook of a repository on GitHub in Colab; empty for other addresses."""
    path = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    return f"{BADGE}(https://colab.research.google.com/github/{path[1]}/blob/main/colabs/{name})" if path else ""


def with_beginning(notebook: dict[str, Any], name: str, address: str) -> dict[str, Any]:
    """The notebook with the link after its title and with the cells of the installation; outputs stay."""
    title, about, install, *others = notebook["cells"]
    lines = [line for line in "".join(title["source"]).split("\n") if not line.startswith(BADGE)]
    text = "\n".join(lines[2:] if not lines[1] else lines[1:]).lstrip("\n")
    new = "\n\n".join(part for part in (lines[0], badge(name, address), text) if part)
    code = INSTALL.format(repository=address)
    sources = zip((title, about, install), (new, ABOUT, code), strict=True)
    beginning = [cell | {"source": source.splitlines(keepends=True)} for cell, source in sources]
    return notebook | {"cells": [*beginning, *others]}


def listing(readme: str, address: str) -> str:
    """The README with the list of notebooks between its markers."""
    rows = []
    for path in NOTEBOOKS:
        title = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"]).partition("\n")[0].removeprefix("# ")
        rows.append(f"- [{title}](colabs/{path.name}) {badge(path.name, address)}".rstrip())
    text = "\n".join(["<!-- notebooks -->", *rows, "<!-- /notebooks -->"])
    return re.sub("<!-- notebooks -->.*<!-- /notebooks -->", lambda _: text, readme, flags=re.DOTALL)


def files() -> dict[Path, str]:
    """The contents of the notebooks and of the README, with the address of `setup.py`."""
    address = repository()
    written = {}
    for path in NOTEBOOKS:
        notebook = with_beginning(json.loads(path.read_text("utf-8")), path.name, address)
        written[path] = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    readme = ROOT / "README.md"
    return written | {readme: listing(readme.read_text("utf-8"), address)}


def main() -> None:
    for path, content in files().items():
        path.write_text(content, "utf-8")


if __name__ == "__main__":
    main()
