"""Writes the parts of the documentation that follow from the source: the map of packages, and the floors of imports.

python docs/code_map.py
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEEPEST = 3  # directories below hpnlp/ that the map shows


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, without its period."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return re.split(r"\.(?:\s|$)", text.partition("\n\n")[0].replace("\n", " "), maxsplit=1)[0]


def package_map() -> str:
    """The packages of hpnlp with the first sentences of their docstrings, and the modules beside them."""
    package = ROOT / "hpnlp"
    lines = ["| package | content |", "|---|---|"]
    for path in sorted(package.rglob("__init__.py"), key=lambda path: path.parent.parts):
        parts = path.parent.relative_to(package).parts
        if 0 < len(parts) <= DEEPEST:
            lines.append(f"| `{'/'.join(parts)}/` | {_cell(summary(path))} |")
    for path in sorted(package.glob("*.py")):
        if not path.name.startswith("__"):
            lines.append(f"| `{path.name}` | {_cell(summary(path))} |")
    return "\n".join(lines)


def floors() -> str:
    """The floors of imports, the highest first, from the contracts of pyproject.toml."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    text = " > ".join(", ".join(f"`{name.strip()}`" for name in re.split(r"[:|]", layer)) for layer in layers)
    return textwrap.fill(text, 120)


SECTIONS = {"docs/architecture.md": ("map", package_map), "CONTRIBUTING.md": ("floors", floors)}


def replaced(text: str, name: str, content: str) -> str:
    """The text with another content between the comments `<!-- NAME -->` and `<!-- /NAME -->`."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"there are no comments {begin.strip()} and {end.strip()}")
    return head + begin + content + end + tail


def _cell(text: str) -> str:
    return text.replace("|", "&#124;")


def main() -> None:
    """Writes all sections."""
    for file, (name, make) in SECTIONS.items():
        path = ROOT / file
        path.write_text(replaced(path.read_text("utf-8"), name, make()), "utf-8")


if __name__ == "__main__":
    main()
