"""Spec strings: names of table entries with arguments and repeats, as `"window(256,0)*5,full"`, and their parsed form."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import keyword
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from hpnlp.errors import InputError, RangeError

T = TypeVar("T")

# Keywords of Python are valid names, as in "global(16)". They carry a mark while Python parses the string.
_KEYWORDS = re.compile(rf"\b({'|'.join(set(keyword.kwlist) - {'True', 'False', 'None'})})\b")
_MARK = "\N{MODIFIER LETTER HALF TRIANGULAR COLON}"
# Types of arguments that a spec can hold, by their names in annotations.
_PLAIN = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
# Arguments that Flax adds to every module. Only callers pass them, never spec strings.
_FLAX_ARGUMENTS = ("parent", "name")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One entry of a spec string: `name(*args, **dict(kwargs)) * repeat`.

    Attributes:
      name: Name of a table entry.
      args: Positional arguments of the entry.
      kwargs: Keyword arguments, as (name, value) pairs, so that the Spec is hashable.
      repeat: Number of times that a list of specs holds the entry.
    """

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    repeat: int = 1

    def __str__(self) -> str:
        """The spec string that parses to this entry."""
        arguments = ", ".join([*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)])
        return self.name + (f"({arguments})" if arguments else "") + (f"*{self.repeat}" if self.repeat > 1 else "")


# Kinds of entries that users may add in files of their own, as messages name them; and the end of messages on unknown ones.
OPEN_KINDS = ("mask", "mixer", "model.mlp", "optimizer.name", "output layer", "task")
OWN_ENTRY = "if it is an entry of your own, pass --register=FILE with its file, or import the file first"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggestion for an unknown name, to end an error message with.

    Args:
      name: The unknown name.
      known: All known names.

    Returns:
      "did you mean 'NAME'?" for the nearest known name, or the list of all known names if none is near.
    """
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def unknown_name(name: str, known: Iterable[str], noun: str) -> str:
    """Message about an unknown name of a table entry.

    Args:
      name: The unknown name.
      known: All known names.
      noun: Kind of the entries, as "mixer".

    Returns:
      The message, with a suggestion; for OPEN_KINDS, it mentions --register.
    """
    return f"unknown {noun} {name!r}: {did_you_mean(name, known)}{f' ({OWN_ENTRY})' * (noun in OPEN_KINDS)}"


def parse(text: str, field: str, example: str = "window(256,0)*5,full") -> tuple[Spec, ...]:
    """Parses a spec string: `"a(1, x=2)*3,b"` -> (Spec(a, (1,), (("x", 2),), 3), Spec(b)).

    Args:
      text: The string. Arguments are Python literals, or bare words, which become strings.
      field: The config field or argument that holds the string, for error messages.
      example: A valid string of this kind, for error messages.

    Returns:
      The entries.

    Raises:
      InputError: The string is not a spec.
    """
    try:
        marked = _KEYWORDS.sub(lambda word: word[0] + _MARK, text)
        tree = ast.parse(f"({marked},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        _unmark(tree)
        return tuple(_spec(node) for node in tree.elts)
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{field}={shortened(text)} is not a spec: expected names with optional arguments and repeats, as in "
            f'"{example}"'
        ) from error


def parse_period(text: str, field: str) -> tuple[Spec, ...]:
    """The shortest period of the entries that layers take in turn.

    Args:
      text: A spec string, as "window(256,0)*5,full".
      field: The config field or argument that holds the string, for error messages.

    Returns:
      The entries of one period, with repeats written out.

    Raises:
      InputError: The string is not a spec.
    """
    specs = tuple(dataclasses.replace(spec, repeat=1) for spec in parse(text, field) for _ in range(spec.repeat))
    periods = (n for n in range(1, len(specs)) if specs == specs[:n] * (len(specs) // n))
    return specs[: next(periods, len(specs))]


def _unmark(tree: ast.AST) -> None:
    """Removes the marks of keywords from a parsed string."""
    for node in ast.walk(tree):
        for field in ("id", "arg", "value"):
            if isinstance(text := getattr(node, field, None), str):
                setattr(node, field, text.replace(_MARK, ""))


def _spec(node: ast.expr) -> Spec:
    """Converts one parsed entry; ValueError if it is not a name or a call."""
    repeat = 1
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        node, repeat = node.left, ast.literal_eval(node.right)
        if type(repeat) is not int or repeat < 1:
            raise ValueError("a repeat is a whole number of at least 1")
    if isinstance(node, ast.Name):
        return Spec(node.id, repeat=repeat)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        args = tuple(_literal(arg) for arg in node.args)
        kwargs = tuple((keyword.arg, _literal(keyword.value)) for keyword in node.keywords if keyword.arg is not None)
        if len(kwargs) < len(node.keywords):
            raise ValueError("** is not supported")
        return Spec(node.func.id, args, kwargs, repeat)
    raise ValueError("not a name or a call")


def _literal(node: ast.expr) -> Any:
    value = node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value


def shortened(value: object, length: int = 200) -> str:
    """The repr of a value, for error messages.

    Args:
      value: Any value.
      length: Most characters of the repr.

    Returns:
      The repr, cut off with "..." if it is longer.
    """
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


class UnknownNameError(InputError):
    """A name that is in no table: misspelt, or an entry of one's own that is not registered in this process."""


def lookup(table: Mapping[str, T], name: str, noun: str) -> T:
    """Looks up an entry of a table.

    Args:
      table: Name -> entry.
      name: Name of the entry.
      noun: Kind of the entries, for error messages.

    Returns:
      `table[name]`.

    Raises:
      UnknownNameError: Unknown name.
    """
    if name not in table:
        raise UnknownNameError(unknown_name(name, table, noun))
    return table[name]


def build(spec: Spec, table: Mapping[str, Callable[..., T]], noun: str, **extra: Any) -> T:
    """Calls the table entry that a spec names.

    Args:
      spec: Name and arguments.
      table: Name -> function or class.
      noun: Kind of the entries, for error messages.
      **extra: Further keyword arguments, which the spec cannot set.

    Returns:
      The result of the call.

    Raises:
      InputError: Unknown name, or wrong arguments.
    """
    entry, bound = _bind(spec, table, noun, extra)
    try:
        if any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
            return entry(*bound.args, **bound.kwargs, **extra)
        return entry(**bound.arguments, **extra)  # by name: parameters that the caller fills in may come first
    except RangeError as error:
        problem = error.problem if isinstance(entry, type) else error  # a function may call entries of other arguments
        raise InputError(f"{noun} {str(dataclasses.replace(spec, repeat=1))!r}: {problem}") from error


def checked(spec: Spec, table: Mapping[str, Callable[..., T]], noun: str, extra: Collection[str]) -> Callable[..., T]:
    """Checks a spec against the signature of the table entry that it names.

    Args:
      spec: Name and arguments.
      table: Name -> function or class.
      noun: Kind of the entries, for error messages.
      extra: Names of other keyword arguments, which the spec cannot set.

    Returns:
      The table entry.

    Raises:
      InputError: Unknown name, or wrong arguments.
    """
    return _bind(spec, table, noun, extra)[0]


def _bind(
    spec: Spec, table: Mapping[str, Callable[..., T]], noun: str, extra: Collection[str]
) -> tuple[Callable[..., T], inspect.BoundArguments]:
    """The table entry that `spec` names, and the spec's arguments by the entry's parameters without those in `extra`."""
    entry = lookup(table, spec.name, noun)
    parameters = inspect.signature(entry).parameters
    settable = [
        p.replace(annotation=p.empty)
        for name, p in parameters.items()
        if name not in extra and name not in _FLAX_ARGUMENTS and p.kind is not p.VAR_KEYWORD
    ]
    names = [p.name for p in settable]
    for name, _ in spec.kwargs:
        if [other for other, _ in spec.kwargs].count(name) > 1:
            raise InputError(f"{noun} {spec.name!r} is given {name!r} more than once: leave all but one out")
        if name not in names:
            suggestion = did_you_mean(name, names) if names else "it takes none"
            raise InputError(f"{noun} {spec.name!r} has no argument {name!r}: {suggestion}")
    try:
        bound = inspect.Signature(settable).bind(*spec.args, **dict(spec.kwargs))
    except TypeError as error:
        arguments = inspect.Signature(settable) if settable else "no arguments"
        raise InputError(f"{noun} {spec.name!r} takes {arguments}: {error}") from error
    for name in (p.name for p in settable if p.name in bound.arguments and p.kind is not p.VAR_POSITIONAL):
        value, expected = bound.arguments[name], parameters[name].annotation
        if not _fits(value, expected):
            expected = expected.__name__ if isinstance(expected, type) else expected
            raise InputError(f"{noun} {spec.name!r} has {name}={shortened(value, 40)}: expected {expected}")
    return entry, bound


def _fits(value: object, annotation: object) -> bool:
    """False if the annotation of a parameter names plain types, and `value` has none of them."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text == "tuple[int, ...]":
        return isinstance(value, tuple) and all(_fits(item, int) for item in value)
    names = [name.strip() for name in text.split("|")]
    if not set(names) <= _PLAIN.keys():
        return True
    return any(isinstance(value, _PLAIN[name]) and isinstance(value, bool) == (name == "bool") for name in names)


def parse_one(text: str, field: str) -> Spec:
    """Parses a spec string of exactly one entry without repeats.

    Args:
      text: The string.
      field: The config field or argument that holds the string, for error messages.

    Returns:
      The entry.

    Raises:
      InputError: The string is not a spec, or has several entries.
    """
    specs = parse(text, field)
    if len(specs) != 1 or specs[0].repeat != 1:
        count = sum(spec.repeat for spec in specs)
        raise InputError(f"{field}={text!r} names {count} entries: expected exactly one, as in {specs[0].name!r}")
    return specs[0]


def is_name(text: str) -> bool:
    """Whether a string has the form of a spec's entry, and not of a path.

    Args:
      text: The string.

    Returns:
      True for a name with or without arguments.
    """
    return re.match(r"^[A-Za-z_]\w*(\(.*\))?$", text) is not None
