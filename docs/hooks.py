"""Generated parts of the documentation: the flags of each command, every config field with its default and help, and a list of
the modules of the API reference."""

from __future__ import annotations

import ast
import html
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The tests import this file where mkdocs is not installed.
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "train",
    "check-data",
    "predict",
    "encode",
    "generate",
    "evaluate",
    "inspect",
    "sweep",
    "launch",
    "lra",
    "compress",
    "compare",
    "plan",
    "scaling",
    "draw",
    "convert",
    "export",
    "neighbours",
    "index",
    "mix",
    "completion",
)


def on_page_markdown(markdown: str, *, config: MkDocsConfig, **_: object) -> str:
    """Replaces each `<!-- generated: NAME -->` by its text, and links to source files, which the site lacks, by their text."""
    markdown = re.sub(r"\[([^\]]+)\]\((?:\.\./)+hpnlp/[^)]*\)", r"\1", markdown)
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](config), markdown)


def commands(_: MkDocsConfig) -> str:
    """`--help` of every command, without the list of config fields, which has a section of its own."""
    sections = []
    for name in COMMANDS:
        shown = subprocess.run(
            [sys.executable, "-m", "hpnlp", name, "--help"], capture_output=True, text=True, check=True
        ).stdout
        usage = re.sub(r"\nConfig fields and their defaults.*?(?=\nFlags:)", "", shown, flags=re.DOTALL)
        synopsis, *paragraphs = usage.strip().split("\n\n")
        sections += [f"### hpnlp {name}", f"```sh\n{synopsis}\n```", *map(paragraph, paragraphs)]
    return "\n\n".join(sections) + "\n"


def paragraph(text: str) -> str:
    """A paragraph of --help; a list of names with their help becomes a table."""
    title, _, listing = text.partition(":\n  ")
    if pairs := re.findall(r"^ *(\S.*)\n {6}(.*)$", listing, flags=re.MULTILINE):
        lines = [f"| {title.lower()} | meaning |", "|---|---|"]
        return "\n".join(lines + [f"| `{name}` | {cell(meaning)} |" for name, meaning in pairs])
    return html.escape(text, quote=False)


def cell(text: str) -> str:
    """Text in a cell of a Markdown table."""
    escaped = html.escape(text, quote=False).replace("|", "&#124;")
    return re.sub(
        r"`([^`]+)`", lambda match: f"<code>{match[1].replace('*', '&#42;').replace('_', '&#95;')}</code>", escaped
    )


def fields(_: MkDocsConfig) -> str:
    """A table for each section of the config; of the sections model and data one for each task."""
    from hpnlp.cli.fields import described
    from hpnlp.tasks import TASKS
    from hpnlp.training.config import Config

    sections, common = [], []
    for task in TASKS:
        for title, summary, rows in described(Config(task=task)):
            typed = title in ("model", "data")
            if not typed and task != "lm":
                continue
            heading = f"### {title or 'task'}" + f" of task {task}" * (typed and task != "lm")
            lines = [f"{heading}\n", f"{summary}\n", "| field | default | meaning |", "|---|---|---|"]
            for name, default, text in rows:
                lines.append(f"| `{title}{'.' * bool(title)}{name}` | `{default!r}` | {cell(text)} |")
            (sections if typed or not title else common).append("\n".join(lines) + "\n")
    return "\n".join(sections + common)


def modules(config: MkDocsConfig) -> str:
    """For each group of pages of the API reference, a table of its modules with the first line of their docstrings."""
    (groups,) = (entry["API reference"] for entry in config.nav or () if "API reference" in entry)
    sections = []
    for group, pages in (pair for entry in groups for pair in entry.items() if isinstance(pair[1], list)):
        lines = [f"## {group}\n", "| page | module | content |", "|---|---|---|"]
        for title, page in (pair for entry in pages for pair in entry.items()):
            cells = [f"[{title}]({page.removeprefix('api/')})"]
            for name in re.findall(r"^::: (\S+)", Path(config.docs_dir, page).read_text("utf-8"), re.MULTILINE):
                path = ROOT / name.replace(".", "/")
                source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
                summary = (ast.get_docstring(ast.parse(source.read_text("utf-8"))) or "").partition("\n")[0]
                lines.append(f"| {cells.pop() if cells else ''} | [`{name}`][{name}] | {cell(summary)} |")
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


GENERATED: dict[str, Callable[[MkDocsConfig], str]] = {"commands": commands, "fields": fields, "modules": modules}
