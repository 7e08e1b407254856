"""ListOps: expressions have the published distribution of lengths, depths and results."""

import collections
import dataclasses
import statistics

import numpy as np
import pytest

from hpnlp.data.examples import ClassificationConfig, prepare_examples
from hpnlp.data.examples.generated import list_ops

COUNT = 600
EVALUATE = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(tokens):
    """The value of an expression, its depth, and the number of arguments of each of its operators, by a stack."""
    stack, depth, arguments = [[]], 0, []
    for token in tokens:
        if token in EVALUATE:
            stack.append([token])
            depth = max(depth, len(stack) - 1)
        elif token == "]":
            operator, *values = stack.pop()
            arguments.append(len(values))
            stack[-1].append(EVALUATE[operator](values))
        else:
            assert token in "0123456789"
            stack[-1].append(int(token))
    ((value,),) = stack
    return value, depth, arguments


@pytest.fixture(scope="module")
def rows():
    return list(list_ops.generate(dataclasses.replace(list_ops.PUBLISHED, count=COUNT)))


def test_results_match_an_independent_evaluation(rows):
    for row in rows:
        value, depth, arguments = evaluate(row["text"].split())
        assert str(value) == row["label"]
        assert min(arguments) >= 2 and max(arguments) <= 10 and depth <= 9


def naive_lengths(draw, count):
    """Lengths of accepted trees of the published definition, which is recursive."""

    def length(depth):
        if depth == 10 or draw.random() > 0.25:
            return 1
        return 2 + sum(length(depth + 1) for _ in range(draw.integers(2, 11)))

    result = []
    while len(result) < count:
        if 500 < (n := length(1)) < 2000:
            result.append(n)
    return result


def test_lengths_and_operators_have_the_published_distribution(rows):
    tokens = [row["text"].split() for row in rows]
    lengths = sorted(map(len, tokens))
    assert 500 < lengths[0] < 600 and 1900 < lengths[-1] < 2000
    # Two samples of one distribution have a Kolmogorov-Smirnov distance below 1.95 sqrt(1/n + 1/m) in 99.9 % of the cases.
    other = np.sort(naive_lengths(np.random.default_rng(1), 60))
    at = np.arange(500, 2000)
    distance = np.abs(np.searchsorted(lengths, at) / COUNT - np.searchsorted(other, at) / 60).max()
    assert distance < 1.95 * (1 / COUNT + 1 / 60) ** 0.5
    counts = collections.Counter(token for row in tokens for token in row)
    operators = sum(counts[name] for name in EVALUATE)
    assert all(abs(counts[name] / operators - 1 / 4) < 0.01 for name in EVALUATE) and counts["]"] == operators
    digits = sum(counts[digit] for digit in "0123456789")
    assert all(abs(counts[digit] / digits - 1 / 10) < 0.01 for digit in "0123456789")


def test_all_classes_occur_and_none_dominates(rows):
    shares = {label: count / COUNT for label, count in collections.Counter(row["label"] for row in rows).items()}
    # Minima and maxima make 0 and 9 more frequent than the others.
    assert sorted(shares) == list("0123456789") and 0.1 < max(shares.values()) < 0.25 and min(shares.values()) > 0.04


def test_expressions_differ_and_the_seed_decides():
    short = dataclasses.replace(list_ops.SHORT, count=3000)
    rows = list(list_ops.generate(short))
    assert len({row["text"] for row in rows}) == len({row["group"] for row in rows}) == 3000
    assert rows == list(list_ops.generate(short)) != list(list_ops.generate(short, seed=1))
    lengths = [len(row["text"].split()) for row in rows]
    assert short.above < min(lengths) and max(lengths) < short.below


def test_each_token_of_an_expression_is_one_id(cache, monkeypatch):
    monkeypatch.setattr(list_ops, "SHORT", dataclasses.replace(list_ops.SHORT, count=200))
    config = ClassificationConfig(
        "list_ops_short", tokenizer="words(32, by=whitespace)", seq_len=252, batch_size=4, cache=str(cache)
    )
    examples = prepare_examples(config)
    assert examples.tokenizer.vocab_size == len(list_ops.TOKENS) + 4 and "cut" not in examples.summary
    assert examples.labels == tuple("0123456789")
    stored = examples.stored["train"]
    assert len(stored.part(0, 0)) == len(stored.text(0, 0).split())
