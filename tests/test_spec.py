"""Spec strings: parsing, building, and errors."""

import dataclasses

import flax.linen as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpnlp.spec import Spec, build, did_you_mean, is_name, lookup, parse, parse_one
from hpnlp.types import InputError
from tests.messages import raises


def test_valid_strings_are_parsed():
    for text, specs in (
        ("full", (Spec("full"),)),
        ("window(256,0)*5,full", (Spec("window", (256, 0), repeat=5), Spec("full"))),
        ("a(1, x=2.5, y='s')", (Spec("a", (1,), (("x", 2.5), ("y", "s"))),)),
        ("sampled(1024, unigram)", (Spec("sampled", (1024, "unigram")),)),
        ("a(-1, None, True, (1, 2))", (Spec("a", (-1, None, True, (1, 2))),)),
        (" a ( ) , b ", (Spec("a"), Spec("b"))),
        ("global(2)*3,with", (Spec("global", (2,), repeat=3), Spec("with"))),  # words of Python's own
        ("a(is, 'not in', lambda=None)", (Spec("a", ("is", "not in"), (("lambda", None),)),)),
    ):
        assert parse(text, "thing") == specs
        assert parse(",".join(map(str, specs)), "thing") == specs


def test_invalid_strings_raise():
    for text in (
        "a(",
        "",
        "1",
        "a b",
        "a*0",
        "a(b(1))",
        "a.b",
        "a(*x)",
        "'a'",
        "a+b",
        "a(1e999)",
        "(" * 300,
        "a(" + "-" * 5000 + "1)",
    ):
        raises("^thing=.* is not a spec: expected names with optional arguments", parse, text, "thing")


@given(st.text(max_size=20))
def test_any_text_parses_or_raises_input_error(text):
    try:
        specs = parse(text, "thing")
    except InputError:
        return
    assert all(isinstance(spec, Spec) for spec in specs)


def test_parsing_runs_no_code():
    with pytest.raises(InputError):
        parse("a(__import__('os').system('true'))", "thing")


def test_specs_are_values():
    (spec,) = parse("a(1, x=2)", "thing")
    assert spec == dataclasses.replace(spec) and len({spec, *parse("a(1,x=2)", "thing")}) == 1


def test_parse_one_expects_one_entry():
    assert parse_one("wsd(0.1)", "schedule") == Spec("wsd", (0.1,))
    for text in ("a,b", "a*2"):
        raises("schedule=.* expected exactly one, as in 'a'", parse_one, text, "schedule")


TABLE = {"ring": lambda size, scale=1.0: ("ring", size, scale), "rung": lambda: "rung"}


def test_build_calls_the_entry():
    assert build(parse_one("ring(3, scale=0.5)", "mixer"), TABLE, "mixer") == ("ring", 3, 0.5)
    assert build(parse_one("ring", "mixer"), TABLE, "mixer", size=7) == ("ring", 7, 1.0)


def test_invalid_names_and_arguments_raise():
    for text, message in (
        ("rign(3)", "unknown mixer 'rign': did you mean 'ring'?"),
        ("ring(3, scael=1.0)", "mixer 'ring' has no argument 'scael': did you mean 'scale'?"),
        ("ring", "mixer 'ring' takes (size, scale=1.0): missing a required argument: 'size'"),
        ("ring(1, 2, 3)", "mixer 'ring' takes (size, scale=1.0): too many positional arguments"),
    ):
        with pytest.raises(InputError) as caught:
            build(parse_one(text, "mixer"), TABLE, "mixer")
        assert message in str(caught.value)


def typed(size: int, scale: float = 1.0, by: "str | None" = None, ends: tuple[int, ...] = (), *, exact: bool = False):
    return size, scale, by, ends, exact


def test_arguments_of_another_type_or_given_twice_raise():
    for text, message in (
        ("t(a)", "mixer 't' has size='a': expected int"),
        ("t(1.5)", "mixer 't' has size=1.5: expected int"),
        ("t(True)", "mixer 't' has size=True: expected int"),
        ("t(1, x)", "mixer 't' has scale='x': expected float"),
        ("t(1, by=3)", "mixer 't' has by=3: expected str | None"),
        ("t(1, ends=(1, 2.0))", "mixer 't' has ends=(1, 2.0): expected tuple[int, ...]"),
        ("t(1, exact=1)", "mixer 't' has exact=1: expected bool"),
        ("t(size=1, size=2)", "mixer 't' is given 'size' more than once: leave all but one out"),
    ):
        with pytest.raises(InputError) as caught:
            build(parse_one(text, "mixer"), {"t": typed}, "mixer")
        assert message in str(caught.value)
        assert build(parse_one("t(1, 2, by=a, ends=(1, 2), exact=True)", "mixer"), {"t": typed}, "mixer")[3] == (1, 2)


def test_positional_arguments_skip_what_the_caller_fills_in():
    assert build(parse_one("ring(0.5)", "mixer"), TABLE, "mixer", size=7) == ("ring", 7, 0.5)


def test_specs_cannot_set_arguments_of_the_caller():
    raises(r"mixer 'ring' takes \(size\): missing", lambda: build(parse_one("ring", "mixer"), TABLE, "mixer", scale=7))
    raises("mixer 'ring' has no argument", lambda: build(parse_one("ring(size=3)", "mixer"), TABLE, "mixer", size=7))


class Module(nn.Module):
    depth: int = 1


def test_specs_cannot_set_arguments_of_flax():
    for text, extra, message in (
        ("ring(parent=3)", {}, "layer 'ring' has no argument 'parent': "),
        ("ring(name=a)", {"name": "b"}, "layer 'ring' has no argument 'name': known: depth"),
        ("ring(name=a)", {"depth": 2}, "layer 'ring' has no argument 'name': it takes none"),
    ):
        with pytest.raises(InputError) as caught:
            build(parse_one(text, "layer"), {"ring": Module}, "layer", **extra)
        assert message in str(caught.value)
        assert build(parse_one("ring(3)", "layer"), {"ring": Module}, "layer", name="b").name == "b"


def test_lookup_suggests_the_nearest_name():
    assert lookup({"a": 1}, "a", "thing") == 1
    assert did_you_mean("zzz", ["ring", "chain"]) == "known: chain, ring"
    assert did_you_mean("rin", ["ring", "chain"]) == "did you mean 'ring'?"


def test_is_name_distinguishes_names_from_paths():
    assert is_name("bytes") and is_name("bpe(4096)")
    assert not is_name("runs/x/tokenizer.json") and not is_name("tokenizer.json") and not is_name("./bytes")
