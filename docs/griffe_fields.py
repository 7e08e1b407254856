"""Shows the fields of configs and modules in the API reference with their defaults and help, wherever these are written.

A config field is `name: type = option(default, "help")`; an option of a module has comments that begin with `#:` above it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import griffe


class Fields(griffe.Extension):
    """Gives attributes the default and the docstring that mkdocstrings would otherwise not find."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "option":
            attr.value, text = value.arguments[:2]
            attr.docstring = griffe.Docstring(ast.literal_eval(str(text)), parent=attr)
        elif attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text("utf-8").splitlines()[: attr.lineno - 1]
            comments = []
            while lines and (line := lines.pop().strip()).startswith("#:"):
                comments.append(line.removeprefix("#:").strip())
            if comments:
                attr.docstring = griffe.Docstring(" ".join(reversed(comments)), parent=attr)
