"""ListOps: nested operations on lists of digits, whose results are to be predicted.

References: Nangia and Bowman 2018, "ListOps: a diagnostic dataset for latent tree learning"; the form with long expressions is
of Tay et al. 2021, "Long Range Arena: a benchmark for efficient transformers", sec. 2.2.1, whose published generator
(google-research/long-range-arena, lra_benchmarks/data/listops.py) `examples` equals in distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hpnlp.data.examples.generated.entry import Generated
from hpnlp.data.reading.sources import File

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
TOKENS = (*"0123456789", *OPERATORS, END)

_OPERATOR_SHARE = 0.25  # share of operators among arguments above the largest depth; the others are digits
_ROOTS = 2048  # expressions that are generated at once, most of which have other lengths


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Sizes of expressions.

    An argument is a nested operation with a probability of 0.25, and a digit otherwise or at the largest depth. Operators,
    numbers of arguments and digits are uniform. Expressions of other lengths are rejected. The length counts digits, operators
    and closing brackets.

    Attributes:
      max_depth: Depth from which on all arguments are digits; the outermost operator has depth 1.
      max_args: Largest number of arguments of an operator; the smallest is 2.
      above: Expressions are longer than this.
      below: Expressions are shorter than this.
      count: Number of expressions.
    """

    max_depth: int
    max_args: int
    above: int
    below: int
    count: int


PUBLISHED = Grammar(max_depth=10, max_args=10, above=500, below=2000, count=98_000)
SHORT = Grammar(max_depth=5, max_args=10, above=64, below=250, count=50_000)


def examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates the published form: 98,000 expressions of 501 to 1999 tokens.

    Records have "text", tokens separated by spaces, "label", the result as a digit, and "group", the number of the record.
    """
    return generate(PUBLISHED)


def short_examples(files: Sequence[File]) -> Iterator[dict[str, str]]:
    """Generates a small form, whose accuracies do not compare with published ones: 50,000 of 65 to 249 tokens."""
    return generate(SHORT)


def generate(grammar: Grammar, seed: int = 0) -> Iterator[dict[str, str]]:
    """Generates different expressions.

    Cost: about 0.2 ms per expression of the published form.
    """
    draw = np.random.default_rng(seed)
    seen: set[str] = set()
    while True:
        for tokens, value in _expressions(grammar, draw):
            text = " ".join([TOKENS[token] for token in tokens.tolist()])
            if text not in seen:
                yield {"text": text, "label": str(value), "group": str(len(seen))}
                seen.add(text)
                if len(seen) == grammar.count:
                    return


@dataclasses.dataclass
class _Level:
    """The nodes of one depth of many trees, in order; children of an operator are next to each other.

    Attributes:
      tree: Number of each node's tree.
      is_operator: Whether a node is an operator; otherwise a digit.
      code: Index in OPERATORS, or the digit.
      arguments: Number of children of each operator, in the order of the operators.
      size: Tokens of the subtree.
      value: Result of the subtree.
      position: Index of the subtree's first token within the text of all trees.
    """

    tree: np.ndarray
    is_operator: np.ndarray
    code: np.ndarray
    arguments: np.ndarray
    size: Any = None
    value: Any = None
    position: Any = None

    @property
    def starts(self) -> np.ndarray:
        """Index of each operator's first child in the next level."""
        return np.cumsum(self.arguments) - self.arguments


def _expressions(grammar: Grammar, draw: np.random.Generator) -> list[tuple[np.ndarray, int]]:
    """Generates _ROOTS trees, level by level, and returns tokens and values of those with a valid length.

    Trees that are too long already do not grow, and those of a single digit are not generated: both are rejected.
    """
    levels, lengths = _grow(grammar, draw)
    _evaluate(levels)
    accepted = (lengths > grammar.above) & (lengths < grammar.below)
    ends = np.cumsum(np.where(accepted, lengths, 0))
    starts = ends - np.where(accepted, lengths, 0)
    tokens = np.zeros(ends[-1], np.int8)
    levels[0].position = starts
    for level, children in zip(levels, [*levels[1:], None], strict=True):
        keep = accepted[level.tree]
        tokens[level.position[keep]] = (level.code + 10 * level.is_operator)[keep]
        closed = keep & level.is_operator
        tokens[(level.position + level.size - 1)[closed]] = TOKENS.index(END)
        if children is not None:
            before = np.cumsum(children.size) - children.size
            first = level.position[level.is_operator] + 1 - before[level.starts]
            children.position = np.repeat(first, level.arguments) + before
    values = levels[0].value
    return [(tokens[starts[tree] : ends[tree]], int(values[tree])) for tree in np.flatnonzero(accepted)]


def _grow(grammar: Grammar, draw: np.random.Generator) -> tuple[list[_Level], np.ndarray]:
    """Levels of the trees, without sizes, values and positions, and the length of each tree."""
    tree, is_operator = np.arange(_ROOTS), np.ones(_ROOTS, bool)
    lengths = np.full(_ROOTS, 2)
    levels: list[_Level] = []
    for depth in range(1, grammar.max_depth + 1):
        if depth > 1:
            is_operator = draw.random(len(tree)) <= _OPERATOR_SHARE
            lengths += np.bincount(tree, minlength=_ROOTS)
            is_operator &= (depth < grammar.max_depth) & (lengths < grammar.below)[tree]
            lengths += np.bincount(tree[is_operator], minlength=_ROOTS)
        code = np.where(is_operator, draw.integers(len(OPERATORS), size=len(tree)), draw.integers(10, size=len(tree)))
        arguments = draw.integers(2, grammar.max_args + 1, size=np.count_nonzero(is_operator))
        levels.append(_Level(tree, is_operator, code, arguments))
        if not len(arguments):
            break
        tree = np.repeat(tree[is_operator], arguments)
    return levels, lengths


def _evaluate(levels: list[_Level]) -> None:
    """Sets sizes and values, from the deepest level up."""
    children: _Level | None = None
    for level in reversed(levels):
        level.size, level.value = np.ones(len(level.tree), np.int64), level.code.copy()
        if children is not None:
            at = level.is_operator
            level.size[at] = 2 + np.add.reduceat(children.size, level.starts)
            level.value[at] = _results(level.code[at], children.value, level.arguments, level.starts)
        children = level


def _results(operators: np.ndarray, values: np.ndarray, arguments: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Results of operators, whose arguments are consecutive: a median of two middle values is rounded down."""
    parents = np.repeat(np.arange(len(arguments)), arguments)
    ordered = values[np.lexsort((values, parents))]
    median = (ordered[starts + (arguments - 1) // 2] + ordered[starts + arguments // 2]) // 2
    by_operator = (
        ordered[starts],
        ordered[starts + arguments - 1],
        median,
        np.add.reduceat(values, starts) % 10,
    )
    return np.choose(operators, by_operator)


LIST_OPS = Generated(examples)
LIST_OPS_SHORT = Generated(short_examples)
