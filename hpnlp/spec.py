"""Spec strings: `"window(256,0)*5,full"` names table entries with arguments and repeats; parsed once, into values."""

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

from hpnlp.types import InputError

T = TypeVar("T")

# Words of Python's grammar are good names too, as in "global(16)": while Python parses them, they carry a mark.
_WORDS = re.compile(rf"\b({'|'.join(set(keyword.kwlist) - {'True', 'False', 'None'})})\b")
_MARK = "\N{MODIFIER LETTER HALF TRIANGULAR COLON}"
# Types of arguments that a spec can hold, by their names in annotations.
_PLAIN = {"int": int, "float": (int, float), "str": str, "bool": bool, "None": type(None)}
# What Flax adds to the arguments of modules: for the caller to say, if anybody.
_FLAX = ("parent", "name")


@dataclasses.dataclass(frozen=True)
class Spec:
    """One entry of a spec string: `name(*args, **dict(kwargs)) * repeat`."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    repeat: int = 1


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean NAME?)' for the nearest known name, or the list of all of them where nothing is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def parse(text: str, what: str) -> tuple[Spec, ...]:
    """`"a(1, x=2)*3,b"` -> (Spec(a, (1,), (("x", 2),), 3), Spec(b)).

    Arguments are Python literals or bare words, which are taken as strings. what: the config field or argument that holds
    `text`. Raises InputError where `text` is no spec.
    """
    try:
        marked = _WORDS.sub(lambda word: word[0] + _MARK, text)
        tree = ast.parse(f"({marked},)", mode="eval").body
        assert isinstance(tree, ast.Tuple)
        _unmark(tree)
        return tuple(_spec(node) for node in tree.elts)
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{what}={shortened(text)} is not a spec: expected names with optional arguments and repeats, as in "
            '"window(256,0)*5,full"'
        ) from error


def _unmark(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        for field in ("id", "arg", "value"):
            if isinstance(text := getattr(node, field, None), str):
                setattr(node, field, text.replace(_MARK, ""))


def _spec(node: ast.expr) -> Spec:
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
            raise ValueError("** unpacks what a string cannot hold")
        return Spec(node.func.id, args, kwargs, repeat)
    raise ValueError("not a name or a call")


def _literal(node: ast.expr) -> Any:
    value = node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value


def shortened(value: Any, length: int = 200) -> str:
    """The repr of `value`, cut off after `length` characters."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """`table[name]`, or an InputError that says which `what` was meant."""
    if name not in table:
        raise InputError(f"unknown {what} {name!r}: {did_you_mean(name, table)}")
    return table[name]


def build(spec: Spec, table: Mapping[str, Callable[..., T]], what: str, **extra: Any) -> T:
    """Calls the table entry that `spec` names with its arguments and `extra`; a wrong argument is an InputError."""
    entry, bound = _bound(spec, table, what, extra)
    if any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return entry(*bound.args, **bound.kwargs, **extra)
    return entry(**bound.arguments, **extra)  # by name: what the caller fills in may come first


def checked(spec: Spec, table: Mapping[str, Callable[..., T]], what: str, extra: Collection[str]) -> Callable[..., T]:
    """The table entry that `spec` names, which takes its arguments and those named in `extra`, or an InputError."""
    return _bound(spec, table, what, extra)[0]


def _bound(
    spec: Spec, table: Mapping[str, Callable[..., T]], what: str, extra: Collection[str]
) -> tuple[Callable[..., T], inspect.BoundArguments]:
    """The table entry that `spec` names, and the spec's arguments by the entry's parameters without those in `extra`."""
    entry = lookup(table, spec.name, what)
    known = inspect.signature(entry).parameters
    parameters = [p.replace(annotation=p.empty) for name, p in known.items() if name in extra or name not in _FLAX]
    own = [p for p in parameters if p.name not in extra and p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in own]
    for name, _ in spec.kwargs:
        if [given for given, _ in spec.kwargs].count(name) > 1:
            raise InputError(f"{what} {spec.name!r} is given {name!r} more than once: leave all but one out")
        if name not in names:
            near = did_you_mean(name, names) if names else "it takes none"
            raise InputError(f"{what} {spec.name!r} has no argument {name!r}: {near}")
    try:
        bound = inspect.Signature(own).bind(*spec.args, **dict(spec.kwargs))
    except TypeError as error:
        raise InputError(
            f"{what} {spec.name!r} takes {inspect.Signature(own) if own else 'no arguments'}: {error}"
        ) from error
    for name in (p.name for p in own if p.name in bound.arguments and p.kind is not p.VAR_POSITIONAL):
        value, expected = bound.arguments[name], known[name].annotation
        if not _fits(value, expected):
            expected = expected.__name__ if isinstance(expected, type) else expected
            raise InputError(f"{what} {spec.name!r} has {name}={shortened(value, 40)}: expected {expected}")
    return entry, bound


def _fits(value: Any, annotation: Any) -> bool:
    """False where the annotation of a parameter names plain types, and `value` is of none of them."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    if text == "tuple[int, ...]":
        return isinstance(value, tuple) and all(_fits(item, int) for item in value)
    names = [name.strip() for name in text.split("|")]
    if not set(names) <= _PLAIN.keys():
        return True
    return any(isinstance(value, _PLAIN[name]) and isinstance(value, bool) == (name == "bool") for name in names)


def parse_one(text: str, what: str) -> Spec:
    """The single entry of a spec string that must name exactly one. what: as of `parse`."""
    specs = parse(text, what)
    if len(specs) != 1 or specs[0].repeat != 1:
        count = sum(spec.repeat for spec in specs)
        raise InputError(f"{what}={text!r} names {count} entries: expected exactly one, as in {specs[0].name!r}")
    return specs[0]


def is_name(text: str) -> bool:
    """True where `text` reads as a spec's name (and so not as a path)."""
    return re.match(r"^[A-Za-z_]\w*(\(.*\))?$", text) is not None
