"""Mask expressions as text: `"Causal() & (Window(64) | Global(8))"`, read as Python reads it and never run."""

from __future__ import annotations

import ast
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hpnlp.ops.attention import Mask, PerHead
from hpnlp.ops.attention.masks.table import MASKS
from hpnlp.spec import Spec, build, did_you_mean
from hpnlp.types import InputError

# Names that an expression may use; `Where` needs a function, which no text can hold.
NAMES: Mapping[str, Callable[..., Mask | PerHead]] = {
    name: pattern.make for name, pattern in MASKS.items() if name != "Where"
}

_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}
_EXPECTED = "expected masks, as Causal() or Window(64), with & | ~ and .shift(n) between them"


def parse_mask(text: str) -> Mask | PerHead:
    """The mask that an expression describes.

    Names are those of NAMES; arguments are whole numbers, True, False, None, masks, and tuples of these; masks combine
    with `&`, `|`, `~`, brackets and `.shift(n)`. Raises InputError, with the place and the nearest name, for all else.
    """
    text = " ".join(text.split())
    try:
        with warnings.catch_warnings(action="ignore"):  # Python's advice on how to write what is refused here anyway
            tree = ast.parse(text, mode="eval").body
        return _mask(tree, text)
    except SyntaxError as error:
        raise InputError(f"{text!r:.80}, column {error.offset or 1}: {error.msg}: {_EXPECTED}") from error
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{text!r:.80} is nested too deeply, or holds what is no text: {_EXPECTED}") from error


def signature(name: str) -> str:
    """`"Window(left, right=None)"`: how an entry of NAMES is written."""
    of = inspect.signature(NAMES[name])
    bare = [p.replace(annotation=p.empty) for p in of.parameters.values()]
    return f"{name}{inspect.Signature(bare)}"


def _mask(node: ast.expr, text: str) -> Mask | PerHead:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _mask(node.left, text), _mask(node.right, text)
        try:
            return _OPERATORS[type(node.op)](left, right)
        except InputError as error:
            _refuse(node, text, str(error), error)
    if isinstance(node, ast.BoolOp | ast.UnaryOp):
        _refuse(node, text, "write & for and, | for or, ~ for not")
    if isinstance(node, ast.Name):
        if node.id in NAMES:
            _refuse(node, text, f"no mask without its brackets: write {signature(node.id)}")
        _refuse(node, text, f"unknown mask {node.id!r}: {did_you_mean(node.id, NAMES)}")
    if not isinstance(node, ast.Call):
        _refuse(node, text, _EXPECTED)
    return _call(node, text)


def _call(node: ast.Call, text: str) -> Mask | PerHead:
    if isinstance(node.func, ast.Attribute):
        name, what, table = node.func.attr, "method", {"shift": _mask(node.func.value, text).shift}
    elif isinstance(node.func, ast.Name):
        name, what, table = node.func.id, "mask", NAMES
    else:
        _refuse(node.func, text, _EXPECTED)
    if name == "Where":
        _refuse(node, text, "Where needs a function, which no text can hold: in Python, call hpnlp.mask_plot.draw")
    if name not in table:
        _refuse(node.func, text, f"unknown {what} {name!r}: {did_you_mean(name, table)}")
    args = tuple(_value(arg, text) for arg in node.args)
    kwargs = tuple((keyword.arg or "**", _value(keyword.value, text)) for keyword in node.keywords)
    try:
        return build(Spec(name, args, kwargs), table, what)
    except InputError as error:
        _refuse(node, text, str(error), error)
    except TypeError as error:
        _refuse(node, text, f"wrong kind of argument for {signature(name) if table is NAMES else 'shift(n)'}", error)


def _value(node: ast.expr, text: str) -> Any:
    """An argument."""
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, text) for item in node.elts)
    sign, number = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, number = -1, node.operand
    if not isinstance(number, ast.Constant):
        return _mask(node, text)
    if sign > 0 and (isinstance(number.value, bool) or number.value is None):
        return number.value
    if type(number.value) is not int or number.value >= 2**31:  # positions are 32 bits wide
        _refuse(node, text, "expected whole numbers below 2 ** 31, True, False, None, or masks")
    return sign * number.value


def _refuse(node: ast.expr, text: str, message: str, cause: Exception | None = None) -> NoReturn:
    column = len(text.encode()[: node.col_offset].decode()) + 1
    place = ast.get_source_segment(text, node)
    raise InputError(f"{text!r:.80}, column {column}, {place!r:.80}: {message}") from cause
