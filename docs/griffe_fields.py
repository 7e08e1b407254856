"""Completes the API reference: import lines of functions and classes, and the defaults and help of config fields and options.

A config field is `name: type = option(default, "help")`, or the result of another of _FIELDS; an option of a module has
comments that begin with `#:` above it.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import griffe

from hpnlp.types import limits_in_words

_FIELDS = ("option", "keyword_only")  # ends of the names of functions that return a field


def field_of(attr: griffe.Attribute) -> dataclasses.Field[Any]:
    """The field of a config or an entry, which its module computes, as from a constant or a function that several share."""
    assert attr.parent is not None
    owner: Any = getattr(importlib.import_module(attr.module.path), attr.parent.name)
    return owner.__dataclass_fields__[attr.name]


def add_import_lines(module: griffe.Module, packages: tuple[griffe.Module, ...] = ()) -> None:
    """Gives each function and class its import from the package nearest to the root that exports it, else from its module."""
    packages = (*packages, module)
    for name, member in module.members.items():
        if isinstance(member, griffe.Module):
            add_import_lines(member, packages)
        elif isinstance(member, (griffe.Function, griffe.Class)) and not name.startswith("_"):
            home = next((package for package in packages if name in (package.exports or ())), module)
            member.extra["hpnlp"]["import_line"] = f"from {home.path} import {name}"


class Fields(griffe.Extension):
    """Gives objects the import line, the default and the docstring that mkdocstrings would otherwise not find."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.path == "hpnlp":
            add_import_lines(pkg)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and (function := str(value.function)).endswith(_FIELDS):
            field = field_of(attr)
            has_default = field.default is not dataclasses.MISSING
            attr.value = (value.arguments[0] if function == "option" else repr(field.default)) if has_default else None
            limits = limits_in_words(field.metadata)
            text = field.metadata["help"] + f" Expected: {limits}." * bool(limits)
            attr.docstring = griffe.Docstring(text, parent=attr)
        elif attr.docstring is None and attr.lineno and isinstance(attr.filepath, Path):
            lines = attr.filepath.read_text("utf-8").splitlines()[: attr.lineno - 1]
            comments = []
            while lines and (line := lines.pop().strip()).startswith("#:"):
                comments.append(line.removeprefix("#:").strip())
            if comments:
                attr.docstring = griffe.Docstring(" ".join(reversed(comments)), parent=attr)
