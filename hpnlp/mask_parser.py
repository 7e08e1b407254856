"""Parser of mask expressions: `"Causal() & (Window(64) | Global(8))"`, with Python's syntax, without running any of it."""

from __future__ import annotations

import ast
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hpnlp.ops.attention import Mask, PerHead
from hpnlp.ops.attention.masks.table import MASKS
from hpnlp.spec import Spec, build, unknown_name
from hpnlp.types import InputError

# The patterns that an expression may name.
NAMES: Mapping[str, Callable[..., Mask | PerHead]] = {
    name: pattern.make for name, pattern in MASKS.items() if pattern.in_text
}

_OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}
_EXPECTED = "expected masks, such as Causal() or Window(64), with & | ~ and .shift(n) between them"


def parse_mask(text: str) -> Mask | PerHead:
    """Parses a mask expression.

    Masks combine with `&`, `|`, `~`, parentheses and `.shift(n)`. Arguments are integers, True, False, None, masks, and tuples
    or lists of these.

    Args:
      text: The expression. Its names are those of NAMES.

    Returns:
      The mask.

    Raises:
      InputError: The text is anything else. The message gives the column, the part in question, and the nearest known name.
    """
    text = " ".join(text.split())
    try:
        # Python's syntax warnings propose corrections that would be rejected here as well.
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval").body
        return _parse_mask(tree, text)
    except SyntaxError as error:
        raise InputError(f"{text!r:.80}, column {error.offset or 1}: {error.msg}: {_EXPECTED}") from error
    except InputError:
        raise
    except (RecursionError, MemoryError, ValueError) as error:
        raise InputError(
            f"{text!r:.80} is nested too deeply or contains invalid characters: {_EXPECTED}, less deeply nested"
        ) from error


def signature(name: str) -> str:
    """The call of a pattern, with its arguments and defaults.

    Args:
      name: A key of NAMES.

    Returns:
      For example `"Window(left, right=None)"`.
    """
    parameters = inspect.signature(NAMES[name]).parameters.values()
    return f"{name}{inspect.Signature([p.replace(annotation=p.empty) for p in parameters])}"


def _parse_mask(node: ast.expr, text: str) -> Mask | PerHead:
    """A mask: an operator between masks, or a call. Raises InputError for any other expression."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_parse_mask(node.operand, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _parse_mask(node.left, text), _parse_mask(node.right, text)
        try:
            return _OPERATORS[type(node.op)](left, right)
        except InputError as error:
            _reject(node, text, str(error), error)
    if isinstance(node, ast.BoolOp | ast.UnaryOp):
        _reject(node, text, "expected & in place of `and`, | in place of `or`, ~ in place of `not`")
    if isinstance(node, ast.Name):
        if node.id in NAMES:
            _reject(node, text, f"expected a call with parentheses: {signature(node.id)}")
        _reject(node, text, unknown_name(node.id, NAMES, "mask"))
    if not isinstance(node, ast.Call):
        _reject(node, text, _EXPECTED)
    return _parse_call(node, text)


def _parse_call(node: ast.Call, text: str) -> Mask | PerHead:
    """A call of a pattern or of the method `shift`."""
    if isinstance(node.func, ast.Attribute):
        name, kind, table = node.func.attr, "method", {"shift": _parse_mask(node.func.value, text).shift}
    elif isinstance(node.func, ast.Name):
        name, kind, table = node.func.id, "mask", NAMES
    else:
        _reject(node.func, text, _EXPECTED)
    if kind == "mask" and name in MASKS and name not in NAMES:
        _reject(node, text, f"{name} takes a function, which text cannot contain: call hpnlp.mask_plot.draw in Python")
    if name not in table:
        _reject(node.func, text, unknown_name(name, table, kind))
    args = tuple(_parse_argument(arg, text) for arg in node.args)
    kwargs = tuple((keyword.arg or "**", _parse_argument(keyword.value, text)) for keyword in node.keywords)
    try:
        return build(Spec(name, args, kwargs), table, kind)
    except InputError as error:
        _reject(node, text, str(error), error)
    except TypeError as error:
        _reject(
            node, text, f"wrong type of argument: expected {signature(name) if kind == 'mask' else 'shift(n)'}", error
        )


def _parse_argument(node: ast.expr, text: str) -> Any:
    """An argument of a call: a whole number, bool, None, a mask, or a tuple of these."""
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_parse_argument(item, text) for item in node.elts)
    sign, constant = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, constant = -1, node.operand
    if not isinstance(constant, ast.Constant):
        return _parse_mask(node, text)
    if sign > 0 and (isinstance(constant.value, bool) or constant.value is None):
        return constant.value
    if type(constant.value) is not int or constant.value >= 2**31:  # positions are int32
        _reject(node, text, "expected whole numbers below 2 ** 31, True, False, None, or masks")
    return sign * constant.value


def _reject(node: ast.expr, text: str, message: str, cause: Exception | None = None) -> NoReturn:
    """Raises InputError with the column and the source of `node`."""
    column = len(text.encode()[: node.col_offset].decode()) + 1
    source = ast.get_source_segment(text, node)
    raise InputError(f"{text!r:.80}, column {column}, {source!r:.80}: {message}") from cause
